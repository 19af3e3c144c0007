"""Signals against a float64 oracle that forms every token's weight gradient; what they cost."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchfmri
from torchfmri._capture.taps import CallKey
from torchfmri.routing import (
    Divergence,
    LearningDynamics,
    Price,
    RoutingConfig,
    RoutingLanguageModel,
    Signals,
    SparseProtoLinear,
    agreement,
    computation_parameters,
    helpfulness,
    mas,
    routing_parameters,
    worth,
    worth_over_tokens,
)
from torchfmri.routing.scaling import shares
from torchfmri.routing.signals import Factors, read_signals

pytestmark = pytest.mark.usefixtures("one_thread")
VOCABULARY = 11


class Watched(torch.optim.SGD):
    """Keeps the gradients of its last step, and changes nothing."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.0)
        self.seen: list[Tensor | None] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = self.param_groups[0]["params"]
        self.seen = [None if each.grad is None else each.grad.clone() for each in held]


class Branches(nn.Module):
    """Layers called in an order of their own, one of them several times."""

    def __init__(self, order: str, size: int = 6) -> None:
        super().__init__()
        self.order = order
        self.layers = nn.ModuleDict({name: SparseProtoLinear(size, size) for name in "abc"})

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for step, name in enumerate(self.order):
            x = torch.tanh(x + 0.3 * step)
            total = total + (step + 1) * self.layers[name](x)
        return total


def build(blocks: int = 2, size: int = 8, shared: bool = False) -> RoutingLanguageModel:
    torch.manual_seed(0)
    config = RoutingConfig(VOCABULARY, hidden_size=size, blocks=blocks, heads=2)
    model = RoutingLanguageModel(config).double()
    if shared:
        model.blocks = nn.ModuleList([model.blocks[0]] * blocks)
    return model


def loss_of(model: nn.Module, seed: int = 1) -> Tensor:
    torch.manual_seed(seed)
    if isinstance(model, Branches):
        return model(torch.randn(2, 4, 6, dtype=torch.float64)).square().mean()
    ids = torch.randint(VOCABULARY, (2, 5))
    return model(ids, labels=ids).loss


def dynamics_of(model: nn.Module, **options: Any) -> LearningDynamics:
    main, meta = Watched(computation_parameters(model)), Watched(routing_parameters(model))
    return LearningDynamics(model, main, meta, keep_signals=True, **options)


def signals_of(model: nn.Module, **options: Any) -> dict[CallKey, Signals]:
    with dynamics_of(model, **options) as dynamics:
        dynamics.compute_and_apply_gradients(loss_of(model))
    return dynamics.signals


class Oracle:
    """The weight of every token of every call is a copy of its own: autograd does the rest."""

    def __init__(self, model: nn.Module) -> None:
        self.names: dict[int, str] = {}
        for name, module in model.named_modules():
            if isinstance(module, SparseProtoLinear):
                self.names.setdefault(id(module), name)
        self.copies: dict[CallKey, Tensor] = {}
        self.added: dict[CallKey, Tensor] = {}
        self.outputs: dict[CallKey, Tensor] = {}
        handles = []
        for module in model.modules():
            if isinstance(module, SparseProtoLinear):
                handles.append(module.computation.register_forward_hook(self._replace(module)))
                handles.append(module.register_forward_hook(self._keep(module)))
        loss_of(model).backward()
        for handle in handles:
            handle.remove()
        model.zero_grad()

    def _key(self, module: nn.Module, found: dict[CallKey, Tensor]) -> CallKey:
        layer = self.names[id(module)]
        return CallKey(layer, sum(key.layer == layer for key in found))

    def _replace(self, module: SparseProtoLinear) -> Any:
        def hook(linear: nn.Linear, arguments: tuple[Tensor], output: Tensor) -> Tensor:
            key = self._key(module, self.copies)
            x = arguments[0]
            copies = linear.weight.detach().expand(*x.shape[:-1], -1, -1).clone()
            self.copies[key] = copies.requires_grad_()
            self.added[key] = torch.zeros_like(output).requires_grad_()
            own = torch.einsum("bsoi,bsi->bso", copies, x) + linear.bias
            return own + self.added[key]

        return hook

    def _keep(self, module: SparseProtoLinear) -> Any:
        def hook(layer: nn.Module, arguments: Any, output: Tensor) -> None:
            self.outputs[self._key(module, self.outputs)] = output.detach()

        return hook

    def cost(self, key: CallKey) -> Tensor:
        return self.copies[key].grad.norm(dim=-1)

    def relevance(self, key: CallKey) -> Tensor:
        return self.added[key].grad.abs()


