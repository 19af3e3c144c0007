"""The table of failures of building a model, an optimizer or a batch."""

from __future__ import annotations

from torchfmri._explain import setup_clues as clues
from torchfmri._explain.failure import Failure

SETUP_FAILURES = (
    Failure(
        "module_init",
        r"cannot (?:assign|register) (?P<thing>\w+?)s? before Module\.__init__\(\) call",
        "A {thing} was assigned to a module before nn.Module had been set up.",
        "super().__init__() makes the tables in which a module keeps its layers, parameters and "
        "buffers, so it comes before the first of them.",
        ("Make super().__init__() the first line of __init__.",),
        clues=clues.by_unfinished_module,
    ),
    Failure(
        "module_init",
        r"'(?P<cls>\w+)' object has no attribute '_(?:parameters|buffers|modules|\w+_hooks)'",
        "A module of class {cls} was used although nn.Module has not been set up.",
        "Its __init__ does not call super().__init__(), which makes the tables in which a module "
        "keeps its layers, parameters and hooks.",
        ("Make super().__init__() the first line of __init__ of {cls}.",),
        when=clues.is_unfinished,
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
        clues=clues.by_lost_layers,
    ),
    Failure(
        "optimizer_parameters",
        r"can't optimize a non-leaf Tensor|optimizer can only optimize Tensors"
        r"|params argument given to the optimizer should be|object is not iterable"
        r"|parameters appear in more than one parameter group",
        "The optimizer was given something else than parameters, or one of them twice.",
        "It takes an iterable of leaf tensors (or of dicts with 'params'). A parameter that was "
        "moved, cast or computed with afterwards is no leaf any more.",
        (
            "Pass model.parameters(), not the model; [x], not x.",
            "A tensor: x = torch.randn(3, device=...).requires_grad_() as the last step.",
        ),
        when=clues.in_optimizer,
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
        when=clues.in_collate,
        clues=clues.by_samples,
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
