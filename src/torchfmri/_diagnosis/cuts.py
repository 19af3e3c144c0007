"""Every threshold that turns a signal into a finding, with its reason.

The diagnoses of this room compare signals with them; lengths of windows and least counts stand in
the files that use them. The comment of a threshold says on which side of it a finding lies, what is
compared, and where the value comes from: arithmetic, literature, or a measured separation.
`python -m benchmarks diagnosis --thresholds` reads these comments and prints each beside the worst
healthy setup and the mildest planted fault. Change a value only with that table before and after,
and with the suite (120 faults named, no alarm on 90 healthy setups): most values sit between two
measured figures. `docs/diagnosis.md` repeats every value and reason, and a test compares them.
"""

# -- the optimizer -------------------------------------------------------------------------------

# Above: update / weight per step, median over the matrices. Why: a tenth of every weight replaced
# per step, while the loss does not fall; the rule of thumb is 1e-3, healthy runs have 2e-3 to
# 1.5e-2 and up to 0.11 while the loss falls.
UPDATE_HIGH = 0.1
# Above: update / weight of one step, median over the matrices. Why: the update is as large as the
# weights: what was there is gone.
UPDATE_REPLACED = 1.0
# Above: update / weight over its median before (above 0.1, the loss not seen). Why: schedules
# change it by little from step to step; warm restarts stay below 0.1.
UPDATE_JUMP = 10.0
# Above: update / weight of one step that is followed by steps of the usual size. Why: the weights
# are ten times as large afterwards: nothing is left of what was learnt.
UPDATE_ALONE = 10.0
# Above: size of a parameter over what the last update explains. Why: nothing but the optimizer
# should write to them; loading other weights changes their size less.
OUTSIDE_GROWTH = 10.0
# Above: growth or shrinking of a parameter that no update explains, in 3 steps or more. Why:
# weights that are exchanged and put back, or kept at a size, do not grow in sum.
OUTSIDE_SUM = 2.0
# Below: update / weight per step, median over the matrices. Why: a million steps to change a weight
# once; fine-tuning at lr 1e-6 still has 5e-5.
UPDATE_LOW = 1e-6
# Above: learning rate of a group / that of the group nearest to it. Why: layer-wise decay has steps
# of 1.1 to 2.6 and width-wise (muP) rates are equal at the width they are tuned at; a head may well
# have 10 to 1000 times its body's rate, so this counts together with the group's own update /
# weight.
GROUP_GAP = 10.0
# Below: learning rate / the largest before, on a quarter of the steps. Why: a cosine is below it
# for the last 2 % of its steps and a line for the last 0.1 %; three drops by ten just reach it.
RATE_LEFT = 1e-3
# Above: momentum of SGD. Why: a gradient is added 1/(1 - momentum) times: a thousandfold; at 1 none
# is ever forgotten.
MOMENTUM = 0.999
# Above: loss afterwards / loss before. Why: a run that learns gets below it within a few steps of
# the size above.
LOSS_NOT_BETTER = 0.95
# Above: loss at the end / loss at the start. Why: a loss that grew tenfold and stays there (each of
# the last third above all of the first); adversarial losses rise two- to fivefold.
DIVERGED = 10.0
# Below: norm after clipping / before, on nine steps in ten. Why: measured: 5e-5 where an explosion
# hides, 0.65 where clipping is in order.
CLIPPED = 1e-2
# Below: norm of the gradients after clipping, where that leaves a hundredth or less. Why: usual
# limits are 0.1 to 10: below, it is the limit that is wrong and not the gradients.
CLIPPED_NORM = 1e-2
# Above: learning rate x weight decay, per step. Why: 1 % of every weight lost per step, whatever
# the gradient says: half in 69 steps; usual settings are 1e-6 to 1e-3.
DECAY = 0.01
# Below: size of the weights after the run / before. Why: the decay is seen to win.
SHRUNK = 0.8
# Below: share of a matrix that the run changed at all. Why: with gradients and a learning rate,
# weights that stay bit for bit were not reached by any update.
UNMOVED = 0.01
# Above: norm of the gradients / median of the steps before. Why: ten times the usual, together with
# the next.
SPIKE = 10.0
# Above: rise of the loss above its median / first loss of the run. Why: a quarter of all that there
# was to learn; a converged run has large factors of very little; and twice as far out as any of the
# 50 steps before, for rare classes come back.
SPIKE_RISE = 0.25
# Above: loss, or norm of the gradients / the largest of all steps before. Why: counts after
# ordinary updates only, where the weights have hardly changed, and where its own update is none; a
# spike of a healthy run is ten times its median.
ODD_STEP = 50.0