def models() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "two blocks": build(),
        "one block twice": build(shared=True),
        "another order": Branches("cab").double(),
        "repeated layers": Branches("bacabb").double(),
    }


@pytest.mark.parametrize("name", list(models()))
def test_signals_are_those_of_the_oracle(name: str) -> None:
    model = models()[name]
    oracle, found = Oracle(model), signals_of(model)
    assert set(found) == set(oracle.copies)
    for key, signals in found.items():
        close = {"rtol": 1e-10, "atol": 1e-14}
        torch.testing.assert_close(signals.cost, oracle.cost(key), **close)
        torch.testing.assert_close(signals.relevance, oracle.relevance(key), **close)
        torch.testing.assert_close(signals.contribution, oracle.outputs[key].abs(), **close)


@pytest.mark.parametrize("name", list(models()))
def test_pairing_by_index_would_be_wrong(name: str) -> None:
    """The negative control: inputs in forward order, gradients in backward order, one by one."""
    model = models()[name]
    oracle = Oracle(model)
    inputs: list[Tensor] = []
    gradients: list[Tensor] = []
    handles = []
    for module in {id(each): each for each in model.modules()}.values():
        if isinstance(module, SparseProtoLinear):

            def hook(layer: nn.Module, arguments: tuple[Tensor], output: Tensor) -> None:
                inputs.append(arguments[0].detach())
                output.register_hook(lambda g: gradients.append(g))

            handles.append(module.computation.register_forward_hook(hook))
    loss_of(model).backward()
    for handle in handles:
        handle.remove()
    paired = [
        g.abs() * x.norm(dim=-1, keepdim=True) for x, g in zip(inputs, gradients, strict=True)
    ]
    keys = list(oracle.copies)  # forward order
    wrong = sum(
        not torch.allclose(each, oracle.cost(key)) for each, key in zip(paired, keys, strict=True)
    )
    assert wrong >= len(keys) - 1  # no error, every shape agrees, and nearly all are wrong


def test_cost_is_that_of_token_gradients() -> None:
    model = build()
    found = signals_of(model)
    with torchfmri.token_gradients(model, "*.computation.weight") as tokens:
        loss_of(model).backward()
    for key, signals in found.items():
        expected = tokens[f"{key.layer}.computation.weight"].norm(by="output")
        torch.testing.assert_close(signals.cost, expected)


@pytest.mark.parametrize("shared", [False, True])
def test_aggregate_cost_is_that_of_the_weight_gradient(shared: bool) -> None:
    model = build(shared=shared)
    found = signals_of(model, signal="aggregate")
    model.zero_grad()
    loss_of(model).backward()
    for key, signals in found.items():
        rows = model.get_submodule(key.layer).computation.weight.grad.norm(dim=-1)
        torch.testing.assert_close(signals.cost, rows.expand_as(signals.cost))


def test_agreement_and_effect_are_those_of_the_oracle() -> None:
    model = build()
    oracle, found = Oracle(model), signals_of(model)
    for key, signals in found.items():
        each = oracle.copies[key].grad.flatten(0, 1)  # (t, o, i)
        rest = each.sum(0) - each
        expected = torch.nn.functional.cosine_similarity(each, rest, dim=-1, eps=1e-30)
        alone = rest.norm(dim=-1) < 1e-6 * each.norm(dim=-1)  # no other token moves the unit
        expected = expected.masked_fill(alone, 0)
        torch.testing.assert_close(signals.agreement.flatten(0, 1), expected)
        # The effect: what the loss loses to first order when a unit's weight goes to 0.
        weights = signals.weights
        gate = signals.factors.g / weights.clamp_min(1e-300)  # dL/d masked output
        torch.testing.assert_close(signals.effect, -gate * signals.factors.y)


