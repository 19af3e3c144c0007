"""A digital fMRI for PyTorch models."""

from torchfmri._checkup import diagnose
from torchfmri._cost import Advice, Cost, Growth, LayerCost, Option, advise, cost
from torchfmri._diagnosis import Diagnosis
from torchfmri._explain import Explanation, explain, explained
from torchfmri._incidents import Incident, Incidents
from torchfmri._inspect import Difference, Inspector, first_difference
from torchfmri._model import NamedModel, load_model
from torchfmri._monitor import Monitor, MonitorWarning
from torchfmri._records import Call, Finding, History, Inspection, Record
from torchfmri._scan import (
    Anatomy,
    DatasetScan,
    LiveToken,
    Scan,
    ScannedSequence,
    Scanner,
    ScanOptions,
    ScanStream,
    Tokens,
    load,
    scan,
    scan_dataset,
    stream,
)
from torchfmri._tokens import (
    Coverage,
    CoverageRow,
    TokenGradient,
    TokenGradients,
    TokenLossGradient,
    TokenLossGradients,
    TokenSelection,
    TopEntries,
    token_gradients,
    token_loss_dots,
    token_losses,
)
from torchfmri._verify import GradientCheck, Verification, verify_gradients
from torchfmri.exceptions import (
    ExplainedError,
    FindingWarning,
    GuardError,
    InspectionError,
    LayerNotFoundError,
    MemoryLimitError,
    NonFiniteError,
    NonFiniteWarning,
    ScanFormatError,
    UnsupportedLayerError,
)
from torchfmri.statistics import ChannelStatistics, Statistics, calculate_statistics

__version__ = "0.1.0"

__all__ = [
    "Advice",
    "Anatomy",
    "Call",
    "ChannelStatistics",
    "Cost",
    "Coverage",
    "CoverageRow",
    "DatasetScan",
    "Diagnosis",
    "Difference",
    "ExplainedError",
    "Explanation",
    "Finding",
    "FindingWarning",
    "GradientCheck",
    "Growth",
    "GuardError",
    "History",
    "Incident",
    "Incidents",
    "Inspection",
    "InspectionError",
    "Inspector",
    "LayerCost",
    "LayerNotFoundError",
    "LiveToken",
    "MemoryLimitError",
    "Monitor",
    "MonitorWarning",
    "NamedModel",
    "NonFiniteError",
    "NonFiniteWarning",
    "Option",
    "Record",
    "Scan",
    "ScanFormatError",
    "ScanOptions",
    "ScanStream",
    "ScannedSequence",
    "Scanner",
    "Statistics",
    "TokenGradient",
    "TokenGradients",
    "TokenLossGradient",
    "TokenLossGradients",
    "TokenSelection",
    "Tokens",
    "TopEntries",
    "UnsupportedLayerError",
    "Verification",
    "advise",
    "calculate_statistics",
    "cost",
    "diagnose",
    "explain",
    "explained",
    "first_difference",
    "load",
    "load_model",
    "scan",
    "scan_dataset",
    "stream",
    "token_gradients",
    "token_loss_dots",
    "token_losses",
    "verify_gradients",
]

# Reprs, tracebacks and pickles name `torchfmri`, not the room where a name happens to be defined.
for _name in __all__:
    globals()[_name].__module__ = __name__
del _name
