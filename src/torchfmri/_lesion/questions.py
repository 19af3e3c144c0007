"""Questions: a prompt, the answer that counts, and what the model is asked about it.

`lesion` and `patch` make questions with `read_questions`; `lesion_run` and `paths` feed `ids`, get
the logits of the last `needed` positions from `logits_for`, and hand exactly these to `measure`,
which counts positions from the end; `steer` uses `logits_for` alone. If you change what `ids`
holds for a metric (see `LesionQuestion`), change `needed` and `measure` with it. A model
that takes `logits_to_keep` computes the needed logits alone. Masked language models are asked at
their masks, all masked at once. Effects of lesions are small differences, so the metrics by name
are computed in float64, and the number that a user's function returns is never rounded. Words of
errors are free; a new metric by name is an entry of `METRICS` and a branch in `measure`, `needed`
and `_question`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from torchfmri._arguments import require
from torchfmri._model import device_of, unwrap
from torchfmri._scan import (
    encode,
    is_causal,
    logits_of,
    refuse_two_stacks,
    refuse_unknown_ids,
    refuse_without_tokens,
    takes,
)
from torchfmri._text import plural
from torchfmri.exceptions import InspectionError

Metric: TypeAlias = "str | Callable[[Tensor, Tensor], Tensor | float]"
METRICS = ("surprisal", "logit_difference")
_TWO_STACKS = (
    "a prompt is read by the encoder and an answer written by the decoder, and here both are one "
    "sequence. Edit either side and compare your own passes: "
    "torchfmri.edited(model, {'decoder.L3H1': 'zero'})."
)


@dataclass(frozen=True, eq=False)
class LesionQuestion:
    """One prompt with its answer, as the model is fed it.

    Attributes:
        prompt: As text, or the ids in words.
        answer: As text; "" if there is none.
        foil: The other answer, as text; "" if there is none.
        ids: (s,) what the model is fed. For the surprisal that is the prompt and the answer without
            its last token, which predicts nothing that counts; for a function the prompt and the
            whole answer; for a logit difference and for masked models the prompt.
        answer_ids: (a,) the answer's.
        foil_id: The first of the foil's.
        metric: "surprisal", "logit_difference", or a function of logits and ids.
        masks: Positions of the mask tokens in the prompt; () for causal models, whose answer
            follows the prompt, and for a function.
    """

    prompt: str
    answer: str
    foil: str
    ids: Tensor
    answer_ids: Tensor
    foil_id: int | None
    metric: Metric
    masks: tuple[int, ...] = ()

    @property
    def needed(self) -> int | None:
        """How many of the last positions the metric looks at; None for all."""
        if callable(self.metric) or self.masks:
            return None
        return 1 if self.metric == "logit_difference" else len(self.answer_ids)

    def measure(self, logits: Tensor) -> Tensor:
        """Return (b,) the metric of every row, from the logits (b, s, vocabulary).

        Raises:
            InspectionError: A function of the user's did not return one number.
        """
        if callable(self.metric):
            found = [self.metric(row, self.ids) for row in logits]
            wrong = [each for each in found if not _is_one_number(each)]
            if wrong:
                raise InspectionError(
                    f"The metric returned {_kind(wrong[0])} for logits of shape "
                    f"{tuple(logits.shape[1:])}; it has to return one number."
                )
            tensors = [each.reshape(()) for each in found if isinstance(each, Tensor)]
            if len(tensors) == len(found):
                return torch.stack(tensors)
            # Python's numbers have 64 bits, and torch would make float32 of them.
            numbers = [float(each.detach() if isinstance(each, Tensor) else each) for each in found]
            return torch.tensor(numbers, dtype=torch.float64, device="cpu")
        wide = logits.double()
        if self.masks:
            wide = wide[:, list(self.masks)]
        if self.metric == "logit_difference":
            assert self.foil_id is not None
            at = 0 if self.masks else -1
            return wide[:, at, int(self.answer_ids[0])] - wide[:, at, self.foil_id]
        answers = self.answer_ids.to(logits.device)
        picked = wide.log_softmax(-1).gather(-1, answers.expand(len(wide), -1)[..., None])
        return -picked.sum((1, 2))

    def refuse_infinite(self, found: float) -> None:
        """Raise if the metric of the prompt as it is cannot be compared with anything.

        Raises:
            InspectionError: The metric is NaN or infinite.
        """
        if not math.isfinite(found):
            name = self.metric if isinstance(self.metric, str) else "metric"
            raise InspectionError(
                f"The {name} of {self.prompt[:40]!r} is {found} before anything is changed, so "
                "nothing can be compared with it. Look for NaN in the model, or at your metric."
            )


def read_questions(
    model: nn.Module,
    tokenizer: Any,
    prompts: Any,
    answers: str | Sequence[str] | None,
    foils: str | Sequence[str] | None,
    metric: Metric,
) -> list[LesionQuestion]:
    """Return the questions that prompts and answers make.

    Raises:
        InspectionError: Prompts and answers do not fit together, an answer has no tokens, the model
            does not know a token, or a masked model cannot be asked.
    """
    known = isinstance(metric, str) and metric in METRICS
    choices = f"choose {' or '.join(map(repr, METRICS))}, or give a function of logits and ids"
    require(known or callable(metric), "metric", metric, choices)
    if isinstance(prompts, str) or _is_ids(prompts):
        several = [prompts]
    else:
        several = list(prompts) if isinstance(prompts, Iterable) else []
    require(bool(several), "prompts", prompts, "give a text, the ids of tokens, or a list of those")
    texts = _as_many(answers, len(several), "answers")
    others = _as_many(foils, len(several), "foils")
    if not callable(metric) and texts is None:
        raise InspectionError(
            f"metric={metric!r} is about an answer: give answers=, one for each prompt, such as "
            "' Paris' (with the space that comes before it)."
        )
    if metric == "logit_difference" and others is None:
        raise InspectionError(
            "metric='logit_difference' compares the answer with another one: give foils=, one for "
            "each prompt, such as ' London'."
        )
    refuse_two_stacks(model, _TWO_STACKS)
    refuse_without_tokens(model)
    rows = zip(
        several, texts or [None] * len(several), others or [None] * len(several), strict=True
    )
    return [_question(model, tokenizer, *row, metric) for row in rows]


def logits_for(model: nn.Module, ids: Tensor, needed: int | None) -> Tensor:
    """Return the logits (b, n, vocabulary) of the last `needed` positions.

    Raises:
        InspectionError: The model returns none.
    """
    keywords: dict[str, Any] = {}
    if takes(model, "use_cache"):
        keywords["use_cache"] = False
    if needed is not None and takes(model, "logits_to_keep"):
        keywords["logits_to_keep"] = needed
    called = model(input_ids=ids, **keywords) if takes(model, "input_ids") else model(ids)
    logits = logits_of(called)
    if logits is None:
        raise InspectionError(
            f"{type(model).__name__} returns no logits (b, s, vocabulary), so nothing can be "
            "said about an answer. Give a model with a language modelling head."
        )
    return logits if needed is None else logits[:, -needed:]


def _question(
    model: nn.Module, tokenizer: Any, prompt: Any, answer: Any, foil: Any, metric: Metric
) -> LesionQuestion:
    ids = encode(prompt, tokenizer).ids[0].cpu()  # they are joined here, and moved below
    answer_ids = torch.empty(0, dtype=torch.long, device="cpu")
    if answer is not None:
        answer_ids = _answer_ids(answer, tokenizer, "answer")
    foil_ids = None if foil is None else _answer_ids(foil, tokenizer, "foil")
    foil_id = None if foil_ids is None else int(foil_ids[0])
    if metric == "logit_difference" and foil_id == int(answer_ids[0]):
        raise InspectionError(
            f"The answer {answer!r} and the foil {foil!r} begin with the same token: their "
            "difference is always 0. Choose others."
        )
    fed = ids
    masks: tuple[int, ...] = ()
    if not is_causal(model):
        masks = _masks(model, tokenizer, ids, answer, answer_ids, metric)
    elif metric != "logit_difference" and len(answer_ids):
        end = None if callable(metric) else -1  # the last token predicts nothing that counts
        fed = torch.cat([ids, answer_ids[:end]])
    place = device_of(model)
    refuse_unknown_ids(model, ids[None])
    refuse_unknown_ids(model, answer_ids[None], what="answer")
    if foil_ids is not None:
        refuse_unknown_ids(model, foil_ids[None], what="foil")
    return LesionQuestion(
        prompt=prompt if isinstance(prompt, str) else str(ids.tolist()),
        answer="" if answer is None else str(answer),
        foil="" if foil is None else str(foil),
        ids=fed.to(place),
        answer_ids=answer_ids.to(place),
        foil_id=foil_id,
        metric=metric,
        masks=masks,
    )


def _masks(
    model: nn.Module, tokenizer: Any, ids: Tensor, answer: Any, answer_ids: Tensor, metric: Metric
) -> tuple[int, ...]:
    """Return the positions at which a masked language model is asked for an answer.

    Raises:
        InspectionError: The model has no language modelling head, no tokenizer says what the mask
            token is, or the prompt does not have exactly one mask per answer token. A logit
            difference is asked at the first mask, so more of them are accepted there.
    """
    if callable(metric):
        return ()  # it is given all logits, and knows where to look
    kind, mask = type(unwrap(model)).__name__, getattr(tokenizer, "mask_token_id", None)
    head = getattr(unwrap(model), "get_output_embeddings", lambda: None)()
    if head is None and "MaskedLM" not in kind:
        raise InspectionError(
            f"{kind} has no language modelling head, so nothing can be said about an answer. "
            "Give a model with one (AutoModelForCausalLM, AutoModelForMaskedLM), or a metric of "
            "your own."
        )
    if mask is None:
        raise InspectionError(
            f"{kind} predicts tokens that are masked, not the next one, and no tokenizer says what "
            "the mask token is. Give the model's tokenizer, or a metric of your own."
        )
    found = (ids == int(mask)).nonzero().flatten().tolist()
    wanted = 1 if metric == "logit_difference" else len(answer_ids)
    if len(found) < 1 or (len(found) != wanted and metric != "logit_difference"):
        text = getattr(tokenizer, "mask_token", mask)
        has = f"The prompt has {plural(len(found), 'mask token')}"
        if metric == "logit_difference":
            advice = f"{has}: write {text!r} where answer and foil would stand."
        else:
            advice = (
                f"{has}, and the answer {answer!r} has {plural(len(answer_ids), 'token')}: write "
                f"{text!r} for each of them in the prompt."
            )
        raise InspectionError(f"{kind} predicts tokens that are masked, not the next one. {advice}")
    return tuple(found[:wanted])


def _answer_ids(text: Any, tokenizer: Any, what: str) -> Tensor:
    if isinstance(text, str) and callable(tokenizer):
        found = tokenizer(text, add_special_tokens=False)["input_ids"]
        require(bool(found), what, text, "it has no tokens; give a text with some")
        return torch.tensor(found, device="cpu")
    return encode(text, tokenizer).ids[0].cpu()


def _is_one_number(value: object) -> bool:
    """Whether what a metric returned is one real number; numpy's count."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real)


def _kind(value: object) -> str:
    """Return what a metric returned, in words."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return type(value).__name__


def _is_ids(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 1
    is_list = isinstance(value, (list, tuple)) and bool(value)
    return is_list and all(isinstance(each, int) for each in value)


def _as_many(value: Any, count: int, name: str) -> list[Any] | None:
    if value is None:
        return None
    meaning = f"give one for each of {count} prompts, or one for all"
    require(isinstance(value, (int, Iterable)), name, value, meaning)
    several = [value] * count if isinstance(value, (str, int)) else list(value)
    several = [[each] if isinstance(each, int) else each for each in several]  # the id of a token
    require(len(several) == count, name, value, meaning)
    return several
