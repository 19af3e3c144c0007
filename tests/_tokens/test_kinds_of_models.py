"""Models of many kinds: every row of every layer belongs to the token written beside the model.

What a model finds in its own attributes, in data or in random numbers may differ between passes of
the same shapes: then tokens are followed again, or refused.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from attribution import REFUSED, RIGHT, Truth, judge
from kinds_of_grids import KINDS
from kinds_of_models import B, H, Kind, S, free, linear, truth_by_rows
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint

import torchfmri

pytestmark = pytest.mark.usefixtures("one_thread", "double")


@pytest.fixture
def double() -> Iterator[None]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(default)


def truth_of_kind(model: Kind, inputs: tuple[Any, ...]) -> Truth:
    """The truth, which has to be that of the same loss, and to add up to `.grad`."""
    loss, truth = truth_by_rows(model, *inputs)
    plain = model.loss(*inputs)
    torch.testing.assert_close(plain.detach(), loss, rtol=1e-10, atol=1e-10)
    plain.backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            truth.readings.pop(name, None)
        elif name in truth.readings:
            (reading,) = truth.readings[name]
            total = sum((each.sum((0, 1)) for each in reading.values()), torch.zeros(()))
            torch.testing.assert_close(total, parameter.grad, rtol=1e-9, atol=1e-9)
    model.zero_grad()
    return truth


# Layers and parameters of recurrences whose tokens a reader may tell, and that nothing proves.
UNPROVED = {
    "written into a buffer, from the first position": "u",
    "last states of both directions, side by side": "u head",
    "a tree of sums": "u",
    "a first state made of the sample": "u",
    "an encoder and a decoder, after their steps": "w v",
    "an encoder and a decoder by hand": "w v",
    "two states back": "w v",
    "attention to the sequence, with a state for a query": "w u",
    "attention to all earlier states": "w",
    "a product with all earlier states and zeros": "w u",
    "a product with all earlier states": "u",
    "states of two steps before": "w",
    "two positions of three": "w",
    "earlier positions in each step": "head",
    "states in a sequence of zeros, read before a layer": "w head",
    "a recurrence over a plane, with two layers": "u v",
    "a recurrence over a plane, with a layer along its columns": "u w",
    "a recurrence over a plane, with a layer along its rows": "u",
    "a second walk, states added to by cat": "w u",
    "a second walk backwards, states in a sequence of zeros": "u",
    "a second walk, states in a sequence of zeros": "u",
    "a second walk backwards over three positions, states in a stack": "w u",
    "a second walk over two positions taken apart before": "u",
    "the mean of a window of earlier rows, in a buffer": "w",
    "a second walk backwards, with features side by side": "u",
    "a learned first state, and one row for each sample returned": "head",
    "ids that a state has chosen": "table head",
}


@pytest.mark.parametrize("name", KINDS)
def test_every_row_has_its_token(name: str) -> None:
    model = KINDS[name]()
    inputs = model.inputs()
    truth = truth_of_kind(model, inputs)
    with torchfmri.token_gradients(model) as tokens:
        model.loss(*inputs).backward()
    found = judge(tokens, truth)
    assert found
    unproved = UNPROVED.get(name, "").split()
    refused = {each for each in truth.readings if each.split(".")[0] in unproved}
    allowed = {RIGHT: set(truth.readings), REFUSED: {*model.refused, *refused}}
    assert [each for each in found if each.name not in allowed.get(each.outcome, ())] == []


@pytest.mark.parametrize("how", ["a decay", "a layer before the step", "a layer after the step"])
def test_two_positions_that_are_all_are_refused(how: str) -> None:
    """They may be a recurrence, in either direction, or none."""
    model = KINDS[f"two positions in all, {how}"]()
    inputs = model.inputs()
    with torchfmri.token_gradients(model) as tokens:
        model.loss(*inputs).backward()
    assert tokens.coverage().missing == list(tokens.coverage())
    with pytest.raises(torchfmri.UnsupportedLayerError, match="the steps of a recurrence"):
        tokens[next(name for name, _ in model.named_parameters())]


def test_a_row_at_another_token_is_seen() -> None:
    """The truth of one kind, moved by one token, is the truth of nothing."""
    model = KINDS["patches by reshape"]()
    inputs = model.inputs()
    truth = truth_of_kind(model, inputs)
    moved = Truth({
        name: [{kind: each.roll(1, 1) for kind, each in reading.items()} for reading in several]
        for name, several in truth.readings.items()
    })  # fmt: skip
    with torchfmri.token_gradients(model) as tokens:
        model.loss(*inputs).backward()
    assert not {each.outcome for each in judge(tokens, moved)} & {RIGHT, REFUSED}


# -- passes that differ --------------------------------------------------------------------------


class Wandering(nn.Module):
    """Takes its rows in another order in each pass, and remembers which."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.step, self.layer = how, 0, linear()
        self.flag, self.queue, self.order = False, [0, 1, 2, 3, 4, 5], torch.arange(S)
        self.config = type("Config", (), {})()
        self.config.shift, self.shifts = 0, iter(range(9))

    def forward(self, x: Tensor) -> Tensor:
        t, shift = torch.arange(S), 0
        if self.how == "counter":
            self.step += 1
            shift = self.step
        elif self.how == "flag":
            self.flag = not self.flag
            shift = 2 if self.flag else 1
        elif self.how == "configuration":
            self.config.shift += 1
            shift = self.config.shift
        elif self.how == "iterator":
            shift = next(self.shifts)
        elif self.how == "random":
            shift = random.randrange(S)
        elif self.how in READS:
            shift = READS[self.how](x[0, :, 0].detach())
        if self.how == "list":
            self.queue = [*self.queue[1:], self.queue[0]]
            x = torch.stack([x[:, each] for each in self.queue], 1)
            self.order = torch.tensor(self.queue)
        else:
            x, self.order = torch.cat([x[:, shift:], x[:, :shift]], 1), t.roll(-shift)
        return self.layer(x)


