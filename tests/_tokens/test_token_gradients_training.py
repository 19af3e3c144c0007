"""Token gradients in real training steps: checkpoints, mixed precision, accumulation, adapters.

The user's step must be bit for bit what it is without us, and what we say must not depend on how
the step is carried out.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, BATCH, LENGTH, Batch, tokens
from fused_layers import FusedRMSNorm, FusedSine
from oracles import numbers
from test_token_gradients_transformers import (
    assert_complete,
    build,
    cast,
    last_attention,
    loss_of,
    measured,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import torchfmri
from torchfmri._tokens.calls.gradients import TokenGradients

# The fast tier keeps half of the cases of each test; the slow tier runs the others.
pytestmark = [pytest.mark.usefixtures("waiting"), pytest.mark.one_in(2)]

KEEPS = ("factors", "norms")
# Position embeddings outside of a checkpoint, shared layers, experts, a state space, two stacks.
CHECKPOINTED = ("llama", "gpt2", "bert", "t5", "mixtral", "mamba", "gpt-oss", "gemma3")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small are slower on several threads than on one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def bits(tensor: Tensor | None) -> bytes | None:
    if tensor is None:
        return None
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def gradients_of(model: nn.Module) -> dict[str, bytes | None]:
    return {name: bits(each.grad) for name, each in model.named_parameters()}


def norms_of(found: TokenGradients) -> dict[str, Tensor]:
    """Every parameter's norms per token, by parameter and token axis."""
    return {
        f"{name} on {axis}": found.on(axis)[name].norm()
        for axis, names in found.axes.items()
        for name in names
    }


def assert_same_norms(
    one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = 1e-12
) -> None:
    assert one.keys() == other.keys()
    for name, each in one.items():
        scale = float(each.abs().max())
        assert float((each - other[name]).abs().max()) <= tolerance * scale, name


# -- checkpoints -----------------------------------------------------------------------------


def with_checkpoints(model: nn.Module, reentrant: bool) -> nn.Module:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return model


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
@pytest.mark.parametrize("name", CHECKPOINTED)
@pytest.mark.one_in(4)
def test_checkpoints_change_nothing(name: str, reentrant: bool, keep: str) -> None:
    batch = cast(ARCHITECTURES[name].batch(), torch.float64)
    if name in ("llama", "gpt-oss", "mixtral", "gemma3"):
        batch["use_cache"] = False
    # The routers' extra loss has no gradient in a reentrant checkpoint, whoever watches.
    changes = {"output_router_logits": False} if name in ("mixtral", "gpt-oss") else {}
    plain = norms_of(measured(build(name, last_attention(name), **changes), batch, keep=keep))
    model = with_checkpoints(build(name, last_attention(name), **changes), reentrant)
    loss_of(model, batch)().backward()
    unwatched = gradients_of(model)
    found = measured(model, batch, keep=keep)
    assert gradients_of(model) == unwatched
    assert_complete(found, model, 1e-6)  # norms in float32 are transformers' own
    assert_same_norms(plain, norms_of(found), 1e-7 if name in ("gemma3", "mamba") else 1e-10)


class Blocks(nn.Module):
    """Blocks of layers, each in a checkpoint; one Linear is called twice in every block."""

    def __init__(self, how: Callable[..., Any] | None) -> None:
        super().__init__()
        self.how = how
        self.embedding = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({
                "first": nn.Linear(8, 8), "norm": nn.LayerNorm(8), "last": nn.Linear(8, 8)
            })
            for _ in range(3)
        )  # fmt: skip
        self.inside: list[weakref.ref[Any]] = []

    def block(self, layers: Any, x: Tensor) -> Tensor:
        y = F.dropout(layers["first"](x), 0.25)
        y = layers["first"](torch.relu(y))
        z = layers["norm"](y)
        self.inside += [weakref.ref(each.untyped_storage()) for each in (y, z)]
        return x + layers["last"](z)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layers in self.blocks:
            x = self.block(layers, x) if self.how is None else self.how(self.block, layers, x)
        return x.square().mean()


def _nested(function: Any, layers: Any, x: Tensor) -> Tensor:
    def outer(layers: Any, x: Tensor) -> Tensor:
        return checkpoint(function, layers, x, use_reentrant=False)

    return checkpoint(outer, layers, x, use_reentrant=False)


