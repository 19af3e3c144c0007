"""`diagnose`: a short training run on copies, observed closely, then judged.

`copies` keeps the user's model out of it. `watcher`, `gradient_watch`, `operations` and
`loss_watch` observe, `layer_logs` and `batch_log` take notes, and `run` makes one `Observation`
of them for `_diagnosis`. `entry_point` also watches a whole training script.
"""

from torchfmri._checkup.entry_point import diagnose, diagnose_script
