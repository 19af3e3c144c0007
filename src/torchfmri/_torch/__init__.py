"""PyTorch's own mechanisms: private symbols, hooks, graph edges, nested containers.

Every private symbol of torch that we use is in `private`, with a fallback; nothing else touches
one. `hooks` has the object registered on modules, puts hooks on for the time of a block, and tells
operations of a pass from those of our hooks in it. `elements` walks containers of tensors, `graph`
finds where an input enters the graph and numbers backward passes, and `deferred` fetches numbers
from a GPU without waiting for it.
"""

from torchfmri._torch.deferred import Deferred, widest_dtype
from torchfmri._torch.elements import (
    Element,
    flatten,
    flatten_arguments,
    local_part,
    map_tensors,
    storage_of,
)
from torchfmri._torch.graph import (
    Backwards,
    InputEdge,
    ViewGeometry,
    consumers,
    nodes_before,
    nodes_behind,
    runs_checkpoint,
    runs_grad,
    view_geometry,
)
from torchfmri._torch.hooks import (
    Aside,
    Attached,
    FollowingMode,
    Hook,
    ReplacingHook,
    hook_side,
    hooked,
)
from torchfmri._torch.private import (
    NO_BACKWARD,
    CompiledForward,
    DispatchMode,
    HookSet,
    OutputHooks,
    calls_itself,
    checkpointed_function,
    compile_cuda,
    compiled_graphs,
    compiled_parts,
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
    is_compiler_error,
    is_transformed,
    leave,
    may_autocast,
    node_sequence_number,
    norms,
    operator_schema,
    own_copy,
    saved_count,
    saved_tensor_errors,
    saved_tensor_hooks,
    scaler_went_on,
    sequence_number,
    set_to_zero,
    stream_of,
    uncompiled,
    uncompiled_call,
    users_of_memory,
)
