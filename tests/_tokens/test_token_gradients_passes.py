"""Token gradients however the passes are made: by hand, twice, with a cache, from embeddings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, Batch, tokens
from test_token_gradients_transformers import (
    assert_complete,
    assert_tokens,
    build,
    last_attention,
    measured,
)
from torch import Tensor, nn
from torch.nn import functional as F
from transformer_copies import no_float32, token_gradients_by_copies

import torchfmri
from torchfmri._tokens.calls.gradients import TokenGradients
from torchfmri.exceptions import InspectionError

# The fast tier keeps half of the cases of each test; the slow tier runs the others.
pytestmark = [pytest.mark.usefixtures("waiting"), pytest.mark.one_in(2)]

NAMES = ("llama", "gpt2", "mixtral", "gpt-oss", "mamba")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small are slower on several threads than on one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def evaluated(name: str) -> nn.Module:
    return build(name, last_attention(name)).eval()


def batch_of(seed: int, s: int = 9) -> Batch:
    ids = tokens(length=s, seed=seed)
    return {"input_ids": ids, "labels": ids}


def assert_equal_norms(one: TokenGradients, other: TokenGradients, factor: float = 1.0) -> None:
    assert one.names == other.names
    for name in one.names:
        mine, theirs = one[name].norm(), factor * other[name].norm()
        assert mine.shape == theirs.shape, name
        assert float((mine - theirs).abs().max()) <= 1e-6 * float(theirs.max()), name


def by_forward(model: Any, batch: Batch) -> Tensor:
    """Without the call of the model itself, whose hooks do not fire then."""
    return model.forward(**batch).loss


def by_parts(model: Any, batch: Batch) -> Tensor:
    """The body and the head one after the other, as trainers with losses of their own do."""
    hidden = model.base_model(input_ids=batch["input_ids"]).last_hidden_state
    logits = model.lm_head(hidden)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


@pytest.mark.parametrize("way", [by_forward, by_parts])
@pytest.mark.parametrize("name", NAMES)
def test_the_model_itself_need_not_be_called(name: str, way: Any) -> None:
    model, batch = build(name, last_attention(name), output_router_logits=False).eval(), batch_of(5)
    expected = measured(model, batch)
    model.zero_grad()
    with torchfmri.token_gradients(model) as found:
        way(model, batch).backward()
    assert_complete(found, model, 1e-6)
    assert_equal_norms(found, expected)


@pytest.mark.parametrize("keep", ["factors", "norms"])
@pytest.mark.parametrize("way", [by_forward, by_parts])
@pytest.mark.parametrize("name", ["llama", "mixtral", "mamba"])
@pytest.mark.one_in(3)
def test_tokens_of_two_passes_are_never_added(name: str, way: Any, keep: str) -> None:
    model = build(name, last_attention(name), output_router_logits=False).eval()
    parts = [batch_of(5), batch_of(6)]
    alone = [measured(model, part) for part in parts]
    model.zero_grad()
    with torchfmri.token_gradients(model, keep=keep) as found:
        for part in parts:
            way(model, part).backward()
    for name in found.names:
        expected = torch.cat([each[name].norm() for each in alone])
        norms = found[name].norm()
        assert norms.shape == expected.shape, name
        assert torch.allclose(norms, expected, rtol=1e-5, atol=1e-6 * float(expected.max())), name


@pytest.mark.parametrize("name", NAMES)
def test_autograd_grad_in_place_of_backward(name: str) -> None:
    """`.grad` stays empty, and the tokens are the same."""
    model, batch = evaluated(name), batch_of(5)
    expected = measured(model, batch)
    model.zero_grad(set_to_none=True)
    with torchfmri.token_gradients(model) as found:
        torch.autograd.grad(model(**batch).loss, list(model.parameters()))
    assert all(each.grad is None for each in model.parameters())
    coverage = found.coverage()
    assert not coverage.missing
    assert all(row.residual is not None and row.residual < 1e-6 for row in coverage)
    assert_equal_norms(found, expected)


@pytest.mark.parametrize("name", NAMES)
def test_two_backward_passes_through_one_graph(name: str) -> None:
    model, batch = evaluated(name), batch_of(5)
    expected = measured(model, batch)
    model.zero_grad()
    with torchfmri.token_gradients(model) as found:
        loss = model(**batch).loss
        loss.backward(retain_graph=True)
        loss.backward()
    assert_complete(found, model, 1e-6)
    assert_equal_norms(found, expected, 2.0)


@pytest.mark.parametrize("name", NAMES)
def test_norms_of_two_backward_passes_are_refused_or_right(name: str) -> None:
    """Norms of two passes cannot be added; a parameter has the right ones, or a reason."""
    model, batch = evaluated(name), batch_of(5)
    expected = measured(model, batch)
    model.zero_grad()
    with torchfmri.token_gradients(model, keep="norms") as found:
        loss = model(**batch).loss
        loss.backward(retain_graph=True)
        loss.backward()
    rows = found.coverage()
    assert len(rows) == len(expected.names)
    for row in rows:
        if row.rule == "none":
            assert "factors" in row.note, row
        else:
            norms, once = found[row.name].norm(), expected[row.name].norm()
            assert torch.allclose(norms, 2 * once, rtol=1e-5, atol=1e-6 * float(once.max())), row
    assert isinstance(found.axes, dict)


def test_a_penalty_on_the_weights_is_unattributed() -> None:
    """The part of the gradient that came through no token is exactly the residual."""
    model, batch = evaluated("llama"), batch_of(5)
    plain = measured(model, batch)
    without = {name: each.grad.clone() for name, each in model.named_parameters()}
    model.zero_grad()
    decayed = dict(model.named_parameters())["model.layers.0.mlp.up_proj.weight"]
    with torchfmri.token_gradients(model) as found:
        (model(**batch).loss + 0.01 * decayed.square().sum()).backward()
    assert_equal_norms(found, plain)
    for row in found.coverage():
        assert row.residual is not None
        if row.name != "model.layers.0.mlp.up_proj.weight":
            assert row.residual < 1e-6, row
            continue
        penalty = 0.02 * decayed.detach()
        assert torch.allclose(found[row.name].sum(), without[row.name], rtol=1e-9)
        least = 0.1 * float(penalty.norm() / (penalty.norm() + without[row.name].norm()))
        assert row.residual > least, row
        assert "unattributed" in row.note


def test_a_parameter_used_in_the_loss_alone_is_listed() -> None:
    """It has a gradient and no token: a row that says so, not a gap."""
    model = build("llama", "sdpa").eval()
    model.register_parameter("temperature", nn.Parameter(torch.tensor(2.0, dtype=torch.float64)))
    batch = batch_of(5)
    with torchfmri.token_gradients(model) as found:
        logits = model(input_ids=batch["input_ids"]).logits / model.temperature
        F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()).backward()
    assert [row.name for row in found.coverage().missing] == ["temperature"]
    assert "unattributed" in found.coverage()["temperature"].note


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_embeddings_in_place_of_ids(name: str) -> None:
    model, batch = evaluated(name), batch_of(5)
    expected = measured(model, batch)
    embedded = model.get_input_embeddings()(batch["input_ids"]).detach()
    model.zero_grad(set_to_none=True)
    with torchfmri.token_gradients(model) as found:
        model(inputs_embeds=embedded, labels=batch["labels"]).loss.backward()
    assert_complete(found, model, 1e-6)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    for each in found.names:
        if not (tied and each.endswith(("wte.weight", "embed_tokens.weight"))):
            one, other = found[each].norm(), expected[each].norm()
            assert torch.allclose(one, other, rtol=1e-5, atol=1e-6 * float(other.max())), each


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.one_in(3)
def test_a_prefix_in_the_cache(name: str, padded: bool) -> None:
    """The tokens are those of this pass, and of a mask over everything only its end counts."""
    ids = tokens()
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :2] = 0  # on the left, in the prefix
        mask[0, -1] = 0  # and at the end of this pass
    with no_float32():
        model = build(name, last_attention(name), output_router_logits=False).eval()

        def loss() -> Tensor:
            with torch.no_grad():
                cache = model(
                    input_ids=ids[:, :5], attention_mask=mask[:, :5], use_cache=True
                ).past_key_values
            output = model(input_ids=ids[:, 5:], attention_mask=mask, past_key_values=cache)
            return output.logits.square().mean()

        truth, _ = _passes_after_the_first(model, loss)
        model.zero_grad()
        with torchfmri.token_gradients(model) as found:
            loss().backward()
        assert_complete(found, model, 1e-9)
        assert_tokens(found, truth, mask[:, 5:], 1e-10)


def _passes_after_the_first(model: nn.Module, loss: Any) -> Any:
    """Brute force on the last pass alone: the first one has no gradient, and another length."""
    from transformer_copies import Copies

    original = Copies.of

    def of(self: Copies, layer: str, parameter: Tensor, s: int, b: int | None = None) -> Tensor:
        if not torch.is_grad_enabled():
            return parameter.detach().expand(b or self.batch, s, *parameter.shape)
        return original(self, layer, parameter, s, b)

    Copies.of = of
    try:
        return token_gradients_by_copies(model, loss, 2, tolerance=1e-9)
    finally:
        Copies.of = original


@pytest.mark.parametrize("name", [*NAMES, "qwen3-moe", "gemma3", "bert"])
@pytest.mark.one_in(3)
def test_a_single_token(name: str) -> None:
    """One sample of one position, and experts of which it takes one alone."""
    changes = {"num_experts_per_tok": 1} if name in ("mixtral", "qwen3-moe", "gpt-oss") else {}
    with no_float32():
        model = build(name, last_attention(name), **changes).eval()

        def loss() -> Tensor:
            return model(input_ids=tokens(length=1, batch=1)).logits.square().mean()

        truth, _ = token_gradients_by_copies(model, loss, 1)
        model.zero_grad()
        with torchfmri.token_gradients(model) as found:
            loss().backward()
        assert_complete(found, model, 1e-9)
        assert_tokens(found, truth, None, 1e-10)


class Prompted(nn.Module):
    """Prompt tuning: trained positions before those of the text, and a scale of the logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = evaluated("llama")
        self.prompt = nn.Parameter(torch.randn(3, 16, dtype=torch.float64))
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.embedded: Tensor | None = None
        self.logits: Tensor | None = None

    def forward(self, ids: Tensor) -> Tensor:
        text = self.body.get_input_embeddings()(ids)
        self.embedded = torch.cat([self.prompt.expand(len(ids), -1, -1), text], 1)
        self.logits = self.body(inputs_embeds=self.embedded).logits
        return (self.logits * self.scale).square().mean()


