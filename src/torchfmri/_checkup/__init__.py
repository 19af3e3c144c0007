"""`diagnose`: a short training run on copies, observed closely, then judged.

`copies` keeps the user's model out of it. `watcher`, `gradient_watch`, `operations` and
`loss_watch` observe, `layer_logs` and the `*_log` files note, and `run` makes one `Observation` of
it for `_diagnosis`. `script` does the same with a whole training script.
"""

from torchfmri._checkup.entry_point import diagnose
from torchfmri._checkup.script import diagnose_script
