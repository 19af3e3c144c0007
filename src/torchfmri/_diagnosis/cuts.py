"""Every threshold that turns a signal into a finding, with its reason.

The diagnoses of this room read `cuts.NAME.value`; lengths of windows and least counts stand in the
files that use them. `python -m benchmarks diagnosis --thresholds` prints each beside the worst
healthy setup and the mildest planted fault. Change a value only with that table before and after,
and with the suite (120 faults named, no alarm on 90 healthy setups): most values sit between two
measured figures. `docs/diagnosis.md` repeats every value, and a test compares them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cut:
    """A threshold.

    Attributes:
        value: The threshold itself.
        signal: The number that is compared with the threshold, in words.
        above: Whether a finding lies above it, and not below.
        reason: The source of the value: arithmetic, literature, or a measured separation.
    """

    value: float
    signal: str
    above: bool
    reason: str


def above(value: float, signal: str, reason: str) -> Cut:
    """Return a threshold that a signal must not exceed."""
    return Cut(value, signal, above=True, reason=reason)


def below(value: float, signal: str, reason: str) -> Cut:
    """Return a threshold that a signal must not fall short of."""
    return Cut(value, signal, above=False, reason=reason)


# -- the optimizer -------------------------------------------------------------------------------

UPDATE_HIGH = above(
    0.1,
    "update / weight per step, median over the matrices",
    "a tenth of every weight replaced per step, while the loss does not fall; the rule of thumb is "
    "1e-3, healthy runs have 2e-3 to 1.5e-2 and up to 0.11 while the loss falls",
)
UPDATE_REPLACED = above(
    1.0,
    "update / weight of one step, median over the matrices",
    "the update is as large as the weights: what was there is gone",
)
UPDATE_JUMP = above(
    10.0,
    "update / weight over its median before (above 0.1, the loss not seen)",
    "schedules change it by little from step to step; warm restarts stay below 0.1",
)
UPDATE_ALONE = above(
    10.0,
    "update / weight of one step that is followed by steps of the usual size",
    "the weights are ten times as large afterwards: nothing is left of what was learnt",
)
OUTSIDE_GROWTH = above(
    10.0,
    "size of a parameter over what the last update explains",
    "nothing but the optimizer should write to them; loading other weights changes their size less",
)
OUTSIDE_SUM = above(
    2.0,
    "growth or shrinking of a parameter that no update explains, in 3 steps or more",
    "weights that are exchanged and put back, or kept at a size, do not grow in sum",
)
UPDATE_LOW = below(
    1e-6,
    "update / weight per step, median over the matrices",
    "a million steps to change a weight once; fine-tuning at lr 1e-6 still has 5e-5",
)
GROUP_GAP = above(
    10.0,
    "learning rate of a group / that of the group nearest to it",
    "layer-wise decay has steps of 1.1 to 2.6 and width-wise (muP) rates are equal at the width "
    "they are tuned at; a head may well have 10 to 1000 times its body's rate, so this counts "
    "together with the group's own update / weight",
)
RATE_LEFT = below(
    1e-3,
    "learning rate / the largest before, on a quarter of the steps",
    "a cosine is below it for the last 2 % of its steps and a line for the last 0.1 %; three "
    "drops by ten just reach it",
)
MOMENTUM = above(
    0.999,
    "momentum of SGD",
    "a gradient is added 1/(1 - momentum) times: a thousandfold; at 1 none is ever forgotten",
)
LOSS_NOT_BETTER = above(
    0.95,
    "loss afterwards / loss before",
    "a run that learns gets below it within a few steps of the size above",
)
DIVERGED = above(
    10.0,
    "loss at the end / loss at the start",
    "a loss that grew tenfold and stays there (each of the last third above all of the first); "
    "adversarial losses rise two- to fivefold",
)
CLIPPED = below(
    1e-2,
    "norm after clipping / before, on nine steps in ten",
    "measured: 5e-5 where an explosion hides, 0.65 where clipping is in order",
)
CLIPPED_NORM = below(
    1e-2,
    "norm of the gradients after clipping, where that leaves a hundredth or less",
    "usual limits are 0.1 to 10: below, it is the limit that is wrong and not the gradients",
)
DECAY = above(
    0.01,
    "learning rate x weight decay, per step",
    "1 % of every weight lost per step, whatever the gradient says: half in 69 steps; usual "
    "settings are 1e-6 to 1e-3",
)
SHRUNK = below(
    0.8,
    "size of the weights after the run / before",
    "the decay is seen to win",
)
UNMOVED = below(
    0.01,
    "share of a matrix that the run changed at all",
    "with gradients and a learning rate, weights that stay bit for bit were not reached by any "
    "update",
)
SPIKE = above(
    10.0,
    "norm of the gradients / median of the steps before",
    "ten times the usual, together with the next",
)
SPIKE_RISE = above(
    0.25,
    "rise of the loss above its median / first loss of the run",
    "a quarter of all that there was to learn; a converged run has large factors of very little; "
    "and twice as far out as any of the 50 steps before, for rare classes come back",
)
ODD_STEP = above(
    50.0,
    "loss, or norm of the gradients / the largest of all steps before",
    "counts after ordinary updates only, where the weights have hardly changed, and where its own "
    "update is none; a spike of a healthy run is ten times its median",
)

# -- flow ----------------------------------------------------------------------------------------

DEPTH_RATIO = below(
    1e-5,
    "smallest / largest rms of the matrices' gradients, falling towards the input",
    "measured: 2e-8 in a stack of sigmoids, at least 9.8e-4 in healthy nets (a residual net whose "
    "branches start at 0)",
)
DEPTH_TREND = above(
    0.7,
    "correlation of log rms with depth",
    "a trend, not one layer that differs",
)
GROWTH_WARN = above(
    100.0,
    "rms of the last / of the first of alike layers, growing along the depth",
    "pre-norm nets grow as the square root of depth; doubling variances (x1.41 per layer) reach "
    "100 after 14 layers",
)
GROWTH_ALARM = above(
    1e3,
    "rms of the last / of the first of alike layers, growing along the depth",
    "the first layers' share of the sum is below 0.1 %",
)
SIGNAL_LEFT = below(
    1e-4,
    "difference between samples, last / first hidden layer, where the loss does not fall",
    "the default of Linear behind ReLU leaves 0.41 per layer: 5e-4 after 9 layers, where Adam "
    "still learns, and 4e-8 after 20, where nothing does",
)
DEAD_INFORM = above(
    0.1,
    "share of units that are off for every sample of a window",
    "healthy small nets lose up to 16 % of their units without harm",
)
DEAD_WARN = above(
    0.25,
    "share of units that are off for every sample of a window",
    "measured: 1.0 with a bad bias; 0 in healthy nets, also where 77 % of the values are 0; a "
    "remark where the loss falls by 5 % all the same (few clusters, up to 0.42)",
)
DEAD_ALARM = above(0.5, "share of units that are off for every sample of a window", "half")
DROPPED = above(
    0.9,
    "share of the values that a dropout layer sets to 0",
    "what is left is scaled tenfold, and the gradient's noise with it; 0.1 to 0.5 is usual",
)
FLAT_WARN = above(
    0.25,
    "share of a hidden layer's values where its function is flat",
    "|tanh| > 0.97 (6 % of its largest slope), sigmoid below 1 % of its largest slope",
)
FLAT_ALARM = above(
    0.5,
    "share of a hidden layer's values where its function is flat",
    "measured: 0.78 at faults; half of the values pass no gradient; a remark where the loss halves "
    "and the function was not flat at first (units that are sure, up to 0.73)",
)
ENTROPY = below(
    0.05,
    "entropy of attention / ln of the number of keys, in half of the heads",
    "measured: 3e-5 where it collapsed, 0.97 in healthy models; counts together with the next",
)
LOGIT_WARN = above(
    50.0,
    "largest attention logit",
    "exp(-50) = 2e-22: one key has it all; capped at 50 in Gemma 2",
)
LOGIT_ALARM = above(
    1e3,
    "largest attention logit",
    "measured: 2.5e3 at faults, 2 in healthy models; runs above 1e4 diverge (Dehghani et al. 2023)",
)
SPREAD = below(
    1e-3,
    "how much the last representation differs between samples / its size",
    "nothing of the input is left in it",
)
EXPERTS = below(
    1.2,
    "number of experts in use, exp of the entropy of the load",
    "all tokens on one expert, for at least half of the steps; three idle experts of eight have 4 "
    "to 5",
)

# -- init, loss, data ----------------------------------------------------------------------------

INITIAL_LOSS = above(
    3.0,
    "first cross entropy / ln of the number of classes",
    "measured: 12 to 2e4 at faults, 1.0 to 1.2 in healthy models; 1 is what guessing costs",
)
GAIN = above(
    4.0,
    "rms of a matrix x sqrt(fan in), together with a symptom",
    "0.58 is PyTorch's default for Linear, 1.41 Kaiming's: the ratio of outputs to inputs",
)
LOGITS_LEFT = below(
    0.01,
    "largest logit / largest output of the last layer, where the loss does not fall",
    "temperatures are 0.01 to 20 (distillation); beyond, differences between classes are lost",
)
OUTPUT_SIZE = above(
    10.0,
    "rms of the first output / rms of the targets",
    "a hundredfold first squared error",
)
INPUT_SIZE = above(
    30.0,
    "rms of the input, where no norm layer reads it",
    "initialisations assume about 1; raw pixels have 130, healthy data 0.3 to 3",
)
INPUT_SMALL = below(
    1e-2,
    "rms of the input, where no norm layer reads it and the loss does not fall",
    "initialisations assume about 1: behind the first layer a bias of default size is then a "
    "hundred times what differs between samples; audio has 0.02 to 0.1, pixels of 0 to 1 have 0.5",
)
TARGET_SIZE = above(
    100.0,
    "rms of the targets, where the loss does not fall by 5 %",
    "the first outputs are about 1, and a step of Adam moves them by about its learning rate: tens "
    "of thousands of steps to get there; healthy data 0.3 to 3",
)
ODD_BATCH = above(
    50.0,
    "rms of a batch / median of all batches",
    "counts where the numbers stop being finite right after it, its update is not an ordinary one, "
    "its gradient is as odd, or running statistics take it in",
)
REPEATED = above(
    0.5,
    "share of samples that equal another one of their batch",
    "more copies than data",
)
CHANGING = above(
    0.5,
    "share of the samples seen before that had another class then",
    "classes drawn again agree once in as many times as there are classes; noise in labels is the "
    "same at each visit",
)
ONE_CLASS = above(
    0.5,
    "share of batches with a single class, where there are several, above chance",
    "sorted data has such a batch at nearly every step, and shuffled data 0 more than chance gives "
    "(2 x 0.5^8 with two classes and batches of 8; most batches where one class is rare)",
)
PADDING = above(0.1, "share of the targets that are padding", "a tenth of the loss")
SCORE = above(
    0.9,
    "loss of outputs that equal targets of 0 and 1, where that of their opposite is 1 - this",
    "arithmetic: Dice, IoU and F1 are 1 and 0; an error is 0 for the right answer, and a cross "
    "entropy far above 1 for the opposite",
)
OUTSIDE = above(0.05, "share of the targets that the last function cannot return", "arithmetic")

MIXED = above(
    1e-3,
    "change of an output when another sample is exchanged / how outputs differ",
    "0 where samples are computed one by one; rounding is about 1e-6",
)
FUTURE = above(
    0.5,
    "share of later tokens that attention may read, where the next token is the target",
    "arithmetic: 0 with a causal mask, 1 without",
)
NORM_VALUES = below(
    5.0,
    "how many numbers of a channel a batch norm averages",
    "two numbers become -1 and 1 whatever they were, and n at most sqrt(n - 1): below five hardly "
    "more than their order is left",
)
NORM_MOMENTUM = above(
    0.5,
    "share of the newest batch in a batch norm's running statistics",
    "arithmetic: they are a mean of about (2 - m)/m batches, less than three above 0.5; 0.1 is "
    "the default, and what Keras and papers call momentum is 1 - m",
)

# -- precision -----------------------------------------------------------------------------------

HEADROOM_WARN = above(
    0.25,
    "largest float16 value / 65504",
    "two doublings from infinity",
)
HEADROOM_ALARM = above(0.5, "largest float16 value / 65504", "one doubling from infinity")
UNDERFLOW_WARN = above(
    0.3,
    "share of the non-zero float16 gradients below its normal range",
    "below 6e-5 digits are lost one by one, and below 6e-8 all; a remark where the loss halves",
)
UNDERFLOW_ALARM = above(
    0.7,
    "share of the non-zero float16 gradients below its normal range",
    "most of them",
)

CUTS: dict[str, Cut] = {name: each for name, each in globals().items() if isinstance(each, Cut)}
"""All of them by name."""
