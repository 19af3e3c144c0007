"""`edited`: run a model with changed activations, and leave no trace of it.

`edit` says what to do and to which part; `bound` does it to the value of one place; `parts` is the
part of a tensor that is read and written; `passes` knows which tokens a pass is fed, also with a
cache; `carried` finds the tensor in what a module takes or returns; `attached` puts the hooks on
and takes them off. A new kind of edit is a constructor in `edit` and a branch of `BoundEdit._new`.
"""

from torchfmri._edit.attached import attached, bind_edits, edited, require_acted
from torchfmri._edit.bound import BoundEdit
from torchfmri._edit.carried import change_arguments, change_output
from torchfmri._edit.edit import Edit, Spec
from torchfmri._edit.passes import EditPasses
