"""PyTorch's own mechanisms: private symbols, hooks, graph edges, nested containers.

Every private symbol of torch that we use stands in `private`, with a fallback; nothing else touches
one. `hooks` is the object registered on modules, `elements` walks containers of tensors, `edges`
finds where an input enters the graph, `backward_passes` numbers backward passes, and `deferred`
fetches numbers from a GPU without waiting for it.
"""

from torchfmri._torch.backward_passes import Backwards, runs_checkpoint, runs_grad
from torchfmri._torch.deferred import Deferred
from torchfmri._torch.edges import InputEdge, ViewGeometry, consumers, view_geometry
from torchfmri._torch.elements import Element, flatten, flatten_arguments, map_tensors
from torchfmri._torch.hooks import Hook, ReplacingHook
from torchfmri._torch.private import (
    NO_BACKWARD,
    DispatchMode,
    HookSet,
    OutputHooks,
    calls_itself,
    checkpointed_function,
    compile_cuda,
    copy_into,
    current_backward,
    current_node,
    differences,
    function_of,
    gradient_bytes,
    gradient_scale,
    gradient_scale_version,
    has_post_accumulate_hooks,
    infers_shapes,
    is_compiled_in_place,
    is_transformed,
    leave,
    may_autocast,
    node_sequence_number,
    norms,
    own_copy,
    saved_count,
    saved_tensor_errors,
    saved_tensor_hooks,
    scaler_went_on,
    sequence_number,
    users_of_memory,
)

__all__ = [
    "NO_BACKWARD",
    "Backwards",
    "Deferred",
    "DispatchMode",
    "Element",
    "Hook",
    "HookSet",
    "InputEdge",
    "OutputHooks",
    "ReplacingHook",
    "ViewGeometry",
    "calls_itself",
    "checkpointed_function",
    "compile_cuda",
    "consumers",
    "copy_into",
    "current_backward",
    "current_node",
    "differences",
    "flatten",
    "flatten_arguments",
    "function_of",
    "gradient_bytes",
    "gradient_scale",
    "gradient_scale_version",
    "has_post_accumulate_hooks",
    "infers_shapes",
    "is_compiled_in_place",
    "is_transformed",
    "leave",
    "map_tensors",
    "may_autocast",
    "node_sequence_number",
    "norms",
    "own_copy",
    "runs_checkpoint",
    "runs_grad",
    "saved_count",
    "saved_tensor_errors",
    "saved_tensor_hooks",
    "scaler_went_on",
    "sequence_number",
    "users_of_memory",
    "view_geometry",
]
