"""A digital fMRI for PyTorch models."""

from torchfmri._difference import Difference, first_difference
from torchfmri._history import History
from torchfmri._inspection import Inspection
from torchfmri._inspector import Inspector
from torchfmri._monitor import Monitor, MonitorWarning
from torchfmri._records import Call, Record
from torchfmri.exceptions import InspectionError, LayerNotFoundError, MemoryLimitError
from torchfmri.statistics import ChannelStatistics, Statistics, calculate_statistics

__version__ = "0.1.0"

__all__ = [
    "Call",
    "ChannelStatistics",
    "Difference",
    "History",
    "Inspection",
    "InspectionError",
    "Inspector",
    "LayerNotFoundError",
    "MemoryLimitError",
    "Monitor",
    "MonitorWarning",
    "Record",
    "Statistics",
    "calculate_statistics",
    "first_difference",
]