CHECKPOINTS: dict[str, Callable[..., Any]] = {
    "reentrant": lambda *call: checkpoint(*call, use_reentrant=True),
    "not-reentrant": lambda *call: checkpoint(*call, use_reentrant=False),
    "nested": _nested,
    "no-random": lambda *call: checkpoint(*call, use_reentrant=False, preserve_rng_state=True),
}


def step_of_blocks(how: Callable[..., Any] | None, keep: str | None) -> tuple[Blocks, Any]:
    torch.manual_seed(0)
    model = Blocks(how).double()
    ids = torch.randint(20, (2, 5))
    torch.manual_seed(1)
    if keep is None:
        model(ids).backward()
        return model, None
    with torchfmri.token_gradients(model, keep=keep) as found:
        model(ids).backward()
    return model, found


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("how", CHECKPOINTS)
def test_checkpoints_of_torch(how: str, keep: str) -> None:
    _, expected = step_of_blocks(None, "factors")
    plain, _ = step_of_blocks(CHECKPOINTS[how], None)
    model, found = step_of_blocks(CHECKPOINTS[how], keep)
    assert gradients_of(model) == gradients_of(plain)
    assert_complete(found, model, 1e-12)
    assert_same_norms(norms_of(expected), norms_of(found), 1e-12)


@pytest.mark.parametrize("keep", ["norms", "voxels"])
@pytest.mark.parametrize("how", CHECKPOINTS)
@pytest.mark.one_in(4)
def test_norms_do_not_keep_what_a_checkpoint_lets_go(how: str, keep: Any) -> None:
    """After the forward pass nothing from inside a checkpoint is alive; without one it is."""
    torch.manual_seed(0)
    model = Blocks(CHECKPOINTS[how])
    ids = torch.randint(20, (2, 5))
    with torchfmri.token_gradients(model, keep=keep) as found:
        loss = model(ids)
        gc.collect()
        assert model.inside
        assert [each() for each in model.inside] == [None] * len(model.inside)
        loss.backward()
    assert not found.coverage().missing
    model.how = None
    model.inside.clear()
    loss = model(ids)
    assert any(each() is not None for each in model.inside)
    del loss


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
@pytest.mark.parametrize("name", ["mixtral", "mamba", "gpt-oss", "qwen3"])
@pytest.mark.one_in(4)
def test_norms_do_not_keep_what_layers_without_a_rule_read(name: str, reentrant: bool) -> None:
    """Experts and state spaces are run again: their arguments may not outlive the checkpoint."""
    model = with_checkpoints(build(name, last_attention(name), torch.float32), reentrant)
    kinds = ("Experts", "Mixer", "Router", "MLP")
    inner = [each for each in model.modules() if type(each).__name__.endswith(kinds)]
    inside: list[weakref.ref[Any]] = []

    def remember(module: nn.Module, arguments: Any, output: Any) -> None:
        seen = [each for each in (*arguments, output) if isinstance(each, Tensor)]
        inside.extend(weakref.ref(each.untyped_storage()) for each in seen)

    handles = [each.register_forward_hook(remember) for each in inner]
    with torchfmri.token_gradients(model, keep="norms") as found:
        loss = loss_of(model, ARCHITECTURES[name].batch())()
        gc.collect()
        alive = sum(each() is not None for each in inside)
        assert len(inside) >= 2
        assert alive == 0, f"{alive} of {len(inside)} tensors are alive"
        loss.backward()
    for handle in handles:
        handle.remove()
    assert_complete(found, model, 1e-4)


def live_bytes() -> int:
    gc.collect()
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in gc.get_objects()
        if type(each) in (Tensor, nn.Parameter) and each.layout == torch.strided
    }
    return sum(storages.values())


@pytest.mark.parametrize("keep", ["norms", "voxels"])
@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
@pytest.mark.one_in(4)
def test_norms_are_all_that_is_left(name: str, keep: str) -> None:
    """After the block a few numbers per token and parameter, and nothing of the pass."""
    model = build(name, last_attention(name), torch.float32)
    batch = ARCHITECTURES[name].batch()
    measured(model, batch)
    before = live_bytes()
    kept = measured(model, batch, keep=keep)  # here 64 units are all there are: one voxel
    count = sum(each.grad is not None for each in model.parameters())
    numbers = count * BATCH * LENGTH * 8
    assert live_bytes() - before < 6 * numbers
    del kept
    everything = measured(model, batch, keep="factors")
    assert live_bytes() - before > 6 * numbers  # so the comparison can fail
    del everything


