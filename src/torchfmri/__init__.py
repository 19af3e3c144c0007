"""A digital fMRI for PyTorch models.

Names are imported when they are first used, so that `import torchfmri` costs nothing beside torch.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchfmri._checkup import diagnose
    from torchfmri._compare import (
        Comparison,
        Difference,
        HistoryComparison,
        Run,
        StepDifference,
        compare,
        import_hidden_states,
    )
    from torchfmri._contrast import (
        GLM,
        Calibration,
        Classification,
        Contrast,
        ContrastReport,
        Direction,
        LayerAccuracy,
        Peak,
        load_contrast,
    )
    from torchfmri._cost import Advice, Cost, Growth, LayerCost, Option, advise, cost
    from torchfmri._diagnosis import Diagnosis
    from torchfmri._edit import Edit, edited
    from torchfmri._explain import Explanation, explain, explained
    from torchfmri._incidents import Incident, Incidents
    from torchfmri._inspect import Inspector
    from torchfmri._lens import InputAttribution, Lens, LogitAttribution
    from torchfmri._lesion import LesionMap, PatchMap, Steering, lesion, patch, steer
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
        attribute_inputs,
        attribute_logit,
        contrast,
        lens,
        load,
        scan,
        scan_dataset,
        stream,
        view,
    )
    from torchfmri._tokens import (
        Coverage,
        CoverageRow,
        TokenGradient,
        TokenGradients,
        TokenLossGradient,
        TokenLossGradients,
        TokenSelection,
        TokenVerification,
        TokenVerificationRow,
        TopEntries,
        token_gradients,
        token_loss_dots,
        token_losses,
    )
    from torchfmri._verify import GradientCheck, Verification, verify_gradients
    from torchfmri._viewer import View
    from torchfmri.exceptions import (
        ExplainedError,
        FileFormatError,
        FindingWarning,
        GuardError,
        InspectionError,
        LayerNotFoundError,
        MemoryLimitError,
        MissingTokensWarning,
        NonFiniteError,
        NonFiniteWarning,
        ScanFormatError,
        UnsupportedLayerError,
    )
    from torchfmri.statistics import ChannelStatistics, Statistics, calculate_statistics

__version__ = "0.1.0"

__all__ = [
    "GLM",
    "Advice",
    "Anatomy",
    "Calibration",
    "Call",
    "ChannelStatistics",
    "Classification",
    "Comparison",
    "Contrast",
    "ContrastReport",
    "Cost",
    "Coverage",
    "CoverageRow",
    "DatasetScan",
    "Diagnosis",
    "Difference",
    "Direction",
    "Edit",
    "ExplainedError",
    "Explanation",
    "FileFormatError",
    "Finding",
    "FindingWarning",
    "GradientCheck",
    "Growth",
    "GuardError",
    "History",
    "HistoryComparison",
    "Incident",
    "Incidents",
    "InputAttribution",
    "Inspection",
    "InspectionError",
    "Inspector",
    "LayerAccuracy",
    "LayerCost",
    "LayerNotFoundError",
    "Lens",
    "LesionMap",
    "LiveToken",
    "LogitAttribution",
    "MemoryLimitError",
    "MissingTokensWarning",
    "Monitor",
    "MonitorWarning",
    "NamedModel",
    "NonFiniteError",
    "NonFiniteWarning",
    "Option",
    "PatchMap",
    "Peak",
    "Record",
    "Run",
    "Scan",
    "ScanFormatError",
    "ScanOptions",
    "ScanStream",
    "ScannedSequence",
    "Scanner",
    "Statistics",
    "Steering",
    "StepDifference",
    "TokenGradient",
    "TokenGradients",
    "TokenLossGradient",
    "TokenLossGradients",
    "TokenSelection",
    "TokenVerification",
    "TokenVerificationRow",
    "Tokens",
    "TopEntries",
    "UnsupportedLayerError",
    "Verification",
    "View",
    "advise",
    "attribute_inputs",
    "attribute_logit",
    "calculate_statistics",
    "compare",
    "contrast",
    "cost",
    "diagnose",
    "edited",
    "explain",
    "explained",
    "import_hidden_states",
    "lens",
    "lesion",
    "load",
    "load_contrast",
    "load_model",
    "patch",
    "scan",
    "scan_dataset",
    "steer",
    "stream",
    "token_gradients",
    "token_loss_dots",
    "token_losses",
    "verify_gradients",
    "view",
]

_NAMES = {
    "_checkup": "diagnose",
    "_contrast": "Calibration Classification Contrast ContrastReport Direction GLM LayerAccuracy "
    "Peak load_contrast",
    "_compare": "Comparison Difference HistoryComparison Run StepDifference compare "
    "import_hidden_states",
    "_cost": "Advice Cost Growth LayerCost Option advise cost",
    "_diagnosis": "Diagnosis",
    "_edit": "Edit edited",
    "_explain": "Explanation explain explained",
    "_incidents": "Incident Incidents",
    "_lesion": "LesionMap PatchMap Steering lesion patch steer",
    "_lens": "InputAttribution Lens LogitAttribution",
    "_inspect": "Inspector",
    "_model": "NamedModel load_model",
    "_monitor": "Monitor MonitorWarning",
    "_records": "Call Finding History Inspection Record",
    "_scan": "Anatomy DatasetScan LiveToken Scan ScanOptions ScanStream ScannedSequence Scanner "
    "Tokens attribute_inputs attribute_logit contrast lens load scan scan_dataset stream view",
    "_tokens": "Coverage CoverageRow TokenGradient TokenGradients TokenLossGradient "
    "TokenLossGradients TokenSelection TokenVerification TokenVerificationRow TopEntries "
    "token_gradients token_loss_dots token_losses",
    "_verify": "GradientCheck Verification verify_gradients",
    "_viewer": "View",
    "exceptions": "ExplainedError FileFormatError FindingWarning GuardError InspectionError "
    "LayerNotFoundError MemoryLimitError MissingTokensWarning NonFiniteError NonFiniteWarning "
    "ScanFormatError UnsupportedLayerError",
    "statistics": "ChannelStatistics Statistics calculate_statistics",
}
"""Room or module -> the public names that it defines."""
_REPLACED = {"first_difference": "torchfmri.compare(a, b).first"}
_ROOM_OF = {name: room for room, names in _NAMES.items() for name in names.split()}
_MODULES = ("exceptions", "integrations", "reference", "routing", "statistics", "visualization")


def __getattr__(name: str) -> Any:
    """A public name or module, imported now."""
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _ROOM_OF:
        hint = f": it became {_REPLACED[name]}" if name in _REPLACED else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    import_module(f"{__name__}.{_ROOM_OF[name]}")
    # Reprs, tracebacks and pickles name `torchfmri`, not the room where a name is defined: also of
    # what other rooms have brought along, such as the class of a result.
    for room in filter(None, (sys.modules.get(f"{__name__}.{each}") for each in _NAMES)):
        if getattr(room.__spec__, "_initializing", False):  # another thread is importing it
            continue
        for each in _NAMES[room.__name__.removeprefix(f"{__name__}.")].split():
            globals()[each] = getattr(room, each)
            globals()[each].__module__ = __name__
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
