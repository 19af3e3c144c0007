"""Read clues about a failure while building a model, an optimizer or a batch.

Each function takes a `Crash` and the match of a failure's pattern. A guess says probably.
"""

from __future__ import annotations

import re
from pathlib import Path

from torch import nn

from torchfmri._explain.crash import Crash
from torchfmri._explain.failure import Clues

_OPTIMIZERS = str(Path("torch", "optim"))
_COLLATE = re.compile(r"collate_fn\(|\bin (?:default_)?collate")


def is_unfinished(crash: Crash, _: re.Match[str]) -> bool:
    """Return whether the object is a module without its tables (or nothing is known)."""
    value = crash.local("self")
    return not crash.steps or (isinstance(value, nn.Module) and "_modules" not in vars(value))


def in_optimizer(crash: Crash, _: re.Match[str]) -> bool:
    """Return whether the last frame belongs to an optimizer (or nothing is known)."""
    return not crash.steps or _OPTIMIZERS in crash.steps[-1].file


def in_collate(crash: Crash, _: re.Match[str]) -> bool:
    """Return whether a DataLoader was making a batch, here or in a worker."""
    here = any(step.of_torch and "collate_fn(" in step.line.code for step in crash.steps)
    return here or _COLLATE.search(crash.message) is not None


def by_unfinished_module(crash: Crash, _: re.Match[str]) -> Clues:
    """Find which class is being built, and the name of the attribute to be kept."""
    module, name = crash.local("self"), crash.local("name")
    if not isinstance(module, nn.Module) or not isinstance(name, str):
        return Clues()
    return Clues((f"It is the attribute {name!r} of {type(module).__name__}.",))


def by_lost_layers(crash: Crash, _: re.Match[str]) -> Clues:
    """Find modules in plain lists or dicts, which the model does not see; frozen parameters."""
    facts = []
    for root in {id(each): each for each in crash.known_modules}.values():
        for path, module in root.named_modules():
            for name, value in vars(module).items():
                held = list(value.values()) if isinstance(value, dict) else value
                if not name.startswith("_") and _holds_modules(held):
                    where = ".".join(filter(None, (path, name)))
                    kind = type(value).__name__
                    facts.append(
                        f"{type(root).__name__}: {where!r} is a plain {kind} of {len(held)} "
                        "modules, whose parameters are not registered."
                    )
        parameters = list(root.parameters())
        if parameters and not any(each.requires_grad for each in parameters):
            facts.append(
                f"{type(root).__name__}: none of its {len(parameters)} parameters requires grad."
            )
    return Clues(tuple(dict.fromkeys(facts)))


def by_samples(crash: Crash, match: re.Match[str]) -> Clues:
    """Find the sizes of the first two samples that differ."""
    if match["first"] is None:
        return Clues(("The samples are lists of different lengths.",))
    told = f"Entry {match['i']} has size {match['first']}, entry {match['j']} {match['second']}."
    return Clues((told,))


def _holds_modules(value: object) -> bool:
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(each, nn.Module) for each in value)
    )
