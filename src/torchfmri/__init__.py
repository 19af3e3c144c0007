"""A digital fMRI for PyTorch models."""

from torchfmri._checkup.diagnose import diagnose
from torchfmri._costs.advice import Advice, Option
from torchfmri._costs.advise import advise
from torchfmri._costs.cost import cost
from torchfmri._costs.growth import Growth
from torchfmri._costs.layer_cost import Cost, LayerCost
from torchfmri._diagnosis.finding import Finding
from torchfmri._diagnosis.report import Diagnosis
from torchfmri._difference import Difference, first_difference
from torchfmri._explanations.explained import explain, explained
from torchfmri._explanations.explanation import Explanation
from torchfmri._history import History
from torchfmri._incidents.incident import Incident
from torchfmri._incidents.options import Incidents
from torchfmri._inspection import Inspection
from torchfmri._inspector import Inspector
from torchfmri._monitor import Monitor, MonitorWarning
from torchfmri._named_models import NamedModel, load_model
from torchfmri._records import Call, Record
from torchfmri._scan import scan, scan_dataset, stream
from torchfmri._scanning.dataset import DatasetScan
from torchfmri._scanning.live_token import LiveToken
from torchfmri._scanning.scan_options import ScanOptions
from torchfmri._scanning.scanner import Scanner
from torchfmri._scanning.stream import ScanStream
from torchfmri._scans.anatomy import Anatomy
from torchfmri._scans.loading import load
from torchfmri._scans.scan import Scan
from torchfmri._scans.sequence import ScannedSequence, Tokens
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
    FindingWarning,
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
