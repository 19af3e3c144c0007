"""Failures of shapes, types, devices, memory and loading: their table, and how clues are read.

`entry_points` puts this table last, because its entries are the most general. A function that reads
clues takes a `Crash` and the match of the failure's pattern; it may fail, and a guess says
probably. A new entry needs a test that makes the real failure happen and a row in `docs/errors.md`.
"""

from __future__ import annotations

import math
import re

import torch
from torch import nn

from torchfmri._explain.crash import Crash
from torchfmri._explain.failure import SIZES, Clues, Failure
from torchfmri._text import bytes_text, few

_PREFIXES = {"module.": "DistributedDataParallel", "_orig_mod.": "torch.compile"}
_ALIASES = {"long int": "long", "unsigned char": "byte", "float16": "half", "float64": "double"}
_KEY = re.compile(r'"([^"]+)"')


def by_matrix(crash: Crash, match: re.Match[str]) -> Clues:
    """Find what the layer takes, and whether flattening or swapping dimensions would help."""
    tensors = list(crash.inputs().values())
    if not isinstance(crash.module, nn.Linear) or not tensors:
        return Clues()
    shape, wanted = tuple(tensors[0].shape), crash.module.in_features
    facts = (f"The layer takes {wanted} features; the last size of {shape} is {shape[-1]}.",)
    for start in range(len(shape) - 1):
        if math.prod(shape[start:]) == wanted:
            return Clues(facts, (f"Flatten the input first: x.flatten({start}) has {wanted}.",))
    if wanted in shape:
        axis = shape.index(wanted)
        return Clues(facts, (f"Dimension {axis} has {wanted}: x.transpose({axis}, -1) fits.",))
    return Clues(facts, (f"Make it nn.Linear({shape[-1]}, ...) if the input is what you meant.",))


def by_channels(crash: Crash, match: re.Match[str]) -> Clues:
    """Find whether the channels are in another dimension."""
    tensors = list(crash.inputs().values())
    wanted = int(match["wanted"])
    if tensors and tensors[0].dim() > 2 and tensors[0].shape[-1] == wanted:
        order = (0, tensors[0].dim() - 1, *range(1, tensors[0].dim() - 1))
        where = f"The last dimension has {wanted}: probably channels come last in your data."
        return Clues((where,), (f"Put the channels first: x.permute{order}.",))
    return Clues()


def by_joined_sizes(crash: Crash, match: re.Match[str]) -> Clues:
    """Say what usually makes two sizes differ by one."""
    if abs(int(match["first"]) - int(match["second"])) != 1:
        return Clues()
    told = "They differ by one: probably an odd size was halved by a stride and doubled again."
    return Clues((told,))


def by_keys(crash: Crash, _: re.Match[str]) -> Clues:
    """Find which keys are missing or unexpected, and whether only a prefix differs."""
    missing = _keys(crash.message, "Missing")
    unexpected = _keys(crash.message, "Unexpected")
    shapes = re.findall(r"size mismatch for (\S+):", crash.message)
    found = {"missing": missing, "unexpected": unexpected, "resized": shapes}
    facts = tuple(f"{len(keys)} {word}: {few(keys)}." for word, keys in found.items() if keys)
    first = next(iter(shapes or missing), None)
    layer = first.rpartition(".")[0] if first and first.rpartition(".")[0] in crash.layers else None
    return Clues(facts, _prefix_cure(missing, unexpected), layer)


def by_types(crash: Crash, match: re.Match[str]) -> Clues:
    """Say what usually brings these two types together."""
    words = [re.split(r"::|\.", each)[-1].lower() for each in match.groups() if each]
    names = {_ALIASES.get(word, word.removesuffix("tensor")) for word in words}
    if names & {"double"}:
        return Clues(cure=("float64 comes from NumPy: torch.from_numpy(a).float(), or x.float().",))
    if names & {"half", "bfloat16"}:
        told = "One side has 16 bits: model.half(), or an output made inside autocast used outside."
        cure = "Run all of it inside one torch.autocast block, or cast: x.to(layer.weight.dtype)."
        return Clues((told,), (cure,))
    if names & {"long", "int", "byte", "bool", "short", "char"}:
        return Clues(cure=("Whole numbers do not multiply with weights: x.float().",))
    return Clues()


