"""The gradients of a scan, each of its three kinds against a slow oracle in float64.

"position": retained gradients of every module's output, and a copy of every parameter for every
token. "cached": one step at a time on a new cache that is a constant. "token_loss": a new forward
pass for every token. The oracles run every sequence alone and without padding; the scan runs them
as one batch that is padded on both sides.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from architectures import tokens
from scan_oracles import (
    activations,
    build,
    dense_gradients,
    is_close,
    norm_over,
    output_gradients,
    outputs_of,
    summed_loss,
    voxels_of,
)
from torch import Tensor, nn
from transformer_copies import no_float32, token_gradients_by_copies
from transformers import DynamicCache

import torchfmri
from torchfmri import Scan
from torchfmri._scan.run.cached_pass import run_cached
from torchfmri._scan.run.gradient_pass import run_pass
from torchfmri._scan.run.learning_costs import _add_at
from torchfmri._scan.run.scan_loss import ScanLoss
from torchfmri._scan.run.scan_pass import ScanPass, Sequences
from torchfmri._scan.run.subject import ScanSubject, find_subject
from torchfmri._scan.run.token_loss_pass import _residual, run_token_losses

# The fast tier keeps half of the cases of each test; the slow tier runs the others.
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.one_in(2)]
RUN: dict[str, Callable[..., ScanPass]] = {
    "position": run_pass,
    "cached": run_cached,
    "token_loss": run_token_losses,
}
WIDTH, START = 11, 6
ROWS = (slice(0, 9), slice(4, 11))  # the columns of each sequence: padding on either side
VOXEL = 8
EXACT = 1e-10
DECODERS = ("llama", "qwen3", "gpt2", "gemma", "gemma2", "gemma3", "mistral", "phi", "phi3",
            "falcon", "opt", "mixtral", "qwen3-moe")  # fmt: skip


@pytest.fixture
def float64() -> Iterator[None]:
    """transformers computes norms and softmax in float32; here it does not."""
    with no_float32():
        yield


def double(name: str, **changes: Any) -> Any:
    return build(name, torch.float64, **{"experts": "eager", **changes})


def batch() -> Sequences:
    ids = tokens(length=WIDTH, seed=21)
    mask = torch.zeros_like(ids)
    for row, where in enumerate(ROWS):
        mask[row, where] = 1
    generated = (torch.arange(WIDTH) >= START).expand(2, -1) & mask.bool()
    return Sequences(ids * mask, mask, generated)


# -- truth ---------------------------------------------------------------------------------------


@dataclass
class RowTruth:
    """One sequence: layer -> (s, w) norms of units' gradients, parameter -> (s, *shape)."""

    outputs: dict[str, Tensor] = field(default_factory=dict)  # layer -> (s, w), calls in rms sense
    parameters: dict[str, Tensor] = field(default_factory=dict)


def units(several: list[Tensor]) -> Tensor:
    """Calls of a layer together: the norm over them, unit by unit."""
    total: Any = sum(each.double().square() for each in several)
    return torch.sqrt(total)


def by_position(model: Any, ids: Tensor, counts: Tensor) -> RowTruth:
    def run() -> Tensor:
        return summed_loss(model(ids).logits, ids, counts).sum()

    outputs = output_gradients(model, run, *ids.shape)
    found, _ = token_gradients_by_copies(model, run, 1, tolerance=1e-9)
    return RowTruth(
        {name: units(several)[0] for name, several in outputs.items() if several},
        {name: each[""][0] for name, each in found.items()},
    )


def by_step(model: Any, ids: Tensor, counts: Tensor) -> RowTruth:
    """Each token with a new cache, built without gradients from what came before it."""
    s = ids.shape[1]
    truth = RowTruth()
    for at in range(s - 1):
        if not counts[0, at + 1]:
            continue
        cache = DynamicCache(config=model.config)
        if at:
            with torch.no_grad():
                model(ids[:, :at], past_key_values=cache, use_cache=True)
        kept: dict[str, list[Tensor]] = {}
        with torch.enable_grad(), outputs_of(model, kept):
            output = model(ids[:, at : at + 1], past_key_values=cache, use_cache=True)
        logs = torch.log_softmax(output.logits[0, -1].double(), -1)
        loss = -logs[ids[0, at + 1]]
        wanted = [each for several in kept.values() for each in several if each.requires_grad]
        values = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
        gradients = {id(each): value for each, value in zip(wanted, values, strict=True)}
        for name, several in kept.items():
            own = [gradients.get(id(each)) for each in several]
            known = [each.reshape(1, -1) for each in own if each is not None]
            if known:
                put(truth.outputs, name, at, units(known)[0], s)
        for name, each in dense_gradients(model, loss).items():
            put(truth.parameters, name, at, each, s)
    return truth


