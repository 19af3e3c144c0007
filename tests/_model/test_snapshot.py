"""A run leaves the model as it was, bit for bit: after success, exceptions and interrupts."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from oracles import assert_same_bits, assert_same_state, loss_of, same_bits, state_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchfmri import InspectionError, Inspector
from torchfmri._model import snapshot
from torchfmri._model.snapshot import copy_of_data, unchanged

WHAT = (
    "inputs",
    "activations",
    "gradients",
    "input_gradients",
    "parameters",
    "parameter_gradients",
)


class Stateful(nn.Module):
    """A module that changes everything a forward pass can change."""

    def __init__(self, fail: str = "", error: type[BaseException] = ValueError) -> None:
        super().__init__()
        self.fail, self.error = fail, error
        self.norm = nn.BatchNorm1d(4)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.old_spectral = nn.utils.spectral_norm(nn.Linear(4, 4))
        self.drop = nn.Dropout(0.5)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.full((4,), float("nan")))
        self.register_buffer("queue", torch.zeros(2, 4), persistent=False)
        self.register_buffer("grown", torch.zeros(1, 4))
        self.register_buffer("later", None)
        self.cache_list: list[Any] = [1]
        self.cache_dict: dict[str, Any] = {"a": torch.zeros(4)}
        self.cache_ordered = OrderedDict(x=1)
        self.cache_deque: deque[Any] = deque([1, 2], maxlen=3)
        self.cache_set = {1}
        self.plain_tensor = torch.zeros(4)
        self.counter = 0
        self.gone_after = "here"

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.average.copy_(x.detach().mean(0))
        self.queue.data[0] = 7  # unseen by the version counter
        self.grown = torch.cat([self.grown, x.detach()[:1]])
        self.later = x.detach().clone()
        self.cache_list.append(x)
        self.cache_dict["b"] = x
        self.cache_ordered.move_to_end("x")
        self.cache_ordered["y"] = 2
        self.cache_deque.append(3)
        self.cache_set.add(2)
        self.plain_tensor += 1
        self.counter += 1
        self.new_attribute = x
        del self.gone_after
        random.random()
        np.random.rand()
        self.training_seen = self.training
        self.drop.eval()
        h = self.drop(self.old_spectral(self.spectral(self.norm(x))))
        h = nn.functional.dropout(h) * torch.rand(())
        if self.fail == "forward":
            raise self.error("planned")
        if self.fail == "backward":
            h.register_hook(self.refuse)
        return self.frozen(h)

    def refuse(self, _: Tensor) -> None:
        raise self.error("planned")


def watch_all(model: nn.Module, **options: Any) -> Inspector:
    inspector = Inspector(model, **options)
    inspector.watch(["", "*"], WHAT)
    return inspector


def model_with(fail: str = "", error: type[BaseException] = ValueError) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Stateful(fail, error)).train()
    for parameter in model[0].parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def test_parameters_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen ones neither: they are as large. Buffers and other tensors are."""
    model = model_with().requires_grad_(False)
    saved: list[int] = []
    inner = snapshot._save_tensor
    monkeypatch.setattr(
        snapshot, "_save_tensor", lambda each: saved.append(id(each)) or inner(each)
    )
    with unchanged(model):
        model[1].norm.running_mean.add_(1)
    assert saved
    assert {id(each) for each in model.buffers()} <= set(saved)
    assert not {id(each) for each in model.parameters()} & set(saved)
    assert float(model[1].norm.running_mean.abs().sum()) == 0


@pytest.mark.parametrize("keep", ["statistics", "tensors"])
@pytest.mark.parametrize("mode", ["train", "eval", "mixed"])
def test_success_leaves_no_trace(keep: str, mode: str) -> None:
    model = model_with()
    if mode != "train":
        model.eval()
    if mode == "mixed":
        model[1].norm.train()
    x = torch.randn(3, 4)
    inspector = watch_all(model, keep=keep)
    before = state_of(model, x)
    inspection = inspector.run_inspection(x, loss=loss_of)
    assert_same_state(before, state_of(model, x))
    assert inspection["1.norm"].calls
    assert inspection["0"].calls[0].value("gradients") is not None


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("fail", ["forward", "loss", "backward"])
def test_failure_leaves_no_trace(fail: str, error: Any) -> None:
    model = model_with(fail, error)
    x = torch.randn(3, 4)

    def loss(output: Tensor) -> Tensor:
        if fail == "loss":
            raise error("planned")
        return loss_of(output)

    inspector = watch_all(model)
    before = state_of(model, x)
    with pytest.raises(error, match="planned"):
        inspector.run_inspection(x, loss=loss)
    assert_same_state(before, state_of(model, x))
    model[1].fail = ""
    before = state_of(model, x)
    inspector.run_inspection(x, loss=loss_of)
    assert_same_state(before, state_of(model, x))


