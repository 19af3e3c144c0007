"""Files and folders: written whole or not at all, read as if an enemy wrote them.

`regular` opens regular files within limits and locks them. `sealed` is JSON with a checksum,
`forms` is what may stand in it, `tensor_file` is a safetensors file that is mapped, `listed` tells
which files belong together. `replacing` writes a file or a folder beside its place and puts it
there in one step. Everything of ours on disk goes through these, so a new kind of file is safe as
soon as it uses them; `foreign_text` is for what is printed of it. What is wrong with a file raises
`FileFormatError`.
"""

from torchfmri._files.foreign_text import printable
from torchfmri._files.forms import require_form, require_forms
from torchfmri._files.listed import compare_files, is_listing, list_files, sha256_of
from torchfmri._files.regular import (
    list_names,
    lock,
    open_limited,
    open_regular,
    read_regular,
    size_of,
    sync_folder,
    write_all,
)
from torchfmri._files.replacing import (
    find_replaced,
    held_alone,
    make_folder,
    new_file,
    new_folder,
    recover,
)
from torchfmri._files.sealed import finite_json, parse, plain, seal, to_json, unseal
from torchfmri._files.tensor_file import (
    DTYPES,
    TAGS,
    FileColumn,
    Tensor,
    is_intact,
    map_file,
    parse_tensors,
    read_tensors,
    shape_of,
    write_tensors,
)