def by_token_loss(model: Any, ids: Tensor, counts: Tensor) -> RowTruth:
    """Each token's loss with a forward pass of its own, over everything that it could see."""
    s = ids.shape[1]
    truth = RowTruth()
    for at in range(s - 1):
        if not counts[0, at + 1]:
            continue
        only = torch.zeros_like(counts)
        only[0, at + 1] = True

        def run(only: Tensor = only) -> Tensor:
            return summed_loss(model(ids).logits, ids, only).sum()

        for name, several in output_gradients(model, run, *ids.shape).items():
            if several:
                put(truth.outputs, name, at, units(several)[0].square().sum(0).sqrt(), s)
        for name, each in dense_gradients(model, run()).items():
            put(truth.parameters, name, at, each, s)
    return truth


def put(into: dict[str, Tensor], name: str, at: int, value: Tensor, s: int) -> None:
    if name not in into:
        into[name] = value.new_full((s, *value.shape), torch.nan)
    into[name][at] = value


TRUTH = {"position": by_position, "cached": by_step, "token_loss": by_token_loss}


def truths(per: str, model: Any, sequences: Sequences, kind: str = "generated") -> list[RowTruth]:
    found = []
    for row, where in enumerate(ROWS):
        ids = sequences.ids[row : row + 1, where]
        counts = sequences.generated[row : row + 1, where]
        counts = counts if kind == "generated" else torch.ones_like(counts)
        found.append(TRUTH[per](model, ids, counts))
    return found


# -- comparing -----------------------------------------------------------------------------------


def unit_axis(module: nn.Module, shape: torch.Size) -> int:
    """Which axis of a parameter (without tokens) is the layer's output."""
    turned = isinstance(module, nn.Embedding) or type(module).__name__ == "Conv1D"
    return 1 if turned and len(shape) == 2 else 0


def own_parameters(model: nn.Module, layer: str) -> list[str]:
    """The names of a layer's own parameters; a tied one belongs to the layer that has it first."""
    return [name for name, _ in model.named_parameters() if name.rpartition(".")[0] == layer]


def measure(
    subject: ScanSubject, sequences: Sequences, per: str, kind: str = "generated"
) -> ScanPass:
    return RUN[per](subject, sequences, ScanLoss(kind), voxel=VOXEL)


