"""`Scanner`: scan one model, prompt by prompt.

`scan`, `scan_dataset`, the command line and users make one for a model. It checks everything that
can be wrong before the model runs, describes what will be measured, lets `BatchRun` do the work and
puts the `Scan` together. What is found out about the model (`find_subject`) is kept for the next
prompt, so the model must not change its layers in between. The model, its `.grad`, mode and random
state are put back however a scan ends; keep the work inside `unchanged`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchfmri._arguments import check_number, check_real, require
from torchfmri._model import (
    device_of,
    every_module,
    every_parameter,
    find_layers,
    named_layers,
    runnable,
    switched_off,
    unchanged,
    unwrap,
)
from torchfmri._scan.record.anatomy import Anatomy
from torchfmri._scan.run.batch_rows import BatchRow
from torchfmri._scan.run.batch_run import BatchRun
from torchfmri._scan.run.cached_pass import check_cached
from torchfmri._scan.run.decoding import Decode, Decoding
from torchfmri._scan.run.description import scan_meta
from torchfmri._scan.run.live_token import LiveToken
from torchfmri._scan.run.mean_vectors import VectorPlan, chosen_tokens, plan_vectors
from torchfmri._scan.run.model_call import is_causal, refuse_unknown_ids
from torchfmri._scan.run.prompt import Prompt, encode
from torchfmri._scan.run.readouts import describe_readouts
from torchfmri._scan.run.refusals import (
    refuse_inputs,
    refuse_options,
    refuse_other_prompts,
    refuse_padding,
    refuse_shards,
    refuse_two_stacks,
    refuse_unrunnable,
    refuse_virtual_tokens,
)
from torchfmri._scan.run.scan_loss import ScanLoss, check_loss
from torchfmri._scan.run.scan_options import ScanOptions
from torchfmri._scan.run.spelling import Speller
from torchfmri._scan.run.subject import PLACES, ScanSubject, find_subject
from torchfmri._scan.scan_record import Scan
from torchfmri._text import plural
from torchfmri.exceptions import InspectionError


class Scanner:
    """Scans one model, prompt by prompt; what is found out about the model is found out once.

    Args:
        model: Left as it was after each scan.
        tokenizer: Of the model; None where prompts are token ids.
        options: What to measure.

    Examples:
        >>> import torchfmri
        >>> model, tokenizer = torchfmri.load_model("tiny")
        >>> scanner = torchfmri.Scanner(model, tokenizer, torchfmri.ScanOptions(per=None))
        >>> scan = scanner.scan("Once upon a time", max_new_tokens=4)
        >>> len(scan)
        1
    """

    def __init__(
        self, model: nn.Module, tokenizer: Any = None, options: ScanOptions | None = None
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InspectionError(
                f"scan takes an nn.Module, not {type(model).__name__}. For a model by name: "
                "model, tokenizer = torchfmri.load_model('tiny')."
            )
        refuse_unrunnable(model)
        refuse_two_stacks(model)
        if options is not None and not isinstance(options, ScanOptions):
            raise InspectionError(
                f"options is a {type(options).__name__}. Write options=torchfmri.ScanOptions(...)."
            )
        self.options = options or ScanOptions()
        refuse_shards(model, self.options.per)
        self._model, self._tokenizer = runnable(model), tokenizer
        self._speller = Speller(tokenizer)
        self._subject: ScanSubject | None = None
        layers = named_layers(model)
        wanted = self.options.tensors
        # A wildcard also matches lists of layers, which put out nothing.
        self._tensors = frozenset(
            name
            for name in (find_layers(layers, wanted) if wanted is not None else ())
            if not isinstance(layers[name], PLACES)
        )

    @property
    def model(self) -> nn.Module:
        """The model that is scanned."""
        return self._model

    def samples(self, generate: Mapping[str, Any]) -> bool:
        """Whether tokens are drawn, by these options or by the model's own settings."""
        return bool(Decoding(0, generate).setting(self._model, "do_sample"))

    def scan(
        self,
        prompt: Prompt,
        max_new_tokens: int = 64,
        *,
        chat: bool = False,
        seed: int | None = None,
        on_token: Callable[[LiveToken], None] | None = None,
        tell_every: float = 0.0,
        decode: Decode | None = None,
        names: Sequence[str] | None = None,
        conditions: Sequence[str] | None = None,
        fields: Sequence[Mapping[str, Any]] | None = None,
        generate: Mapping[str, Any] | None = None,
    ) -> Scan:
        """Let the model answer, and return what it did.

        Args:
            prompt: A text, chat messages, token ids, or a list of these.
            max_new_tokens: How many tokens to generate at most; 0 only reads.
            chat: Wrap a text as a user's message in the tokenizer's template.
            seed: Of sampling; without it the present random state is used (and put back).
            on_token: Called with each token as soon as the model has been run on it.
            tell_every: Seconds for which tokens may wait, to be handed to `on_token` together: a
                fast model is slowed less so. Up to ten times as long where handing over takes more
                than a fiftieth of the time. 0 hands each of them over at once.
            decode: Your own loop, called with the model and (b, s) ids; returns all ids.
            names: What to call the sequences.
            conditions: Their labels, for contrasts.
            fields: The rows of a dataset that they come from, one mapping each. With them,
                `vectors="auto"` keeps mean vectors.
            generate: Options for the model's `generate`.

        Raises:
            InspectionError: Something of this cannot be done; the message says what to do.
        """
        listed = generate is None or isinstance(generate, Mapping)
        require(listed, "generate", generate, "give the options of generate: {'top_k': 5}")
        if on_token is not None and not callable(on_token):
            raise InspectionError(f"on_token={on_token!r}: give a function that takes a token.")
        check_real("tell_every", tell_every, "give seconds, such as 0.1, or 0", least=0)
        if seed is not None:
            check_number("seed", seed, None, "a whole number that fits into 64 bits, or None")
        started = time.perf_counter()
        with torch.inference_mode(False):
            run = self._prepare(
                prompt, max_new_tokens, chat, generate or {}, decode, dataset=fields is not None
            )
            run.seed, run.on_token, run.tell_every = seed, on_token, tell_every
            samples = max_new_tokens > 0 and self.samples(generate or {})
            refuse_other_prompts(self._model, run.prompt.ids, seed, samples)
            if decode is None:  # whose sequences are counted when they are there
                _check_labels(run.count, names, conditions)
            written: list[str] = []
            with unchanged(self._model, written.append):
                if any(each.training for each in every_module(self._model)):
                    self._model.eval()
                rows = run.run(max_new_tokens > 0)
        if written:
            run.notes.append(f"the model wrote into its parameters: {', '.join(written[:3])}")
        _check_labels(len(rows), names, conditions)
        names = names if names is not None else _names(rows)
        conditions = conditions if conditions is not None else [""] * len(rows)
        known = fields if fields is not None else [{}] * len(rows)
        sequences = [
            row.sequence(name, condition, own)
            for row, name, condition, own in zip(rows, names, conditions, known, strict=True)
        ]
        subject = run.subject
        meta = self._meta(run, chat)
        if left_out := sorted(self._tensors - {*subject.anatomy.layers, *subject.missed}):
            run.notes.append(
                f"tensors={self.options.tensors!r} also matches {', '.join(left_out[:3])}"
                f"{' and others' if len(left_out) > 3 else ''}, which layers= leaves out"
            )
        lacking = [each for sequence in sequences for each in sequence.unmeasured]
        meta["notes"] = list(dict.fromkeys([*run.notes, *lacking]))
        meta["missed"] |= run.missed
        meta["generation"] = run.path
        meta["run"] = {"seconds": time.perf_counter() - started, "seed": seed}
        return Scan(subject.anatomy, sequences, meta)

    def describe(
        self,
        prompt: Prompt,
        max_new_tokens: int = 64,
        *,
        chat: bool = False,
        generate: Mapping[str, Any] | None = None,
    ) -> tuple[Anatomy, dict[str, Any]]:
        """The anatomy and the meta that scans of a dataset of such prompts have."""
        run = self._prepare(prompt, max_new_tokens, chat, generate or {}, None, dataset=True)
        return run.subject.anatomy, self._meta(run, chat) | {"notes": list(run.notes)}

    def _meta(self, run: BatchRun, chat: bool) -> dict[str, Any]:
        meta = scan_meta(self._model, run.subject, self.options, run.loss, run.decoding, chat)
        if run.vectors is not None:
            meta["vectors"] = list(run.vectors.tokens)
        return meta

    def _prepare(
        self,
        prompt: Prompt,
        max_new_tokens: int,
        chat: bool,
        generate: Mapping[str, Any],
        decode: Decode | None,
        dataset: bool,
    ) -> BatchRun:
        """Check everything that can be wrong, and return the run; the model has not run yet."""
        _check_possible(self._model, max_new_tokens)
        if decode is not None and not callable(decode):
            raise InspectionError(f"decode={decode!r}: give a function that takes model and ids.")
        if self.options.per is not None:
            _check_differentiable(self._model)
        side = "left" if is_causal(self._model) else "right"
        encoded = encode(prompt, self._tokenizer, chat, side).to(device_of(self._model))
        refuse_unknown_ids(self._model, encoded.ids)
        refuse_padding(self._model, encoded.mask)
        if decode is not None and not bool(encoded.mask.all()):
            raise InspectionError(
                "decode= is handed token ids without a mask, so prompts of different lengths "
                "cannot be padded for it. Scan them one by one."
            )
        refuse_options(generate, encoded, max_new_tokens)
        if self.options.per is not None or not self.options.live:
            refuse_inputs(self._model, generate)
        generates = max_new_tokens > 0
        loss = self._loss(generates)
        decoding = Decoding(max_new_tokens, generate, decode, self._tokenizer)
        describe_readouts(self._model, self.options)  # what cannot be read is said before the run
        subject = self._find_subject(encoded.ids)
        refuse_unknown_ids(self._model, encoded.ids, subject.vocabulary)
        subject.refuse_length(int(encoded.mask.sum(1).max()))
        vectors = self._vectors(subject, dataset, generates)
        run = BatchRun(
            options=self.options,
            speller=self._speller,
            tensors=self._tensors,
            subject=subject,
            prompt=encoded,
            decoding=decoding,
            loss=loss,
            vectors=vectors,
        )
        run.notes += vectors.notes if vectors is not None else ()
        return run

    def _vectors(self, subject: ScanSubject, dataset: bool, generates: bool) -> VectorPlan | None:
        tokens = chosen_tokens(self.options.vectors, dataset=dataset, generates=generates)
        if not tokens:
            return None
        special = sorted(self._speller.special_ids)
        return plan_vectors(subject, tokens, special, self.options.vector_bytes)

    def _loss(self, generates: bool) -> ScanLoss | None:
        if self.options.per is None:
            return None
        loss = check_loss(self.options.loss, generates, is_causal(self._model))
        if self.options.per == "cached":
            check_cached(self._model, loss)
        return loss

    def _find_subject(self, ids: Tensor) -> ScanSubject:
        if self._subject is None:
            options = self.options
            subject = find_subject(
                self._model, options.layers, ids, options.voxel, heads=options.heads
            )
            if self.options.tensors is not None and not self._tensors & set(subject.anatomy.layers):
                raise InspectionError(
                    f"tensors={self.options.tensors!r} matches no layer that is scanned: "
                    f"layers={self.options.layers!r} leaves them out, or they have no tokens."
                )
            self._subject = subject
        return self._subject


