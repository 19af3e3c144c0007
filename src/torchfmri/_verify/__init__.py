"""`verify_gradients`: every layer's backward pass against a numerical derivative.

`module_calls` notes what each layer gets, `varied_call` runs it with other numbers, `directional`
and `judgement` take two derivatives, `comparison` compares them, and `layer_verdict` weighs
precision and kinks. A mistake that is recognised by its looks is a case of `explain` in
`comparison`.
"""

from torchfmri._verify.report import GradientCheck, Verification
from torchfmri._verify.verify import verify_gradients

__all__ = [
    "GradientCheck",
    "Verification",
    "verify_gradients",
]
