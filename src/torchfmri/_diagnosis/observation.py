"""What was observed of a training run: the one thing that every diagnosis reads.

`_checkup` fills everything, a live Monitor only the trace and the structure. Parts that were not
looked at are empty, and their defaults are values that no cut is beyond: a diagnosis need not ask
whether they are there. Only `steps` and `reach` are None without a check-up, where a diagnosis then
looks at the trace instead. New facts go in here with such a default; records are frozen, so that
findings can refer to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from torchfmri._diagnosis.structure import Structure
from torchfmri._diagnosis.trace import Floats, RunTrace
from torchfmri._records import Finding


class HasLayer(Protocol):
    """A record about one layer."""

    @property
    def layer(self) -> str:
        """The name of the layer."""


def layers_of(found: Iterable[HasLayer]) -> tuple[str, ...]:
    """Return the layers that records are about, each once, in their order."""
    return tuple(dict.fromkeys(each.layer for each in found))


@dataclass(frozen=True)
class UnitActivity:
    """How the units behind one nonlinearity behaved.

    Attributes:
        layer: The layer of the nonlinearity, or the one that feeds it where it is a function and
            no layer; "" if that is not known.
        source: The layer whose output went into it; "" if that is not known.
        function: "relu", "tanh", "sigmoid", ...
        units: How many units.
        samples: How many values of each were seen while `silent` was counted.
        steps: The number of steps.
        silent: How many units had slope 0 for every one of these samples.
        first_silent: The first step from which on most of these were silent; None if none is.
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
        future: The share of the keys after its own place that a query may read; nan if queries
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
        unregistered: Leaf tensors behind the loss that the model does not list as parameters.
        loss_has_graph: Whether the loss can be differentiated at all.
        linear_pairs: Linear layers with nothing between them that one could not do alone.
        has_residual: Whether something is added to what it was computed from.
    """

    called: tuple[str, ...]
    without_graph: frozenset[str]
    consumed: frozenset[str]
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
class LossFacts:
    """What the loss does with the output, at the first step.

    Attributes:
        classes: The number of classes of a cross entropy; None if there is none.
        cross_entropy: Its mean over the targets that count, in nats; None if there is none.
        misread: What the loss expects and what it gets: ("logits", "probabilities").
        broadcast: The two shapes that a comparison blew up, and the shape of the result.
        inner: The value of the innermost loss (mean squared error, cross entropy), if there is one.
        value: The loss itself.
        output_function: What made the output: "relu", "sigmoid", "tanh", "softmax", or "".
        output_layer: The last layer with parameters.
        output_size: rms of the output / rms of the targets; nan if these are not numbers.
        outside: The share of the targets that this function cannot return.
        range: What that function can return, in words.
        bounded: Whether a cross entropy was given logits that lie within -1 and 1 because the
            model ends in a squashing function.
        targets: What the class numbers equal: "inputs", "next inputs", or "".
        logit: The largest |logit| that a cross entropy was given; nan if there is none.
        score: What the loss makes of outputs that equal targets of 0 and 1, and of their opposite;
            None if that was not asked.
        weights: The factor on each mean in it, and the number of samples it is taken over.
    """

    classes: int | None = None
    cross_entropy: float | None = None
    misread: tuple[str, str] | None = None
    broadcast: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None = None
    inner: float | None = None
    value: float = float("nan")
    output_function: str = ""
    output_layer: str = ""
    output_size: float = float("nan")
    outside: float = 0.0
    range: str = ""
    bounded: bool = False
    targets: str = ""
    weights: tuple[tuple[float, int], ...] = ()
    logit: float = float("nan")
    score: tuple[float, float] | None = None

    @property
    def layers(self) -> tuple[str, ...]:
        """The output layer as a finding names it: none if it is not known."""
        return (self.output_layer,) if self.output_layer else ()


@dataclass(frozen=True)
class DataFacts:
    """What was seen in the batches.

    Attributes:
        rms: The rms of the floating-point inputs, median over the batches; None if there are none.
        normalised: Whether a norm layer is what reads the input.
        reader: The layer that reads the input.
        repeated: The share of samples that equal another of their batch, over all batches.
        contradicting: The share of these that have another target.
        changing: The share of samples that came again in another batch with another class.
        samples: How many samples were seen.
        one_class_batches: The share of batches (of at least 8) in which all targets are one class,
            less what chance gives.
        classes_seen: How many classes over all batches.
        padding: The share of target positions that look like padding and count in the loss.
        padding_token: The token that looks like padding.
        padding_rows: Embedding layer -> rms of its padding row, if that is not 0.
        target_rms: The rms of floating-point targets, median over the batches; 0 if there are none.
        given: Layer -> rms of its input, if that was made from the data alone.
        mixed: How much outputs move when another sample is exchanged / how they differ; nan if
            that was not looked at.
        sizes: "inputs" and "targets" -> their rms in each batch; nan if there are none.
    """

    rms: float | None = None
    normalised: bool = False
    reader: str = ""
    repeated: float = 0.0
    contradicting: float = 0.0
    changing: float = 0.0
    samples: int = 0
    one_class_batches: float = 0.0
    classes_seen: int = 0
    padding: float = 0.0
    padding_token: int | None = None
    padding_rows: Mapping[str, float] = field(default_factory=dict)
    target_rms: float = 0.0
    mixed: float = float("nan")
    given: Mapping[str, float] = field(default_factory=dict)
    sizes: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class NormFacts:
    """One batch norm over a run.

    Attributes:
        layer: Where it is.
        training: Whether it took its statistics from the batch.
        samples: How many samples a batch had, mostly.
        values: How many numbers of a channel a mean was taken over, mostly.
        untouched: Whether its running statistics are those that it was made with: 0 and 1.
        momentum: The share of the newest batch in them; nan for a mean over all batches.
        calls: How often it ran.
    """

    layer: str
    training: bool
    samples: int
    values: int
    untouched: bool
    momentum: float
    calls: int


@dataclass(frozen=True)
class MisplacedSoftmax:
    """A softmax that does not run over what its result is used for.

    Attributes:
        layer: Where it ran.
        axis: The axis that it runs over, counted from 0.
        shape: The shape of its output.
        over: The axis that it runs over, in words.
        wanted: The axis that it should run over, in words; "" if that is not known.
        in_loss: Whether it ran after the model.
    """

    layer: str
    axis: int
    shape: tuple[int, ...]
    over: str
    wanted: str
    in_loss: bool


@dataclass(frozen=True)
class ConstantLayer:
    """A layer that always returns the same, because it compares one number with itself.

    Attributes:
        layer: Where it is; "" outside all layers.
        function: "softmax", "log_softmax", or the class of a norm layer.
        in_loss: Whether it ran after the model.
    """

    layer: str
    function: str
    in_loss: bool = False


@dataclass(frozen=True)
class Observation:
    """A run as it was observed; parts that were not looked at are None or empty.

    Attributes:
        copied_tables: Embeddings and output layers that are two parameters of equal values.
        norms: The batch norms that ran.
        softmaxes: The softmaxes that run over the wrong axis.
        constants: Layers that return the same whatever they are given.
        origin: Where the first number that is not finite came from, if the run ended there.
        signals: Signals of the whole run that several diagnoses read, once computed.
    """

    trace: RunTrace
    structure: Structure
    units: Sequence[UnitActivity] = ()
    heads: Sequence[HeadActivity] = ()
    routers: Sequence[RouterActivity] = ()
    weights: Mapping[str, WeightFacts] = field(default_factory=dict)
    reach: Reach | None = None
    loss: LossFacts = field(default_factory=LossFacts)
    data: DataFacts = field(default_factory=DataFacts)
    steps: StepFacts | None = None
    copied_tables: Sequence[tuple[str, str]] = ()
    norms: Sequence[NormFacts] = ()
    softmaxes: Sequence[MisplacedSoftmax] = ()
    constants: Sequence[ConstantLayer] = ()
    origin: Finding | None = None
    signals: dict[str, Floats] = field(init=False, repr=False, compare=False, default_factory=dict)

    @property
    def order(self) -> list[str]:
        """The layers in the order in which they run, as far as that is known."""
        if self.reach is not None:
            return list(self.reach.called)
        return list(self.structure.kinds)