def assert_gradients(
    found: ScanPass,
    subject: ScanSubject,
    model: Any,
    expected: list[RowTruth],
    tolerance: float = EXACT,
) -> None:
    """Every layer, voxel and position: the gradient's norm and the learning cost."""
    assert found.gradient is not None
    assert found.cost is not None
    assert found.layer_cost is not None
    compared = {"gradient": 0, "voxel": 0, "cost": 0, "voxel cost": 0, "expert": 0}
    by_layer = found.gradient.by_layer()
    modules = dict(model.named_modules())
    for layer in subject.layers:
        for row, (truth, where) in enumerate(zip(expected, ROWS, strict=True)):
            place = (layer.name, row)
            ours = by_layer[row, where, layer.index]
            gradient = truth.outputs.get(layer.name)
            if gradient is not None:
                keep = ~gradient.isnan().any(-1)
                norm = gradient.square().sum(-1).sqrt()
                assert is_close(ours[keep], norm[keep], tolerance), ("gradient", *place)
                compared["gradient"] += 1
                for voxel, part in voxels_of(subject.anatomy, layer.name):
                    norm = gradient[:, part].square().sum(-1).sqrt()
                    ours = found.gradient.norms[row, where, voxel]
                    assert is_close(ours[keep], norm[keep], tolerance), ("voxel", voxel, *place)
                    compared["voxel"] += 1
            parameters = {
                name: truth.parameters[name]
                for name in own_parameters(model, layer.name)
                if name in truth.parameters
            }
            if not parameters:
                continue
            squares = [each.flatten(1).double().square().sum(-1) for each in parameters.values()]
            total: Any = sum(squares)
            ours = found.layer_cost[row, where, layer.index]
            keep = ~total.isnan()
            assert is_close(ours[keep], total.sqrt()[keep], tolerance), ("cost", *place)
            compared["cost"] += 1
            module = modules[layer.name]
            if isinstance(module, (nn.Linear, nn.Embedding)) or type(module).__name__ == "Conv1D":
                for voxel, part in voxels_of(subject.anatomy, layer.name):
                    total = 0
                    for each in parameters.values():
                        axis = 1 + unit_axis(module, each.shape[1:])
                        own = each.movedim(axis, 1)[:, part].flatten(1)
                        total = total + own.double().square().sum(-1)
                    ours = found.cost[row, where, voxel]
                    equal = is_close(ours[keep], total.sqrt()[keep], tolerance)
                    assert equal, ("voxel cost", *place)
                    compared["voxel cost"] += 1
            fused = [each for each in parameters.values() if each.ndim == 4]
            for number, voxel in enumerate(range(layer.experts.start, layer.experts.stop)):
                total = sum(each[:, number].flatten(1).double().square().sum(-1) for each in fused)
                ours = found.cost[row, where, voxel]
                assert is_close(ours[keep], total.sqrt()[keep], tolerance), ("expert", *place)
                compared["expert"] += 1
    for kind, count in compared.items():
        if kind != "expert":
            assert count > 20, (kind, count)
    has_experts = any(layer.experts.stop > layer.experts.start for layer in subject.layers)
    assert bool(compared["expert"]) == has_experts


# -- against the oracles -------------------------------------------------------------------------


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", DECODERS)
def test_position_gradients(name: str) -> None:
    model, sequences = double(name), batch()
    subject = find_subject(model, "*", sequences.ids, VOXEL)
    found = measure(subject, sequences, "position")
    assert_gradients(found, subject, model, truths("position", model, sequences))
    assert found.residual is not None
    assert found.residual < EXACT


@pytest.mark.usefixtures("float64")
def test_position_gradients_of_a_recurrent_model() -> None:
    """Mamba: without padding on the right, which a state would read."""
    model = double("mamba")
    ids = tokens(length=WIDTH, seed=21)
    generated = (torch.arange(WIDTH) >= START).expand(2, -1)
    sequences = Sequences(ids, torch.ones_like(ids), generated)
    subject = find_subject(model, "*", ids, VOXEL)
    found = measure(subject, sequences, "position")
    assert found.gradient is not None
    assert found.layer_cost is not None
    by_layer = found.gradient.by_layer()
    for row in range(2):
        truth = by_position(model, ids[row : row + 1], generated[row : row + 1])
        for layer in subject.layers:
            if layer.name in truth.outputs:
                norm = truth.outputs[layer.name].square().sum(-1).sqrt()
                assert is_close(by_layer[row, :, layer.index], norm, EXACT), layer.name
            own = [
                truth.parameters[name].flatten(1).square().sum(-1)
                for name in own_parameters(model, layer.name)
                if name in truth.parameters
            ]
            if own:
                total: Any = sum(own)
                ours = found.layer_cost[row, :, layer.index]
                assert is_close(ours, total.sqrt(), EXACT), layer.name


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.one_in(3)
def test_cached_gradients(name: str) -> None:
    model, sequences = double(name), batch()
    subject = find_subject(model, "*", sequences.ids, VOXEL)
    found = measure(subject, sequences, "cached")
    assert_gradients(found, subject, model, truths("cached", model, sequences))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "qwen3-moe", "phi"])
