"""Facts about the data, the loss, and single operations, as a check-up notes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class LossFacts:
    """What the loss does with the output, at the first step.

    Attributes:
        classes: The number of classes of a cross entropy; None if there is none.
        cross_entropy: Its mean over the targets that count, in nats; None if there is none.
        misread: What the output is taken for and what it is: ("logits", "probabilities").
        broadcast: The two shapes that a comparison blew up, and the shape of the result.
        inner: The value of the innermost loss (mean squared error, cross entropy), if there is one.
        value: The loss itself.
        output_function: What made the output: "relu", "sigmoid", "tanh", "softmax", or "".
        output_layer: The last layer with parameters.
        output_size: rms of the output / rms of the targets; nan if these are not numbers.
        outside: The share of the targets that this function cannot return.
        range: What it can return, in words.
        bounded: Whether a cross entropy was given logits that lie within -1 and 1 because the
            model ends in a squashing function.
        targets: What its class numbers are: "inputs", "next inputs", or "".
        logit: The largest |logit| that a cross entropy was given; nan where there is none.
        score: What the loss makes of outputs that equal targets of 0 and 1, and of their opposite;
            None where that was not asked.
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
        padding_token: Which token that is.
        padding_rows: Embedding layer -> rms of its padding row, where that is not 0.
        target_rms: The rms of floating-point targets, median over the batches; 0 if there are none.
        given: Layer -> rms of what it is given, where that was made from the data alone.
        mixed: How much outputs move when another sample is exchanged / how they differ; nan where
            that was not looked at.
        sizes: "inputs" and "targets" -> their rms in each batch; nan where there are none.
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
        over: What it runs over, in words.
        wanted: What it should run over, in words; "" where that is not known.
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
