"""One batch of prompts: generated under watch, run once with gradients, cut into rows.

`Scanner` makes a `BatchRun` for each batch and runs it with the model in eval mode, after saving
the model's state. Compiled code runs eagerly in here, except where `recorded_inside` takes it over:
hooks that were added after compiling would not be called.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchfmri._model import compiled_code_as_eager, generators_restored, resting, spared_grad
from torchfmri._scan.run.batch_rows import BatchRow, Frame, cut_rows
from torchfmri._scan.run.cached_pass import run_cached
from torchfmri._scan.run.collection import RestingCollector
from torchfmri._scan.run.decoding import Decoding
from torchfmri._scan.run.endings import Endings
from torchfmri._scan.run.first_call import FirstCall
from torchfmri._scan.run.gradient_pass import run_pass
from torchfmri._scan.run.live import LiveRecording, LiveStep
from torchfmri._scan.run.live_token import LiveToken, live_tokens
from torchfmri._scan.run.mean_vectors import VectorPlan
from torchfmri._scan.run.model_call import is_causal, positions_of
from torchfmri._scan.run.prompt import EncodedPrompt
from torchfmri._scan.run.readouts import read_out, wants_readouts
from torchfmri._scan.run.recorded_generation import recorded_inside
from torchfmri._scan.run.scan_loss import ScanLoss
from torchfmri._scan.run.scan_options import ScanOptions
from torchfmri._scan.run.scan_pass import ScanPass, Sequences
from torchfmri._scan.run.spelling import Speller
from torchfmri._scan.run.subject import ScanSubject
from torchfmri._scan.run.token_loss_pass import run_token_losses

_ROOM = 1024
"""For how many new tokens room is made at first; the model may well stop long before the most."""


@dataclass(eq=False)
class BatchRun:
    """One batch of prompts on its way through a model.

    Attributes:
        options: What to measure.
        speller: Token ids -> bytes.
        tensors: Layers that are kept in full.
        subject: What is scanned.
        prompt: The batch.
        decoding: How the tokens are chosen.
        loss: What is differentiated; None for activations alone.
        vectors: Which mean vectors are kept.
        seed: Of sampling.
        on_token: Told of each token as it comes.
        tell_every: Seconds that tokens may wait to be told together.
        notes: What has to be known about the result.
        missed: Layer -> what was not captured of it, and why.
        path: How the steps of generating ran: "compiled", "compiled parts" or "eager".
    """

    options: ScanOptions
    speller: Speller
    tensors: frozenset[str]
    subject: ScanSubject
    prompt: EncodedPrompt
    decoding: Decoding
    loss: ScanLoss | None
    vectors: VectorPlan | None = None
    seed: int | None = None
    on_token: Callable[[LiveToken], None] | None = None
    tell_every: float = 0.0
    notes: list[str] = field(default_factory=list)
    missed: dict[str, str] = field(default_factory=dict)
    path: str = "eager"

    @property
    def count(self) -> int:
        """How many sequences there will be."""
        prompt = self._expanded() if self.decoding.max_new_tokens else self.prompt
        return len(prompt.ids)

    def run(self, generates: bool) -> list[BatchRow]:
        """Generate, pass, and cut the batch into its sequences."""
        options, model = self.options, self.subject.model
        start = self.prompt.ids.shape[1]
        ids, live, tokens_identical, first_position = self.prompt.ids, None, None, None
        if generates:
            reason = self.decoding.pass_only(model) if options.live else "live=False"
            if reason and options.live:
                self.notes.append(f"activations are from the pass alone: {reason}")
            endings = self.decoding.endings(model, self._expanded())
            with FirstCall(model, self.prompt.mask) as first_call:
                ids, live = self._generate(endings, record=not reason)
            first_position = first_call.first
            if reason or not self.decoding.tells_endings(model):
                endings.look_through(ids)
            if options.verify:
                again, _ = self._generate(self.decoding.endings(model, self._expanded()))
                tokens_identical = bool(torch.equal(ids, again))
        else:
            endings = Endings(start, frozenset())
        sequences = self._sequences(ids, start, endings.lengths(ids), first_position)
        found = None
        if options.per is not None or live is None:
            found = self._pass(sequences)
        if live is None and self.on_token is not None and found is not None:
            self._tell_all(sequences, found, start)
        checks = {"tokens_identical": tokens_identical} if tokens_identical is not None else {}
        if self.subject.looks_ahead and is_causal(model):
            self.notes.append(
                "the model looks ahead: what it computes at a position depends on the tokens after "
                "it, and so do the surprisals"
            )
        rows = cut_rows(self.frame(), sequences, found, live, checks)
        if wants_readouts(options):
            readouts = read_out(model, sequences, options)
            readouts.add_to(rows, sequences.mask)
            self.missed |= readouts.missed
        return rows

    def frame(self) -> Frame:
        """What its rows have in common."""
        likeliest = self.decoding.takes_the_likeliest(self.subject.model)
        return Frame(self.subject, self.loss, self.options.per, self.speller, likeliest)

    def _generate(
        self, endings: Endings, record: bool = False
    ) -> tuple[Tensor, LiveRecording | None]:
        model, options = self.subject.model, self.options
        # A loop of the user's own may run backward passes.
        own = model.parameters() if self.decoding.decode is not None else ()
        # What is not recorded again after compiled steps is what the user would run: compiled.
        stance = nullcontext() if self.path != "eager" and not record else compiled_code_as_eager()
        with spared_grad(own), generators_restored(), torch.no_grad(), stance:
            if self.seed is not None:
                torch.manual_seed(self.seed)
            if not record:
                return self.decoding.run(model, self.prompt, endings), None
            prompt = self._expanded()
            recording = LiveRecording(
                self.subject,
                prompt.ids,
                prompt.ids.shape[1] + min(self.decoding.max_new_tokens, _ROOM),
                mask=prompt.mask,
                endings=endings,
                statistics=options.per is None,
                tensors=self.tensors if options.per is None else frozenset(),
                vectors=self.vectors if options.per is None else None,
                on_step=self._tell(prompt) if self.on_token is not None else None,
                tell_every=self.tell_every,
            )
            config = self.decoding.setting(model, "compile_config")
            may_change = self.decoding.runs_own_code or self.on_token is not None
            with recording, recorded_inside(recording, config, may_change) as compiled:
                ids = self.decoding.run(model, self.prompt, endings)
            self.path = compiled.path
            self.notes += compiled.notes
            if not recording.seen:
                self.notes.append(
                    "activations are from the pass alone: the model was not run while decoding"
                )
                return ids, None
            recording.finish(ids)
            self.missed |= recording.missed
            if recording.unseen:
                self.notes.append(
                    f"the first {recording.unseen} positions were in the cache that was given and "
                    "were not run: they have no live activations"
                )
            return ids, recording

    def _expanded(self) -> EncodedPrompt:
        """The prompt once for each sequence that is returned."""
        copies = int(self.decoding.setting(self.subject.model, "num_return_sequences") or 1)
        if copies == 1:
            return self.prompt
        ids, mask = (
            each.repeat_interleave(copies, 0) for each in (self.prompt.ids, self.prompt.mask)
        )
        return EncodedPrompt(ids, mask, single=False)

    def _tell_all(self, sequences: Sequences, found: ScanPass, start: int) -> None:
        """Hand over all tokens after the pass, where none came while generating."""
        prompt = EncodedPrompt(sequences.ids[:, :start], sequences.mask[:, :start], single=False)
        nothing = torch.full(sequences.ids.shape, torch.nan, device="cpu")
        surprisal = nothing if found.surprisal is None else found.surprisal
        entropy = nothing if found.entropy is None else found.entropy
        norms = found.activation.norms
        kept = sequences.mask.bool()
        self._tell(prompt)(
            LiveStep(
                first=0,
                ids=sequences.ids,
                activation=norms,
                surprisal=surprisal,
                entropy=entropy,
                kept=kept,
            )
        )

    def _tell(self, prompt: EncodedPrompt) -> Callable[[LiveStep], None]:
        on_token = self.on_token
        assert on_token is not None
        tell = live_tokens(self.subject, prompt, self.speller)

        def act(step: LiveStep) -> None:
            tokens = list(tell(step))
            with resting():  # the reader of a stream may take long, and run something else
                for token in tokens:
                    on_token(token)

        return act

    def _sequences(
        self, ids: Tensor, start: int, lengths: list[int], first_position: int | None
    ) -> Sequences:
        """The finished sequences, with the positions that the model was fed while generating."""
        copies = len(ids) // len(self.prompt.ids)
        mask = torch.ones_like(ids)
        mask[:, :start] = self.prompt.mask.repeat_interleave(copies, 0)
        places = torch.arange(ids.shape[1], device=ids.device)
        mask[places >= torch.tensor(lengths, device=ids.device)[:, None]] = 0
        width = max(lengths)
        mask = mask[:, :width]
        if self.options.per is not None or not self.options.live:
            self.subject.refuse_length(int(mask.sum(1).max()))
        generated = torch.zeros_like(ids, dtype=torch.bool)
        generated[:, start:] = True
        if first_position is None and is_causal(self.subject.model) and not bool(mask.all()):
            first_position = self.subject.first_position  # as the model would count without padding
        positions = None if first_position is None else positions_of(mask) + first_position
        return Sequences(ids[:, :width], mask, generated[:, :width] & mask.bool(), positions)

    def _pass(self, sequences: Sequences) -> ScanPass:
        options = self.options
        runs: dict[str | None, Callable[..., ScanPass]] = {
            "cached": run_cached,
            "token_loss": run_token_losses,
        }
        run = runs.get(options.per, run_pass)
        with RestingCollector() if run is run_pass else nullcontext():
            found = run(
                self.subject, sequences, self.loss,
                voxel=options.voxel, tensors=self.tensors, vectors=self.vectors,
            )  # fmt: skip
        for each in (found.activation, found.gradient):
            if each is not None:
                each.flush()  # which may find out that something is missing
        self.notes += found.notes
        self.missed |= found.missed
        return found