def test_token_loss_gradients(name: str) -> None:
    model, sequences = double(name), batch()
    subject = find_subject(model, "*", sequences.ids, VOXEL)
    found = measure(subject, sequences, "token_loss")
    assert_gradients(found, subject, model, truths("token_loss", model, sequences))
    assert found.residual is not None
    assert found.residual < EXACT


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("per", RUN)
@pytest.mark.one_in(3)
def test_the_loss_of_all_tokens(per: str) -> None:
    model, sequences = double("qwen3"), batch()
    subject = find_subject(model, "*", sequences.ids, VOXEL)
    found = measure(subject, sequences, per, "all")
    assert_gradients(found, subject, model, truths(per, model, sequences, "all"))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("per", RUN)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.one_in(3)
def test_tied_and_untied_embeddings(name: str, tied: bool, per: str) -> None:
    """A tied weight's cost is of both uses together, cross term included."""
    model, sequences = double(name, tie_word_embeddings=tied), batch()
    assert (model.get_input_embeddings().weight is model.lm_head.weight) is tied
    subject = find_subject(model, "*", sequences.ids, VOXEL)
    found = measure(subject, sequences, per)
    assert_gradients(found, subject, model, truths(per, model, sequences))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ["qwen3", "gpt2", "mixtral"])
def test_the_comparison_can_fail(name: str) -> None:
    """Two tokens exchanged, and another kind of gradient, are noticed."""
    model, sequences = double(name), batch()
    subject = find_subject(model, "*", sequences.ids, VOXEL)
    found = measure(subject, sequences, "position")
    expected = truths("position", model, sequences)
    for each in expected[0].outputs.values():
        each[[5, 6]] = each[[6, 5]]
    with pytest.raises(AssertionError, match="gradient"):
        assert_gradients(found, subject, model, expected)
    expected = truths("position", model, sequences)
    for each in expected[0].parameters.values():
        each[[5, 6]] = each[[6, 5]]
    with pytest.raises(AssertionError, match="cost"):
        assert_gradients(found, subject, model, expected)
    with pytest.raises(AssertionError):
        assert_gradients(found, subject, model, truths("cached", model, sequences))


# -- modules that are called several times -------------------------------------------------------