def test_our_own_refusal_leaves_no_trace() -> None:
    model = model_with()
    x = torch.randn(3, 4)
    inspector = watch_all(model)
    for options in ({}, {"loss": lambda output: output}, {"loss": "mean"}, {"max_bytes": 10}):
        options = {"keep": "tensors", **options}
        before = state_of(model, x)
        with pytest.raises(InspectionError):
            inspector.run_inspection(x, **options)
        assert_same_state(before, state_of(model, x))


def test_the_oracle_of_states_notices_each_change() -> None:
    """Negative control: a plain forward pass of the same model changes what we compare."""
    model = model_with()
    x = torch.randn(3, 4)
    before = state_of(model, x)
    loss_of(model(x)).backward()
    after = state_of(model, x).facts
    changed = {name for name, fact in before.facts.items() if after.get(name) != fact}
    for expected in (
        "1._buffers",
        "1.norm._buffers",
        "1.spectral.parametrizations.weight.0._buffers",
        "1.old_spectral._buffers",
        "1.cache_list",
        "1.cache_dict",
        "1.cache_ordered",
        "1.cache_deque",
        "1.cache_set",
        "1.plain_tensor",
        "1.counter",
        "1.gone_after",
        "1.drop: training",
        "0.weight: parameter",
        "torch random",
        "python random",
        "numpy random",
    ):
        assert expected in changed
    assert "1.new_attribute" in after


def test_same_result_as_a_plain_run_from_the_same_state() -> None:
    """Restoring must not begin before the end: loss and activations are those of the plain run."""
    x = torch.randn(3, 4)
    model = model_with()
    state = torch.get_rng_state()
    inspection = watch_all(model, keep="tensors").run_inspection(x, loss=loss_of)
    assert torch.equal(torch.get_rng_state(), state)
    output = model(x)
    assert_same_bits(inspection[""].activations, output, "output")


# -- the data ------------------------------------------------------------------------------------


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, extra: Any = None) -> Tensor:
        y = self.layer(x.clone())
        x.detach().zero_()
        if extra is not None:
            extra["seen"].add_(1)
            extra["list"].append(1)
        return y


def test_data_written_by_the_model_is_the_users_no_longer() -> None:
    model = Writes()
    x = torch.randn(3, 4)
    extra = {"seen": torch.zeros(2), "list": [torch.ones(1)]}
    before = state_of(model, x, extra)
    watch_all(model).run_inspection((x, extra), loss="sum")
    watch_all(model).run_inspection({"x": x, "extra": extra}, loss="sum")
    assert_same_state(before, state_of(model, x, extra))


