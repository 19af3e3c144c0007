"""Failures of building a model, an optimizer or a batch: their table, and how clues are read.

`entry_points` puts the table together with the others. A function that reads clues takes a `Crash`
and the match of the failure's pattern; it may fail, and a guess says probably. A new entry needs a
test that makes the real failure happen and a row in `docs/errors.md`.
"""

from __future__ import annotations

import re
from pathlib import Path

from torch import nn

from torchfmri._explain.crash import Crash
from torchfmri._explain.failure import Clues, Failure

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


# -- the table ------------------------------------------------------------------------------------

SETUP_FAILURES = (
    Failure(
        "module_init",
        r"cannot (?:assign|register) (?P<thing>\w+?)s? before Module\.__init__\(\) call",
        "A {thing} was assigned to a module before nn.Module had been set up.",
        "super().__init__() makes the tables in which a module keeps its layers, parameters and "
        "buffers, so it comes before the first of them.",
        ("Make super().__init__() the first line of __init__.",),
        clues=by_unfinished_module,
    ),
    Failure(
        "module_init",
        r"'(?P<cls>\w+)' object has no attribute '_(?:parameters|buffers|modules|\w+_hooks)'",
        "A module of class {cls} was used although nn.Module has not been set up.",
        "Its __init__ does not call super().__init__(), which makes the tables in which a module "
        "keeps its layers, parameters and hooks.",
        ("Make super().__init__() the first line of __init__ of {cls}.",),
        when=is_unfinished,
    ),
    Failure(
        "optimizer_parameters",
        r"optimizer got an empty parameter list",
        "The optimizer was given no parameters.",
        "Layers in a plain list or dict are not registered, so model.parameters() does not see "
        "them; a filter left nothing; or a generator was already used up by an earlier call.",
        (
            "Keep layers in nn.ModuleList or nn.ModuleDict, tensors as nn.Parameter.",
            "Ask for them anew: torch.optim.SGD(model.parameters(), ...), not a stored generator.",
        ),
        clues=by_lost_layers,
    ),
    Failure(
        "optimizer_parameters",
        r"can't optimize a non-leaf Tensor|optimizer can only optimize Tensors"
        r"|params argument given to the optimizer should be|object is not iterable"
        r"|parameters appear in more than one parameter group",
        "The optimizer was given something else than parameters, or one of them twice.",
        "It takes an iterable of leaf tensors (or of dicts with 'params'). A parameter that was "
        "moved, cast or computed with afterwards is not a leaf any more.",
        (
            "Pass model.parameters(), not the model; [x], not x.",
            "A tensor: x = torch.randn(3, device=...).requires_grad_() as the last step.",
        ),
        when=in_optimizer,
    ),
    Failure(
        "collate",
        r"stack expects each tensor to be equal size, but got (?P<first>\[[^\]]*\]) at entry "
        r"(?P<i>\d+) and (?P<second>\[[^\]]*\]) at entry (?P<j>\d+)"
        r"|each element in list of batch should be of equal size",
        "The DataLoader cannot make one batch of samples of different sizes.",
        "By default the samples of a batch are stacked, which takes equal shapes.",
        (
            "Sequences: a collate_fn with torch.nn.utils.rnn.pad_sequence(samples, True).",
            "Images: one size for all, Resize((h, w)); Resize(n) keeps the proportions.",
        ),
        when=in_collate,
        clues=by_samples,
    ),
    Failure(
        "collate",
        r"default_collate: batch must contain tensors.* found (?P<found><class '[^']*'>)",
        "The DataLoader cannot make a batch of {found}.",
        "By default a batch is made of tensors, NumPy arrays, numbers, strings, dicts and lists of "
        "these. None often comes from a __getitem__ without return.",
        ("Convert it in __getitem__, or pass a collate_fn of your own.",),
    ),
    Failure(
        "attention_heads",
        r"embed_dim must be divisible by num_heads",
        "The width of an attention layer cannot be split evenly among its heads.",
        "Each head gets embed_dim / num_heads features.",
        ("Choose num_heads among the divisors of embed_dim.",),
    ),
)
