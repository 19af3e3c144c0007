"""Lesions of one question: many rows in one forward pass, each row with a lesion of its own.

`entry_point` and `patching` make a `LesionRun`. A row of a batch must give what a pass of its own
would, so `refuse_mixing` compares rows first; its limit is rounding, which other batch sizes
change. `reading` keeps values at places by hooks that only look. Attribution patching is the
gradient of the metric times the change of the value, from one backward pass. Lesions are bound in
the order of their rows, and the results of a pass are read by row. The rounding limits are
measured; change them only with the tests of batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torchfmri._edit import BoundEdit, Edit, EditPasses, attached, change_arguments, change_output
from torchfmri._lens import FeatureSource
from torchfmri._lesion.questions import LesionQuestion, logits_for
from torchfmri._lesion.targets import LesionTarget
from torchfmri._model import Place, named_layers, thawed, unwrap
from torchfmri._tokens import VOXEL
from torchfmri._torch import Hook, hook_side, hooked
from torchfmri.exceptions import InspectionError

Key = tuple[str, str]
"""Layer, and "inputs" or "activations"."""
_ROUNDING = 300.0
"""How far equal rows may be apart in units of the dtype: other batch sizes sum in other orders."""
_MOST_ROUNDING = 0.1
"""The limit relative to the largest logit: 300 units of bfloat16 exceed the logit itself."""


class Measured(NamedTuple):
    """One question: the metric without a lesion, with each lesion, and what was there.

    Attributes:
        intact: The metric.
        lesioned: (n,) the metric with each lesion; NaN if lesions were only estimated.
        estimate: (n,) estimated changes of the metric; NaN if none were asked for.
        activation: (n,) the root mean square of each target's value.
    """

    intact: float
    lesioned: NDArray[np.float64]
    estimate: NDArray[np.float64]
    activation: NDArray[np.float64]


class LesionRun:
    """Lesions targets of a model one by one.

    Args:
        model: The module to run, in evaluation mode.
        targets: What to lesion.
        edit: What a lesion is; "mean" and "resample" take their values from the questions.
        seed: The seed of "resample".
        tokens: Which tokens are lesioned; None for all.
        batch: How many lesions one forward pass carries.
    """

    def __init__(
        self,
        model: nn.Module,
        targets: Sequence[LesionTarget],
        edit: str,
        seed: int,
        tokens: Any,
        batch: int,
    ) -> None:
        self.model, self.targets, self.batch = model, targets, batch
        self.layers = named_layers(model)
        self._keys: list[Key] = list(dict.fromkeys(key_of(each.place) for each in targets))
        self._edit, self._seed, self._tokens = edit, seed, tokens
        self._values: dict[Key, Tensor] = {}

    def gather(self, questions: Sequence[LesionQuestion]) -> None:
        """Take the values that "mean" and "resample" put in the place of others."""
        if self._edit == "zero":
            return
        found: dict[Key, list[Tensor]] = {key: [] for key in self._keys}
        for question in questions:
            with torch.no_grad(), self.reading() as values:
                logits_for(self.model, question.ids[None], question.needed)
            for key, value in values.items():
                found[key].append(value.detach().reshape(-1, value.shape[-1]))
        self._values = {key: torch.cat(each) for key, each in found.items() if each}

    def measure(
        self, question: LesionQuestion, estimate: bool, exact: bool, step: Callable[[int], None]
    ) -> Measured:
        """Run a question without and with every lesion.

        Args:
            question: What is asked.
            estimate: Whether to estimate the lesions by one backward pass.
            exact: Whether to lesion at all.
            step: Told how many lesions are done.
        """
        values, intact, estimates = self._intact(question, estimate)
        sizes = self._sizes(values)  # before any lesion: it refuses features that are not there
        lesioned = np.full(len(self.targets), np.nan)
        for first in range(0, len(self.targets), self.batch) if exact else ():
            several = self.targets[first : first + self.batch]
            lesioned[first : first + len(several)] = self.lesion_rows(question, several)
            step(first + len(several))
        return Measured(intact=intact, lesioned=lesioned, estimate=estimates, activation=sizes)

    def _sizes(self, values: Mapping[Key, Tensor]) -> NDArray[np.float64]:
        """Return (n,) the root mean square of the value that each lesion takes out."""
        encoded: dict[str, Tensor] = {}  # one call of a dictionary, not one for each feature
        found = []
        for each in self.targets:
            part = each.place.units_of(values[key_of(each.place)])
            if each.source is not None and each.feature is not None:
                name = each.source.name
                if name not in encoded:
                    encoded[name] = each.source.features(part).detach().float()
                part = _feature(encoded[name], each.feature, name)
            found.append(float(part.float().square().mean().sqrt()))
        return np.array(found)

    def active_features(
        self, questions: Sequence[LesionQuestion], sources: Mapping[str, FeatureSource]
    ) -> dict[str, list[int]]:
        """Return, by place, the features that are on at any token of the questions."""
        found: dict[str, set[int]] = {name: set() for name in sources}
        wanted = dict.fromkeys(key_of(each.place) for each in sources.values())
        for question in questions:
            with torch.no_grad(), self.reading(list(wanted)) as values:
                logits_for(self.model, question.ids[None], question.needed)
            for name, source in sources.items():
                key = key_of(source.place)
                if key not in values:
                    raise InspectionError(
                        f"Layer {key[0]!r} was never called as a module, so no features are read "
                        "there. Give a place that the model calls."
                    )
                with torch.no_grad():
                    on = source.features(source.place.units_of(values[key])) > 0
                found[name].update(on.flatten(0, -2).any(0).nonzero().flatten().tolist())
        return {name: sorted(each) for name, each in found.items()}

    def lesion_rows(
        self, question: LesionQuestion, several: Sequence[LesionTarget]
    ) -> NDArray[np.float64]:
        """Return the metric with each of several lesions, from one forward pass."""
        passes = EditPasses()
        bound = [self._lesion(each, row, passes) for row, each in enumerate(several)]
        found = self.rows(question, len(several), bound, passes)
        for each in bound:
            if not each.acted:
                raise InspectionError(
                    f"The lesion of {each.place.name!r} never acted on {question.prompt!r}: layer "
                    f"{each.place.layer!r} was not called, or no token was selected."
                )
        return np.array(found)

    def rows(
        self, question: LesionQuestion, count: int, bound: Sequence[BoundEdit], passes: EditPasses
    ) -> list[float]:
        """Return the metric of every row of one edited pass; each row asks the question."""
        ids = question.ids.expand(count, -1)
        with torch.no_grad(), attached(self.model, bound, passes, {}):
            found = question.measure(logits_for(self.model, ids, question.needed))
        return [float(each) for each in found]

    def bind(self, place: Place, edit: Edit, passes: EditPasses) -> BoundEdit:
        """Return an edit bound to a place of this model."""
        return BoundEdit(place, edit, self.layers[place.layer], passes, VOXEL)

    def refuse_mixing(self, question: LesionQuestion) -> None:
        """Raise if the rows of a batch influence each other: a lesion would reach other rows.

        Raises:
            InspectionError: A row gives other logits among other rows, beyond rounding.
        """
        ids = question.ids.expand(max(self.batch, 2), -1).clone()
        ids[1:] = ids[1:, :1]  # one token over and over: other statistics, and one expert's alone
        with torch.no_grad():
            alone = logits_for(self.model, question.ids[None], question.needed)[0].double()
            together = logits_for(self.model, ids, question.needed)[0]
        share = min(_ROUNDING * torch.finfo(together.dtype).eps, _MOST_ROUNDING)
        limit = share * float(alone.abs().max())
        apart = float((together.double() - alone).abs().max())
        if apart > limit:
            raise InspectionError(
                f"Rows of one batch influence each other in {type(unwrap(self.model)).__name__}: "
                f"among other rows the logits of {question.prompt[:40]!r} are {apart:.2g} off, and "
                f"rounding explains {limit:.2g} (batch statistics, or experts with a capacity). "
                "Lesion one at a time: batch=1."
            )

    def _lesion(self, target: LesionTarget, row: int, passes: EditPasses) -> BoundEdit:
        edit, values = Edit.zero(), self._values.get(key_of(target.place))
        if target.source is not None and target.feature is not None:
            edit = Edit.without_features(target.source.dictionary, [target.feature])
        elif self._edit == "mean" and values is not None:
            edit = Edit.replace(values.double().mean(0).to(values.dtype))
        elif self._edit == "resample" and values is not None:
            edit = Edit.resample(values, self._seed)
        return self.bind(target.place, edit.at(rows=[row], tokens=self._tokens), passes)

    def _intact(
        self, question: LesionQuestion, estimate: bool
    ) -> tuple[dict[Key, Tensor], float, NDArray[np.float64]]:
        """Return the values at all places, the metric, and the estimated effects."""
        estimates = np.full(len(self.targets), np.nan)
        with torch.set_grad_enabled(estimate), thawed(self.model, (), lambda _: None):
            with self.reading() as values:
                logits = logits_for(self.model, question.ids[None], question.needed)
            metric = question.measure(logits)[0]
            if estimate:
                estimates = self._estimate(question, metric, values)
        missing = [key for key in self._keys if key not in values]
        if missing:
            raise InspectionError(
                f"Layer {missing[0][0]!r} was never called as a module, so it cannot be lesioned. "
                "Remove it from of=."
            )
        question.refuse_infinite(float(metric.detach()))
        detached = {key: value.detach() for key, value in values.items()}
        return detached, float(metric.detach()), estimates

    def _estimate(
        self, question: LesionQuestion, metric: Tensor, values: Mapping[Key, Tensor]
    ) -> NDArray[np.float64]:
        """Return the metric's change to first order: its gradient times the change of the value."""
        if not metric.requires_grad:
            raise InspectionError(
                "The metric has no gradient, so lesions cannot be estimated from it. Return "
                "a tensor computed from the logits, or leave method='lesion'."
            )
        keys = [key for key in self._keys if key in values]
        found = torch.autograd.grad(metric, [values[key] for key in keys], allow_unused=True)
        gradients = dict(zip(keys, found, strict=True))
        passes, estimates = EditPasses(), []
        passes.feed(1, len(question.ids))  # edits are made outside a pass here
        with torch.no_grad():
            for target in self.targets:
                key = key_of(target.place)
                gradient, old = gradients[key], values[key].detach()
                new = self._lesion(target, 0, passes).change(old, None)
                if gradient is None or new is None:
                    estimates.append(0.0)
                else:
                    estimates.append(float((gradient.double() * (new - old).double()).sum()))
        return np.array(estimates)

    @contextmanager
    def reading(
        self, keys: Sequence[Key] | None = None, *, before_edits: bool = False
    ) -> Iterator[dict[Key, Tensor]]:
        """Hold the value at every place of the pass that runs in the block.

        Args:
            keys: Which places; those of the targets by default.
            before_edits: Whether to read what a layer makes before the edits that are attached
                already change it.
        """
        values: dict[Key, Tensor] = {}
        wanted = self._keys if keys is None else keys
        with hooked(self._hook(values, key, before_edits) for key in wanted):
            yield values

    def _hook(self, values: dict[Key, Tensor], key: Key, first: bool) -> RemovableHandle:
        """Register the hook that keeps the value at a place, before other hooks or after them."""
        layer, what = key

        def keep(value: Tensor) -> Tensor:
            values[key] = value
            return value

        def see(_: object, given: Any, other: Any) -> None:
            if what == "inputs":  # it is handed arguments and keywords, else arguments and output
                change_arguments(given, other, keep)
            else:
                change_output(other, keep)

        module = self.layers[layer]
        return hook_side(module, what, Hook(see, module), prepend=first)


def key_of(place: Place) -> Key:
    """Return the layer of a place, and which side of it."""
    return place.layer, place.what


def _feature(encoded: Tensor, feature: int, name: str) -> Tensor:
    if feature >= encoded.shape[-1]:
        raise InspectionError(
            f"There is no feature {feature} at {name!r}: its dictionary has {encoded.shape[-1]}, "
            f"0 to {encoded.shape[-1] - 1}."
        )
    return encoded[..., feature]
