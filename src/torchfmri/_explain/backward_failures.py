"""The table of autograd failures: PyTorch's words, and our explanation.

`entry_points` tries the entries in order, so special ones stand before general ones. Texts may be
changed freely; `kind` is public. A pattern must match every PyTorch version that is supported, and
its groups are named in the texts. Each entry has a test that makes the real failure happen, and a
row in `docs/errors.md`.
"""

from __future__ import annotations

from torch.autograd.gradcheck import GradcheckError
from torch.utils.checkpoint import CheckpointError

from torchfmri._explain import backward_clues as clues
from torchfmri._explain.failure import Failure

BACKWARD_FAILURES = (
    Failure(
        "saved_tensors",
        r"values to unpack \(expected (?P<wanted>\d+)(?:, got (?P<got>\d+))?\)"
        r"|tuple index out of range|saved_tensors mismatch",
        "The backward of a custom autograd.Function asks ctx.saved_tensors for other tensors than "
        "its forward kept.",
        "ctx.saved_tensors holds what forward gave to ctx.save_for_backward: as many tensors, in "
        "the same order. A second call of save_for_backward replaces the first.",
        (
            "Take out as many as were kept, in the same order: the names in both lines agree.",
            "Keep what backward needs in one call: ctx.save_for_backward(x, weight, bias).",
            "Numbers, shapes and flags are kept as attributes: ctx.scale = scale.",
        ),
        when=clues.takes_saved_tensors,
        clues=clues.by_saved_tensors,
    ),
    Failure(
        "saved_tensors",
        r"save_for_backward can only save variables, but argument (?P<index>\d+) is of type "
        r"(?P<got>\w+)",
        "ctx.save_for_backward was given a {got} as its argument {index}, and keeps tensors only.",
        "It watches the tensors it keeps for changes in place; other values need no watching.",
        ("Keep it as an attribute instead: ctx.scale = scale, and read ctx.scale in backward.",),
    ),
    Failure(
        "saved_tensors",
        r"'(?P<function>\w+)Backward' object has no attribute '(?P<name>\w+)'",
        "The backward of {function} reads ctx.{name}, which its forward did not set.",
        "ctx is the same object in forward and backward: what backward reads as an attribute, "
        "forward must have set. Tensors go through save_for_backward and saved_tensors.",
        ("Set it in forward: ctx.{name} = ...", "A tensor: ctx.save_for_backward(tensor)."),
        when=clues.in_function,
        clues=clues.by_saved_tensors,
    ),
    Failure(
        "modified_in_place",
        r"modified by an inplace operation: \[(?P<type>[\w.]+) (?P<shape>\[[^\]]*\])\]"
        r"(?:, which is output \d+ of (?P<operation>\w+))?,? is at version (?P<now>\d+); "
        r"expected version (?P<expected>\d+)",
        "A tensor of shape {shape} that the backward pass needs was changed after the forward "
        "pass had kept it: it was kept at version {expected} and is at version {now}.",
        "Many operations keep their input or their output for the backward pass. An in-place "
        "operation (add_, +=, x[i] = ..., relu(inplace=True), out=, optimizer.step()) writes into "
        "that memory, so the gradient would be wrong.",
        (
            "Do that operation out of place: x = x + 1 instead of x += 1, inplace=False.",
            "If it must be in place, let the other one keep a copy: op(x.clone()).",
        ),
        clues=clues.by_written_tensor,
    ),
    Failure(
        "backward_twice",
        r"backward through the graph a second time|saved tensors after .{0,20}already been freed",
        "The backward pass reached a part of the graph that an earlier backward pass had freed.",
        "A backward pass frees what the forward pass kept as it goes. Either the same loss went "
        "back twice, or two losses share a part of the forward pass, or a tensor kept from an "
        "earlier step (hidden state, running loss, cache, a list of outputs) leads into old graph.",
        (
            "A state carried from step to step: state = state.detach() before it is used again.",
            "Two losses on one forward pass: (loss_a + loss_b).backward().",
            "Sums for logging: total += loss.item(), not total += loss.",
            "Only where you do need the same graph again: backward(retain_graph=True).",
        ),
    ),
    Failure(
        "gradcheck",
        r"Jacobian mismatch for output (?P<output>\d+) with respect to input (?P<input>\d+)",
        "gradcheck found that the gradient of output {output} with respect to input {input} is not "
        "the measured one.",
        "gradcheck compares backward with differences of the forward pass over a step of 1e-6. In "
        "float32 these differences are mostly rounding, so a right backward fails as well.",
        (
            "If the inputs are float64, the backward is wrong, or the forward is not smooth there.",
            "torchfmri.verify_gradients(model, data) says in which layer, and how it is wrong.",
        ),
        error=GradcheckError,
        clues=clues.by_checked_inputs,
    ),
    Failure(
        "number_of_gradients",
        r"function (?P<function>\w+) returned an incorrect number of gradients "
        r"\(expected (?P<wanted>\d+), got (?P<got>\d+)\)",
        "The backward of a custom autograd.Function returned {got} gradients; its forward has "
        "{wanted} inputs.",
        "backward must return one gradient for every argument of forward after ctx, in the same "
        "order, and None for those without (integers, flags, masks).",
        ("Return {wanted} values: a gradient or None for each argument of forward.",),
        clues=clues.by_function,
    ),
    Failure(
        "gradient_shape",
        r"function (?P<function>\w+) returned an invalid gradient at index (?P<index>\d+) - got "
        r"(?P<got>\[[^\]]*\]) but expected shape compatible with (?P<wanted>\[[^\]]*\])",
        "Gradient number {index} returned by a custom backward has shape {got}; the input it "
        "belongs to has {wanted}.",
        "A gradient has the shape of its input. Where forward broadcast the input, backward must "
        "sum over the broadcast dimensions; a transposed product gives a transposed gradient.",
        (
            "Return gradient {index} in shape {wanted}, e.g. with gradient.sum_to_size(x.shape).",
            "If the shape is right, check the order: gradients come in the order of the inputs.",
        ),
        clues=clues.by_function,
    ),
    Failure(
        "gradient_device",
        r"function (?P<function>\w+) returned an invalid gradient at index (?P<index>\d+) - "
        r"expected (?:device|type|dtype) (?P<wanted>\S+) but got (?P<got>\S+)",
        "Gradient number {index} returned by a custom backward is on or of {got}; its input is "
        "{wanted}.",
        "backward made a new tensor with default device or dtype instead of those of its input.",
        ("Make it like the input: torch.zeros_like(x), or gradient.to(x.device, x.dtype).",),
        clues=clues.by_function,
    ),
    Failure(
        "gradient_dtype",
        r"isFloatingType\(grad|grad_is_complex",
        "A custom backward returned a gradient whose dtype cannot be that of its input: complex "
        "for a real input, or whole numbers.",
        "A gradient has the dtype of its input, or one that can be cast to it.",
        ("Cast it in backward: gradient.real, or gradient.to(x.dtype).",),
        clues=clues.by_only_function,
    ),
    Failure(
        "gradient_type",
        r"expected Variable or None \(got (?P<got>\w+)\)",
        "A custom backward returned a {got} where a tensor or None is wanted.",
        "Every gradient is a tensor; None stands for no gradient.",
        ("Return a tensor (torch.as_tensor(...)) or None.",),
        clues=clues.by_only_function,
    ),
    Failure(
        "nan_gradient",
        r"Function '(?P<function>\w+)' returned nan values in its (?P<index>\d+)\w* output",
        "Anomaly detection found the first NaN of the backward pass: {function} produced it.",
        "Typical: sqrt, norm or pow at 0, log or division of 0, 0 * inf behind a torch.where, an "
        "overflow in 16 bits.",
        (
            "Keep away from the singular point: torch.sqrt(x + eps), x.clamp_min(eps).log().",
            "With torch.where mask the INPUT of the dangerous function, not its output.",
        ),
        clues=clues.by_function,
    ),
    Failure(
        "no_graph",
        r"element \d+ of tensors does not require grad",
        "backward() was called on a tensor without a graph: nothing that leads to it requires a "
        "gradient.",
        "It was computed under no_grad or inference_mode, cut off by detach(), item(), numpy() or "
        "argmax, or all parameters are frozen (requires_grad=False). With reentrant checkpointing "
        "also when no INPUT of the checkpointed part requires a gradient.",
        (
            "Follow the tensors back from the loss: before the first with a grad_fn it was cut.",
            "Frozen model: parameter.requires_grad_() for what you train.",
            "Checkpointing: use_reentrant=False.",
        ),
        clues=clues.by_loss,
    ),
    Failure(
        "loss_not_scalar",
        r"grad can be implicitly created only for scalar outputs",
        "backward() was called on a tensor with several values; a gradient belongs to one number.",
        "A loss with reduction='none', or an output of the model instead of a loss.",
        (
            "Reduce it: loss.mean().backward().",
            "Or say what to weigh each value by: output.backward(gradient=weights).",
        ),
        clues=clues.by_loss,
    ),
    Failure(
        "gradient_given",
        r"Mismatch in shape: grad_output\[\d+\] has a shape of (?P<got>.*) and output\[\d+\] has a "
        r"shape of (?P<wanted>.*)\.",
        "backward was given a gradient of shape {got} for a tensor of shape {wanted}.",
        "The gradient that is passed to backward or autograd.grad belongs to the output, one "
        "value for each of its values.",
        ("Pass torch.ones_like(output), or reduce the output to a number first.",),
    ),
    Failure(
        "hook_changed_shape",
        r"hook '(?P<hook>[^']*)' has changed the (?P<which>\w+) of value",
        "The hook {hook} returned a gradient of another {which} than it was given.",
        "What a hook on a tensor returns replaces the gradient, so it must be of the same kind.",
        ("Return None from a hook that only looks.", "Else return a tensor like the gradient."),
    ),
    Failure(
        "not_in_graph",
        r"differentiated Tensors?.{0,40} not have been used in the graph",
        "torch.autograd.grad was asked for the gradient of a tensor that the output does not "
        "depend on.",
        "The tensor was not used, or a copy of it was: x.to(...), x.detach() or torch.tensor(x) "
        "make another tensor.",
        ("Pass the very tensor that the forward pass used.", "Or allow it: allow_unused=True."),
    ),
    Failure(
        "leaf_in_place",
        r"leaf Variable that requires grad .{0,30}in-place operation",
        "An in-place operation was applied to a parameter (a leaf that requires a gradient), or "
        "to a view of it, while gradients were being recorded.",
        "A leaf must keep the value that its gradient belongs to; writing into it would make it "
        "the result of an operation.",
        (
            "A manual update or initialisation: with torch.no_grad(): parameter.add_(...).",
            "A computation: make a new tensor, y = parameter + 1.",
        ),
    ),
    Failure(
        "hooked_in_place",
        r"Output \d+ of BackwardHook\w* is a view and is being modified inplace",
        "An in-place operation follows a module that has a full backward hook.",
        "register_full_backward_hook passes the output through a Function of its own, whose output "
        "must not be changed in place.",
        (
            "Take inplace=False in the layer that follows.",
            "Or read gradients without such hooks: torchfmri.Inspector copes with in-place layers.",
        ),
    ),
    Failure(
        "view_in_place",
        r"is a view and (?:is being|its base).{0,60}modified inplace"
        r"|view was created in (?:no_grad|inference) mode and",
        "An in-place operation was applied to a view whose history autograd cannot rewrite.",
        "The view came from an operation with several results (unbind, split, chunk, iterating "
        "over a tensor), from a custom Function, or was made under no_grad.",
        (
            "Do it out of place, or on a copy: part = part.clone().",
            "Write through the base instead: x[0].add_(1) becomes x = x.index_add(...).",
            "View and in-place operation belong both inside or both outside no_grad.",
        ),
    ),
    Failure(
        "inference_tensor",
        r"inference tensor",
        "A tensor made under torch.inference_mode() met autograd outside that mode.",
        "Such tensors have no version counter and can never take part in a graph. Often a cache, "
        "an embedding or a buffer that was computed once under inference_mode.",
        (
            "Make it under torch.no_grad() instead of torch.inference_mode().",
            "Or use a copy outside: x = x.clone().",
        ),
    ),
    Failure(
        "checkpoint_mismatch",
        r"",
        "Activation checkpointing recomputed a part of the model and got something else than in "
        "the forward pass.",
        "The checkpointed part is not a pure function: it depends on a counter, a global, a cache, "
        "a random choice outside torch's generators, on autocast or on train/eval mode.",
        (
            "Move what changes from call to call out of the checkpointed part.",
            "Do not use a KV cache with checkpointing (use_cache=False).",
            "To see the first difference: checkpoint(..., debug=True).",
        ),
        error=CheckpointError,
        clues=clues.by_checkpoint,
    ),
    Failure(
        "unused_parameters",
        r"Expected to have finished reduction in the prior iteration"
        r"(?:.*did not receive grad for rank \d+: (?P<indices>[\d ]+))?",
        "DistributedDataParallel waits for gradients of parameters that took no part in the loss.",
        "Every process must produce a gradient for every parameter, in every step. A branch that "
        "was not taken, a head that is not in the loss or a frozen layer leaves some without.",
        (
            "Freeze what is not trained before wrapping: parameter.requires_grad_(False).",
            "Or let it search each step, which costs time: find_unused_parameters=True.",
        ),
        clues=clues.by_unused,
    ),
)