@pytest.mark.parametrize("power", [-80, -40, 40])
def test_agreement_does_not_depend_on_the_size_of_gradients(power: int) -> None:
    """The mean over a large batch makes gradients small: squares of squares must not underflow."""
    for key, signals in signals_of(build()).items():
        x, g, length = (each.float() for each in (signals.factors.x, *_sized(signals)))
        plain, scaled = (
            read_signals(
                key, Factors(x, size * g, signals.factors.y, length), None, "token", signals.route
            ).agreement
            for size in (1.0, 2.0**power)  # a power of two rounds nothing
        )
        torch.testing.assert_close(scaled, plain, atol=1e-6, rtol=0)
        both = (plain != 0) & (signals.agreement != 0)
        torch.testing.assert_close(plain[both], signals.agreement.float()[both], atol=0.02, rtol=0)
        assert both.any()


def _sized(signals: Signals) -> tuple[Tensor, Tensor]:
    """Return g with its largest value 1, and the lengths of x."""
    g = signals.factors.g
    return g / g.abs().max(), signals.factors.length


def test_effect_is_a_first_order_difference() -> None:
    """Scale one unit's masked output of one token a little: the loss moves by effect * scale."""
    model = build(blocks=1)
    signals = signals_of(model)[CallKey("blocks.0.output", 0)]
    layer = model.blocks[0].output
    where = (signals.effect.abs() == signals.effect.abs().max()).nonzero()[0].tolist()
    losses = []
    for scale in (1 + 1e-5, 1 - 1e-5):

        def hook(module: nn.Module, arguments: Any, output: Tensor, scale: float = scale) -> Tensor:
            factor = torch.ones_like(output)
            factor[tuple(where)] = scale
            return output * factor

        handle = layer.register_forward_hook(hook)
        losses.append(float(loss_of(model).detach()))
        handle.remove()
    slope = (losses[0] - losses[1]) / 2e-5
    assert -slope == pytest.approx(float(signals.effect[tuple(where)]), rel=1e-6)


# -- what Goodness is ------------------------------------------------------------------------


def test_worth_is_the_formula() -> None:
    for signals in signals_of(build()).values():
        gain = mas(mas(signals.contribution) * mas(signals.relevance))
        torch.testing.assert_close(worth(signals), gain / (mas(signals.cost) + 1e-6))


def test_length_of_x_cancels_per_token_and_relevance_with_it() -> None:
    """MAS(cost) equals MAS(relevance) where one token is scaled: Goodness is the contribution."""
    for signals in signals_of(build()).values():
        torch.testing.assert_close(mas(signals.cost), mas(signals.relevance))
        # So relevance and cost cancel, too, down to eps: what is left is the contribution.
        left = mas(signals.relevance) / (mas(signals.relevance) + 1e-6)
        torch.testing.assert_close(shares(worth(signals)), shares(signals.contribution * left))
        # Over tokens and units together it does not cancel, where |x_t| differs: behind a norm it
        # does not.
        joint = mas(signals.cost, (-3, -2, -1)), mas(signals.relevance, (-3, -2, -1))
        differs = bool((joint[0] - joint[1]).abs().max() > 1e-2)
        assert differs == signals.call.layer.endswith("output")


def test_a_goodness_of_ones_own_in_a_few_lines() -> None:
    seen = []

    def cheap(signals: Signals) -> Tensor:
        seen.append(signals.call)
        return signals.contribution / (signals.cost + 1e-9)

    model = build()
    with dynamics_of(model, meta_loss=Divergence(cheap)) as dynamics:
        result = dynamics.compute_and_apply_gradients(loss_of(model))
    assert len(seen) == 8
    assert float(result.meta_loss) > 0


def test_a_goodness_of_the_wrong_shape_says_so() -> None:
    model = build()
    with (
        dynamics_of(model, meta_loss=Divergence(lambda signals: signals.cost.sum(-1))) as dynamics,
        pytest.raises(torchfmri.InspectionError, match="one number per token and unit"),
    ):
        dynamics.compute_and_apply_gradients(loss_of(model))