# -- precision -------------------------------------------------------------------------------


def unpadded() -> Batch:
    ids = tokens()
    return {"input_ids": ids, "labels": ids}


def is_linear(rule: str) -> bool:
    return rule in ("linear", "conv1d_of_transformers")


@pytest.mark.parametrize("where", ["forward", "forward-and-backward"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "mixtral", "mamba", "qwen3-moe"])
def test_autocast(name: str, where: str) -> None:
    """The sum over tokens is `.grad`: bit for bit for Linear, to rounding for all others."""
    model = build(name, last_attention(name), torch.float32)
    batch = unpadded()

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, batch)()
            if where == "forward-and-backward":
                loss.backward()
        if where == "forward":
            loss.backward()

    step()
    unwatched = gradients_of(model)
    model.zero_grad()
    with torchfmri.token_gradients(model) as found:
        step()
    assert gradients_of(model) == unwatched
    assert_complete(found, model, 2e-2)
    weights = [
        row.name for row in found.coverage() if is_linear(row.rule) and row.name.endswith("weight")
    ]
    assert len(weights) >= 6 or name == "mamba"
    parameters = dict(model.named_parameters())
    for each in weights:
        assert bits(found[each].sum()) == bits(parameters[each].grad), each


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "mixtral", "t5"])
def test_a_model_in_bfloat16(name: str, keep: str) -> None:
    model = build(name, last_attention(name), torch.bfloat16)
    batch = cast(ARCHITECTURES[name].batch(), torch.bfloat16)
    found = measured(model, batch, keep=keep)
    assert_complete(found, model, 5e-2)
    single = measured(build(name, last_attention(name), torch.float32), batch)
    for axis, names in single.axes.items():
        for each in names:
            one, other = found.on(axis)[each].norm().float(), single.on(axis)[each].norm()
            apart = float((one - other).norm() / other.norm())
            assert apart < 0.2, (each, apart)


def test_a_scaled_loss_scales_every_norm() -> None:
    """As GradScaler does it: a power of two changes no other bit."""
    model, batch = build("qwen3", "sdpa", torch.float32), ARCHITECTURES["qwen3"].batch()
    plain = norms_of(measured(model, batch, keep="norms"))
    model.zero_grad()
    with torchfmri.token_gradients(model, keep="norms") as found:
        (loss_of(model, batch)() * 1024).backward()
    for name, each in norms_of(found).items():
        assert torch.equal(each, plain[name] * 1024), name


@pytest.mark.parametrize("keep", KEEPS)
def test_gradients_that_are_changed_inside_the_block(keep: str) -> None:
    """Unscaling, clipping, a step and zero_grad in the block: the residual is of what came."""
    model, batch = build("llama", "sdpa", torch.float32), ARCHITECTURES["llama"].batch()
    plain = norms_of(measured(model, batch, keep=keep))

    def unscale() -> None:
        for each in model.parameters():
            assert each.grad is not None
            each.grad.mul_(1 / 8)

    for change in (
        unscale,
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
        lambda: model.zero_grad(set_to_none=True),
        lambda: model.zero_grad(set_to_none=False),
    ):
        model.zero_grad(set_to_none=True)
        with torchfmri.token_gradients(model, keep=keep) as found:
            loss_of(model, batch)().backward()
            change()
        coverage = found.coverage()
        assert not coverage.missing
        assert coverage.residual < 1e-4
        assert_same_norms(plain, norms_of(found), 1e-6)


