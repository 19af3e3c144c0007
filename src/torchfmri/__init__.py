"""A digital fMRI for PyTorch models."""

from torchfmri._checkup.entry_point import diagnose
from torchfmri._cost.advice import Advice, Option
from torchfmri._cost.advice_run import advise
from torchfmri._cost.cost_run import cost
from torchfmri._cost.growth import Growth
from torchfmri._cost.layer_cost import Cost, LayerCost
from torchfmri._diagnosis.report import Diagnosis
from torchfmri._explain.entry_points import explain, explained
from torchfmri._explain.explanation import Explanation
from torchfmri._incidents.incident import Incident
from torchfmri._incidents.options import Incidents
from torchfmri._inspect.difference import Difference, first_difference
from torchfmri._inspect.inspector import Inspector
from torchfmri._model.named_models import NamedModel, load_model
from torchfmri._monitor.monitor import Monitor, MonitorWarning
from torchfmri._records.finding import Finding
from torchfmri._records.history import History
from torchfmri._records.inspection import Inspection
from torchfmri._records.record import Call, Record
from torchfmri._scan.loading import load
from torchfmri._scan.record.anatomy import Anatomy
from torchfmri._scan.record.sequence import ScannedSequence, Tokens
from torchfmri._scan.run.dataset import DatasetScan
from torchfmri._scan.run.entry_points import scan, scan_dataset, stream
from torchfmri._scan.run.live_token import LiveToken
from torchfmri._scan.run.scan_options import ScanOptions
from torchfmri._scan.run.scanner import Scanner
from torchfmri._scan.run.stream import ScanStream
from torchfmri._scan.scan_record import Scan
from torchfmri._tokens.algebra.coverage import Coverage, CoverageRow
from torchfmri._tokens.algebra.gradient import TokenGradient, TopEntries
from torchfmri._tokens.algebra.selection import TokenSelection
from torchfmri._tokens.calls.gradients import TokenGradients
from torchfmri._tokens.entry_point import token_gradients
from torchfmri._tokens.losses.dots import token_loss_dots
from torchfmri._tokens.losses.gradient import TokenLossGradient
from torchfmri._tokens.losses.gradients import TokenLossGradients
from torchfmri._tokens.losses.token_losses import token_losses
from torchfmri._verify.report import GradientCheck, Verification
from torchfmri._verify.verify import verify_gradients
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