READS: dict[str, Callable[[Tensor], int]] = {
    "int": lambda x: int(x.argmax()),
    "item": lambda x: int(x.argmax().item()),
    "a branch": lambda x: 2 if x.sum() > 0 else 1,
    "tolist": lambda x: max(range(S), key=x.tolist().__getitem__),
    "numpy": lambda x: int(x.numpy().argmax()),
    "an array": lambda x: int(np.asarray(x).argmax()),
    "dlpack": lambda x: int(np.from_dlpack(x).argmax()),
    "memory": lambda x: max(
        range(S), key=(ctypes.c_double * S).from_address(x.data_ptr()).__getitem__
    ),
    "storage": lambda x: 1 + bytes(x.clone().untyped_storage())[3] % (S - 1),
}
WAYS = ("counter", "flag", "configuration", "iterator", "random", "list", *READS)


@pytest.mark.parametrize("how", WAYS)
def test_a_pass_that_takes_another_way(how: str) -> None:
    """Right or refused, with the same shapes each time; passes that always differ are followed."""
    model, refusals = Wandering(how), 0
    weights = torch.arange(1.0, S + 1)
    for _ in range(6):
        model.zero_grad()
        with torchfmri.token_gradients(model) as tokens:
            (model(torch.randn(B, S, H)) * weights[:, None]).sum().backward()
        if tokens.coverage().missing:
            refusals += 1
            assert len(tokens.coverage().missing) == len(tokens.coverage())
            with pytest.raises(torchfmri.UnsupportedLayerError, match="another way"):
                tokens["layer.bias"]
            continue
        wanted = torch.zeros(S).index_put((model.order,), weights)[:, None]
        found = tokens["layer.bias"].materialise()
        torch.testing.assert_close(found, wanted.expand(B, S, H))
    assert refusals <= (2 if how == "random" or how in READS else 0)


def test_a_way_that_changes_later_is_refused() -> None:
    model, weights = Wandering("flag"), torch.arange(1.0, S + 1)
    model.how = "none"
    missing = []
    for number in range(6):
        model.how = "flag" if number > 3 else "none"
        with torchfmri.token_gradients(model) as tokens:
            (model(torch.randn(B, S, H)) * weights[:, None]).sum().backward()
        missing.append(len(tokens.coverage().missing))
    assert missing == [0, 0, 0, 0, 2, 0]


@pytest.mark.parametrize("hide", [lambda e: [e], lambda e: {"part": (e,)}, lambda e: lambda: e])
def test_a_module_that_is_not_registered_is_looked_into(hide: Callable[[nn.Module], Any]) -> None:
    class Rolling(nn.Module):
        step = 0

        def forward(self, x: Tensor) -> Tensor:
            return x.roll(self.step, 1)

    class Hiding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.hidden = linear(), hide(rolling)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(rolling(x))

    rolling = Rolling()
    model, missing = Hiding(), []
    for number in range(6):
        rolling.step = max(0, number - 3)
        with torchfmri.token_gradients(model) as tokens:
            model(torch.randn(B, S, H)).square().sum().backward()
        missing.append(len(tokens.coverage().missing))
    assert missing == [0, 0, 0, 0, 2, 0]


