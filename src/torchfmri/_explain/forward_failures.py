"""Failures of shapes, types, devices, memory and loading, in the words of PyTorch and in ours."""

from __future__ import annotations

import torch

from torchfmri._explain import forward_clues as clues
from torchfmri._explain.failure import Failure

_SIZES = (
    r"(?:size of tensor a|expanded size of the tensor) \((?P<first>\d+)\) must match the "
    r"(?:size of tensor b|existing size) \((?P<second>\d+)\)"
)
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
        clues=clues.by_memory,
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
        clues=clues.by_memory,
    ),
    # --- shapes --------------------------------------------------------------------------------
    Failure(
        "doubled_cache",
        _SIZES,
        "Attention met sizes {first} and {second}, one twice the other, while a cache of keys and "
        "values was in use: the signature of the same sequence fed twice into one cache.",
        "A cache already holds the keys and values of the positions that went through the model. "
        "Feeding these again appends them a second time: keys are twice as many as the mask or "
        "the queries expect. Without an explicit mask the same mistake gives no error but wrong "
        "numbers.",
        (
            "Feed only the new token: ids[:, -1:], with the cache of those before it.",
            "Or take a new cache for a pass over the whole sequence (past_key_values=None).",
            "To step back one position: cache.crop(-1).",
        ),
        when=clues.with_doubled_cache,
    ),
    Failure(
        "matrix_shape",
        r"shapes cannot be multiplied \((?P<rows>\d+)x(?P<got>\d+) and (?P<wanted>\d+)x"
        r"|same reduction dim, but got \[(?P<r>\d+), (?P<g>\d+)\] X \[(?P<w>\d+)",
        "A matrix product got {got}{g} features where its other side has {wanted}{w}.",
        "The last size of the input must equal in_features of a Linear layer (the first size of "
        "the right-hand matrix).",
        ("Print x.shape before the layer and follow it back to where it is not what you expect.",),
        clues=clues.by_matrix,
    ),
    Failure(
        "channels",
        r"expected input(?P<input>\[[^\]]*\]) to have (?P<wanted>\d+) channels, but got "
        r"(?P<got>\d+)",
        "A convolution for {wanted} channels got {got} (input {input}).",
        "Convolutions take (batch, channels, ...). The image has another number of channels "
        "(grey, RGB, alpha), the batch dimension is missing, or channels come last.",
        ("Make in_channels={got}, or bring the input to {wanted} channels.",),
        clues=clues.by_channels,
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
        r"|expecting embedding dimension of (?P<w>\d+), but got (?P<g>\d+)",
        "A layer for {wanted}{w} features got {got}{g}.",
        "A recurrent or attention layer takes its features in the last dimension.",
        ("Bring the input to {wanted}{w} features, or make the layer for {got}{g}.",),
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
        r"(?P<got>\[[^\]]*\])",
        "{name} takes a {wanted} input and got one of size {got}.",
        "The batch or the channel dimension is missing.",
        ("Add it: x.unsqueeze(0) for the batch, x.unsqueeze(1) for one channel.",),
    ),
    Failure(
        "sizes",
        _SIZES + r"|Sizes of tensors must match except in dimension"
        r"|expected size for first two dimensions of batch2",
        "Two tensors whose sizes must agree do not.",
        "Element-wise operations need equal sizes or 1 (broadcasting counts from the last "
        "dimension); a residual connection, a mask or a positional embedding often differs.",
        ("Print both shapes on the line above.",),
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
    # --- indices and targets -------------------------------------------------------------------
    Failure(
        "index_out_of_range",
        r"index out of range in self|Index \d+ of input takes value (?P<value>-?\d+)",
        "An embedding was asked for a row that it does not have.",
        "Token ids beyond num_embeddings (tokenizer and model do not belong together, tokens were "
        "added), a negative padding id, or positions longer than the position table.",
        (
            "Check ids.min() >= 0 and ids.max() < num_embeddings.",
            "Tokens were added: model.resize_token_embeddings(len(tokenizer)).",
            "Positions: shorten the sequence.",
        ),
        when=clues.in_embedding,
        clues=clues.by_indices,
    ),
    Failure(
        "target_out_of_range",
        r"Target (?P<target>-?\d+) is out of bounds",
        "The target holds class {target}, which the scores do not have.",
        "Classes are counted from 0 to the number of scores - 1. Labels that start at 1, an "
        "unknown label coded as -1, or a last layer with too few outputs.",
        ("Check target.min() and target.max() against the last layer's out_features.",),
        when=clues.in_loss,
        clues=clues.by_target,
    ),
    Failure(
        "target_dtype",
        r"expected target dtype to be Long|expected scalar type Long but found"
        r"|Expected floating point type for target|not implemented for 'Int'",
        "The target of a classification loss has the wrong dtype.",
        "cross_entropy takes class numbers as int64 of shape (b,), or probabilities as floats in "
        "the shape of the scores.",
        ("Class numbers: target.long().", "Probabilities or one-hot: target.float()."),
        when=clues.in_loss,
        clues=clues.by_target,
    ),
    Failure(
        "target_shape",
        r"Expected target size \[|multi-target not supported|Expected input batch_size \("
        r"|Target size \(.*must be the same as input size|0D or 1D target tensor expected",
        "The target of a loss has another shape than its scores ask for.",
        "cross_entropy takes scores (b, classes, ...) and a target (b, ...): classes are "
        "dimension 1, for sequences too. The binary losses take two equal shapes.",
        (
            "Sequences: cross_entropy(scores.flatten(0, 1), target.flatten()).",
            "A trailing 1: target.squeeze(-1), or scores.squeeze(-1).",
        ),
    ),
    Failure(
        "index_dtype",
        r"'indices' to have one of the following scalar types: Long, Int; but got (?P<got>\S+)",
        "An embedding was given {got} instead of whole numbers.",
        "An embedding looks up rows by number. Ids turned into floats on the way (a collate "
        "function, .float(), NumPy), or the input goes to the wrong layer.",
        ("Pass ids.long().",),
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
        clues=clues.by_types,
    ),
    Failure(
        "dtype_not_supported",
        r"\"(?P<kernel>\w+)\" not implemented for '(?P<dtype>\w+)'",
        "The operation behind {kernel} does not exist for dtype {dtype} on this device.",
        "Most functions exist for float32 and float64; for whole numbers, bool and (on the CPU) 16 "
        "bits only in part.",
        ("Convert the input: x.float().",),
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
        clues=clues.by_keys,
    ),
)
