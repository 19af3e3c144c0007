"""Read from tensors, layers and names what the message of a failure does not say.

Each function takes a `Crash` and the match of a failure's pattern. A guess says probably.
"""

from __future__ import annotations

import math
import re

from torch import nn

from torchfmri._explain.crash import Crash
from torchfmri._explain.failure import Clues

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
    facts = tuple(
        f"{len(keys)} {word}: {', '.join(keys[:3])}{', ...' if len(keys) > 3 else '.'}"
        for word, keys in (("missing", missing), ("unexpected", unexpected), ("resized", shapes))
        if keys
    )
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
    asked = re.search(r"allocate ([\d.]+ [KMGT]?i?B|\d+ bytes)", crash.message)
    facts = [f"It asked for {_size_text(asked[1])}."] if asked else []
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


def _size_text(asked: str) -> str:
    number, unit = asked.split()
    if unit != "bytes":
        return asked
    amount, units = float(number), ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while amount >= 1024 and len(units) > 1:
        amount, units = amount / 1024, units[1:]
    return f"{amount:.3g} {units[0]}"