# -- the two streams -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["strict", "joint"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_main_gradients_are_bit_equal_with_the_meta_stream(mode: Any, dtype: torch.dtype) -> None:
    model = build().to(dtype)
    parameters = computation_parameters(model)
    loss_of(model).backward()
    plain = [parameter.grad.clone() for parameter in parameters]
    model.zero_grad()
    with dynamics_of(model, mode=mode) as dynamics:
        dynamics.compute_and_apply_gradients(loss_of(model))
    found = dynamics._optimizer.seen
    assert len(found) == len(plain)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def meta_by_autograd(model: RoutingLanguageModel, found: dict[CallKey, Signals]) -> list[Tensor]:
    """The gradients of the sum of divergences, layer by layer, with x held constant."""
    total = torch.zeros((), dtype=torch.float64)
    inherited: dict[str, Any] = dict.fromkeys(("query", "key", "value", "output"))
    for number, block in enumerate(model.blocks):
        for name in inherited:
            layer = getattr(block, name)
            inherited[name] = layer.effective_prototypes(inherited[name])
            signals = found[CallKey(f"blocks.{number}.{name}", 0)]
            x = signals.factors.x
            match = x @ inherited[name].T / layer.in_features**0.5
            raw = x @ layer.gate.T
            logits = match - torch.relu(raw / raw.abs().amax(-1, keepdim=True))
            routed = torch.relu(logits / logits.abs().amax(-1, keepdim=True)) + 1e-30
            p = routed / routed.sum(-1, keepdim=True)
            good = mas(worth(signals)) + 1e-30
            q = good / good.sum(-1, keepdim=True)
            middle = (p + q) / 2
            each = (p * (p / middle).log() + q * (q / middle).log()).sum(-1) / 2
            largest = signals.relevance.amax(-1)
            felt = largest > 1e-14 * largest.max()  # not the last token, nor the first query
            total = total + (each * felt).mean()
    return list(torch.autograd.grad(total, routing_parameters(model)))


def test_meta_gradients_are_those_of_the_definition() -> None:
    model = build()
    with dynamics_of(model) as dynamics:
        dynamics.compute_and_apply_gradients(loss_of(model))
    expected = meta_by_autograd(model, dynamics.signals)
    for found, each in zip(dynamics._meta_optimizer.seen, expected, strict=True):
        torch.testing.assert_close(found, each, rtol=1e-8, atol=1e-12)


def test_joint_is_the_sum_of_both() -> None:
    model = build()
    routing = routing_parameters(model)
    loss_of(model).backward()
    main = [parameter.grad.clone() for parameter in routing]
    model.zero_grad()
    seen = {}
    for mode in ("strict", "joint"):
        with dynamics_of(model, mode=mode) as dynamics:
            dynamics.compute_and_apply_gradients(loss_of(model))
        seen[mode] = dynamics._meta_optimizer.seen
    for strict, joint, each in zip(seen["strict"], seen["joint"], main, strict=True):
        torch.testing.assert_close(joint, strict + each)
        assert not torch.allclose(joint, strict)


def test_price_is_the_mean_weight() -> None:
    model = build()
    with dynamics_of(model, meta_loss=Price(0.5), mode="joint") as dynamics:
        result = dynamics.compute_and_apply_gradients(loss_of(model))
    expected = sum(each.weights.mean() for each in dynamics.signals.values())
    torch.testing.assert_close(result.meta_loss, 0.5 * expected)


def test_accumulation_equals_one_large_batch() -> None:
    model = build(size=32)
    torch.manual_seed(1)
    ids = torch.randint(VOCABULARY, (4, 5))
    with dynamics_of(model, mode="joint") as whole:
        assert whole.compute_and_apply_gradients(model(ids, labels=ids).loss).applied
    with dynamics_of(model, mode="joint", accumulation_steps=2) as parts:
        results = [
            parts.compute_and_apply_gradients(model(each, labels=each).loss)
            for each in ids.split(2)
        ]
    assert [each.applied for each in results] == [False, True]
    for stream in ("_optimizer", "_meta_optimizer"):
        pairs = zip(getattr(parts, stream).seen, getattr(whole, stream).seen, strict=True)
        for found, expected in pairs:
            torch.testing.assert_close(found, expected)


