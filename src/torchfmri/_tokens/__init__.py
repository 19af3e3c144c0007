"""`token_gradients`: exact parameter gradients of every token, never materialised.

`algebra` computes with factors of gradients and holds the results; `rules` turns one call of a
layer into factors; `calls` watches a model's calls during one backward pass (`per="position"`);
`losses` differentiates each token's own loss (`per="token_loss"`). A new layer rule is a function
in `rules/layer_rules.py`, entered in `RULES`; a layer without one is run again and tracked.
"""

from torchfmri._tokens.algebra.coverage import Coverage, CoverageRow
from torchfmri._tokens.algebra.gradient import TokenGradient, TopEntries
from torchfmri._tokens.algebra.parameter import VOXEL, ParameterInfo, describe, head_size
from torchfmri._tokens.algebra.precision import without_autocast
from torchfmri._tokens.algebra.selection import TokenSelection
from torchfmri._tokens.algebra.verification import TokenVerification, TokenVerificationRow
from torchfmri._tokens.calls.checks import Checks, alike_of
from torchfmri._tokens.calls.gradients import TokenGradients
from torchfmri._tokens.entry_point import token_gradients
from torchfmri._tokens.losses.dots import token_loss_dots
from torchfmri._tokens.losses.gradient import TokenLossGradient
from torchfmri._tokens.losses.gradients import TokenLossGradients
from torchfmri._tokens.losses.token_losses import token_losses
from torchfmri._tokens.rules.arguments import given_origins
from torchfmri._tokens.rules.numbers import NOBODY
from torchfmri._tokens.rules.origins import Origins
from torchfmri._tokens.rules.trace import TokenTrace