def _check_labels(
    count: int, names: Sequence[str] | None, conditions: Sequence[str] | None
) -> None:
    """Raise where sequences have not a name and a condition each, if these were given."""
    for what, given in (("names", names), ("conditions", conditions)):
        listed = given is None or isinstance(given, (str, Sequence))
        texts = listed and all(isinstance(each, str) for each in given or ())
        require(texts, what, given, "give a list of texts, one for each sequence")
        if given is not None and (isinstance(given, str) or len(given) != count):
            number = "one text" if isinstance(given, str) else str(len(given))
            raise InspectionError(
                f"{plural(count, 'sequence')} and {number} for {what}=: give a list with one for "
                "each sequence."
            )


def _names(rows: Sequence[BatchRow]) -> list[str]:
    """Place and content."""
    return [f"{index:06d}-{row.fingerprint}" for index, row in enumerate(rows)]


def _check_differentiable(model: nn.Module) -> None:
    if any(each.is_inference() for each in every_parameter(model)):
        raise InspectionError(
            "The model was made inside torch.inference_mode(), so nothing can be differentiated "
            "through it. Make it outside, or scan activations: per=None."
        )


def _check_possible(model: nn.Module, max_new_tokens: int) -> None:
    if switched_off():
        raise InspectionError(
            "TORCHFMRI=off in the environment switches every attachment off, and a scan is "
            "nothing else. Unset it to scan."
        )
    check_number("max_new_tokens", max_new_tokens, 0, "how many tokens to generate, 0 for none")
    refuse_virtual_tokens(model)
    if max_new_tokens and not is_causal(model):
        raise InspectionError(
            f"{type(unwrap(model)).__name__} is not a causal language model and cannot go on "
            "writing. Read the text with max_new_tokens=0."
        )