def test_padding_does_not_count() -> None:
    model = build()
    torch.manual_seed(1)
    ids = torch.randint(VOCABULARY, (2, 5))
    padded = torch.cat((ids, torch.randint(VOCABULARY, (2, 3))), 1)
    mask = torch.cat((torch.ones(2, 5), torch.zeros(2, 3)), 1)
    labels = torch.cat((ids, torch.full((2, 3), -100)), 1)
    for meta_loss in (Divergence(), Divergence(worth_over_tokens, "tokens_and_units"), Price()):
        with dynamics_of(model, meta_loss=meta_loss, mode="joint") as dynamics:
            short = dynamics.compute_and_apply_gradients(model(ids, labels=ids).loss).meta_loss
            long = dynamics.compute_and_apply_gradients(model(padded, mask, labels).loss).meta_loss
        torch.testing.assert_close(long, short)


def test_bf16_autocast() -> None:
    """In the same pass, token gradients are the second opinion."""
    model = build(size=16).float()
    with (
        torch.autocast("cpu", torch.bfloat16),
        torchfmri.token_gradients(model, "*.computation.weight") as tokens,
        dynamics_of(model) as dynamics,
    ):
        dynamics.compute_and_apply_gradients(loss_of(model))
    for key, signals in dynamics.signals.items():
        expected = tokens[f"{key.layer}.computation.weight"].norm(by="output")
        assert signals.cost.dtype == torch.float32
        assert signals.factors.g.dtype == torch.bfloat16
        # The weight's own product took x in bf16, too.
        torch.testing.assert_close(signals.cost, expected.float(), rtol=1e-2, atol=1e-12)
    assert all(torch.isfinite(each).all() for each in dynamics._meta_optimizer.seen)


@pytest.mark.parametrize("goodness", [worth, helpfulness, agreement])
def test_it_learns_under_bf16(goodness: Any) -> None:
    model = build(size=16).float()
    main = torch.optim.AdamW(computation_parameters(model), lr=1e-2)
    meta = torch.optim.AdamW(routing_parameters(model), lr=1e-3)
    losses = []
    with LearningDynamics(model, main, meta, meta_loss=Divergence(goodness)) as dynamics:
        for _ in range(15):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model)
            losses.append(float(dynamics.compute_and_apply_gradients(loss).loss))
    assert losses[-1] < 0.7 * losses[0]


# -- leaving no trace ------------------------------------------------------------------------


def hooks_of(model: nn.Module) -> int:
    return sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules())


def test_hooks_are_gone_also_after_an_error() -> None:
    model = build()
    attached = []

    def interrupted() -> None:
        attached.append(hooks_of(model))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), dynamics_of(model):
        interrupted()
    assert attached[0] > 0
    assert hooks_of(model) == 0


def test_other_passes_do_not_disturb() -> None:
    """Evaluation, and a forward pass whose loss is never used, between two steps."""
    model = build()
    alone = signals_of(model)
    with dynamics_of(model) as dynamics:
        with torch.no_grad():
            loss_of(model, seed=5)
        dynamics.compute_and_apply_gradients(loss_of(model))
        loss_of(model, seed=6)
        dynamics.compute_and_apply_gradients(loss_of(model))
    costs = {key.layer: each.cost for key, each in dynamics.signals.items()}
    assert all(torch.equal(costs[key.layer], each.cost) for key, each in alone.items())


def test_checkpointed_blocks() -> None:
    from torch.utils.checkpoint import checkpoint

    model = build()

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, ids: Tensor) -> Tensor:
            inner = self.inner
            hidden, prototypes = inner.embedding(ids), None
            context = inner._context(ids, None, None)
            for block in inner.blocks:
                hidden, prototypes = checkpoint(
                    block, hidden, context, prototypes, use_reentrant=False
                )
            return inner.head(inner.norm(hidden))

    wrapped, (torch_ids) = Checkpointed(), torch.randint(VOCABULARY, (2, 5))

    def loss(logits: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), torch_ids.flatten())

    with dynamics_of(model) as dynamics:
        dynamics.compute_and_apply_gradients(loss(model(torch_ids).logits))
    plain = dynamics.signals
    with dynamics_of(wrapped) as dynamics:
        dynamics.compute_and_apply_gradients(loss(wrapped(torch_ids)))
    for key, signals in plain.items():
        found = dynamics.signals[CallKey(f"inner.{key.layer}", 0)]
        torch.testing.assert_close(found.cost, signals.cost)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "both"}, "mode='both'"),
        ({"signal": "batch"}, "signal='batch'"),
        ({"meta_loss": None}, "without a meta loss"),
        ({"accumulation_steps": 0}, "accumulation_steps=0"),
    ],
)
def test_wrong_options_say_so(options: dict[str, Any], text: str) -> None:
    with pytest.raises(torchfmri.InspectionError, match=text):
        dynamics_of(build(), **options)


