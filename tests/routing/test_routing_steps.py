"""Steps of LearningDynamics in two halves: clipping and scaling against steps by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchfmri
from torchfmri.routing import (
    LearningDynamics,
    RoutingConfig,
    RoutingLanguageModel,
    SparseProtoLinear,
    computation_parameters,
    routing_parameters,
)

pytestmark = pytest.mark.usefixtures("one_thread")
RATE = 0.5


def build(dtype: torch.dtype = torch.float64) -> RoutingLanguageModel:
    torch.manual_seed(0)
    return RoutingLanguageModel(RoutingConfig(11, hidden_size=8, blocks=2, heads=2)).to(dtype)


def loss_of(model: nn.Module, seed: int = 1) -> Tensor:
    ids = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(seed))
    return model(ids, labels=ids).loss


def dynamics_of(model: nn.Module, **options: Any) -> LearningDynamics:
    main = torch.optim.SGD(computation_parameters(model), lr=RATE)
    meta = torch.optim.SGD(routing_parameters(model), lr=RATE)
    return LearningDynamics(model, main, meta, **options)


def gradients_of(model: nn.Module, passes: int = 1, **options: Any) -> dict[str, Tensor]:
    """The gradients of a step without clipping and scaling, told by what SGD did with them."""
    twin = copy.deepcopy(model)
    with dynamics_of(twin, accumulation_steps=passes, **options) as dynamics:
        for seed in range(passes):
            dynamics.compute_and_apply_gradients(loss_of(twin, 1 + seed))
    after = dict(twin.named_parameters())
    return {
        name: (before.detach() - after[name].detach()) / RATE
        for name, before in model.named_parameters()
    }


def clipped(gradients: dict[str, Tensor], most: float) -> dict[str, Tensor]:
    total = torch.sqrt(sum((each.square().sum() for each in gradients.values()), torch.zeros(())))
    assert total > 2 * most, "the clipping must bite"
    return {name: each * (most / (total + 1e-6)) for name, each in gradients.items()}


def assert_stepped(
    model: nn.Module, start: nn.Module, gradients: dict[str, Tensor], tolerance: float = 1e-12
) -> None:
    before = dict(start.named_parameters())
    for name, parameter in model.named_parameters():
        expected = before[name].detach() - RATE * gradients[name]
        torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("mode", ["strict", "joint"])
@pytest.mark.parametrize("passes", [1, 3])
def test_clipping_between_the_halves_is_clipping_by_hand(mode: str, passes: int) -> None:
    start, model = build(), build()
    expected = clipped(gradients_of(start, passes, mode=mode), 0.01)
    with dynamics_of(model, mode=mode, accumulation_steps=passes) as dynamics:
        for seed in range(passes):
            result = dynamics.compute_gradients(loss_of(model, 1 + seed))
            assert not result.applied
            assert dynamics.ready == (seed == passes - 1)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        assert dynamics.apply_gradients()
    assert dynamics.step == 1
    assert not dynamics.ready
    assert_stepped(model, start, expected)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_step_by_hand_without_a_meta_loss() -> None:
    """Nothing of ours in the expected step: backward, clip, step."""
    model, hand = build(), build()
    optimizer = torch.optim.SGD(hand.parameters(), lr=RATE)
    loss_of(hand).backward()
    nn.utils.clip_grad_norm_(hand.parameters(), 0.01)
    optimizer.step()
    with dynamics_of(model, mode="joint", meta_loss=None) as dynamics:
        dynamics.compute_gradients(loss_of(model))
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        dynamics.apply_gradients()
    for one, two in zip(model.parameters(), hand.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("mode", ["strict", "joint"])
@pytest.mark.parametrize("signal", ["token", "aggregate"])
@pytest.mark.parametrize("passes", [1, 2])
def test_scaled_step_is_the_step_without_a_scaler(mode: str, signal: str, passes: int) -> None:
    start, model = build(), build()
    options: dict[str, Any] = {"mode": mode, "signal": signal}
    expected = gradients_of(start, passes, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with dynamics_of(model, scaler=scaler, accumulation_steps=passes, **options) as dynamics:
        for seed in range(passes):
            result = dynamics.compute_and_apply_gradients(loss_of(model, 1 + seed))
    assert result.applied
    assert result.loss < 100, "it is told without the scale"
    assert_stepped(model, start, expected)


def test_scaled_gradients_are_clipped_without_the_scale() -> None:
    start, model = build(), build()
    expected = clipped(gradients_of(start), 0.01)
    with dynamics_of(model, scaler=torch.amp.GradScaler("cpu", init_scale=512.0)) as dynamics:
        dynamics.compute_gradients(loss_of(model))
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        assert dynamics.apply_gradients()
    assert_stepped(model, start, expected)


def test_scaler_skips_a_step_that_overflows() -> None:
    start, model = build(), build()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with dynamics_of(model, scaler=scaler) as dynamics:
        result = dynamics.compute_and_apply_gradients(loss_of(model) * torch.inf)
        assert not result.applied
        assert dynamics.step == 0
        assert scaler.get_scale() == 512
        for one, two in zip(model.parameters(), start.parameters(), strict=True):
            assert torch.equal(one, two)
        assert dynamics.compute_and_apply_gradients(loss_of(model)).applied
    assert_stepped(model, start, gradients_of(start))


def test_signals_of_half_precision_do_not_carry_the_scale() -> None:
    def signals(scaler: torch.amp.GradScaler | None) -> Any:
        model = build(torch.float32)
        with dynamics_of(model, scaler=scaler, keep_signals=True) as dynamics:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loss_of(model)
            dynamics.compute_gradients(loss)
            return dynamics.signals

    plain = signals(None)
    scaled = signals(torch.amp.GradScaler("cpu", init_scale=256.0))
    assert plain.keys() == scaled.keys()
    for key, each in plain.items():
        assert scaled[key].relevance.dtype == torch.float32
        torch.testing.assert_close(
            scaled[key].relevance, each.relevance.float(), rtol=5e-3, atol=1e-6
        )


def test_halves_out_of_order_are_refused() -> None:
    model = build()
    with dynamics_of(model, accumulation_steps=2) as dynamics:
        with pytest.raises(torchfmri.InspectionError, match="no gradients to apply"):
            dynamics.apply_gradients()
        dynamics.compute_gradients(loss_of(model))
        with pytest.raises(torchfmri.InspectionError, match=r"2 times .* \(accumulation_steps=2\)"):
            dynamics.apply_gradients()
        dynamics.compute_gradients(loss_of(model))
        with pytest.raises(torchfmri.InspectionError, match="were not applied"):
            dynamics.compute_gradients(loss_of(model))
        dynamics.apply_gradients()


@pytest.mark.parametrize("loss", [torch.ones(3, requires_grad=True), 1.5, None])
def test_loss_that_is_no_number_is_refused(loss: Any) -> None:
    with (
        dynamics_of(build()) as dynamics,
        pytest.raises(torchfmri.InspectionError, match="The loss must be one number"),
    ):
        dynamics.compute_and_apply_gradients(loss)


def test_something_else_than_a_scaler_is_refused() -> None:
    with pytest.raises(torchfmri.InspectionError, match="scaler='x': give torch"):
        dynamics_of(build(), scaler="x")


# --- the output of the computation, by its name -------------------------------------------------


def test_computation_output_can_be_watched_by_its_name() -> None:
    model = build()
    inspector = torchfmri.Inspector(model, keep="tensors")
    names = inspector.watch("*.computation_output", ["activations", "gradients"])
    layers = [name for name, each in model.named_modules() if isinstance(each, SparseProtoLinear)]
    assert names == [f"{layer}.computation_output" for layer in layers]
    inspector.watch("*.computation", "inputs")
    ids = torch.randint(11, (2, 5))
    inspection = inspector.run_inspection({"input_ids": ids, "labels": ids})
    model(ids, labels=ids).loss.backward()
    for layer in layers:
        computation = model.get_submodule(f"{layer}.computation")
        seen = inspection[f"{layer}.computation_output"]
        x = inspection[f"{layer}.computation"].inputs
        torch.testing.assert_close(seen.activations, computation(x), rtol=1e-12, atol=1e-12)
        per_token = torch.einsum("bso,bsi->bsoi", seen.gradients, x)
        torch.testing.assert_close(
            per_token.sum((0, 1)), computation.weight.grad, rtol=1e-9, atol=1e-12
        )
    assert inspector.get_statistics(layer_name="*.computation_output", what="gradients")


def test_layer_saved_before_the_name_existed_still_works() -> None:
    layer, x = SparseProtoLinear(4, 4), torch.randn(2, 3, 4)
    expected = layer(x)
    state = {**vars(layer), "_modules": dict(layer._modules)}
    del state["_modules"]["computation_output"]
    old = SparseProtoLinear.__new__(SparseProtoLinear)
    old.__setstate__(state)
    assert torch.equal(old(x), expected)
    assert "computation_output.weight" not in layer.state_dict()