class Twice(nn.Module):
    """Ids -> logits through one block that is called twice, the head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(67, 16)
        self.block = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, ids: Tensor) -> Any:
        x = self.embedding(ids)
        for _ in range(2):
            x = x + torch.tanh(self.block(self.norm(x)).cumsum(1))
        return x @ self.embedding.weight.T


@pytest.mark.parametrize("per", ["position", "token_loss"])
def test_a_module_that_is_called_twice(per: str) -> None:
    model = Twice().double()
    ids = tokens(length=WIDTH, seed=21)
    generated = (torch.arange(WIDTH) >= START).expand(2, -1)
    sequences = Sequences(ids, torch.ones_like(ids), generated)
    subject = find_subject(model, "*", ids, VOXEL)
    found = measure(subject, sequences, per)
    assert found.gradient is not None
    assert found.layer_cost is not None
    index = {layer.name: layer.index for layer in subject.layers}
    by_layer = found.gradient.by_layer()
    if per == "token_loss":
        for row in range(2):
            for at in range(START - 1, WIDTH - 1):
                only = torch.zeros_like(generated[:1])
                only[0, at + 1] = True
                alone = ids[row : row + 1]

                def run(only: Tensor = only, alone: Tensor = alone) -> Tensor:
                    return summed_loss(model(alone), alone, only).sum()

                outputs = output_gradients(model, run, 1, WIDTH)
                dense = dense_gradients(model, run())
                for layer in ("block", "norm", "embedding"):
                    norm = norm_over(outputs[layer]).norm()
                    ours = by_layer[row, at, index[layer]]
                    assert is_close(ours[None], norm[None], EXACT), layer
                    cost = torch.stack(
                        [dense[name].norm() for name in own_parameters(model, layer)]
                    ).norm()
                    ours = found.layer_cost[row, at, index[layer]]
                    assert is_close(ours[None], cost[None], EXACT), layer
        return

    def whole() -> Tensor:
        return summed_loss(model(ids), ids, generated).sum()

    outputs = output_gradients(model, whole, 2, WIDTH)
    for layer in ("block", "norm", "embedding"):
        assert is_close(by_layer[..., index[layer]], norm_over(outputs[layer]), EXACT), layer
    # block: sum over its calls of g (x) x, the cross term included.
    inputs: list[Tensor] = []
    handle = model.block.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    whole()
    handle.remove()
    weight: Any = sum(
        torch.einsum("bso,bsi->bsoi", g, x.detach())
        for g, x in zip(outputs["block"], inputs, strict=True)
    )
    bias: Any = sum(outputs["block"])
    cost = (weight.flatten(2).square().sum(-1) + bias.square().sum(-1)).sqrt()
    assert is_close(found.layer_cost[..., index["block"]], cost, EXACT)


@pytest.mark.usefixtures("float64")
def test_layers_that_a_model_shares() -> None:
    """ALBERT: one layer in the place of three, an encoder with the loss at each own position."""
    model = double("albert")
    ids = tokens(length=WIDTH, seed=21)
    sequences = Sequences(ids, torch.ones_like(ids), torch.zeros_like(ids).bool())
    subject = find_subject(model, "*", ids, VOXEL)
    found = run_pass(subject, sequences, ScanLoss("all", causal=False), voxel=VOXEL)
    assert found.gradient is not None
    assert found.layer_cost is not None

    def run() -> Tensor:
        logs = torch.log_softmax(model(ids).logits, -1)
        return -logs.gather(-1, ids[..., None]).sum()

    outputs = output_gradients(model, run, 2, WIDTH)
    parameters, _ = token_gradients_by_copies(model, run, 2)
    by_layer = found.gradient.by_layer()
    shared = [layer for layer in subject.layers if layer.calls == 3]
    assert len(shared) > 5
    for layer in shared:
        if outputs.get(layer.name):
            ours = by_layer[..., layer.index]
            assert is_close(ours, norm_over(outputs[layer.name]), EXACT), layer.name
        own = [
            parameters[name][""].flatten(2).square().sum(-1)
            for name in own_parameters(model, layer.name)
            if name in parameters
        ]
        if own:
            total: Any = sum(own)
            assert is_close(found.layer_cost[..., layer.index], total.sqrt(), EXACT), layer.name


# -- the identities ------------------------------------------------------------------------------


def last_block(model: Any) -> tuple[list[str], list[str]]:
    """Layers of a Qwen3 in which the three kinds are one, and layers in which they are not."""
    names = [name for name, each in model.named_modules() if isinstance(each, nn.Linear)]
    same = [
        name
        for name in names
        if name == "lm_head"
        or (name.startswith("model.layers.1.") and not name.endswith(("k_proj", "v_proj")))
    ]
    return same, [name for name in names if name not in same]


@pytest.mark.usefixtures("float64")
@pytest.mark.slow
def test_where_the_three_kinds_are_one() -> None:
    model = double("qwen3")
    ids = tokens(length=WIDTH, seed=21)
    sequences = Sequences(ids, torch.ones_like(ids), torch.zeros_like(ids).bool())
    subject = find_subject(model, "*", ids, VOXEL)
    found = {per: measure(subject, sequences, per, "all") for per in RUN}
    index = {layer.name: layer.index for layer in subject.layers}
    same, other = last_block(model)
    assert len(same) == 6
    assert len(other) == 9
    for layer in same:
        for values in (
            [each.layer_cost[:, :-1, index[layer]] for each in found.values()],  # type: ignore[index]
            [each.gradient.by_layer()[:, :-1, index[layer]] for each in found.values()],  # type: ignore[union-attr]
        ):
            assert is_close(values[1], values[0], EXACT), layer
            assert is_close(values[2], values[0], EXACT), layer
    for layer in other:
        one, two, three = (each.layer_cost[:, :-1, index[layer]] for each in found.values())  # type: ignore[index]
        assert not is_close(two, one, 1e-3), layer
        assert not is_close(three, one, 1e-3), layer
        assert not is_close(three, two, 1e-3), layer


@pytest.mark.usefixtures("float64")
def test_what_adds_up_to_grad() -> None:
    """Positions do, token losses do, cached steps do not: what their checks speak of."""
    model = double("qwen3")
    ids = tokens(length=WIDTH, seed=21, batch=1)
    counts = torch.ones_like(ids).bool()
    whole = dense_gradients(model, summed_loss(model(ids).logits, ids, counts).sum())
    sums = {
        per: {
            name: each.nan_to_num().sum(0)
            for name, each in TRUTH[per](model, ids, counts).parameters.items()
        }
        for per in TRUTH
    }
    for name, gradient in whole.items():
        assert is_close(sums["position"][name], gradient, EXACT), name
        assert is_close(sums["token_loss"][name], gradient, EXACT), name
    far = [
        float((sums["cached"][name] - gradient).norm() / gradient.norm())
        for name, gradient in whole.items()
        if name.startswith("model.layers.0.")
    ]
    assert min(far) > 0.01


def test_the_residual_sees_a_gradient_that_is_not_the_tokens_sum() -> None:
    """A penalty on a weight is no token's."""
    model = Twice()
    ids = tokens(length=WIDTH, seed=21)

    def penalised(output: Any, ids: Tensor, generated: Tensor) -> Tensor:
        return output.square().mean() + 0.1 * model.block.weight.square().sum()

    right = torchfmri.scan(model, None, ids, 0, loss=lambda output, *_: output.square().mean())
    wrong = torchfmri.scan(model, None, ids, 0, loss=penalised)
    assert right[0].checks["gradient_residual"] < 1e-5
    assert wrong[0].checks["gradient_residual"] > 1e-2