@pytest.mark.parametrize("keep", ["factors", "norms"])
def test_parameters_of_the_model_itself(keep: str) -> None:
    """A prompt's rows are tokens 0, 1 and 2; the scale has the tokens of the logits."""
    model, ids = Prompted(), tokens()
    loss = model(ids)
    g, back = torch.autograd.grad(loss, [model.embedded, model.logits])
    with torchfmri.token_gradients(model, keep=keep) as found:
        model(ids).backward()
    assert_complete(found, model, 1e-6)
    expected = F.pad(g[:, :3].norm(dim=-1), (0, 9))
    assert torch.allclose(found["prompt"].norm(), expected, rtol=1e-7, atol=1e-15)
    # d/d scale of f(scale * logits) at a token: its logits times d/d logits, divided by the scale.
    expected = ((model.logits * back).sum(-1) / model.scale).abs()
    assert torch.allclose(found["scale"].norm(), expected, rtol=1e-7, atol=1e-15)


def test_other_outputs_in_the_loss() -> None:
    """A loss on hidden states of every layer beside the logits."""
    with no_float32():
        model = evaluated("qwen3")

        def loss() -> Tensor:
            output = model(input_ids=tokens(), output_hidden_states=True)
            hidden = sum(each.square().mean() for each in output.hidden_states)
            return output.logits.square().mean() + hidden

        truth, _ = token_gradients_by_copies(model, loss, 2)
        model.zero_grad()
        with torchfmri.token_gradients(model) as found:
            loss().backward()
        assert_complete(found, model, 1e-9)
        assert_tokens(found, truth, None, 1e-10)