def test_a_step_inside_the_block() -> None:
    """The optimizer writes into the weights before anybody reads the factors."""
    batch = ARCHITECTURES["qwen3"].batch()
    plain = measured(build("qwen3", "sdpa"), batch)
    model = build("qwen3", "sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with torchfmri.token_gradients(model) as found:
        loss_of(model, batch)().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_norms(norms_of(plain), norms_of(found), 1e-12)
    assert found.coverage().residual < 1e-6


# -- accumulation ----------------------------------------------------------------------------


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_micro_batches_are_further_samples(name: str, keep: str) -> None:
    model = build(name, last_attention(name))
    parts: list[Batch] = []
    for seed, s in ((5, 9), (6, 6)):
        ids = tokens(length=s, seed=seed)
        parts.append({"input_ids": ids, "labels": ids})
    alone = [measured(model, part, keep=keep).norm() for part in parts]
    model.zero_grad()
    with torchfmri.token_gradients(model, keep=keep) as found:
        for part in parts:
            loss_of(model, part)().backward()
    assert_complete(found, model, 1e-6)
    together = found.norm()
    assert together.shape == (2 * BATCH, 9)
    assert torch.allclose(together[:BATCH], alone[0], rtol=1e-9)
    assert torch.allclose(together[BATCH:, :6], alone[1], rtol=1e-9)
    assert not together[BATCH:, 6:].any()


@pytest.mark.parametrize("keep", KEEPS)
def test_gradients_from_before_the_block_do_not_count(keep: str) -> None:
    model, batch = build("qwen3", "sdpa"), ARCHITECTURES["qwen3"].batch()
    plain = norms_of(measured(model, batch, keep=keep))
    with torchfmri.token_gradients(model, keep=keep) as found:  # `.grad` holds the first already
        loss_of(model, batch)().backward()
    assert found.coverage().residual < 1e-6
    assert_same_norms(plain, norms_of(found))


def test_one_backward_for_two_passes() -> None:
    """A model called twice, as for a preference loss: two samples after the other."""
    model = build("llama", "sdpa")
    parts = [{"input_ids": tokens(seed=k), "labels": tokens(seed=k)} for k in (1, 2)]
    with torchfmri.token_gradients(model) as found:
        sum(loss_of(model, part)() for part in parts).backward()
    assert_complete(found, model, 1e-6)
    alone = [measured(model, part).norm() for part in parts]
    assert torch.allclose(found.norm(), torch.cat(alone), rtol=1e-9)


# -- adapters, frozen layers, wrappers -------------------------------------------------------


class Lora(nn.Module):
    """W x + B A x with W frozen."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(0.1 * torch.randn(rank, base.in_features, dtype=base.weight.dtype))
        self.b = nn.Parameter(0.1 * torch.randn(base.out_features, rank, dtype=base.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.a.T) @ self.b.T


@pytest.mark.parametrize("keep", KEEPS)
def test_adapters_on_frozen_layers(keep: str) -> None:
    model = build("llama", "sdpa").requires_grad_(False)
    torch.manual_seed(2)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Lora(layer.self_attn.q_proj)
        layer.mlp.down_proj = Lora(layer.mlp.down_proj)
    batch = ARCHITECTURES["llama"].batch()
    found = measured(model, batch, keep=keep)
    trained = [name for name, each in model.named_parameters() if each.requires_grad]
    assert found.names == trained
    assert len(trained) == 8
    assert_complete(found, model, 1e-9)
    if keep == "factors":  # x and the gradient of the adapter's output, by hand
        name = "model.layers.1.mlp.down_proj"
        adapter = model.get_submodule(name)
        seen: dict[str, Tensor] = {}
        adapter.register_forward_hook(
            lambda module, arguments, output: seen.update(x=arguments[0], y=output)
        )
        loss = loss_of(model, batch)()
        (g,) = torch.autograd.grad(loss, seen["y"])
        low = seen["x"] @ adapter.a.T
        mask = batch["attention_mask"][..., None, None]
        expected = torch.einsum("bso,bsr->bsor", g, low) * mask
        assert torch.allclose(found[f"{name}.b"].materialise(), expected, rtol=1e-9, atol=1e-14)
        back = torch.einsum("bso,or->bsr", g, adapter.b)
        expected = torch.einsum("bsr,bsi->bsri", back, seen["x"]) * mask
        assert torch.allclose(found[f"{name}.a"].materialise(), expected, rtol=1e-9, atol=1e-14)


def test_frozen_layers_are_left_out() -> None:
    """The other layers keep their numbers, and frozen ones appear nowhere."""
    batch = ARCHITECTURES["qwen3"].batch()
    everything = norms_of(measured(build("qwen3", "sdpa"), batch))
    model = build("qwen3", "sdpa")
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    found = measured(model, batch)
    assert_complete(found, model, 1e-6)
    assert not any("layers.0" in name or "embed" in name for name in found.names)
    for name, each in norms_of(found).items():
        assert torch.allclose(each, everything[name], rtol=1e-12), name


def test_a_compiled_model_runs_as_it_is() -> None:
    """While watched it runs eagerly; its names have no prefix."""
    batch = ARCHITECTURES["llama"].batch()
    plain = norms_of(measured(build("llama", "sdpa"), batch))
    compiled = torch.compile(build("llama", "sdpa"), backend="eager")
    with torchfmri.token_gradients(compiled) as found:
        loss_of(compiled, batch)().backward()
    assert_same_norms(plain, norms_of(found))


@pytest.mark.parametrize("keep", KEEPS)
def test_generation_inside_the_block(keep: str) -> None:
    model, batch = build("qwen3", "sdpa", torch.float32), ARCHITECTURES["qwen3"].batch()
    plain = norms_of(measured(model, batch, keep=keep))

    def generated() -> Tensor:
        torch.manual_seed(1)
        prompt = tokens(length=4)
        return model.generate(prompt, max_new_tokens=3, do_sample=False)

    expected = generated()
    model.zero_grad()
    with torchfmri.token_gradients(model, keep=keep) as found:
        again = generated()
        loss_of(model, batch)().backward()
        generated()
    assert torch.equal(again, expected)
    assert_complete(found, model, 1e-4)
    assert_same_norms(plain, norms_of(found))


def test_a_wrapped_model_has_the_same_names() -> None:
    batch = ARCHITECTURES["llama"].batch()
    plain = measured(build("llama", "sdpa"), batch)
    wrapped = nn.DataParallel(build("llama", "sdpa"))
    found = measured(wrapped, batch)
    assert found.names == plain.names
    assert_same_norms(norms_of(plain), norms_of(found))


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("name", ["gpt2", "mixtral", "mamba", "t5", "vit"])
def test_nothing_is_left_behind(name: str, keep: str) -> None:
    """Bits of the step, hooks and random numbers; also after a pass that failed."""
    model = build(name, last_attention(name), torch.float32)
    batch = ARCHITECTURES[name].batch()
    loss_of(model, batch)().backward()
    plain, random = gradients_of(model), torch.get_rng_state()
    hooks = _hooks(model)
    measured(model, batch, keep=keep)
    assert gradients_of(model) == plain
    assert torch.equal(torch.get_rng_state(), random)
    assert _hooks(model) == hooks
    with (
        contextlib.suppress(ZeroDivisionError),
        torchfmri.token_gradients(model, keep=keep),
    ):
        loss_of(model, batch)()
        raise ZeroDivisionError
    assert _hooks(model) == hooks
    model.zero_grad(set_to_none=True)
    loss_of(model, batch)().backward()
    assert gradients_of(model) == plain


def _hooks(model: nn.Module) -> list[int]:
    found = [
        len(getattr(each, key, None) or ())
        for each in [*model.modules(), *model.parameters()]
        for key in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    ]
    every = torch.nn.modules.module
    return [*found, len(every._global_forward_pre_hooks), len(every._global_forward_hooks)]


@pytest.mark.parametrize("keep", ["factors", "norms", "voxels"])
@pytest.mark.parametrize("kind", [FusedRMSNorm, FusedSine])
def test_a_fused_layer_writes_into_the_gradient_of_its_output(
    kind: Any, keep: Any, waiting: None
) -> None:
    """With a rule, and run again, through a view; as exact as the same layer written out."""

    def run(fused: bool) -> TokenGradients:
        torch.manual_seed(0)
        layers = (nn.Linear(6, 8), kind(8, fused), nn.Linear(8, 4), kind(4, fused))
        model = nn.Sequential(*layers).double()
        with torchfmri.token_gradients(model, keep=keep) as tokens:
            model(numbers(2, 5, 6)).sin().sum().backward()
        return tokens

    plain, fused = run(False), run(True)
    assert fused.names == plain.names
    assert fused.coverage().residual < 1e-12
    for name in plain.names:
        gap = fused[name].norm() - plain[name].norm()
        assert float(gap.abs().max()) < 1e-12, name