@pytest.mark.parametrize("name", ["opt", "gpt2"])
def test_a_gradient_that_is_zero_but_for_rounding_is_no_residual(name: str) -> None:
    """The bias of attention keys moves nothing: what remains of its gradient is noise alone."""
    model = build(name)
    scan = torchfmri.scan(model, None, tokens(length=WIDTH, seed=21)[0], 3, per="token_loss")
    assert scan.only.checks["gradient_residual"] < 1e-5


def test_the_residual_of_token_losses_can_be_large() -> None:
    """Only what is small beside all the others is measured against those."""
    parts, whole = torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor(3.0)
    right, noise = (parts, whole), (1e-9 * parts, -1e-9 * whole)
    assert _residual([right, noise], torch.float32) < 1e-4
    assert _residual([noise], torch.float32) == pytest.approx(2.0)
    assert _residual([right, (0.01 * parts, 0.005 * whole)], torch.float32) == pytest.approx(0.5)
    assert _residual([], torch.float32) is None


@pytest.mark.usefixtures("float64")
def test_the_weight_of_a_gated_norm() -> None:
    """Mamba 2 norms x times a gate: the learning cost is that of what it really computes."""
    model = build("mamba2", torch.float64)
    ids = tokens(length=WIDTH, seed=21)[:1]
    scan = torchfmri.scan(model, None, ids, 0)
    layer = "backbone.layers.1.mixer.norm"
    counts = torch.ones_like(ids, dtype=torch.bool)

    def run() -> Tensor:
        return summed_loss(model(ids).logits, ids, counts).sum()

    gradient = output_gradients(model, run, *ids.shape)[layer][0]
    scaled = activations(model, ids)[layer][0] / model.get_submodule(layer).weight  # y = w * hat
    expected = (gradient * scaled.detach()).norm(dim=-1)[0].detach()
    ours = torch.from_numpy(scan.only.layers["learning_cost"][:-1, scan.layers.index(layer)])
    assert is_close(ours, expected[:-1], 1e-6)
    assert scan.only.checks["gradient_residual"] < 1e-10


class Stacked(nn.Module):
    """Two parameters that hold matrices as rows, as experts are held: four of them, and two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.four = nn.Parameter(torch.randn(4, 8, 8))
        self.two = nn.Parameter(torch.randn(2, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        first = torch.einsum("bsi,eio->bso", x, self.four)
        return torch.einsum("bsi,eio->bso", first.tanh(), self.two)


@pytest.mark.parametrize("per", ["position", "token_loss"])
def test_stacks_of_different_numbers_in_one_layer(per: Any) -> None:
    """As Funnel's attention has them; the voxels are those of the larger one."""
    model = nn.Sequential(nn.Embedding(67, 8), Stacked(), nn.Linear(8, 67)).double()
    ids = tokens(length=WIDTH, seed=21)[:1]
    scan = torchfmri.scan(model, None, ids, 0, per=per)
    assert scan.only.checks["gradient_residual"] < 1e-10
    column = scan.layers.index("1")
    cost = torch.from_numpy(scan.only.layers["learning_cost"][:-1, column])
    assert cost.isfinite().all()
    if per == "token_loss":
        counts = torch.ones_like(ids, dtype=torch.bool)
        for at in range(WIDTH - 1):
            loss = summed_loss(model(ids), ids, counts)[0, at]
            dense = dense_gradients(model, loss)
            expected = (dense["1.four"].square().sum() + dense["1.two"].square().sum()).sqrt()
            assert float(cost[at]) == pytest.approx(float(expected), rel=1e-6)


