"""A step that turned NaN or infinite: held, traced back, stored, replayed.

`hold` looks at each step before the optimizer applies it, by one number. `aftermath`
runs a bad step again (`redone_step`), from the buffers as they were before it, finds the
operation where it began (`origin`, `trace`) and writes a folder (`stored_incident`), which
`replay_run` runs again. Why an operation makes NaN is an entry of `FORWARD` or `BACKWARD` in
`causes`.
"""

from torchfmri._incidents.aftermath import IncidentSubject
from torchfmri._incidents.content import is_finite
from torchfmri._incidents.hold import Hold
from torchfmri._incidents.incident import Incident, Incidents, check_action, check_incidents
from torchfmri._incidents.origin import find_origin
from torchfmri._incidents.replay_run import replay
from torchfmri._incidents.seen_step import Buffers