@pytest.mark.parametrize("leaf", [True, False])
def test_data_that_requires_grad(leaf: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    source = torch.randn(3, 4, requires_grad=True)
    x = source if leaf else source * 2
    if leaf:
        source.grad = torch.ones(3, 4)
    before = state_of(model, source, x)
    inspection = watch_all(model, keep="tensors").run_inspection(x, loss="sum")
    assert_same_state(before, state_of(model, source, x))
    expected = torch.autograd.grad(model(x.detach().requires_grad_()).sum(), model[0].weight)
    assert torch.equal(inspection["0"].parameter_gradients["weight"], expected[0])
    assert inspection["0"].input_gradients is not None
    (x * 1).sum().backward()  # the user's own graph is still whole


def test_data_on_a_broadcast_or_shared_memory() -> None:
    """A copy of an expanded input has room of its own; aliases among the data are our business."""
    model = nn.Linear(4, 4)
    x = torch.randn(1, 4).expand(3, 4)
    watch_all(model).run_inspection(x, loss="sum")
    base = torch.randn(3, 4)
    copied = copy_of_data((base, base[:1], {"k": [base, None, 3, "text"]}))
    assert copied[0] is not base
    assert torch.equal(copied[1], base[:1])
    assert copied[2]["k"][1:] == [None, 3, "text"]
    assert copied[2]["k"][0].data_ptr() != base.data_ptr()


def test_copy_of_data_keeps_containers() -> None:
    from collections import namedtuple

    pair = namedtuple("pair", "a b")
    value = pair(torch.ones(1), OrderedDict(x=torch.zeros(1)))
    found = copy_of_data(value)
    assert type(found) is pair
    assert type(found.b) is OrderedDict
    assert found.a is not value.a


def test_data_that_cannot_be_copied_is_refused_with_the_way_out() -> None:
    class Stubborn:
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("not me")

    class Model(nn.Module):
        def forward(self, x: Tensor, other: Any) -> Tensor:
            return x

    with pytest.raises(InspectionError, match=r"Stubborn.*not me.*__deepcopy__"):
        watch_all(Model()).run_inspection((torch.ones(1), Stubborn()), loss="sum")


def test_key_value_cache_handed_in_stays_as_long_as_it_was() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.tensor([[1, 2, 3, 4]])
    cache = transformers.DynamicCache(config=config)
    with torch.no_grad():
        model(tokens, past_key_values=cache)
        expected = model(tokens[:, :1], past_key_values=copy.deepcopy(cache)).logits
    inspector = Inspector(model, keep="tensors")
    inspector.watch("lm_head", ["activations", "gradients"])
    data = {"input_ids": tokens[:, :1], "past_key_values": cache}
    before = state_of(model, tokens)
    for _ in range(2):
        inspection = inspector.run_inspection(data, loss=lambda output: output.logits.sum())
        assert cache.get_seq_length() == 4
        torch.testing.assert_close(inspection["lm_head"].activations, expected)
    assert_same_state(before, state_of(model, tokens))


# -- .grad ---------------------------------------------------------------------------------------


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.a, self.first(x), use_reentrant=True)
        return checkpoint(self.b, h, use_reentrant=True)


@pytest.mark.parametrize("fail", ["", "backward"])
@pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "no_leaf"])
def test_reentrant_checkpoint_with_gradients_already_there(fail: str, leaf: bool) -> None:
    """Only backward() can run it, which writes `.grad`: the old ones come back themselves."""
    model = Reentrant()
    for parameter in model.a.parameters():
        parameter.grad = torch.randn_like(parameter)
    x = torch.randn(3, 4, requires_grad=leaf)
    if fail:

        def refuse(_: Tensor) -> None:
            raise KeyboardInterrupt

        model.first.weight.register_hook(refuse)
    before = state_of(model, x)
    inspector = watch_all(model, keep="tensors")
    if fail:
        with pytest.raises(KeyboardInterrupt):
            inspector.run_inspection(x, loss="sum")
    else:
        inspection = inspector.run_inspection(x, loss="sum")
        assert inspection["b"].gradients is not None
    assert_same_state(before, state_of(model, x))


def test_optimizer_in_backward_does_not_step() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    stepped = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda each: stepped.append(each))
    before = state_of(model)
    inspection = watch_all(model, keep="tensors").run_inspection(torch.ones(3, 4), loss="sum")
    assert_same_state(before, state_of(model))
    assert not stepped
    assert inspection["0"].parameter_gradients["weight"].any()


def test_optimizer_in_backward_with_reentrant_checkpoint_is_refused() -> None:
    model = Reentrant()
    stepped = []
    for parameter in model.a.parameters():
        parameter.register_post_accumulate_grad_hook(lambda each: stepped.append(each))
    before = state_of(model)
    with pytest.raises(InspectionError, match=r"reentrant.*optimizer.*use_reentrant=False"):
        watch_all(model).run_inspection(torch.ones(3, 4), loss="sum")
    assert_same_state(before, state_of(model))
    assert not stepped