def by_memory(crash: Crash, match: re.Match[str]) -> Clues:
    """Say how much memory was asked for, and in which part of training."""
    asked = re.search(r"allocate (?:([\d.]+ [KMGT]?i?B)|(\d+) bytes)", crash.message)
    facts = [f"It asked for {asked[1] or bytes_text(int(asked[2]))}."] if asked else []
    if crash.phase == "optimizer step":
        facts.append(
            "In optimizer.step(): the first step allocates the optimizer's state (Adam: 2x)."
        )
    elif crash.phase == "backward":
        facts.append("In the backward pass: tensors kept by the forward pass are all still there.")
    return Clues(tuple(facts))


def _prefix_cure(missing: list[str], unexpected: list[str]) -> tuple[str, ...]:
    """Say how to rename the keys, if all of them differ by the same prefix."""
    for long, short, verb in ((unexpected, missing, "removeprefix"), (missing, unexpected, "add")):
        if not long or len(long) != len(short) or not long[0].endswith(f".{short[0]}"):
            continue
        prefix = long[0].removesuffix(short[0])
        if [prefix + each for each in short] != long:
            continue
        new = f"key.removeprefix({prefix!r})" if verb == "removeprefix" else f"{prefix!r} + key"
        by = f" (put there by {_PREFIXES[prefix]})" if prefix in _PREFIXES else ""
        told = f"Only the prefix {prefix!r} differs{by}: "
        return (f"{told}load {{{new}: value for key, value in state.items()}}.",)
    return ()


def _keys(message: str, word: str) -> list[str]:
    found = re.search(rf"{word} key\(s\) in state_dict: ([^\n]*)", message)
    return _KEY.findall(found[1]) if found else []


# -- the table ------------------------------------------------------------------------------------

_TYPES = (
    r"(?:must have|have|to be of|of) the same d?type,? but got:? (?:query\.dtype: )?(?P<a>[\w:]+)"
    r"(?: and | != | key\.dtype: )(?P<b>[\w:]+)"
    r"|expected scalar type (?P<c>\w+) but found (?P<d>\w+)"
    r"|Input type \((?P<e>[\w:. ]+)\) and (?:bias|weight) type \((?P<f>[\w:. ]+)\) should"
    r"|dtypes match, got (?P<g>\w+) for the destination and (?P<h>\w+) for the source"
    r"|input dtype \((?P<i>[\w.]+)\) does not match weight dtype \((?P<j>[\w.]+)\)"
    r"|Expected self\.dtype to be equal to src\.dtype"
    r"|Found dtype (?P<k>\w+) but expected (?P<l>\w+)"
    r"|result type (?P<m>\w+) can't be cast to the desired output type (?P<n>\w+)"
)
_DEVICES = (
    r"tensors to be on the same device"
    r"|Tensor on device \S+ is not on the expected device"
    r"|Input type \(torch\.cuda\.\w+\) and (?:bias|weight) type \(torch\.(?!cuda)\w+\) should"
    r"|Input type \(torch\.(?!cuda)\w+\) and (?:bias|weight) type \(torch\.cuda\.\w+\) should"
    r"|Placeholder storage has not been allocated on MPS"
    r"|tensors? .{0,40}(?:is|are) on (?:cpu|cuda\S*), (?:different|but)"
)