class TwoOutputs(nn.Module):
    """A layer of its own kind that returns one tensor twice, and another made from it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x @ self.weight
        return y, y, (y * y) @ self.weight


def test_outputs_that_depend_on_each_other() -> None:
    torch.manual_seed(0)
    layer, x = TwoOutputs(), torch.randn(2, 5, 4, dtype=torch.float64)

    def loss(weight: Tensor | None = None) -> Tensor:
        if weight is None:
            first, again, last = layer(x)
        else:  # a copy (b, s, 4, 4) for every token
            first = again = torch.einsum("bsi,bsio->bso", x, weight)
            last = torch.einsum("bsi,bsio->bso", first * first, weight)
        return (first.sin() + 2 * again.cos() + last).square().sum()

    with torchfmri.token_gradients(layer) as found:
        loss().backward()
    copies = layer.weight.detach().expand(2, 5, 4, 4).clone().requires_grad_()
    loss(copies).backward()
    assert copies.grad is not None
    assert found.coverage().residual < 1e-12
    assert torch.allclose(found["weight"].materialise(), copies.grad, rtol=1e-10, atol=1e-13)


def test_batches_of_every_architecture_are_not_all_alike() -> None:
    """The rows of a batch differ, or a row taken for another would not be seen."""
    for each in ARCHITECTURES.values():
        first = next(value for value in each.batch().values() if isinstance(value, Tensor))
        assert not torch.equal(first[0], first[1]), each.name


# -- when gradients are read -----------------------------------------------------------------------


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def positions(seed: int) -> Tensor:
    return torch.randn(2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def residuals(found: TokenGradients) -> dict[str, float | None]:
    return {row.name: row.residual for row in found.coverage().rows}


@pytest.mark.parametrize("keep", ["factors", "norms"])
@pytest.mark.parametrize("between", ["nothing", "to none", "to zero", "halved"])
@pytest.mark.parametrize("before", [False, True])
def test_several_passes_and_what_happens_between(keep: Any, between: str, before: bool) -> None:
    """What each pass brought is compared, whatever was in `.grad`, and whatever is done to it."""
    model = small()
    if before:
        model(positions(9)).square().sum().backward()
    with torchfmri.token_gradients(model, keep=keep) as found:
        for seed in range(3):
            model(positions(seed)).square().sum().backward()
            if between.startswith("to"):
                model.zero_grad(set_to_none=between == "to none")
            elif between == "halved":
                for parameter in model.parameters():
                    parameter.grad.mul_(0.5)
    assert list(found) == [name for name, _ in model.named_parameters()]
    for name, residual in residuals(found).items():
        assert residual is not None, name
        assert residual < 1e-12, name


@pytest.mark.parametrize("keep", ["factors", "norms"])
@pytest.mark.parametrize("order", ["penalty first", "penalty last", "penalty alone"])
def test_a_pass_through_no_layer_at_all(keep: Any, order: str) -> None:
    """Gradients that come to a weight without any call of a layer are never lost sight of."""
    model = small()
    weight: Any = model[0].weight
    with torchfmri.token_gradients(model, keep=keep) as found:
        if order != "penalty last":
            weight.square().sum().backward()
        if order != "penalty alone":
            model(positions(0)).square().sum().backward()
        if order == "penalty last":
            weight.square().sum().backward()
    rows = {row.name: row for row in found.coverage().rows}
    if order == "penalty alone":
        assert list(rows) == ["0.weight"]
        assert "came through no call" in rows["0.weight"].note
        return
    assert rows["0.weight"].residual > 0.1
    assert "unattributed" in rows["0.weight"].note
    assert rows["2.weight"].residual < 1e-12


@pytest.mark.parametrize("keep", ["factors", "norms"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("pattern", ["*", "0.weight"])
@pytest.mark.parametrize("order", ["last", "between", "in a loop"])
def test_penalties_in_passes_of_their_own(keep: Any, bias: bool, pattern: str, order: str) -> None:
    model = nn.Sequential(nn.Linear(3, 6, bias), nn.Tanh(), nn.Linear(6, 2, bias)).double()
    weight: Any = model[0].weight
    with torchfmri.token_gradients(model, pattern, keep=keep) as found:
        for number in range(1 if order == "last" else 3):
            model(positions(number)).square().sum().backward()
            if order != "between" or number == 1:
                weight.square().sum().backward()
            if order == "in a loop":
                model.zero_grad()
    rows = {row.name: row for row in found.coverage().rows}
    assert rows["0.weight"].residual > 1e-2
    assert "unattributed" in rows["0.weight"].note
    if pattern == "*":
        assert rows["2.weight"].residual < 1e-12


@pytest.mark.parametrize("keep", ["factors", "norms"])
@pytest.mark.parametrize("then", ["value", "noise", "part", "negated", "nothing"])
def test_a_loop_with_another_model(keep: Any, then: str) -> None:
    """As adversarial training has it; whatever is done to the gradients in between."""
    model, other = small(), small()
    with torchfmri.token_gradients(model, keep=keep) as found:
        for number in range(2):
            model.zero_grad()
            model(positions(number)).square().sum().backward()
            if then == "value":
                nn.utils.clip_grad_value_(model.parameters(), 1e-3)
            for parameter in model.parameters():
                if then == "noise":
                    parameter.grad.add_(torch.randn_like(parameter))
                elif then == "negated":
                    parameter.grad.neg_()
            if then == "part":
                model[0].zero_grad(set_to_none=False)
            other(positions(number)).square().sum().backward()
    for row in found.coverage():
        assert row.residual is not None
        assert row.residual < 1e-12, row


class _Again(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, depth: int = 1) -> Tensor:
        h = self.inner(x).tanh()
        return self.out(self(h, depth - 1) if depth else h)  # type: ignore[no-any-return]


class _Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(3))
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ZeroDivisionError
        return x * self.g


class _Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.gate, self.layer = nn.Sequential(_Again()), _Gate(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(self.layer(self.part(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("keep", ["factors", "norms"])
def test_a_part_that_calls_itself_is_one_pass(keep: Any) -> None:
    model: Any = _Parts().double()
    with torchfmri.token_gradients(model, keep=keep) as found:
        model.part(positions(0)).square().sum().backward()
    assert found["part.0.out.weight"].shape[:2] == positions(0).shape[:2]
    assert max(row.residual for row in found.coverage()) < 1e-12


def test_a_part_that_fails_by_itself_is_over() -> None:
    model: Any = _Parts().double()
    with torchfmri.token_gradients(model) as found:
        model.gate.fails = True
        with pytest.raises(ZeroDivisionError):
            model.gate(positions(0))
        for number in range(2):
            model.layer(positions(number)).square().sum().backward()
    b, s = positions(0).shape[:2]
    assert found["layer.weight"].shape[:2] == (2 * b, s)
    assert found.coverage()["layer.weight"].residual < 1e-12


@pytest.mark.parametrize("keep", ["factors", "norms"])
@pytest.mark.parametrize("then", ["clipped", "zeroed", "dropped"])
def test_another_model_and_what_happens_to_the_gradients_then(keep: Any, then: str) -> None:
    """A backward pass of others is no penalty, nor is a common factor."""
    model, other = small(), small()
    with torchfmri.token_gradients(model, keep=keep) as found:
        model(positions(0)).square().sum().backward()
        if then == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        else:
            model.zero_grad(set_to_none=then == "dropped")
        other(positions(1)).square().sum().backward()
    for row in found.coverage():
        assert row.residual is not None
        assert row.residual < 1e-12, row
        assert row.note == ""


def test_autograd_grad_after_backward() -> None:
    """A pass that leaves no `.grad` is read from hooks, also behind one that does."""
    model = small()
    with torchfmri.token_gradients(model) as found:
        model(positions(0)).square().sum().backward()
        torch.autograd.grad(model(positions(1)).square().sum(), list(model.parameters()))
    assert all(row < 1e-12 for row in residuals(found).values() if row is not None)
    assert None not in residuals(found).values()


@pytest.mark.parametrize("keep", ["factors", "norms", "voxels"])
def test_nothing_waits_for_the_garbage_collector(keep: Any) -> None:
    """What a block keeps goes when the result goes: factors are as large as activations."""
    import gc
    import weakref

    model = small()
    gc.collect()
    gc.disable()
    try:
        with torchfmri.token_gradients(model, keep=keep) as found:
            loss = model(positions(0)).square().sum()
            loss.backward()
        found.norm()
        parts = [weakref.ref(found), weakref.ref(found._capture)]
        parts += [weakref.ref(each) for each in found._capture.arrivals.records]
        del found, loss
        assert [each() for each in parts] == [None] * len(parts)
    finally:
        gc.enable()


class Scale(nn.Module):
    """Has a weight of its own: run again, by operations or position by position."""

    def __init__(self, width: int, odd: bool = False) -> None:
        super().__init__()
        self.scale, self.odd = nn.Parameter(torch.ones(width)), odd

    def forward(self, x: Tensor) -> Tensor:
        return torch.logaddexp(x, self.scale) if self.odd else x * self.scale


class OnceOnly(Scale):
    """Cannot be run again."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 1:
            raise ValueError("of the model's own")
        return super().forward(x)