def test_gradient_hooks_of_the_user_on_parameters_still_run_but_leave_grad_alone() -> None:
    model = nn.Linear(4, 4)
    model.weight.register_hook(lambda g: g * 2)
    before = state_of(model)
    watch_all(model).run_inspection(torch.ones(1, 4), loss="sum")
    assert_same_state(before, state_of(model))


# -- the model's parameters and special models ---------------------------------------------------


def test_lazy_model_is_refused_with_the_next_step() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(2))
    with pytest.raises(InspectionError, match=r"'1'.*lazy.*Run the model once"):
        watch_all(model).run_inspection(torch.ones(1, 4), loss="sum")
    assert isinstance(model[1], nn.LazyLinear)
    assert not model[0]._forward_hooks


def test_shared_buffer_and_view_of_a_buffer_are_restored() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("whole", torch.zeros(4))
            self.part = self.whole[:2]
            self.again = self.whole

        def forward(self, x: Tensor) -> Tensor:
            self.part += 1
            self.again[3] = -0.0
            self.whole[2] = float("nan")
            return x * self.whole.nan_to_num()

    model = Model()
    before = state_of(model)
    Inspector(model).run_inspection(torch.ones(4))
    assert_same_state(before, state_of(model))
    assert model.part.data_ptr() == model.whole.data_ptr()


def test_buffer_that_is_replaced_or_resized_comes_back() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("replaced", torch.zeros(4))
            self.register_buffer("resized", torch.arange(4.0))
            self.register_buffer("removed", torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            self.replaced = torch.ones(4)
            self.resized.data = torch.full((8,), 9.0)
            del self.removed
            self.register_buffer("added", torch.ones(1))
            self.extra = nn.Linear(1, 1)
            return x

    model = Model()
    before = state_of(model)
    Inspector(model).run_inspection(torch.ones(4))
    assert_same_state(before, state_of(model))
    assert list(model.state_dict()) == ["replaced", "resized", "removed"]


def test_negative_zero_and_nan_are_restored_by_bits() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("values", torch.tensor([-0.0, float("nan"), 1.0]))

        def forward(self, x: Tensor) -> Tensor:
            self.values.abs_()
            self.values[1] = -self.values[1]
            return x

    model = Model()
    before = state_of(model)
    Inspector(model).run_inspection(torch.ones(1))
    assert_same_state(before, state_of(model))


def test_state_one_level_below_an_attribute() -> None:
    """A list in a dict, a tensor in a list."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.caches = {"layer": [torch.zeros(1)]}
            self.tensors = [torch.zeros(2)]

        def forward(self, x: Tensor) -> Tensor:
            self.caches["layer"].append(x)
            self.tensors[0] += 1
            return x

    model = Model()
    before = state_of(model)
    Inspector(model).run_inspection(torch.ones(1))
    assert_same_state(before, state_of(model))


def test_embedding_with_max_norm() -> None:
    """PyTorch's own layer that rescales its weight in the forward pass."""
    model = nn.Embedding(4, 4, max_norm=0.5)
    weight = model.weight.detach().clone()
    Inspector(model).run_inspection(torch.tensor([0, 1]))
    assert_same_bits(model.weight, weight, "weight")


def test_parameter_written_in_place_by_forward_is_restored_or_said() -> None:
    """Weight clipping in forward must not survive an inspection in silence."""

    class Clipped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.layer.weight.clamp_(-0.01, 0.01)
            return self.layer(x)

    model = Clipped()
    weight = model.layer.weight.detach().clone()
    inspection = Inspector(model).run_inspection(torch.ones(1, 4))
    said = [text for text in inspection.notes if "parameter" in text]
    assert same_bits(model.layer.weight, weight) or said


def test_unchanged_alone() -> None:
    model = model_with()
    before = state_of(model)

    def run() -> None:
        with unchanged(model):
            model(torch.randn(3, 4))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert_same_state(before, state_of(model))


@pytest.mark.parametrize("act", [lambda: torch.rand(1), random.random, np.random.rand])
def test_random_numbers_outside_continue_as_if_nothing_happened(act: Callable[[], Any]) -> None:
    def seed() -> None:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)

    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).train()
    seed()
    expected = [act(), act()]
    seed()
    found = [act()]
    Inspector(model).run_inspection(torch.ones(2, 4))
    assert [*found, act()] == expected
