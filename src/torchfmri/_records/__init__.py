"""Results: what is left when the model is gone.

An `Inspection` holds a `Record` per layer with its calls and values; a `History` holds statistics
over training steps; a `Finding` says what is wrong, where and why. What can be watched at all, and
which axis of a layer's output is its units, stands in `values`. `inspection_files`,
`history_store` and `history_files` write them to disk and read them again.
"""

from torchfmri._records.finding import (
    PHASE_OF,
    PHASES,
    SEVERITIES,
    Finding,
    Phase,
    Severity,
    alarm,
    finding_of,
    warn,
)
from torchfmri._records.history import (
    COLUMNS,
    COUNTS,
    DERIVED,
    NO_STEPS,
    STORED,
    UPDATE_SAMPLE,
    UPDATES,
    Floats,
    History,
    HistoryRows,
    Series,
    Step,
)
from torchfmri._records.history_files import write_records
from torchfmri._records.history_store import HistoryFolder, has_ended, step_files
from torchfmri._records.inspection import Inspection
from torchfmri._records.inspection_files import kind_of, tensor_of
from torchfmri._records.record import Call, Record
from torchfmri._records.values import (
    BACKWARD_WHAT,
    GRADIENT_OF,
    PARAMETER_WHAT,
    Value,
    channel_axis,
    check_per,
    check_what,
)