class Penalised(Scale):
    """Uses a weight at no position, too."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum() + self.scale.square().sum()


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.attention(x, x, x)[0]
        return result


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.LSTM(6, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.steps(x)[0]
        return result


@pytest.mark.parametrize(
    ("build", "limit"),
    [
        (lambda: Scale(6), 1 << 30),
        (lambda: Scale(6, odd=True), 1 << 30),
        (lambda: OnceOnly(6), 1 << 30),
        (lambda: Penalised(6), 1 << 30),
        (Attends, 1 << 30),
        (Steps, 1 << 30),
        (nn.Tanh, 300),
    ],
    ids=["rerun", "positions", "fails", "penalised", "attention", "lstm", "limit"],
)
@pytest.mark.one_in(4)
def test_reading_everything_leaves_no_tensor_to_the_garbage_collector(
    build: Callable[[], nn.Module], limit: int
) -> None:
    """Also where layers are run again, and where reading raises: frames keep what they saw."""
    import gc

    model = nn.Sequential(nn.Linear(4, 6), build())
    x = torch.randn(2, 3, 4)

    def step(keep: Any) -> None:
        with torchfmri.token_gradients(model, keep=keep, max_bytes=limit) as found:
            model(x).square().sum().backward()
        for name in found.names:
            with contextlib.suppress(InspectionError):
                found[name].norm()
        with contextlib.suppress(InspectionError, torchfmri.MissingTokensWarning):
            found.norm()
        found.coverage()
        model.zero_grad()
        if isinstance(model[1], OnceOnly):
            model[1].calls = 0

    def tensors() -> int:
        return sum(issubclass(type(each), Tensor) for each in gc.get_objects())

    keeps = ("factors", "norms", "voxels")
    for keep in keeps:  # what is made once is there
        step(keep)
    gc.collect()
    gc.disable()
    try:
        before = tensors()
        for keep in keeps:
            step(keep)
            assert tensors() == before, keep
    finally:
        gc.enable()


class Fails(nn.Module):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ValueError("of the model's own")
        return x


@pytest.mark.parametrize("keep", ["factors", "norms", "voxels"])
def test_an_error_of_the_model_that_somebody_keeps_holds_on_to_nothing(keep: Any) -> None:
    """As a notebook does; its frames have our hooks in them."""
    import gc
    import weakref

    model = nn.Sequential(nn.Linear(4, 4), Fails(), nn.Linear(4, 4))
    kept: list[Exception] = []
    gc.collect()
    gc.disable()
    try:
        with torchfmri.token_gradients(model, keep=keep) as found:
            model(torch.randn(2, 3, 4)).sum().backward()
            model[1].fails = True  # type: ignore[assignment]
            try:
                model(torch.randn(2, 3, 4))
            except ValueError as error:
                kept.append(error)
        parts = [weakref.ref(each) for each in found._capture.arrivals.records]
        assert len(parts) == 3
        del found
        assert [each() for each in parts] == [None] * 3
    finally:
        gc.enable()


def test_calls_are_counted_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls of one layer are reduced together, also where counting them was broken off."""
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(4, 4)).double()
    x = torch.randn(2, 3, 4, dtype=torch.float64)

    def norms(interrupt: bool) -> dict[str, Tensor]:
        class Interrupted(dict[str, int]):
            def __missing__(self, layer: str) -> int:
                return 0

            def __setitem__(self, layer: str, count: int) -> None:
                nonlocal interrupt
                if interrupt:
                    interrupt = False
                    raise KeyboardInterrupt
                super().__setitem__(layer, count)

        monkeypatch.setattr(
            "torchfmri._tokens.rules.record.defaultdict", lambda kind: Interrupted()
        )
        model.zero_grad()
        with torchfmri.token_gradients(model, keep="norms") as found:
            loss = model(x).square().sum()
            if interrupt:
                with pytest.raises(KeyboardInterrupt):
                    loss.backward(retain_graph=True)
                assert not interrupt
                model.zero_grad()
            loss.backward()
        assert found.coverage().residual < 1e-12
        return {name: found[name].norm() for name in found.names}

    plain = norms(False)
    for name, expected in norms(True).items():
        assert torch.allclose(expected, plain[name], rtol=1e-12), name