# -- a model as it comes -------------------------------------------------------------------------


def scanned(model: nn.Module, per: str | None, **options: Any) -> Scan:
    rows = [tokens(length=7).tolist()[0], tokens(length=7).tolist()[1][3:]]
    return torchfmri.scan(model, None, rows, 4, per=per, **options)  # type: ignore[arg-type]


def assert_same(one: Scan, other: Scan, tolerance: float = 0.0) -> None:
    assert one.layers == other.layers
    for a, b in zip(one, other, strict=True):
        assert a.tokens.ids.tolist() == b.tokens.ids.tolist()
        for kind in ("layers", "voxels"):
            ours, theirs = getattr(a, kind), getattr(b, kind)
            assert {*ours} == {*theirs}
            for metric in ours:
                np.testing.assert_allclose(
                    ours[metric], theirs[metric], rtol=tolerance, atol=tolerance,
                    err_msg=f"{kind} {metric}",
                )  # fmt: skip


@pytest.mark.parametrize("per", RUN)
@pytest.mark.parametrize(
    ("name", "frozen"),
    [("llama", "all"), ("llama", "half"), ("gpt2", "embedding"), ("qwen3-moe", "all")],
)
@pytest.mark.one_in(3)
def test_a_frozen_model_is_scanned_as_any_other(name: str, frozen: str, per: str) -> None:
    expected = scanned(build(name), per)
    model = build(name)
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(frozen == "half" and number % 2 == 0)
    if frozen == "embedding":
        model.requires_grad_(True)
        model.get_input_embeddings().requires_grad_(False)
    flags = [each.requires_grad for each in model.parameters()]
    assert_same(scanned(model, per), expected, 2e-6)
    assert [each.requires_grad for each in model.parameters()] == flags
    assert all(each.grad is None for each in model.parameters())


@pytest.mark.parametrize("per", [None, *RUN])
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.one_in(3)
def test_a_model_in_the_middle_of_training(name: str, autocast: bool, per: str | None) -> None:
    """Dropout, gradients that wait for a step, an optimizer with state, checkpointing."""
    model = build(name)
    model.train()
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = tokens(length=7)
    for step in range(2):
        model(ids, labels=ids).loss.backward()
        if not step:
            optimizer.step()
            optimizer.zero_grad()
    twin = copy.deepcopy(model).eval()
    twin.gradient_checkpointing_disable()
    twin.zero_grad(set_to_none=True)
    gradients = [(each.grad, each.grad.clone()) for each in model.parameters()]
    state = copy.deepcopy(optimizer.state_dict())
    with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
        ours, expected = scanned(model, per), scanned(twin, per)
        assert torch.is_autocast_enabled("cpu") is autocast
    assert_same(ours, expected)
    assert model.training
    assert model.is_gradient_checkpointing
    for parameter, (gradient, before) in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is gradient
        assert torch.equal(gradient, before)
    after = optimizer.state_dict()["state"]
    for key, each in state["state"].items():
        assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(after[key][k]))
                   for k, v in each.items())  # fmt: skip


def test_an_optimizer_in_the_backward_pass_does_not_step() -> None:
    model = build("llama")
    expected = scanned(model, "position")
    steps: list[int] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: steps.append(1))
    assert_same(scanned(model, "position"), expected, 1e-5)
    assert not steps


