"""`verify_gradients`: every layer's backward pass against a numerical derivative.

`module_calls` logs the inputs of each layer, `varied_call` runs a layer with other numbers,
`directional` and `judgement` compute two derivatives, `comparison` compares them, and
`layer_verdict` weighs precision and kinks. To recognise another kind of mistake, add a case to
`explain` in `comparison`.
"""

from torchfmri._verify.report import GradientCheck, Verification
from torchfmri._verify.verify import verify_gradients
