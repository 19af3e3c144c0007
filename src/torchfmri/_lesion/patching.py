"""`patch`: values of a clean run put into a corrupted one, tokens matched by their role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchfmri._arguments import check_module, check_number, require
from torchfmri._edit import BoundEdit, Edit, EditPasses
from torchfmri._lesion.lesion_run import Key, LesionRun
from torchfmri._lesion.patch_map import PatchMap
from torchfmri._lesion.paths import Paths
from torchfmri._lesion.questions import LesionQuestion, logits_for, read_questions
from torchfmri._lesion.roles import Pairs, matched_tokens, token_label, unmatched_tokens
from torchfmri._lesion.targets import LesionTarget, find_targets
from torchfmri._model import compiled_code_as_eager, evaluating, runnable, unchanged
from torchfmri.exceptions import InspectionError


def patch(
    model: nn.Module,
    tokenizer: Any,
    clean: Any,
    corrupted: Any,
    answer: Any,
    foil: Any = None,
    *,
    of: str | Sequence[str] = "blocks",
    per: str = "place",
    to: str | Sequence[str] | None = None,
    pairs: Sequence[tuple[int, int]] | None = None,
    batch: int = 32,
) -> PatchMap:
    """Run a corrupted prompt with values of the clean one, place by place (activation patching).

    With `to` it is path patching: the clean value of a place reaches those places alone, on the
    direct way. All attentions and MLPs in between are held at what they are in the corrupted
    prompt, and what then arrives at those places is put into a second pass.

    Args:
        model: A language model.
        tokenizer: That of the model.
        clean: The prompt that has the answer.
        corrupted: The same with something exchanged, so that the answer changes.
        answer: The answer to the clean prompt, with the space before it; or its token ids.
        foil: Another answer; with it the metric is the logit difference, without it the surprisal.
        of: What to patch, as in `lesion`.
        per: `"place"` patches all matched tokens at once, `"token"` one after the other.
        to: Where patches arrive: places such as `"L9H6.q"` or `"L9.mlp"`, `"logits"` for the direct
            effect on the answer, or None for everything after the patch.
        pairs: (clean position, corrupted position) of tokens that stand for each other. By default
            tokens are matched by role: equal ones, and runs of exchanged ones between equal ones
            (of different lengths: their last tokens).
        batch: How many patches one forward pass carries.

    Raises:
        InspectionError: No token matches, the metric is the same for both prompts, rows of a batch
            influence each other, no path leads to `to`, or what is in between cannot be held in
            this architecture.
    """
    check_module("model", model)
    require(per in ("place", "token"), "per", per, "choose 'place' or 'token'")
    check_number("batch", batch, 1, "give how many patches one pass carries, from 1")
    metric = "surprisal" if foil is None else "logit_difference"
    foils = None if foil is None else [foil, foil]
    asked = read_questions(model, tokenizer, [clean, corrupted], [answer, answer], foils, metric)
    targets = find_targets(model, of)
    run = LesionRun(
        model=runnable(model), targets=targets, edit="zero", seed=0, tokens=None, batch=batch
    )
    matched = matched_tokens(asked, pairs)
    groups = [matched] if per == "place" else [[each] for each in matched]
    with unchanged(model), compiled_code_as_eager(), evaluating(model):
        if batch > 1:
            run.refuse_mixing(asked[1])
        metrics: list[float] = []
        values: dict[tuple[str, str], Tensor] = {}
        for question in asked:
            with torch.no_grad(), run.reading() as found:
                logits = logits_for(run.model, question.ids[None], question.needed)
            metrics.append(float(question.measure(logits)[0]))
            question.refuse_infinite(metrics[-1])
            values = values or dict(found)  # the clean run's
        _refuse_equal(metrics, asked)
        way = None if to is None else Paths(run, to, asked[1])
        work = [(each, group) for each in targets for group in groups]
        patched: list[float] = []
        for first in range(0, len(work), batch):
            several = work[first : first + batch]
            bound, passes = _bind_patches(run, several, values)
            if way is None:
                patched += run.rows(asked[1], len(several), bound, passes)
            else:
                patched += way.rows([each for each, _ in several], bound, passes, metrics[1])
        if way is not None:
            way.refuse_unreached(targets)
    labels = ["all tokens"]
    if per == "token":
        labels = [token_label(tokenizer, asked[1].ids, position) for _, position in matched]
    return PatchMap(
        names=tuple(each.place.name for each in targets),
        blocks=np.array([-1 if t.place.block is None else t.place.block for t in targets]),
        labels=tuple(labels),
        pairs=tuple(matched),
        metric=metric,
        clean=metrics[0],
        corrupted=metrics[1],
        patched=np.array(patched).reshape(len(targets), len(groups)),
        unmatched=unmatched_tokens(tokenizer, asked, matched),
        to="" if way is None else way.name,
        unreached=() if way is None else way.unreached(targets),
    )


def _bind_patches(
    run: LesionRun, work: Sequence[tuple[LesionTarget, Pairs]], values: Mapping[Key, Tensor]
) -> tuple[list[BoundEdit], EditPasses]:
    """The patches of one pass, one in each row."""
    passes, bound = EditPasses(), []
    for row, (target, pairs) in enumerate(work):
        donor = values[target.place.layer, target.place.what].detach()
        edit = Edit.replace(donor, source=[one for one, _ in pairs])
        edit = edit.at(tokens=[other for _, other in pairs], rows=[row])
        bound.append(run.bind(target.place, edit, passes))
    return bound, passes


def _refuse_equal(metrics: Sequence[float], asked: Sequence[LesionQuestion]) -> None:
    if abs(metrics[0] - metrics[1]) < 1e-6 * max(1.0, abs(metrics[0])):
        raise InspectionError(
            f"The clean and the corrupted prompt have the same {asked[0].metric}, "
            f"{metrics[0]:.6g}: there is nothing to bring back. Exchange what the answer hangs on."
        )
