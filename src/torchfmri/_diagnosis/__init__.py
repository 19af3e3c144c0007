"""Judgement: an observation of a training run goes in, findings come out.

An `Observation` is all that was seen. `signals` makes numbers of it, `cuts` holds every threshold
with its reason, and the files named after a subject (`depth`, `learning_rates`, `loss`, `units`,
`reach`, `wiring`, ...) hold the diagnoses. A new diagnosis is a function in one of
them with a cut, a name in the table of `_records/finding.py` and an entry in `DIAGNOSES` of
`registry`; plant its fault in `benchmarks/_faults*.py`.
"""

from torchfmri._diagnosis.live import LiveDiagnosis, diagnose_inspection
from torchfmri._diagnosis.observation import (
    ConstantLayer,
    DataFacts,
    HeadActivity,
    LossFacts,
    MisplacedSoftmax,
    NormFacts,
    Observation,
    Reach,
    RouterActivity,
    StepFacts,
    UnitActivity,
    WeightFacts,
)
from torchfmri._diagnosis.registry import find
from torchfmri._diagnosis.report import Diagnosis, Notes
from torchfmri._diagnosis.signals import median, update_ratios
from torchfmri._diagnosis.structure import (
    MATRIX_LAYERS,
    NORM_LAYERS,
    Structure,
    describe,
    parameters_of,
)
from torchfmri._diagnosis.trace import trace_of