FORWARD_FAILURES = (
    # --- memory --------------------------------------------------------------------------------
    Failure(
        "out_of_memory",
        r"",
        "The device has no memory left for the next tensor.",
        "Training keeps the parameters, their gradients, the optimizer's state, and everything the "
        "forward pass saves for the backward pass; the latter grows with batch and length "
        "(attention that is not fused: with the square of the length).",
        (
            "Smaller batches with gradient accumulation; shorter sequences.",
            "Activation checkpointing, bf16 autocast, scaled_dot_product_attention.",
            "torchfmri.cost says which layer keeps how much, torchfmri.advise what would help.",
            "Evaluation: under torch.no_grad(), and keep losses as loss.item().",
        ),
        error=torch.OutOfMemoryError,
        clues=by_memory,
    ),
    Failure(
        "out_of_memory",
        r"DefaultCPUAllocator: (?:can't|not enough)|CUDA out of memory|HIP out of memory"
        r"|MPS backend out of memory|CUBLAS_STATUS_ALLOC_FAILED",
        "There is no memory left for the next tensor.",
        "One tensor is too large (a shape that broadcast to the product of two sizes?), or what "
        "training keeps (parameters, gradients, optimizer's state, saved tensors) fills it.",
        (
            "Compare the size asked for with the shapes: unintended broadcasting makes huge ones.",
            "Smaller batches with gradient accumulation; activation checkpointing; bf16.",
        ),
        clues=by_memory,
    ),
    # --- shapes --------------------------------------------------------------------------------
    Failure(
        "matrix_shape",
        r"shapes cannot be multiplied \((?P<rows>\d+)x(?P<got>\d+) and (?P<wanted>\d+)x"
        r"|same reduction dim, but got \[(?P<r>\d+), (?P<g>\d+)\] X \[(?P<w>\d+)",
        "A matrix product got {got}{g} features where its other side has {wanted}{w}.",
        "The last size of the input must equal in_features of a Linear layer (the first size of "
        "the right-hand matrix).",
        ("Print x.shape before the layer and follow it back to where it is not what you expect.",),
        clues=by_matrix,
    ),
    Failure(
        "channels",
        r"expected input(?P<input>\[[^\]]*\]) to have (?P<wanted>\d+) channels, but got "
        r"(?P<got>\d+)",
        "A convolution for {wanted} channels got {got} (input {input}).",
        "Convolutions take (batch, channels, ...). The image has another number of channels "
        "(grey, RGB, alpha), the batch dimension is missing, or channels come last.",
        ("Make in_channels={got}, or bring the input to {wanted} channels.",),
        clues=by_channels,
    ),
    Failure(
        "one_value_per_channel",
        r"Expected more than 1 (?:value per channel|spatial element) when training, got input size "
        r"(?P<size>.*)",
        "A normalisation layer in training mode got one value per channel: {size}.",
        "The variance of one value is not defined. Usually the last batch of an epoch has one "
        "sample, or a single sample is tried while the model is in training mode.",
        (
            "Trying one sample: model.eval() first.",
            "Training: DataLoader(..., drop_last=True), or GroupNorm/LayerNorm.",
        ),
    ),
    Failure(
        "normalized_shape",
        r"running_mean should contain (?P<got>\d+) elements not (?P<wanted>\d+)"
        r"|Given normalized_shape=\[[^\]]*\], expected input"
        r"|number of channels in input to be divisible by num_groups",
        "A normalisation layer got another number of features than it was made for.",
        "BatchNorm and GroupNorm take channels in dimension 1, LayerNorm the last ones.",
        ("Make the layer for the size it gets, or move the features to that dimension.",),
    ),
    Failure(
        "features",
        r"must be equal to input_size\. Expected (?P<wanted>\d+), got (?P<got>\d+)"
        r"|expecting embedding dimension of (?P<w>\d+), but got (?P<g>\d+)"
        r"|inconsistent input_size: got (?P<g2>\d+),? expected (?P<w2>\d+)",
        "A layer for {wanted}{w}{w2} features got {got}{g}{g2}.",
        "A recurrent or attention layer takes its features in the last dimension.",
        ("Bring the input to {wanted}{w}{w2} features, or make the layer for {got}{g}{g2}.",),
    ),
    Failure(
        "too_small",
        r"Kernel size can't be greater than actual input size|Output size is too small",
        "The input of a convolution or pooling layer is smaller than its window.",
        "Every layer with a stride makes the image smaller; small images are used up before the "
        "last one.",
        ("Larger images, padding=, or fewer layers with a stride.",),
    ),
    Failure(
        "dimensions",
        r"Expected (?P<wanted>\dD .{0,60}) input to (?P<name>\w+), but got input of size: "
        r"(?P<got>\[[^\]]*\])"
        r"|(?P<n>\w+): Expected input to be (?P<w>\dD or \dD), got (?P<g>\dD) instead",
        "{name}{n} takes a {wanted}{w} input and got {got}{g}.",
        "The batch or the channel dimension is missing, or there is one too many.",
        (
            "Add it: x.unsqueeze(0) for the batch, x.unsqueeze(1) for one channel.",
            "Or merge two: x.flatten(1, 2).",
        ),
    ),
    Failure(
        "sizes",
        SIZES,
        "Two tensors whose sizes must agree do not.",
        "Element-wise operations need equal sizes or 1 (broadcasting counts from the last "
        "dimension); a residual connection, a mask or a positional embedding often differs.",
        ("Print both shapes on the line above.",),
    ),
    Failure(
        "sizes",
        r"Expected size for first two dimensions of batch2 tensor to be: (?P<wanted>\[[^\]]*\]) "
        r"but got: (?P<got>\[[^\]]*\])",
        "A batched matrix product got a right-hand side whose first two sizes are {got} instead of "
        "{wanted}.",
        "torch.bmm multiplies (b, n, m) by (b, m, p): the batch and the inner size m must agree.",
        ("Print both shapes; a transpose(1, 2) of one side is often missing, or one too many.",),
    ),
    Failure(
        "sizes",
        r"Sizes of tensors must match except in dimension (?P<along>\d+)\. Expected size "
        r"(?P<first>\d+) but got size (?P<second>\d+) for tensor number (?P<number>\d+)",
        "torch.cat joins along dimension {along}, but in another dimension the first tensor has "
        "size {first} and tensor number {number} of the list has {second}.",
        "Tensors that are joined may differ only in the dimension along which they are joined.",
        (
            "To join where the sizes differ, name that dimension: torch.cat(tensors, dim=...).",
            "Else make them equal first: crop the larger one, or pad the smaller one.",
        ),
        clues=by_joined_sizes,
    ),
    Failure(
        "sizes",
        r"Tensors must have same number of dimensions: got (?P<first>\d+) and (?P<second>\d+)",
        "torch.cat got tensors with {first} and {second} dimensions.",
        "Tensors that are joined have the same number of dimensions, and equal sizes in all but "
        "the one along which they are joined.",
        ("Add the missing dimension: x.unsqueeze(dim).",),
    ),
    Failure(
        "sizes",
        r"stack expects each tensor to be equal size, but got (?P<first>\[[^\]]*\]) at entry "
        r"(?P<i>\d+) and (?P<second>\[[^\]]*\]) at entry (?P<j>\d+)",
        "torch.stack got a tensor of size {first} at entry {i} and one of size {second} at entry "
        "{j}.",
        "torch.stack puts tensors of one and the same shape along a new dimension.",
        (
            "Sequences: torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True).",
            "To join along a dimension that exists: torch.cat(tensors, dim=...).",
        ),
    ),
    Failure(
        "view_shape",
        r"shape '(?P<shape>\[[^\]]*\])' is invalid for input of size (?P<size>\d+)"
        r"|view size is not compatible with input tensor's size and stride",
        "A tensor cannot be viewed in the shape asked for.",
        "Either the number of elements differs (a batch size written into the code?), or the "
        "memory is not contiguous after a transpose.",
        ("Use -1 for the batch: x.view(-1, ...).", "After a transpose: x.reshape(...)."),
    ),
    # --- types and devices ---------------------------------------------------------------------
    Failure(
        "devices",
        _DEVICES,
        "Tensors on different devices met in one operation.",
        "The model was moved and the input was not (or the other way round), a tensor is made "
        "inside forward without device=, or a tensor is an attribute instead of a buffer.",
        (
            "Move the input: x = x.to(next(model.parameters()).device).",
            "Inside forward: torch.zeros(..., device=x.device).",
            "Constants of a module: self.register_buffer('mask', mask), so that .to() moves them.",
        ),
    ),
    Failure(
        "meta_tensor",
        r"Cannot copy out of meta tensor",
        "A parameter has no data: it was made on the meta device.",
        "Large models are built without memory first (device='meta', low_cpu_mem_usage) and filled "
        "later; this one was moved before it was filled.",
        (
            "model.to_empty(device=...), then load_state_dict.",
            "Or load_state_dict(..., assign=True), which puts the loaded tensors in.",
        ),
    ),
    Failure(
        "device_assert",
        r"device-side assert triggered",
        "A kernel on the GPU found a value that must not be; usually an index out of range in an "
        "embedding or in the target of a loss.",
        "The GPU works behind Python: the line shown is where it was noticed, not where it "
        "happened, and the process cannot use the GPU any more.",
        (
            "Run the same batch on the CPU: the message there names the index.",
            "Or start again with CUDA_LAUNCH_BLOCKING=1, so that the line is the right one.",
        ),
    ),
    Failure(
        "dtypes",
        _TYPES,
        "Two tensors of different dtype met in an operation that takes one.",
        "Products and convolutions do not convert by themselves; only autocast does.",
        ("Bring both to one dtype: x = x.to(layer.weight.dtype).",),
        clues=by_types,
    ),
    Failure(
        "dtype_not_supported",
        r"\"(?P<kernel>\w+)\" not implemented for '(?P<dtype>\w+)'",
        "The operation behind {kernel} does not exist for dtype {dtype} on this device.",
        "Most functions exist for float32 and float64; for whole numbers, bool and (on the CPU) 16 "
        "bits only in part.",
        ("Convert the input: x.float().",),
    ),
    Failure(
        "no_dimension",
        r"Dimension out of range \(expected to be in range of \[(?P<low>-?\d+), (?P<high>-?\d+)\]"
        r", but got (?P<got>-?\d+)\)",
        "An operation was asked for dimension {got} of a tensor whose dimensions run from {low} to "
        "{high}.",
        "The tensor has fewer dimensions than the code expects: one sample without its batch, a "
        "squeeze() that removed a dimension of size 1, or an index that took one away.",
        ("Print the shape on the line above; squeeze(-1) and x[:, :1] remove or keep one only.",),
    ),
    Failure(
        "numpy_of_graph",
        r"Can't call numpy\(\) on Tensor that requires grad",
        "A tensor that is part of the graph was to become a NumPy array.",
        "NumPy cannot record gradients: what is computed there is cut off from the loss.",
        (
            "To look at it or keep it: x.detach().cpu().numpy().",
            "To train through it: write that part in torch.",
        ),
    ),
    # --- loading -------------------------------------------------------------------------------
    Failure(
        "state_dict",
        r"Error\(s\) in loading state_dict for (?P<model>\w+)",
        "The names or shapes in the state_dict are not those of {model}.",
        "It was saved from another architecture or configuration, or from a wrapped model (DDP, "
        "torch.compile), whose names carry a prefix.",
        (
            "Compare model.state_dict().keys() with those of the file.",
            "Another head on purpose: drop its keys and pass strict=False (shapes must still fit).",
        ),
        clues=by_keys,
    ),
)
