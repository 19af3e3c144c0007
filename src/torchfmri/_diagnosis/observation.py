"""What was observed of a training run: the one thing that every diagnosis reads.

A live Monitor fills the trace and the structure only; a check-up fills everything. A diagnosis
that needs a part which is not there finds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from torchfmri._diagnosis.facts import (
    ConstantLayer,
    DataFacts,
    LossFacts,
    MisplacedSoftmax,
    NormFacts,
)
from torchfmri._diagnosis.structure import Structure
from torchfmri._diagnosis.trace import RunTrace
from torchfmri._records import Finding

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class UnitActivity:
    """How the units behind one nonlinearity behaved.

    Attributes:
        layer: The layer of the nonlinearity, or the one that feeds it where it is a function and
            no layer; "" where that is not known.
        source: The layer whose output went into it; "" where that is not known.
        function: "relu", "tanh", "sigmoid", ...
        units: How many units.
        samples: How many values of each were seen while `silent` was counted.
        steps: The number of steps.
        silent: How many units had slope 0 for every one of these samples.
        first_silent: The first step from which on most of these were silent; None if none is.
        dormant: How many had less than a 40th of the layer's mean activity.
        flat: Step -> the share of values where the function is flat (see `activations.py`).
        is_last: Whether it makes the output of the model.
        reader: The layer that reads its result where it is a function; "" for a layer.
    """

    layer: str
    source: str
    function: str
    units: int
    samples: int
    steps: int
    silent: int
    first_silent: int | None
    dormant: int
    flat: Mapping[int, float]
    is_last: bool = False
    reader: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells this activity from others."""
        return self.layer, self.function, self.reader

    @property
    def label(self) -> str:
        """The activity in words: a layer with its function, or a function next to a layer."""
        if not self.reader:
            return f"{self.layer!r} ({self.function})"
        if self.layer:
            return f"{self.function} behind {self.layer!r}"
        return f"{self.function} before {self.reader!r}"

    @property
    def named(self) -> tuple[str, ...]:
        """The layers to name: of a function those around it, never what only reads it."""
        around = (self.reader.rpartition(".")[0],) if self.reader and not self.layer else ()
        return tuple(each for each in (self.layer, self.source, *around) if each)


@dataclass(frozen=True)
class HeadActivity:
    """The attention of one layer at one step.

    Attributes:
        layer: The layer.
        step: The step.
        entropy: The entropy of each head / ln of the number of keys; mean over the queries.
        logit: The largest |logit| of each head before the softmax.
        keys: How many keys there are.
        future: The share of the keys after its own place that a query may read; nan where queries
            and keys are not as many.
    """

    layer: str
    step: int
    entropy: tuple[float, ...]
    logit: tuple[float, ...]
    keys: int = 0
    future: float = float("nan")


@dataclass(frozen=True)
class RouterActivity:
    """How a router spread its tokens.

    Attributes:
        layer: The router.
        experts: The layers it chooses from.
        load: Step by expert: the share of the tokens whose first choice it is.
    """

    layer: str
    experts: tuple[str, ...]
    load: Floats


@dataclass(frozen=True)
class WeightFacts:
    """One parameter before and after the run.

    Attributes:
        rms: Its rms before the first step.
        last_rms: Its rms after the last step.
        equal_rows: Whether all rows (units) were equal before the first step.
        still_equal_rows: Whether they are equal after the last one.
        moved: The share of its values that the run changed.
        gradient: Whether a gradient ever arrived: "none", "zero" or "some".
    """

    rms: float
    last_rms: float
    equal_rows: bool
    still_equal_rows: bool
    moved: float
    gradient: str


@dataclass(frozen=True)
class Reach:
    """How far calls, and gradients, got.

    Attributes:
        called: The layers that ran, in the order of their first call.
        without_graph: The layers with trainable parameters whose output had no graph.
        consumed: The layers whose output something read.
        reached: The layers at whose output a gradient arrived.
        unregistered: Leaf tensors behind the loss that the model does not list as parameters.
        loss_has_graph: Whether the loss can be differentiated at all.
        linear_pairs: Linear layers with nothing between them that one could not do alone.
        has_residual: Whether something is added to what it was computed from.
    """

    called: tuple[str, ...]
    without_graph: frozenset[str]
    consumed: frozenset[str]
    reached: frozenset[str]
    unregistered: tuple[str, ...]
    loss_has_graph: bool
    linear_pairs: tuple[tuple[str, str], ...] = ()
    has_residual: bool = False


@dataclass(frozen=True)
class StepFacts:
    """What happened between backward and the end of the step, by step.

    Attributes:
        clip: Norm of the gradients as the optimizer finds them / as backward left them.
        norm: Norm of the gradients as backward left them.
        stale: Whether gradients of the step before were still there when backward began.
        learning_rate: The largest learning rate of the groups.
        stepped: Whether the optimizer stepped.
        half_gradients: Layer -> share of non-zero float16 gradients below the normal range.
        flushed: Layers whose float16 gradient is exactly 0 behind one that is not.
        spread: Layer -> how much its representation differs between samples / its size.
        noise_scale: Batch size at which the noise of the gradient equals the gradient, in samples.
        cleared: Whether gradients arrived and were gone when the optimizer stepped.
        growth: Recurrent layer -> rms of its last output / of its first, at the first step.
        rates: (step, group): the learning rate of each group.
        early: Whether the optimizer stepped before backward, with nothing.
        evaluated: Whether all dropout and batch norms, and the model, were in evaluation mode.
        idle: The parameters of optimizers that never stepped.
        passes: How many backward passes an update is made of, mostly.
        signal: Matrix layer -> by how much its input differs between samples, at the first step.
        scaled_clip: The factor on gradients before a GradScaler unscaled them; nan if none did.
    """

    clip: Floats
    norm: Floats
    stale: NDArray[np.bool_]
    learning_rate: Floats
    stepped: NDArray[np.bool_]
    half_gradients: Mapping[str, float] = field(default_factory=dict)
    flushed: tuple[str, ...] = ()
    spread: Mapping[str, float] = field(default_factory=dict)
    noise_scale: float = float("nan")
    cleared: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))
    growth: Mapping[str, float] = field(default_factory=dict)
    rates: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    early: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))
    evaluated: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))
    signal: Mapping[str, float] = field(default_factory=dict)
    passes: int = 0
    idle: tuple[str, ...] = ()
    scaled_clip: float = float("nan")


@dataclass(frozen=True)
class Observation:
    """A run as it was observed; parts that were not looked at are None or empty.

    Attributes:
        copied_tables: Embeddings and output layers that are two parameters of equal values.
        norms: The batch norms that ran.
        softmaxes: The softmaxes that run over the wrong axis.
        constants: Layers that return the same whatever they are given.
        origin: Where the first number that is not finite came from, if the run ended there.
    """

    trace: RunTrace
    structure: Structure
    units: Sequence[UnitActivity] = ()
    heads: Sequence[HeadActivity] = ()
    routers: Sequence[RouterActivity] = ()
    weights: Mapping[str, WeightFacts] = field(default_factory=dict)
    reach: Reach | None = None
    loss: LossFacts | None = None
    data: DataFacts | None = None
    steps: StepFacts | None = None
    copied_tables: Sequence[tuple[str, str]] = ()
    norms: Sequence[NormFacts] = ()
    softmaxes: Sequence[MisplacedSoftmax] = ()
    constants: Sequence[ConstantLayer] = ()
    origin: Finding | None = None

    @property
    def order(self) -> list[str]:
        """The layers in the order in which they run, as far as that is known."""
        if self.reach is not None:
            return list(self.reach.called)
        return list(self.structure.kinds)
