"""`steer`: an answer with a direction added while it is written, beside plain and random ones.

It is public. The direction is added from the last token of the prompt on. Random directions of the
same length are the control: without them any large push looks like an effect. Answers are greedy,
so that a difference comes from the edit and not from sampling. The first vector of `vectors` is the
user's and the others are the controls; results are read by that position. Table and words are free.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from torchfmri._arguments import check_module, check_number, require
from torchfmri._contrast import Direction
from torchfmri._edit import Edit, edited
from torchfmri._lesion.questions import logits_for
from torchfmri._model import device_of, evaluating, named_layers, places_of, unchanged, unwrap
from torchfmri._scan import encode, refuse_unknown_ids
from torchfmri._text import Column, Grid, number_text, plural
from torchfmri.exceptions import InspectionError


@dataclass(frozen=True, eq=False)
class Steering:
    """What a direction does to an answer, beside random directions of the same length.

    Attributes:
        prompt: What was asked.
        place: Where the direction was added.
        question: The contrast that the direction comes from; "" if that is not known.
        factor: How much of it was added.
        plain: The answer without it.
        steered: The answer with it.
        random: The answers with random directions of the same length.
        shift: How far the direction moves the next token after the prompt: KL divergence from the
            plain distribution, in nats.
        random_shifts: (n,) how far each random direction moves it.

    Examples:
        >>> import torch, torchfmri
        >>> model, tokenizer = torchfmri.load_model("tiny")
        >>> found = torchfmri.steer(
        ...     model, tokenizer, "Once upon a", torch.ones(144), place="L1", max_new_tokens=3
        ... )
        >>> len(found.random), found.shift > 0
        (3, True)
    """

    prompt: str
    place: str
    question: str
    factor: float
    plain: str
    steered: str
    random: tuple[str, ...]
    shift: float
    random_shifts: NDArray[np.float64]

    def __repr__(self) -> str:
        return f"<Steering of {self.place!r} by {number_text(self.factor)}: {self.steered!r}>"

    def __str__(self) -> str:
        return self.table()

    def table(self, width: int | None = None) -> str:
        """Return the answers, one below the other, with how far each moves the next token."""
        above = int((self.random_shifts >= self.shift).sum())
        what = f"{self.question} " if self.question else ""
        shifts = [0.0, self.shift, *self.random_shifts]
        answers = [self.plain, self.steered, *self.random]
        note = (
            f"{above} of {plural(len(self.random), 'random direction')} of the same length "
            f"{'moves' if above == 1 else 'move'} the next token as far, or further."
        )
        return Grid(
            title=(
                f"{number_text(self.factor)} times the direction {what}added at {self.place}, "
                f"from the end of {self.prompt!r} on"
            ),
            heading="direction",
            names=["none", "steered", *(f"random {each}" for each in range(len(self.random)))],
            columns=[
                Column("moves (nats)", [number_text(float(each)) for each in shifts], 9),
                Column("answer", [repr(each) for each in answers], 1, right=False),
            ],
            notes=[note],
        ).text(width)


def steer(
    model: nn.Module,
    tokenizer: Any,
    prompt: Any,
    direction: Direction | Tensor | NDArray[Any],
    *,
    place: str | None = None,
    factor: float = 1.0,
    max_new_tokens: int = 40,
    random: int = 3,
    seed: int = 0,
) -> Steering:
    """Let a model answer with a direction added, beside its plain answer and random directions.

    The direction is added from the last token of the prompt on, at every token that is written.
    Answers are the likeliest ones (no sampling). The model is afterwards as it was.

    Args:
        model: A language model with `generate`.
        tokenizer: The model's tokenizer.
        prompt: A text, chat messages, or token ids.
        direction: `contrast.direction(layer)` of a signed contrast, or (w,) a vector.
        place: Where to add it: a layer or a name such as `"L9"`. By default the direction's layer.
        factor: How much of it; negative to take it away.
        max_new_tokens: How much to write at most.
        random: How many random directions of the same length to compare with, from 1.
        seed: The seed of the random directions.

    Raises:
        LayerNotFoundError: There is no such place.
        InspectionError: The direction does not fit the place, or the model cannot generate.
    """
    check_module("model", model)
    check_number("max_new_tokens", max_new_tokens, 1, "give how many tokens to write, from 1")
    check_number("random", random, 1, "give how many random directions to compare with, from 1")
    check_number("seed", seed, 0, "give a number from 0 upwards")
    wanted = _direction_at(direction, place)
    if len(places_of(named_layers(model), wanted.layer)) != 1:
        raise InspectionError(
            f"place={wanted.layer!r} stands for several places. Name one of them."
        )
    if not hasattr(unwrap(model), "generate"):
        kind = type(unwrap(model)).__name__
        raise InspectionError(f"{kind} has no generate(): give a language model of transformers.")
    ids = encode(prompt, tokenizer).ids
    require(len(ids) == 1, "prompt", prompt, "give one prompt")
    refuse_unknown_ids(model, ids)
    answers = _Answers(model, tokenizer, ids.to(device_of(model)), max_new_tokens)
    vectors = [wanted.vector, *wanted.random(random, seed)]
    edits = [Edit.add(torch.as_tensor(each), factor) for each in vectors]  # checked before we write
    with unchanged(model), evaluating(model), torch.no_grad():
        plain, logs = answers.write()
        found = [answers.write({wanted.layer: each}) for each in edits]
    shifts = [float((new.exp() * (new - logs)).sum()) for _, new in found]
    return Steering(
        prompt=prompt if isinstance(prompt, str) else answers.decode(ids[0]),
        place=wanted.layer,
        question=wanted.question,
        factor=factor,
        plain=plain,
        steered=found[0][0],
        random=tuple(text for text, _ in found[1:]),
        shift=shifts[0],
        random_shifts=np.array(shifts[1:]),
    )


class _Answers:
    """The answers of a model to one prompt."""

    def __init__(self, model: nn.Module, tokenizer: Any, ids: Tensor, most: int) -> None:
        self._model, self._tokenizer, self._ids, self._most = model, tokenizer, ids, most

    def write(self, edits: dict[str, Edit] | None = None) -> tuple[str, Tensor]:
        """Return an answer, and the log probabilities of its first token."""
        count = self._ids.shape[1]
        here = {
            place: each.at(tokens=slice(count - 1, None)) for place, each in (edits or {}).items()
        }
        with edited(self._model, here) if here else nullcontext():
            logs = logits_for(self._model, self._ids, 1)[0, -1].double().log_softmax(-1)
            generate: Any = unwrap(self._model).generate
            most = {"max_new_tokens": self._most, "pad_token_id": self._padding()}
            mask = torch.ones_like(self._ids)
            written = generate(self._ids, attention_mask=mask, do_sample=False, **most)
        return self.decode(written[0, count:]), logs

    def decode(self, ids: Tensor) -> str:
        """Return tokens as text."""
        if self._tokenizer is None:
            return str(ids.tolist())
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=True))

    def _padding(self) -> int:
        """Return a padding token: one row needs none, but transformers warns without one."""
        known = getattr(self._tokenizer, "pad_token_id", None)
        return 0 if known is None else int(known)


def _direction_at(direction: Any, place: str | None) -> Direction:
    """Return the direction with the place at which it is added.

    Raises:
        InspectionError: The value is not a direction, or no place is known.
    """
    if isinstance(direction, Direction):
        layer = direction.layer if place is None else place
        return Direction(layer, direction.vector, direction.question, direction.tokens)
    vector = direction.detach().cpu() if isinstance(direction, Tensor) else direction
    is_vector = isinstance(vector, (Tensor, np.ndarray)) and vector.ndim == 1
    meaning = "give contrast.direction(layer), or a vector (w,)"
    require(is_vector and len(vector) > 0, "direction", direction, meaning)
    require(isinstance(place, str), "place", place, "say where to add the vector, such as 'L9'")
    return Direction(str(place), np.asarray(vector, dtype=np.float64), "", "")