# -- flow ----------------------------------------------------------------------------------------

# Below: smallest / largest rms of the matrices' gradients, falling towards the input. Why:
# measured: 2e-8 in a stack of sigmoids, at least 9.8e-4 in healthy nets (a residual net whose
# branches start at 0).
DEPTH_RATIO = 1e-5
# Above: correlation of log rms with depth. Why: a trend, not one layer that differs.
DEPTH_TREND = 0.7
# Above: rms of the last / of the first of alike layers, growing along the depth. Why: pre-norm nets
# grow as the square root of depth; doubling variances (x1.41 per layer) reach 100 after 14 layers.
GROWTH_WARN = 100.0
# Above: rms of the last / of the first of alike layers, growing along the depth. Why: the first
# layers' share of the sum is below 0.1 %.
GROWTH_ALARM = 1e3
# Below: difference between samples, last / first hidden layer, where the loss does not fall. Why:
# the default of Linear behind ReLU leaves 0.41 per layer: 5e-4 after 9 layers, where Adam still
# learns, and 4e-8 after 20, where nothing does.
SIGNAL_LEFT = 1e-4
# Above: share of units that are off for every sample of a window. Why: healthy small nets lose up
# to 16 % of their units without harm.
DEAD_INFORM = 0.1
# Above: share of units that are off for every sample of a window. Why: measured: 1.0 with a bad
# bias; 0 in healthy nets, also where 77 % of the values are 0; a remark where the loss falls by 5 %
# all the same (few clusters, up to 0.42).
DEAD_WARN = 0.25
# Above: share of units that are off for every sample of a window. Why: half.
DEAD_ALARM = 0.5
# Above: share of the values that a dropout layer sets to 0. Why: what is left is scaled tenfold,
# and the gradient's noise with it; 0.1 to 0.5 is usual.
DROPPED = 0.9
# Above: share of a hidden layer's values where its function is flat. Why: |tanh| > 0.97 (6 % of its
# largest slope), sigmoid below 1 % of its largest slope.
FLAT_WARN = 0.25
# Above: share of a hidden layer's values where its function is flat. Why: measured: 0.78 at faults;
# half of the values pass no gradient; a remark where the loss halves and the function was not flat
# at first (units that are sure, up to 0.73).
FLAT_ALARM = 0.5
# Below: entropy of attention / ln of the number of keys, in half of the heads. Why: measured: 3e-5
# where it collapsed, 0.97 in healthy models; counts together with the next.
ENTROPY = 0.05
# Above: largest attention logit. Why: exp(-50) = 2e-22: one key has it all; capped at 50 in Gemma
# 2.
LOGIT_WARN = 50.0
# Above: largest attention logit. Why: measured: 2.5e3 at faults, 2 in healthy models; runs above
# 1e4 diverge (Dehghani et al. 2023).
LOGIT_ALARM = 1e3
# Below: how much the last representation differs between samples / its size. Why: nothing of the
# input is left in it.
SPREAD = 1e-3
# Below: number of experts in use, exp of the entropy of the load. Why: all tokens on one expert,
# for at least half of the steps; three idle experts of eight have 4 to 5.
EXPERTS = 1.2

# -- init, loss, data ----------------------------------------------------------------------------

