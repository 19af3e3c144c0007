"""`lesion`: every part of a model taken out in turn, and what becomes of its answers.

It is public. The file at `path` is written after every prompt, and a second call goes on from it if
the key is the same; the key covers weights, prompts, places and options, and changing how it is
made orphans old files. The model runs in evaluation mode inside `unchanged`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from torchfmri._arguments import check_callable, check_module, check_number, check_path, require
from torchfmri._edit import Edit
from torchfmri._files import to_json
from torchfmri._lens import feature_labels
from torchfmri._lesion.lesion_map import LesionMap
from torchfmri._lesion.lesion_run import LesionRun, Measured
from torchfmri._lesion.questions import LesionQuestion, Metric, read_questions
from torchfmri._lesion.targets import FeatureChoice, LesionTarget, find_targets, split_features
from torchfmri._model import (
    compiled_code_as_eager,
    evaluating,
    runnable,
    switched_off,
    unchanged,
    unwrap,
)
from torchfmri.exceptions import InspectionError

EDITS = ("zero", "mean", "resample")
METHODS = ("lesion", "attribution", "both")
_ASKED = ("prompt", "answer", "foil")
Step = Callable[[int, int, str], None]


def lesion(
    model: nn.Module,
    tokenizer: Any,
    prompts: Any,
    answers: str | Sequence[str] | None = None,
    foils: str | Sequence[str] | None = None,
    *,
    of: str | Sequence[str] = ("heads", "mlps"),
    metric: Metric = "surprisal",
    edit: str = "zero",
    method: str = "lesion",
    tokens: Any = None,
    batch: int = 32,
    seed: int = 0,
    path: str | Path | None = None,
    on_step: Step | None = None,
    features: object | None = None,
    labels: object | None = None,
) -> LesionMap:
    """Take heads, MLPs or other parts out of a model in turn, and measure its answers.

    One forward pass carries many lesions, each in a row of its own; a row gives what a pass of its
    own would give, to rounding. The model runs in evaluation mode and is afterwards as it was.

    Args:
        model: A language model; its logits are asked for.
        tokenizer: The model's tokenizer; None for token ids.
        prompts: One or several, texts or token ids. For a masked language model (BERT) they have a
            mask token for each token of the answer.
        answers: One for each prompt, with the space before it, such as `" Paris"`.
        foils: Other answers, for `metric="logit_difference"`.
        of: What to lesion: `"heads"`, `"mlps"`, `"attentions"`, `"blocks"`, `"voxels"` (64 hidden
            units of an MLP each), names of places such as `"L3H*"`, `"features"` (all those of
            `features=` that are on at the prompts), `"L2[feature 17]"`, or several of these.
        metric: `"surprisal"` of the answer (nats, summed over its tokens), `"logit_difference"`
            (answer minus foil, at the last token of the prompt or at its first mask), or a function
            of the logits (s, vocabulary) and the ids (s,) that returns a number.
        edit: What a lesion puts there: `"zero"`, `"mean"` (of the unit over all tokens of all
            prompts) or `"resample"` (a token of these prompts drawn by position).
        method: `"lesion"`, `"attribution"` (attribution patching: all lesions estimated from one
            backward pass), or `"both"`, which says how good the estimate is.
        tokens: Which tokens are lesioned, as in `Edit.at`; None for all of them.
        batch: How many lesions one forward pass carries.
        seed: The seed of `"resample"`.
        path: A file that is written after every prompt. Called again with the same arguments,
            `lesion` goes on where it was interrupted.
        on_step: Told (lesions done, lesions in all, prompt), for a progress bar.
        features: {place: object with encode and decode} of dictionaries of features, or one that
            knows its place. A lesion takes one feature out of the value: see
            `Edit.without_features`.
        labels: Texts for features: {feature: text}, a list, or {place: one of these}.

    Raises:
        InspectionError: The arguments do not fit together, rows of a batch influence each other,
            a lesion never acted, or the file at `path` is about something else.
    """
    check_module("model", model)
    require(edit in EDITS, "edit", edit, f"choose {', '.join(map(repr, EDITS))}")
    require(method in METHODS, "method", method, f"choose {', '.join(map(repr, METHODS))}")
    check_number("batch", batch, 1, "give how many lesions one pass carries, from 1")
    check_number("seed", seed, 0, "give a number from 0 upwards")
    check_callable("on_step", on_step, "give a function of done, total and prompt")
    Edit.zero().at(tokens=tokens)  # refuses what selects nothing, before the model runs
    if switched_off():
        raise InspectionError("TORCHFMRI=off: nothing is attached, so nothing is lesioned.")
    questions = read_questions(model, tokenizer, prompts, answers, foils, metric)
    others, choice = split_features(model, of, features)
    _check_features(choice, edit, labels)
    targets = [] if choice is not None and not others else find_targets(model, others)
    if choice is not None:
        targets += _feature_targets(model, questions, choice)
    texts = _texts(targets, labels)
    run = LesionRun(
        model=runnable(model), targets=targets, edit=edit, seed=seed, tokens=tokens, batch=batch
    )
    key = _key(model, questions, targets, (edit, method, seed, repr(tokens)))
    done = _continue(path, key, len(questions))

    def told(before: int, prompt: str, lesions: int) -> None:
        if on_step is not None:
            on_step(before + lesions, len(targets) * len(questions), prompt)

    with unchanged(model), compiled_code_as_eager(), evaluating(model):
        if len(done) < len(questions) and method != "attribution" and batch > 1:
            run.refuse_mixing(questions[0])
        run.gather(questions)
        for number, question in list(enumerate(questions))[len(done) :]:
            step = partial(told, number * len(targets), question.prompt)
            done.append(run.measure(question, method != "lesion", method != "attribution", step))
            if path is not None:
                _assemble(questions, targets, done, edit, key, texts).save(path)
    return _assemble(questions, targets, done, edit, key, texts)


def _check_features(choice: FeatureChoice | None, edit: str, labels: object) -> None:
    if choice is not None and edit != "zero":
        raise InspectionError(
            f"edit={edit!r}: a feature is taken out, which is edit='zero'. Lesion features alone, "
            "with edit='zero'."
        )
    if choice is None and labels is not None:
        raise InspectionError("labels= are texts for features: give features= and of='features'.")


def _feature_targets(
    model: nn.Module, questions: Sequence[LesionQuestion], choice: FeatureChoice
) -> list[LesionTarget]:
    if not choice.is_open:
        return choice.targets({})
    run = LesionRun(runnable(model), [], edit="zero", seed=0, tokens=None, batch=1)
    with unchanged(model), compiled_code_as_eager(), evaluating(model):
        return choice.targets(run.active_features(questions, choice.sources))


def _texts(targets: Sequence[LesionTarget], labels: object) -> tuple[str, ...]:
    """Return the label of each lesion; none at all if no table was given."""
    if labels is None:
        return ()
    return tuple(
        ""
        if each.source is None or each.feature is None
        else feature_labels(labels, each.source.name, [each.feature])[0]
        for each in targets
    )


def _assemble(
    questions: Sequence[LesionQuestion],
    targets: Sequence[LesionTarget],
    done: Sequence[Measured],
    edit: str,
    key: str,
    labels: tuple[str, ...],
) -> LesionMap:
    asked = questions[: len(done)]
    texts: dict[str, Any] = {f"{name}s": tuple(getattr(q, name) for q in asked) for name in _ASKED}
    measured: dict[str, Any] = {
        name: np.stack([getattr(each, name) for each in done]) for name in Measured._fields
    }
    metric = questions[0].metric
    blocks = [-1 if each.place.block is None else each.place.block for each in targets]
    return LesionMap(
        names=tuple(each.place.name for each in targets),
        kinds=tuple(each.kind for each in targets),
        blocks=np.array(blocks, dtype=np.int64),
        columns=np.array([each.column for each in targets], dtype=np.int64),
        **texts,
        metric=metric if isinstance(metric, str) else getattr(metric, "__name__", "metric"),
        edit=edit,
        **measured,
        key=key,
        labels=labels,
        masked=bool(questions[0].masks),
    )


def _continue(path: str | Path | None, key: str, count: int) -> list[Measured]:
    """Return the prompts that a file has lesioned already.

    Raises:
        InspectionError: The file has other lesions.
        FileFormatError: The file is not a map of lesions, or it is damaged.
    """
    if path is None or not check_path("path", path).exists():
        return []
    found = LesionMap.load(path)
    if found.key != key:
        raise InspectionError(
            f"path={str(path)!r} has lesions of another model, other prompts or other options. "
            "Choose another file, or delete this one."
        )
    rows = zip(*(getattr(found, name) for name in Measured._fields), strict=True)
    return [Measured(*row) for row in list(rows)[:count]]


def _key(
    model: nn.Module,
    questions: Sequence[LesionQuestion],
    targets: Sequence[LesionTarget],
    options: Any,
) -> str:
    """Return a key of these lesions: of weights, prompts, places and options."""
    sums = [
        [name, list(each.shape), str(each.dtype), _sum(each)]
        for name, each in unwrap(model).named_parameters()
    ]
    asked = [
        [each.ids.tolist(), each.answer_ids.tolist(), each.foil_id, str(_name(each.metric))]
        for each in questions
    ]
    places = [[each.place.name, each.place.layer, str(each.place.units)] for each in targets]
    sources = {each.source.name: each.source.dictionary for each in targets if each.source}
    sums += [[name, *_tensor_sums(each)] for name, each in sources.items()]
    text = to_json([sums, asked, places, list(map(str, options))])
    return f"{zlib.crc32(text.encode()):08x}-{len(text)}"


def _tensor_sums(dictionary: Any) -> list[str]:
    """Return the sums of a dictionary's weights, or of the tensors among its attributes."""
    own = dictionary.state_dict() if isinstance(dictionary, nn.Module) else vars(dictionary)
    return [f"{name} {_sum(each)}" for name, each in own.items() if isinstance(each, torch.Tensor)]


def _name(metric: Metric) -> str:
    return metric if isinstance(metric, str) else getattr(metric, "__qualname__", "metric")


def _sum(parameter: torch.Tensor) -> str:
    values = parameter.detach()
    if hasattr(values, "to_local"):
        values = values.to_local()
    return f"{float(values.double().sum()):.17g}" if values.is_floating_point() else "-"