def test_a_backward_pass_behind_the_block_is_not_taken_in() -> None:
    model = small()
    with torchfmri.token_gradients(model) as found:
        loss = model(positions(0)).square().sum()
    loss.backward()
    assert list(found) == []


@pytest.mark.parametrize("first", ["norm", "linear"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_layers_that_share_an_input_under_autocast(first: str, dtype: torch.dtype) -> None:
    """Each reads it as autocast hands it over: 16 bits to the product, none to the norm."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(8, dtype=dtype), nn.Linear(8, 8, dtype=dtype)

        def forward(self, x: Tensor) -> Tensor:
            one, other = (self.norm, self.linear)[:: 1 if first == "norm" else -1]
            return one(x).to(dtype) * other(x).to(dtype)

    torch.manual_seed(0)
    model = Both()
    x = torch.randn(2, 6, 8, dtype=dtype)
    with (
        torchfmri.token_gradients(model) as found,
        torch.autocast("cpu", torch.bfloat16),
    ):
        model(x).float().square().sum().backward()
    for name, residual in residuals(found).items():
        assert residual is not None
        assert residual < (1e-5 if "norm" in name or dtype == torch.float64 else 1e-2), name


class Head(nn.Module):
    """A head over many words, of which the check in norms mode sees a few."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 5000, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


@pytest.mark.parametrize("size", [4, 40])  # by torch, and by compiled code where there is some
def test_tokens_mixed_up_are_seen_in_norms_mode(size: int, monkeypatch: Any) -> None:
    from torchfmri._kernels.rows import Numbers
    from torchfmri._tokens.calls.norms import Reducer

    def residual() -> float:
        torch.manual_seed(0)
        model = Head()
        x, labels = torch.randn(2, size, 8), torch.randint(5000, (2 * size,))
        with torchfmri.token_gradients(model, keep="norms") as found:
            F.cross_entropy(model(x).flatten(0, 1), labels).backward()
        (row,) = (row for row in found.coverage().rows if row.name == "head.weight")
        assert row.check == "probe"
        assert row.residual is not None
        return row.residual

    assert residual() < 1e-4
    whole = Reducer.outer_numbers

    def shifted(self: Reducer, *call: Any) -> tuple[Numbers, Numbers]:
        g, x = whole(self, *call)
        return g, Numbers.of(x.squares, x.products.roll(1))  # the neighbour's input

    monkeypatch.setattr(Reducer, "outer_numbers", shifted)
    assert residual() > 1e-2


# -- when gradients are looked at ------------------------------------------------------------------


class Pooled(nn.Module):
    """Its last layer is called, and what it returns is not part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(4, 4) for _ in range(7)))
        self.pooler = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x)
        return x, self.pooler(x[:, 0])


@pytest.mark.parametrize("keep", ["factors", "norms"])
def test_the_last_layer_is_not_part_of_the_loss(keep: Any) -> None:
    """The end of the backward pass is noticed: what is done to `.grad` later does not matter."""
    torch.manual_seed(0)
    model = Pooled().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    with torchfmri.token_gradients(model, "body*", keep=keep) as tokens:
        for _ in range(3):
            model(x)[0].square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(tokens) == 14
    assert tokens.norm().shape == (6, 5)
    assert tokens.coverage().residual < 1e-12
    with torchfmri.token_gradients(model, "body*", keep="factors") as one:
        model(x)[0].square().sum().backward()
    assert torch.allclose(tokens.norm(), one.norm().repeat(3, 1))


@pytest.mark.parametrize("keep", ["factors", "norms"])
def test_backward_passes_inside_of_the_forward_pass(keep: Any) -> None:
    """A hook of the user's trains every layer by a loss of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))).double()
    x = torch.randn(2, 5, 4, dtype=torch.float64)

    def learn(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        output.square().sum().backward()
        return output.detach()

    with torchfmri.token_gradients(model, keep=keep) as tokens:
        handles = [layer.register_forward_hook(learn) for layer in model]
        model(x)
    for handle in handles:
        handle.remove()
    assert tokens.coverage().residual < 1e-12
    for number, layer in enumerate(model):
        gradient = 2 * layer(x)
        expected = gradient.norm(dim=-1) * x.norm(dim=-1)
        assert torch.allclose(tokens[f"{number}.weight"].norm(), expected)
        x = layer(x).detach()


@pytest.mark.parametrize("keep", ["factors", "norms"])
def test_several_forward_passes_before_the_backward_pass(keep: Any) -> None:
    """Calls of one layer in one pass have cross terms; those of different passes have not."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(torch.tanh(self.layer(x)))

    torch.manual_seed(0)
    model = Twice().double()
    one, other = torch.randn(2, 2, 5, 4, dtype=torch.float64)
    with torchfmri.token_gradients(model, keep=keep) as tokens:
        first, second = model(one), model(other)
        (first.square().sum() + second.square().sum()).backward()
    assert tokens.coverage().residual < 1e-12
    parts = []
    for x in (one, other):
        with torchfmri.token_gradients(model) as alone:
            model(x).square().sum().backward()
        parts.append(alone["layer.weight"].norm())
    assert torch.allclose(tokens["layer.weight"].norm(), torch.cat(parts))


def test_nothing_waits_after_the_block() -> None:
    """The backward pass comes later: its gradients go where they would have gone."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    x = torch.randn(2, 5, 4)
    with torchfmri.token_gradients(model, keep="norms") as tokens:
        output = model(x)
    output.sum().backward()
    assert tokens.names == []
    assert not tokens._capture.arrivals.waiting


def test_outputs_and_parameters_have_no_hooks_left() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
    seen: list[Any] = []
    heard: list[Tensor] = []
    model[0].register_forward_hook(lambda *call: seen.append(call[-1]))
    x = torch.randn(2, 5, 4)
    with torchfmri.token_gradients(model, keep="norms"):
        for _ in range(2):  # from the second one on there are hooks on the parameters
            model(x).sum().backward()
        handle = model[1].weight.register_hook(heard.append)
        model(x).sum().backward()
    assert all(output._backward_hooks is None for output in seen)
    assert model[0].weight._backward_hooks is None
    assert len(heard) == 1
    model(x).sum().backward()
    assert len(heard) == 2
    handle.remove()
    model(x).sum().backward()
    assert len(heard) == 2


@pytest.mark.parametrize("keep", ["factors", "norms"])
def test_a_part_is_called_after_passes_whose_last_layer_is_not_part_of_the_loss(keep: Any) -> None:
    torch.manual_seed(0)
    model = Pooled().double()
    inputs = torch.randn(3, 2, 5, 4, dtype=torch.float64)
    with torchfmri.token_gradients(model, "body*", keep=keep) as tokens:
        for x in inputs[:2]:
            model(x)[0].square().sum().backward()
        model.body(inputs[2]).square().sum().backward()
    with torchfmri.token_gradients(model, "body*") as one:
        model.body(inputs.flatten(0, 1)).square().sum().backward()
    assert tokens.coverage().residual < 1e-12
    for name in one:
        assert torch.allclose(tokens[name].norm(), one[name].norm()), name


class Heads(nn.Module):
    """Three heads on a trunk that is frozen; the loss is that of the middle one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4).requires_grad_(False)
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.trunk(x)
        return [head(x) for head in self.heads]


@pytest.mark.parametrize("keep", ["factors", "norms"])
def test_the_first_and_the_last_call_get_no_gradient(keep: Any) -> None:
    torch.manual_seed(0)
    model = Heads().double()
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    with torchfmri.token_gradients(model, keep=keep) as tokens:
        model(x)[1].square().sum().backward()
        assert tokens.names == ["heads.1.weight", "heads.1.bias"]
        assert tokens.norm().shape == (2, 5)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert [row.note for row in tokens.coverage()] == ["", ""]
    assert tokens.coverage().residual < 1e-12
    expected = 2 * model(x)[1].norm(dim=-1) * model.trunk(x).norm(dim=-1)
    assert torch.allclose(tokens["heads.1.weight"].norm(), expected)


class Ignore(torch.autograd.Function):
    """Adds two tensors, and says that the first did not matter."""

    @staticmethod
    def forward(ctx: Any, one: Tensor, other: Tensor) -> Tensor:
        return one + other

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, gradients[0]


@pytest.mark.parametrize("keep", ["factors", "norms"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_gradient_that_autograd_knows_to_be_zero(keep: Any, bias: bool) -> None:
    """A hook is handed None in its place; an output with a bias is a view."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ignored, self.used = (nn.Linear(4, 4, bias=bias) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = Ignore.apply(self.ignored(x), self.used(x))
            return result

    torch.manual_seed(0)
    model = Model().double()
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with (
        torchfmri.Monitor(model, optimizer) as monitor,
        torchfmri.token_gradients(model, keep=keep) as tokens,
    ):
        model(x).square().sum().backward()
        optimizer.step()
    assert tokens.names == [name for name, _ in model.named_parameters() if "used" in name]
    assert tokens.coverage().residual < 1e-12
    assert len(monitor.history) == 1
    assert not monitor.history.missing


class _OrderedWalk(nn.Module):
    """A recurrence with a free parameter, over positions in an order of their own."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.rand(2, dtype=torch.float64))
        self.order = order
        self.register_buffer("kept", torch.arange(4))

    def read(self, x: Tensor, order: Tensor) -> Tensor:
        match self.order:
            case "index":
                return x[:, order]
            case "index_select":
                return x.index_select(1, order)
            case "gather":
                return x.gather(1, order[None, :, None].expand_as(x))
            case "buffer":
                self.kept.copy_(order)
                return x[:, self.kept]
            case "constant":
                return x[:, [3, 1, 0, 2]]
            case _:
                return x[:, x[0, :, 0].argsort()]

    def forward(self, x: Tensor, order: Tensor, a: list[Tensor] | None = None) -> Tensor:
        state, rows = torch.zeros_like(x[:, 0]), self.read(x, order)
        for t in range(x.shape[1]):
            state = torch.tanh((self.a if a is None else a[t]) * state + rows[:, t])
        return state


@pytest.mark.parametrize(
    "order", ["index", "index_select", "gather", "buffer", "argsort", "constant"]
)
def test_an_order_that_changes_from_pass_to_pass(order: str) -> None:
    model = _OrderedWalk(order)
    orders = ([0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2])
    for positions in orders:
        x = torch.randn(1, 4, 2, dtype=torch.float64)
        with torchfmri.token_gradients(model) as tokens:
            model(x, torch.tensor(positions)).sum().backward()
        read = model.read(torch.arange(4.0).expand(1, 2, 4).mT, torch.tensor(positions))
        if order == "argsort":
            read = x[:, :, 0].argsort()[..., None]
        copies = [model.a.detach().clone().requires_grad_() for _ in range(4)]
        model(x, torch.tensor(positions), copies).sum().backward()
        expected = torch.zeros(1, 4, dtype=torch.float64)
        for position, copy in zip(read[0, :, 0].long().tolist(), copies, strict=True):
            assert copy.grad is not None
            expected[0, position] = copy.grad.norm()
        torch.testing.assert_close(tokens["a"].norm(), expected)
        # A position further on would be seen: the first row of the walk has no gradient.
        assert not torch.allclose(expected, expected.roll(1, 1))