@pytest.mark.parametrize("per", RUN)
@pytest.mark.one_in(3)
def test_the_public_scan_has_these_numbers(per: str) -> None:
    """What the door gives is what the passes found, cut into sequences, in float32."""
    model = build("qwen3", torch.float64)
    rows = [tokens(length=7).tolist()[0], tokens(length=7).tolist()[1][3:]]
    scan = torchfmri.scan(model, None, rows, 4, per=per, voxel=VOXEL, eos_token_id=66)  # type: ignore[arg-type]
    ids = torch.zeros(2, 11).long()
    mask = torch.zeros_like(ids)
    for row, each in enumerate(scan):
        ids[row, 11 - len(each) :] = torch.from_numpy(each.tokens.ids)
        mask[row, 11 - len(each) :] = 1
    generated = (torch.arange(11) >= 7).expand(2, -1)
    subject = find_subject(model, "*", ids, VOXEL)
    found = RUN[per](subject, Sequences(ids, mask, generated), ScanLoss("generated"), voxel=VOXEL)
    assert found.gradient is not None
    for row, each in enumerate(scan):
        where = slice(11 - len(each), 11)
        lost = len(each) - 5 if per != "position" else 0  # positions before the first loss
        for metric, voxels, layers in (
            ("gradient", found.gradient.norms, found.gradient.by_layer()),
            ("learning_cost", found.cost, found.layer_cost),
        ):
            assert voxels is not None
            assert layers is not None
            for ours, theirs in ((each.voxels, voxels), (each.layers, layers)):
                assert np.isnan(ours[metric][-1]).all()  # nothing follows the last token
                assert np.isnan(ours[metric][:lost]).all()
                np.testing.assert_allclose(
                    ours[metric][lost:-1], theirs[row, where][lost:-1].numpy(), rtol=1e-6
                )
        assert np.isfinite(each.layers["gradient"][lost:-1]).any(1).all()


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3-moe"])
@pytest.mark.parametrize("per", RUN)
def test_bfloat16(name: str, per: str) -> None:
    """Within rounding of the same weights in float64."""
    model = build(name, torch.bfloat16)
    wide = double(name)
    wide.load_state_dict(model.state_dict())
    sequences = batch()
    ours, theirs = (
        measure(find_subject(each, "*", sequences.ids, VOXEL), sequences, per)
        for each in (model, wide)
    )
    assert ours.gradient is not None
    assert theirs.gradient is not None
    kept = sequences.generated.clone()
    kept[:, :-1] = sequences.generated[:, 1:]
    kept[:, -1] = False
    for one, other in (
        (ours.gradient.by_layer(), theirs.gradient.by_layer()),
        (ours.layer_cost, theirs.layer_cost),
    ):
        assert one is not None
        assert other is not None
        one, other = one[kept], other[kept]
        assert torch.equal(one.isnan(), other.isnan())
        apart = ((one - other).abs() / other.nan_to_num().amax(0)).nan_to_num()
        assert float(apart.median()) < 0.02
        assert float(apart.max()) < 0.5


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
@pytest.mark.parametrize("per", ["position", "cached"])
@pytest.mark.one_in(3)
def test_every_implementation_of_experts(name: str, experts: str, per: str) -> None:
    """The kernels that models really use have no float64: the same numbers in float32."""
    sequences = batch()
    wide = double(name)
    with no_float32():
        expected = truths(per, wide, sequences)
    model = build(name, experts=experts)
    subject = find_subject(model, "*", sequences.ids, VOXEL)
    assert any(layer.experts.stop - layer.experts.start == 4 for layer in subject.layers)
    assert_gradients(measure(subject, sequences, per), subject, model, expected, 1e-4)


@pytest.mark.parametrize("parts", [(torch.nan, 3.0), (3.0, torch.nan), (2.0, 3.0)])
def test_a_gradient_that_is_nan_stays_nan_when_others_are_added(parts: tuple[float, ...]) -> None:
    """An entry to which nothing was added is nan too, and begins at zero."""
    sums, has_some = torch.full((2,), torch.nan), torch.zeros(2, dtype=torch.bool)
    for each in parts:
        _add_at(sums, has_some, 1, torch.tensor(each))
    torch.testing.assert_close(sums, torch.tensor([torch.nan, parts[0] + parts[1]]), equal_nan=True)
