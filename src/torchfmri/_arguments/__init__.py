"""What is wrong with an argument, said in the same way everywhere.

`checks` has the checks: each raises with the value, then what to give. A new one calls `require`.
`extras` says which extra installs a package that is missing.
"""

from torchfmri._arguments.checks import (
    check_callable,
    check_device,
    check_each,
    check_file,
    check_flag,
    check_folder,
    check_module,
    check_number,
    check_path,
    check_real,
    check_scalar,
    check_scaler,
    check_target,
    check_tensor,
    few,
    is_list,
    is_whole,
    require,
    shown,
)
from torchfmri._arguments.extras import from_extra
