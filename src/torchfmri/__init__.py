"""A digital fMRI for PyTorch models."""

from torchfmri._costs.advice import Advice, Option
from torchfmri._costs.advise import advise
from torchfmri._costs.cost import cost
from torchfmri._costs.growth import Growth
from torchfmri._costs.layer_cost import Cost, LayerCost
from torchfmri._difference import Difference, first_difference
from torchfmri._explanations.explained import explain, explained
from torchfmri._explanations.explanation import Explanation
from torchfmri._history import History
from torchfmri._inspection import Inspection
from torchfmri._inspector import Inspector
from torchfmri._monitor import Monitor, MonitorWarning
from torchfmri._records import Call, Record
from torchfmri._token_gradients import token_gradients
from torchfmri._tokens.coverage import Coverage, CoverageRow
from torchfmri._tokens.gradient import TokenGradient, TopEntries
from torchfmri._tokens.gradients import TokenGradients
from torchfmri._tokens.loss_dots import token_loss_dots
from torchfmri._tokens.loss_gradient import TokenLossGradient
from torchfmri._tokens.loss_gradients import TokenLossGradients
from torchfmri._tokens.losses import token_losses
from torchfmri._tokens.selection import TokenSelection
from torchfmri._verification.report import GradientCheck, Verification
from torchfmri._verification.verify import verify_gradients
from torchfmri.exceptions import (
    ExplainedError,
    InspectionError,
    LayerNotFoundError,
    MemoryLimitError,
    UnsupportedLayerError,
)
from torchfmri.statistics import ChannelStatistics, Statistics, calculate_statistics

__version__ = "0.1.0"

__all__ = [
    "Advice",
    "Call",
    "ChannelStatistics",
    "Cost",
    "Coverage",
    "CoverageRow",
    "Difference",
    "ExplainedError",
    "Explanation",
    "GradientCheck",
    "Growth",
    "History",
    "Inspection",
    "InspectionError",
    "Inspector",
    "LayerCost",
    "LayerNotFoundError",
    "MemoryLimitError",
    "Monitor",
    "MonitorWarning",
    "Option",
    "Record",
    "Statistics",
    "TokenGradient",
    "TokenGradients",
    "TokenLossGradient",
    "TokenLossGradients",
    "TokenSelection",
    "TopEntries",
    "UnsupportedLayerError",
    "Verification",
    "advise",
    "calculate_statistics",
    "cost",
    "explain",
    "explained",
    "first_difference",
    "token_gradients",
    "token_loss_dots",
    "token_losses",
    "verify_gradients",
]
