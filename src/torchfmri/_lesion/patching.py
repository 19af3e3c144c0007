"""`patch`: values of a clean run put into a corrupted one, tokens matched by their role.

It is public. The clean run's values are read once and put in row by row, many patches in one pass.
Tokens are matched by `match_roles`; those without a partner stay as they are and are listed. With
`to=` the passes are those of `paths`. `PatchMap` is public too: a score is 0 if the metric stays as
corrupted and 1 if it becomes that of the clean prompt, and may lie outside. Places from which no
path leads are kept with score 0 and listed. The table and the picture may change freely.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from torchfmri._arguments import check_module, check_number, require
from torchfmri._edit import BoundEdit, Edit, EditPasses
from torchfmri._lesion.lesion_run import Key, LesionRun, key_of
from torchfmri._lesion.paths import Paths
from torchfmri._lesion.questions import LesionQuestion, logits_for, read_questions
from torchfmri._lesion.targets import LesionTarget, find_targets
from torchfmri._model import compiled_code_as_eager, evaluating, runnable, unchanged
from torchfmri._text import Column, Grid, few, number_text, plural
from torchfmri.exceptions import InspectionError
from torchfmri.visualization import PatchPicture, draw_patches, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Pairs = list[tuple[int, int]]
"""(Clean position, corrupted position)."""

_MOST_NAMES = 6


@dataclass(frozen=True, eq=False)
class PatchMap:
    """How much of the clean answer comes back when values of the clean run are put in.

    Attributes:
        names: The places.
        blocks: (n,) their blocks; -1 for none.
        labels: The tokens that were patched one by one; one label, "all tokens", if all were.
        pairs: (clean position, corrupted position) of the tokens that stand for each other.
        metric: "logit_difference" or "surprisal".
        clean: The metric of the clean prompt.
        corrupted: The metric of the corrupted one.
        patched: (n, labels) the metric of the corrupted prompt with each patch.
        unmatched: Tokens of either prompt that stand for none of the other, which stay as they are.
        to: What the patches reach; "" if everything after them.
        unreached: Places from which nothing arrives at `to`, because no path leads there; their
            score is 0.

    Examples:
        >>> import torchfmri
        >>> model, tokenizer = torchfmri.load_model("tiny")
        >>> patches = torchfmri.patch(model, tokenizer, "Tom had a", "Lily had a", " dog")
        >>> patches.score.shape
        (5, 1)
    """

    names: tuple[str, ...]
    blocks: NDArray[np.int64]
    labels: tuple[str, ...]
    pairs: tuple[tuple[int, int], ...]
    metric: str
    clean: float
    corrupted: float
    patched: NDArray[np.float64]
    unmatched: tuple[str, ...] = ()
    to: str = ""
    unreached: tuple[str, ...] = ()

    @property
    def score(self) -> NDArray[np.float64]:
        """(n, labels) 0 if it is as corrupted, 1 if it is as clean."""
        found: NDArray[np.float64] = (self.patched - self.corrupted) / (self.clean - self.corrupted)
        return found + 0.0  # no -0

    def top(self, count: int = 10) -> list[tuple[str, str, float]]:
        """Return place, token and score of the patches with the highest scores."""
        check_number("count", count, 1, "give how many to name, from 1")
        order = np.argsort(-self.score, axis=None, kind="stable")[:count]
        places = [np.unravel_index(int(each), self.score.shape) for each in order]
        return [
            (self.names[int(n)], self.labels[int(t)], float(self.score[n, t])) for n, t in places
        ]

    def __repr__(self) -> str:
        return f"<PatchMap of {plural(len(self.names), 'place')}: {self.metric}>"

    def __str__(self) -> str:
        return self.table()

    def table(self, count: int = 12, width: int | None = None) -> str:
        """Return the patches with the highest scores as text."""
        found = self.top(count)
        way = self.to and f", on the direct way to {self.to}"
        notes = [f"not matched by role: {', '.join(self.unmatched)}"] if self.unmatched else []
        if self.unreached:
            places = f"{plural(len(self.unreached), 'place')} ({few(self.unreached, _MOST_NAMES)})"
            notes.append(
                f"no path leads to {self.to} from {places}, which come after it or beside it: "
                "nothing arrives, and the score is 0"
            )
        return Grid(
            title=(
                f"clean values of {plural(len(self.names), 'place')} put into the corrupted "
                f"prompt{way}: {self.metric} {number_text(self.corrupted)} as corrupted (score 0), "
                f"{number_text(self.clean)} as clean (score 1)"
            ),
            heading="place",
            names=[place for place, _, _ in found],
            columns=[
                Column("token", [token for _, token, _ in found], 5, right=False),
                Column("score", [f"{score:.3f}" for _, _, score in found], 9),
            ],
            notes=notes,
        ).text(width)

    def plot(self) -> Figure:
        """Draw the scores: places down, tokens across."""
        score = np.where(np.isin(self.names, self.unreached)[:, None], np.nan, self.score)
        picture = PatchPicture(
            names=self.names, labels=self.labels, score=score, metric=self.metric, to=self.to
        )
        figure = new_figure(*picture.inches)
        draw_patches(figure, picture)
        return figure

    def draw(self, path: str | Path) -> None:
        """Write the picture of `plot` to a file."""
        save_figure(self.plot(), path, dpi=150)


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
        tokenizer: The model's tokenizer.
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
    matched = _matched_tokens(asked, pairs)
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
        labels = [_token_label(tokenizer, asked[1].ids, position) for _, position in matched]
    return PatchMap(
        names=tuple(each.place.name for each in targets),
        blocks=np.array([-1 if t.place.block is None else t.place.block for t in targets]),
        labels=tuple(labels),
        pairs=tuple(matched),
        metric=metric,
        clean=metrics[0],
        corrupted=metrics[1],
        patched=np.array(patched).reshape(len(targets), len(groups)),
        unmatched=_unmatched_tokens(tokenizer, asked, matched),
        to="" if way is None else way.name,
        unreached=() if way is None else way.unreached(targets),
    )


def _bind_patches(
    run: LesionRun, work: Sequence[tuple[LesionTarget, Pairs]], values: Mapping[Key, Tensor]
) -> tuple[list[BoundEdit], EditPasses]:
    """Return the patches of one pass, one in each row."""
    passes, bound = EditPasses(), []
    for row, (target, pairs) in enumerate(work):
        donor = values[key_of(target.place)].detach()
        edit = Edit.replace(donor, source=[one for one, _ in pairs])
        edit = edit.at(tokens=[other for _, other in pairs], rows=[row])
        bound.append(run.bind(target.place, edit, passes))
    return bound, passes


def _refuse_equal(metrics: Sequence[float], asked: Sequence[LesionQuestion]) -> None:
    if abs(metrics[0] - metrics[1]) < 1e-6 * max(1.0, abs(metrics[0])):
        raise InspectionError(
            f"The clean and the corrupted prompt have the same {asked[0].metric}, "
            f"{metrics[0]:.6g}: there is nothing to bring back. Exchange what the "
            "answer depends on."
        )


def match_roles(clean: Sequence[int], corrupted: Sequence[int]) -> Pairs:
    """Return the positions of two prompts that stand for each other.

    Equal runs of tokens are matched one to one, and so are exchanged runs of equal length. Of
    exchanged runs of different lengths the last tokens are matched: there a name is complete.

    Examples:
        >>> match_roles([1, 2, 3, 9], [1, 7, 8, 3, 9])
        [(0, 0), (1, 2), (2, 3), (3, 4)]
    """
    pairs: Pairs = []
    steps = SequenceMatcher(None, list(clean), list(corrupted), autojunk=False).get_opcodes()
    for kind, a, a_end, b, b_end in steps:
        if kind == "equal" or (kind == "replace" and a_end - a == b_end - b):
            pairs += zip(range(a, a_end), range(b, b_end), strict=True)
        elif kind == "replace":
            pairs.append((a_end - 1, b_end - 1))
    return pairs


def _matched_tokens(
    asked: Sequence[LesionQuestion], given: Sequence[tuple[int, int]] | None
) -> Pairs:
    lengths = [len(each.ids) for each in asked]
    if given is None:
        return match_roles(asked[0].ids.tolist(), asked[1].ids.tolist())
    found = [(int(one), int(other)) for one, other in given]
    wrong = [p for p in found if not (0 <= p[0] < lengths[0] and 0 <= p[1] < lengths[1])]
    meaning = (
        f"positions are 0 to {lengths[0] - 1} in the clean prompt and 0 to {lengths[1] - 1} in the "
        "corrupted one"
    )
    require(bool(found) and not wrong, "pairs", wrong or given, meaning)
    twice = len({other for _, other in found}) < len(found)
    require(not twice, "pairs", given, "a corrupted position is given twice; give each once")
    return found


def _token_label(tokenizer: Any, ids: Tensor, position: int) -> str:
    token = int(ids[position])
    text = tokenizer.decode([token]) if hasattr(tokenizer, "decode") else str(token)
    return f"{position} {text!r}"


def _unmatched_tokens(
    tokenizer: Any, asked: Sequence[LesionQuestion], pairs: Pairs
) -> tuple[str, ...]:
    """Return the tokens of each prompt that are in no pair, with their positions."""
    missing = []
    for side, (question, name) in enumerate(zip(asked, ("clean", "corrupted"), strict=True)):
        known = {each[side] for each in pairs}
        rest = [each for each in range(len(question.ids)) if each not in known]
        missing += [f"{name} {_token_label(tokenizer, question.ids, each)}" for each in rest]
    return tuple(missing)