def test_a_counter_that_moves_nothing_costs_no_tokens() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step, self.temperature, self.layer = 0, 1.0, linear()

        def forward(self, x: Tensor) -> Tensor:
            self.step += 1
            self.temperature *= 0.9
            return self.layer(x) / self.temperature

    model = Counting()
    for _ in range(4):
        with torchfmri.token_gradients(model) as tokens:
            model(torch.randn(B, S, H)).square().sum().backward()
        assert not tokens.coverage().missing


# -- layers that are run again -------------------------------------------------------------------


class Handing(nn.Module):
    """Layers that are handed a parameter of another layer, or the sum of two."""

    class Used(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = free(H, H)

        def forward(self, x: Tensor, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
            weight = self.own if given is None else self.own + given
            return (x @ weight).tanh(), weight

    def __init__(self, outer: bool) -> None:
        super().__init__()
        self.one, self.two, self.three = self.Used(), self.Used(), self.Used()
        self.outer = free(H, H) if outer else None

    def forward(self, x: Tensor) -> Tensor:
        given = self.outer
        for layer in (self.one, self.two, self.three):
            x, given = layer(x, given)
        return x


@pytest.mark.parametrize("outer", [False, True])
def test_parameters_that_are_handed_to_other_layers(outer: bool) -> None:
    model, x = Handing(outer), torch.randn(B, S, H)
    first = [model.one.own] if model.outer is None else [model.outer, model.one.own]
    own = [*first, model.two.own, model.three.own]
    start = len(first)
    copies: list[list[Tensor]] = []
    y = x
    for count in range(start, start + 3):  # a copy per token of every parameter that is in use
        some = [e.detach().expand(B, S, H, H).clone().requires_grad_() for e in own[:count]]
        copies.append(some)
        y = torch.einsum("bsi,bsio->bso", y, torch.stack(some).sum(0)).tanh()
    y.square().sum().backward()
    with torchfmri.token_gradients(model) as tokens:
        model(x).square().sum().backward()
    names = [*(["outer"] if outer else []), "one.own", "two.own", "three.own"]
    for number, name in enumerate(names):
        uses = [some[number].grad for some in copies if len(some) > number]
        wanted = torch.stack([each for each in uses if each is not None]).sum(0)
        torch.testing.assert_close(tokens[name].materialise(), wanted, rtol=1e-9, atol=1e-9)
    assert tokens.coverage().residual < 1e-12


class Loop(nn.Module):
    """A free parameter whose gradient is found inside of a checkpoint, beside an inner layer."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant, self.gain, self.layer = reentrant, free(H), linear()

    def step(self, h: Tensor, x: Tensor) -> Tensor:
        return self.layer((self.gain.sigmoid() * h + x).tanh())

    def forward(self, x: Tensor) -> Tensor:
        h, made = torch.zeros(B, H), []
        for t in range(S):
            h = checkpoint(self.step, h, x[:, t], use_reentrant=self.reentrant)
            made.append(h)
        return torch.stack(made, 1)


@pytest.mark.parametrize("keep", ["factors", "norms"])
def test_a_free_parameter_inside_of_a_checkpointed_loop(keep: str) -> None:
    model, x = Loop(reentrant=False), torch.randn(B, S, H)
    gains = model.gain.detach().expand(B, S, H).clone().requires_grad_()
    h, made = torch.zeros(B, H), []
    for t in range(S):
        h = model.layer((gains[:, t].sigmoid() * h + x[:, t]).tanh())
        made.append(h)
    torch.stack(made, 1).square().sum().backward()
    assert gains.grad is not None
    model.zero_grad()
    with torchfmri.token_gradients(model, keep=keep) as tokens:
        model(x).square().sum().backward()
    torch.testing.assert_close(tokens["gain"].norm(), gains.grad.norm(dim=-1))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_reentrant_checkpoint_is_named() -> None:
    model, x = Loop(reentrant=True), torch.randn(B, S, H, requires_grad=True)
    with torchfmri.token_gradients(model) as tokens:
        model(x).square().sum().backward()
    with pytest.raises(torchfmri.UnsupportedLayerError, match="use_reentrant=False"):
        tokens["gain"]


def compiled() -> AbstractContextManager[None]:
    return compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager"))


def test_free_parameters_with_compiled_autograd() -> None:
    model = KINDS["attention pooling with a learned query"]()
    inputs = model.inputs()
    truth = truth_of_kind(model, inputs)
    try:
        with compiled(), torchfmri.token_gradients(model) as tokens:
            model.loss(*inputs).backward()
    finally:
        torch._dynamo.reset()
    assert {each.name: each.outcome for each in judge(tokens, truth)}["query"] == RIGHT
