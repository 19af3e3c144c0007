"""The public functions `lens`, `attribute_logit` and `attribute_inputs` for one prompt.

They encode the prompt, check the model, run it in eval mode without a trace (`_reading`), and leave
the mathematics to `_lens`. They are in this room because they share prompts, spelling and refusals
with scans. Signatures are public. Everything that can be refused is refused before the model runs,
and a token given as text must be a single token, since a logit belongs to one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchfmri._arguments import check_callable, check_flag, check_number, is_whole
from torchfmri._lens import (
    METHODS,
    InputAttribution,
    Lens,
    LogitAttribution,
    Translate,
    attribute,
    attribute_embeddings,
    read_lens,
    refuse_unknown_tokens,
)
from torchfmri._model import (
    compiled_code_as_eager,
    device_of,
    generators_restored,
    runnable,
    unchanged,
    unwrap,
)
from torchfmri._scan.run.model_call import (
    call_model,
    is_causal,
    logits_of,
    refuse_unknown_ids,
)
from torchfmri._scan.run.prompt import Prompt, encode
from torchfmri._scan.run.refusals import (
    refuse_two_stacks,
    refuse_unrunnable,
    refuse_virtual_tokens,
    refuse_without_tokens,
)
from torchfmri._scan.run.spelling import Speller
from torchfmri.exceptions import InspectionError

Target = str | int | None
_TWO_STACKS = (
    "a lens or an attribution reads one sequence. Read its attention with an Inspector "
    "(what='attention'), or edit either side and compare your own passes: "
    "torchfmri.edited(model, {'decoder.L3H1': 'zero'})."
)


@dataclass(frozen=True, eq=False)
class _Text:
    """One prompt, encoded, and how to call the model on it."""

    model: nn.Module
    ids: Tensor
    mask: Tensor
    speller: Speller
    tokenizer: Any

    def call(self) -> Any:
        return call_model(self.model, self.ids, self.mask)

    def logits(self, copies: int) -> Tensor:
        output = call_model(self.model, self.ids.expand(copies, -1), self.mask.expand(copies, -1))
        found = logits_of(output)
        if found is None:
            raise InspectionError(
                f"{type(self.model).__name__} returns no logits (b, s, vocabulary). Load it with "
                "its language model head (AutoModelForCausalLM)."
            )
        return found

    @property
    def pieces(self) -> list[str]:
        return spell_pieces(self.speller, self.ids[0].tolist())

    def spell(self, token: int) -> str:
        return spell_pieces(self.speller, [token])[0]

    def token(self, name: str, given: Target) -> int | None:
        """The id of a token that the user named by its text or its number.

        Raises:
            InspectionError: It is not a token, or several.
        """
        if given is None or is_whole(given):
            return given  # type: ignore[return-value]
        if not isinstance(given, str) or self.tokenizer is None:
            raise InspectionError(
                f"{name}={given!r}: give a token as its text (with a tokenizer), or as its id."
            )
        try:
            ids = self.tokenizer(given, add_special_tokens=False)["input_ids"]
        except TypeError:  # not one of transformers
            ids = self.tokenizer(given)["input_ids"]
        if len(ids) != 1:
            parts = ", ".join(repr(self.spell(each)) for each in ids)
            raise InspectionError(
                f"{name}={given!r} is {len(ids)} tokens ({parts}), and a logit belongs to one. "
                "Most words begin with a space: try ' ' + the word, or give an id."
            )
        return int(ids[0])

    def target(self, name: str, given: Target) -> int | None:
        """The id of a token whose logit is asked for; a model that names its head refuses others.

        Raises:
            InspectionError: It is not a token, several, or one without a logit.
        """
        token = self.token(name, given)
        head = getattr(unwrap(self.model), "get_output_embeddings", lambda: None)()
        if isinstance(head, nn.Linear):
            refuse_unknown_tokens(head.out_features, token)
        return token

    def place(self, position: int) -> int:
        s = self.ids.shape[1]
        if not is_whole(position) or not -s <= position < s:
            raise InspectionError(f"position={position!r}: the prompt has {s} tokens, 0 to {s - 1}")
        return position % s


def spell_pieces(speller: Speller, ids: list[int]) -> list[str]:
    """The text of each token for display."""
    return [each.decode("utf-8", errors="replace") for each in speller.spell(ids)]


@contextmanager
def _reading(model: nn.Module, tokenizer: Any, prompt: Prompt, chat: bool) -> Iterator[_Text]:
    """One prompt for one model, which is left as it was; everything that can be wrong comes first.

    Raises:
        InspectionError: It is not a model, not a prompt, or several prompts.
    """
    if not isinstance(model, nn.Module):
        raise InspectionError(
            f"The model is a {type(model).__name__} and no nn.Module. For a model by name: "
            "model, tokenizer = torchfmri.load_model('tiny')."
        )
    check_flag("chat", chat)
    refuse_unrunnable(model)
    refuse_two_stacks(model, _TWO_STACKS)
    refuse_without_tokens(model)
    refuse_virtual_tokens(model)
    model = runnable(model)
    encoded = encode(prompt, tokenizer, chat, "left" if is_causal(model) else "right")
    if len(encoded.ids) != 1:
        raise InspectionError(
            f"These are {len(encoded.ids)} prompts, and this reads one. Call it for each of them."
        )
    encoded = encoded.to(device_of(model))
    refuse_unknown_ids(model, encoded.ids)
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(unchanged(model, lambda _: None))
        stack.enter_context(generators_restored())
        stack.enter_context(compiled_code_as_eager())
        model.eval()
        yield _Text(model, encoded.ids, encoded.mask, Speller(tokenizer), tokenizer)


def lens(
    model: nn.Module,
    tokenizer: Any,
    prompt: Prompt,
    *,
    top: int = 5,
    translate: Translate | None = None,
    chat: bool = False,
) -> Lens:
    """What each layer of a language model would say next, at every token of a text.

    A masked language model (BERT) says what stands at a token, not what comes after it.

    The stream after each block goes through the model's own final norm, head, scale and softcap.
    The last row is compared with the logits of the model itself; a model for which they differ is
    refused by name. `scan(..., lens=True)` does the same to a text that the model writes.

    Args:
        model: A language model of transformers, or any module from ids to logits with one stack of
            blocks.
        tokenizer: That of the model; None where the prompt is token ids.
        prompt: A text, chat messages or token ids; one of them.
        top: How many of the likeliest tokens to keep.
        translate: A function of the stream (b, s, width) after a block and the block's number,
            applied before norm and head: the translators of a tuned lens.
        chat: Wrap a text as a user's message in the tokenizer's chat template.

    Raises:
        InspectionError: The stream, or what reads it, cannot be resolved for this model.
    """
    check_number("top", top, 1, "how many tokens to keep, such as 5")
    check_callable("translate", translate, "give a function of the stream and a block's number")
    with _reading(model, tokenizer, prompt, chat) as text:
        ahead = int(is_causal(text.model))
        found = read_lens(text.model, text.call, logits_of, text.ids, top, translate, ahead)
        ids = sorted({*found.top.flatten().tolist()})
        return Lens(
            layers=found.names,
            pieces=text.pieces,
            ids=text.ids[0].cpu().numpy(),
            rank=found.rank[:, 0].cpu().numpy(),
            probability=found.probability[:, 0].cpu().float().numpy(),
            entropy=found.entropy[:, 0].cpu().float().numpy(),
            top=found.top[:, 0].cpu().numpy(),
            top_probability=found.top_probability[:, 0].cpu().float().numpy(),
            spelling={each: text.spell(each) for each in ids},
        )


def attribute_logit(
    model: nn.Module,
    tokenizer: Any,
    prompt: Prompt,
    token: Target = None,
    *,
    against: Target = None,
    position: int = -1,
    heads: bool = True,
    chat: bool = False,
) -> LogitAttribution:
    """How much each head and each MLP adds to the logit of a token (direct logit attribution).

    Args:
        model: As for `lens`.
        tokenizer: As for `lens`.
        prompt: As for `lens`.
        token: Whose logit, as text (" Paris") or id; the likeliest token by default.
        against: A token whose logit is taken off: why `token` rather than `against`.
        position: Whose prediction, counted from 0 or from the end; the last token's by default.
        heads: False for one part per attention layer.
        chat: Wrap a text as a user's message in the tokenizer's chat template.

    Raises:
        InspectionError: The logits of this model are no sum of parts, or the token is none.
    """
    check_flag("heads", heads)
    with _reading(model, tokenizer, prompt, chat) as text:
        return attribute(
            text.model,
            text.call,
            logits_of,
            position=text.place(position),
            token=text.target("token", token),
            against=text.target("against", against),
            heads=heads,
            spell=text.spell,
        )


def attribute_inputs(
    model: nn.Module,
    tokenizer: Any,
    prompt: Prompt,
    token: Target = None,
    *,
    against: Target = None,
    position: int = -1,
    method: Literal["gradient_x_input", "integrated_gradients"] = "integrated_gradients",
    steps: int = 50,
    baseline: Target = "mean",
    chat: bool = False,
) -> InputAttribution:
    """How much each input token adds to the logit of a token, by gradients of its embedding.

    Args:
        model: As for `lens`; it may have several stacks, but be no encoder-decoder.
        tokenizer: As for `lens`.
        prompt: As for `lens`.
        token: Whose logit, as text (" Paris") or id; the likeliest token by default.
        against: A token whose logit is taken off: why `token` rather than `against`.
        position: Whose prediction, counted from 0 or from the end; the last token's by default.
        method: "integrated_gradients", on the straight way from the baseline, or
            "gradient_x_input".
        steps: How many points of that way to look at.
        baseline: What stands for nothing: "mean" of all embeddings, "zero" (Captum's default,
            from which models with an RMSNorm rarely converge), or a token as text or id.
        chat: Wrap a text as a user's message in the tokenizer's chat template.

    Raises:
        InspectionError: The model does not say where its tokens are embedded, or the token is none.
    """
    if method not in METHODS:
        raise InspectionError(f"method={method!r}: there are {' and '.join(map(repr, METHODS))}.")
    check_number("steps", steps, 1, "how many points to look at, such as 50")
    with _reading(model, tokenizer, prompt, chat) as text:
        place = text.place(position)
        wanted, other = text.target("token", token), text.target("against", against)
        is_token = baseline not in ("mean", "zero")
        start = text.token("baseline", baseline) if is_token else baseline
        if wanted is None:
            with torch.no_grad():
                wanted = int(text.logits(1)[0, place].argmax())
        score = partial(_score, position=place, token=wanted, against=other)
        values, logit, lowest = attribute_embeddings(
            text.model, text.logits, score, method, steps, "mean" if start is None else start
        )
        return InputAttribution(
            method=method,
            token=text.spell(wanted),
            against=None if other is None else text.spell(other),
            position=place,
            pieces=text.pieces,
            values=values.cpu().numpy(),
            logit=logit,
            baseline=lowest,
            steps=steps if method == "integrated_gradients" else 1,
        )


def _score(logits: Tensor, position: int, token: int, against: int | None) -> Tensor:
    refuse_unknown_tokens(logits.shape[-1], token, against)
    found = logits[:, position, token]
    return found if against is None else found - logits[:, position, against]