# Above: first cross entropy / ln of the number of classes. Why: measured: 12 to 2e4 at faults, 1.0
# to 1.2 in healthy models; 1 is what guessing costs.
INITIAL_LOSS = 3.0
# Above: rms of a matrix x sqrt(fan in), together with a symptom. Why: 0.58 is PyTorch's default for
# Linear, 1.41 Kaiming's: the ratio of outputs to inputs.
GAIN = 4.0
# Below: largest logit / largest output of the last layer, where the loss does not fall. Why:
# temperatures are 0.01 to 20 (distillation); beyond, differences between classes are lost.
LOGITS_LEFT = 0.01
# Above: rms of the first output / rms of the targets. Why: a hundredfold first squared error.
OUTPUT_SIZE = 10.0
# Above: rms of the input, where no norm layer reads it. Why: initialisations assume about 1; raw
# pixels have 130, healthy data 0.3 to 3.
INPUT_SIZE = 30.0
# Below: rms of the input, where no norm layer reads it and the loss does not fall. Why:
# initialisations assume about 1: behind the first layer a bias of default size is then a hundred
# times what differs between samples; audio has 0.02 to 0.1, pixels of 0 to 1 have 0.5.
INPUT_SMALL = 1e-2
# Above: rms of the targets, where the loss does not fall by 5 %. Why: the first outputs are about
# 1, and a step of Adam moves them by about its learning rate: tens of thousands of steps to get
# there; healthy data 0.3 to 3.
TARGET_SIZE = 100.0
# Above: rms of a batch / median of all batches. Why: counts where the numbers stop being finite
# right after it, its update is not an ordinary one, its gradient is as odd, or running statistics
# take it in.
ODD_BATCH = 50.0
# Above: share of samples that equal another one of their batch. Why: more copies than data.
REPEATED = 0.5
# Above: share of the samples seen before that had another class then. Why: classes drawn again
# agree once in as many times as there are classes; noise in labels is the same at each visit.
CHANGING = 0.5
# Above: share of batches with a single class, where there are several, above chance. Why: sorted
# data has such a batch at nearly every step, and shuffled data 0 more than chance gives (2 x 0.5^8
# with two classes and batches of 8; most batches where one class is rare).
ONE_CLASS = 0.5
# Above: share of the targets that are padding. Why: a tenth of the loss.
PADDING = 0.1
# Above: loss of outputs that equal targets of 0 and 1, where that of their opposite is 1 - this.
# Why: arithmetic: Dice, IoU and F1 are 1 and 0; an error is 0 for the right answer, and a cross
# entropy far above 1 for the opposite.
SCORE = 0.9
# Above: share of the targets that the last function cannot return. Why: arithmetic.
OUTSIDE = 0.05
# Above: change of an output when another sample is exchanged / how outputs differ. Why: 0 where
# samples are computed one by one; rounding is about 1e-6.
MIXED = 1e-3
# Above: share of later tokens that attention may read, where the next token is the target. Why:
# arithmetic: 0 with a causal mask, 1 without.
FUTURE = 0.5
# Below: how many numbers of a channel a batch norm averages. Why: two numbers become -1 and 1
# whatever they were, and n at most sqrt(n - 1): below five hardly more than their order is left.
NORM_VALUES = 5.0
# Above: share of the newest batch in a batch norm's running statistics. Why: arithmetic: they are a
# mean of about (2 - m)/m batches, less than three above 0.5; 0.1 is the default, and what Keras and
# papers call momentum is 1 - m.
NORM_MOMENTUM = 0.5

# -- precision -----------------------------------------------------------------------------------

# Above: largest float16 value / 65504. Why: two doublings from infinity.
HEADROOM_WARN = 0.25
# Above: largest float16 value / 65504. Why: one doubling from infinity.
HEADROOM_ALARM = 0.5
# Above: share of the non-zero float16 gradients below its normal range. Why: below 6e-5 digits are
# lost one by one, and below 6e-8 all; a remark where the loss halves.
UNDERFLOW_WARN = 0.3
# Above: share of the non-zero float16 gradients below its normal range. Why: most of them.
UNDERFLOW_ALARM = 0.7