def test_wrong_use_says_so() -> None:
    model = build()
    with pytest.raises(torchfmri.InspectionError, match="inside `with LearningDynamics"):
        dynamics_of(model).compute_and_apply_gradients(loss_of(model))
    early = loss_of(model)
    with (
        dynamics_of(model) as dynamics,
        pytest.raises(torchfmri.InspectionError, match="No gradient came back"),
    ):
        dynamics.compute_and_apply_gradients(early)
    everything = Watched(list(model.parameters()))
    with pytest.raises(torchfmri.InspectionError, match="main optimizer holds prototypes"):
        LearningDynamics(model, everything, Watched(routing_parameters(model)))
    with pytest.raises(torchfmri.InspectionError, match="and 1 other"):
        LearningDynamics(
            model,
            Watched(computation_parameters(model)),
            Watched([*routing_parameters(model), model.head.weight]),
        )
    plain = nn.Linear(2, 2)
    with pytest.raises(torchfmri.InspectionError, match="has no SparseProtoLinear"):
        LearningDynamics(plain, Watched(list(plain.parameters())), Watched([plain.bias]))


# -- cost ------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The most elements that one tensor made meanwhile has."""

    elements = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        out = function(*arguments, **(keywords or {}))
        for each in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(each, Tensor):
                self.elements = max(self.elements, each.untyped_storage().nbytes() // each.itemsize)
        return out


def test_nothing_of_size_bsoi_is_formed() -> None:
    model, tokens, size = build(size=32), 10, 32
    for goodness in (worth, agreement, helpfulness):
        with dynamics_of(model, meta_loss=Divergence(goodness)) as dynamics, Largest() as seen:
            dynamics.compute_and_apply_gradients(loss_of(model))
        assert seen.elements < tokens * size * size / 4
    with Largest() as seen:  # the control: what the decision asked for
        x = torch.randn(2, 5, size)
        torch.einsum("bso,bsi->bsoi", x, x)
    assert seen.elements == tokens * size * size


def test_peak_memory_beside_the_plain_step() -> None:
    """Live bytes, counted operation by operation: the captured x, g and y, not their products."""
    from torchfmri._cost.live_memory import LiveMemory

    model = build(size=32)
    existing = [*model.parameters()]
    peaks = {}
    for watched in (False, True):
        with LiveMemory(None, existing) as memory:
            if watched:
                with dynamics_of(model) as dynamics:
                    dynamics.compute_and_apply_gradients(loss_of(model))
            else:
                loss_of(model).backward()
                model.zero_grad()
        peaks[watched] = memory.peak
    whole = 2 * 5 * 32 * 32 * 8 * 8  # (b, s, o, i) of the eight layers, in float64
    assert peaks[True] - peaks[False] < whole / 2


def test_signals_cost_little() -> None:
    """At most 1.2 of a plain step: thread time, interleaved, the median of the ratios."""
    torch.manual_seed(0)
    model = RoutingLanguageModel(RoutingConfig(VOCABULARY, hidden_size=128, blocks=2))
    main = torch.optim.AdamW(computation_parameters(model), fused=True)
    meta = torch.optim.AdamW(routing_parameters(model), fused=True)
    ids = torch.randint(VOCABULARY, (16, 22))

    def plain() -> None:
        model(ids, labels=ids).loss.backward()
        for each in (main, meta):
            each.step()
            each.zero_grad()

    def seconds(act: Any) -> float:
        begun = time.thread_time()
        act()
        return time.thread_time() - begun

    def signals() -> None:
        d.compute_and_apply_gradients(model(ids, labels=ids).loss)

    with LearningDynamics(model, main, meta, meta_loss=None, mode="joint", keep_signals=True) as d:
        ratios = []
        for _ in range(15):
            d._capture.__exit__()
            before = seconds(plain)
            d._capture.__enter__()
            ratios.append(seconds(signals) / before)
    assert sorted(ratios)[len(ratios) // 2] < 1.2
