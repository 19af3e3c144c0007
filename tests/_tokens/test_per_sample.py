"""A sample's tokens add up to its per-sample gradient: torch.func, Opacus and BackPACK agree."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from oracles import numbers
from token_cases import CASES, Case
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import torchfmri

SAMPLED = [case for case in CASES if case.samples is not None and not case.missing]
# What vmap cannot do: kernels of RNNs, data-dependent shapes, sparse gradients, a Function without
# setup_context. Their samples are run one by one.
LOOPED = {"router", "embedding sparse", "custom function"} | {
    case.name for case in SAMPLED if case.name.split()[0] in ("rnn", "gru", "lstm")
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small are slower with several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def first_of(output: Any) -> Tensor:
    while not isinstance(output, Tensor):
        output = output[0]
    return output


def sample_loss(output: Tensor) -> Tensor:
    """A scalar with another gradient at every number of one sample's output."""
    weight = torch.cos(torch.arange(output.numel(), dtype=output.dtype) + 1).view(output.shape)
    return (output * (weight + 1.5)).sum() + 0.25 * output.square().sum()


def batch_loss(output: Tensor, axis: int) -> Tensor:
    return torch.stack([sample_loss(each) for each in output.unbind(axis)]).sum()


def summed(tokens: Any, name: str, axis: int) -> Tensor:
    """Each sample's tokens added up, (b, *shape)."""
    total: Any = 0
    for where, names in tokens.axes.items():
        if name in names:
            # bias_k and bias_v of an attention have tokens (b, s + 1), whatever the layout.
            along = 0 if axis == 1 and not name.endswith(("bias_k", "bias_v")) else 1
            total = total + tokens.on(where)[name].materialise().sum(along)
    return total


def assert_close(found: Tensor, expected: Tensor, what: str, tolerance: float = 1e-12) -> None:
    assert found.shape == expected.shape, f"{what}: {tuple(found.shape)}, {tuple(expected.shape)}"
    off = float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-300))
    assert off <= tolerance, f"{what}: off by {off:.1e}"


# -- torch.func ----------------------------------------------------------------------------------


def per_sample(case: Case, model: nn.Module, inputs: tuple[Any, ...]) -> dict[str, Tensor]:
    """vmap(grad), or where vmap cannot, one autograd.grad per sample."""
    assert case.samples is not None
    axis = case.samples[0]
    assert axis is not None
    parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
    names = list(parameters)

    def loss(parameters: dict[str, Tensor], *sample: Any) -> Tensor:
        alone = [
            each if where is None else each.unsqueeze(where)
            for each, where in zip(sample, case.samples, strict=True)  # type: ignore[arg-type]
        ]
        output = first_of(functional_call(model, parameters, tuple(alone)))
        return sample_loss(output.select(axis, 0))

    if case.name not in LOOPED:
        return vmap(grad(loss), in_dims=(None, *case.samples))(
            {name: each.detach() for name, each in parameters.items()}, *inputs
        )
    rows = []
    for number in range(inputs[0].shape[axis]):
        sample = [
            each if where is None else each.select(where, number)
            for each, where in zip(inputs, case.samples, strict=True)
        ]
        value = loss(parameters, *sample)
        rows.append(torch.autograd.grad(value, list(parameters.values())))
    dense = [[each.to_dense() for each in row] for row in rows]
    return {name: torch.stack([row[k] for row in dense]) for k, name in enumerate(names)}


@pytest.mark.parametrize("case", SAMPLED, ids=lambda case: case.name)
def test_vmap_of_grad(case: Case) -> None:
    model, inputs = case.model(), case.arguments()
    assert case.samples is not None
    axis = case.samples[0]
    assert axis is not None
    with torchfmri.token_gradients(model) as tokens:
        batch_loss(first_of(model(*inputs)), axis).backward()
    model.zero_grad(set_to_none=True)
    expected = per_sample(case, model, inputs)
    assert tokens.names == list(expected)
    for name in tokens:
        assert_close(summed(tokens, name, axis), expected[name], name, case.tolerance)
        if axis == 0 and not name.endswith(("bias_k", "bias_v")):
            assert_one_sample_by_mask(tokens, name, expected[name], case.tolerance)


def assert_one_sample_by_mask(tokens: Any, name: str, expected: Tensor, tolerance: float) -> None:
    total: Any = 0
    for where, names in tokens.axes.items():
        if name in names:
            found = tokens.on(where)[name]
            mask = torch.zeros(found.shape[:2], dtype=torch.bool)
            mask[-1] = True
            total = total + found.sum(mask)
    off = float((total - expected[-1]).abs().max() / expected.abs().max().clamp_min(1e-300))
    assert off <= max(tolerance, 1e-12), f"{name}: sum(mask) is off by {off:.1e}"


def test_there_are_enough_cases() -> None:
    assert len([case for case in SAMPLED if case.name not in LOOPED]) >= 60


def test_a_wrong_sample_is_seen() -> None:
    """The comparison fails when two samples change places."""
    case = next(case for case in SAMPLED if case.name == "linear 3-D")
    model, inputs = case.model(), case.arguments()
    with torchfmri.token_gradients(model) as tokens:
        batch_loss(first_of(model(*inputs)), 0).backward()
    expected = per_sample(case, model, inputs)["weight"]
    assert_close(summed(tokens, "weight", 0), expected, "weight")
    with pytest.raises(AssertionError):
        assert_close(summed(tokens, "weight", 0), expected.flip(0), "weight")


# -- other people's per-sample gradients ---------------------------------------------------------

# Opacus tests these (opacus/tests/grad_samples): layers and configurations, small.
_GRIDS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 2), (1, 1, 3)]  # stride, dilation, groups


def _opacus_cases() -> list[tuple[str, Any, tuple[int, ...]]]:
    found: list[tuple[str, Any, tuple[int, ...]]] = []
    for dims, kind in ((1, nn.Conv1d), (2, nn.Conv2d), (3, nn.Conv3d)):
        shape = (3, 6, *[6, 5, 4][:dims])
        for stride, dilation, groups in _GRIDS:
            for padding in (0, 1, "same", "valid"):
                if padding == "same" and stride > 1:
                    continue
                settings = {"stride": stride, "dilation": dilation, "groups": groups}
                text = f"conv{dims}d {stride} {dilation} {groups} {padding}"
                found.append((text, _made(kind, 6, 6, 2, padding=padding, **settings), shape))
    for shape in ((3, 4), (3, 5, 4), (3, 2, 5, 4)):
        for bias in (True, False):
            text = f"linear {len(shape)}-D {'bias' if bias else 'no bias'}"
            found.append((text, _made(nn.Linear, 4, 3, bias=bias), shape))
    for normalised in (1, 2, 3):
        shape = (3, 4, 3, 2)
        found.append((f"layer norm {normalised}", _made(nn.LayerNorm, shape[-normalised:]), shape))
        found.append((f"rms norm {normalised}", _made(nn.RMSNorm, shape[-normalised:]), shape))
    found += [
        (f"group norm {groups}", _made(nn.GroupNorm, groups, 4), (3, 4, 3, 2))
        for groups in (1, 2, 4)
    ]
    for dims, kind in ((1, nn.InstanceNorm1d), (2, nn.InstanceNorm2d), (3, nn.InstanceNorm3d)):
        shape = (3, 4, *[3, 2, 2][:dims])
        found.append((f"instance norm {dims}d", _made(kind, 4, affine=True), shape))
    return found


def _made(kind: Any, *arguments: Any, **settings: Any) -> Any:
    return lambda: kind(*arguments, **settings)


@pytest.mark.parametrize(
    ("name", "build", "shape"), _opacus_cases(), ids=[each[0] for each in _opacus_cases()]
)
def test_opacus_configurations_against_vmap(name: str, build: Any, shape: Any) -> None:
    """The list of configurations that Opacus tests, with torch's own answer: Opacus is an extra."""
    case = Case(name, build, lambda: (numbers(*shape),))
    model, inputs = case.model(), case.arguments()
    with torchfmri.token_gradients(model) as tokens:
        batch_loss(model(*inputs), 0).backward()
    assert tokens.coverage().residual < 1e-13
    model.zero_grad(set_to_none=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = per_sample(case, model, inputs)
    for key in expected:
        assert_close(summed(tokens, key, 0), expected[key], key)


def _grad_samples(model: nn.Module, inputs: tuple[Any, ...], axis: int = 0) -> dict[str, Tensor]:
    """Per-sample gradients by Opacus, from a copy with the same weights."""
    opacus = pytest.importorskip("opacus")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = opacus.GradSampleModule(
            model, batch_first=axis == 0, loss_reduction="sum", strict=False
        )
        batch_loss(first_of(wrapped(*inputs)), axis).backward()
    found = {name: each.grad_sample for name, each in model.named_parameters()}
    wrapped.remove_hooks() if hasattr(wrapped, "remove_hooks") else None
    return found


def _against_opacus(model: nn.Module, inputs: tuple[Any, ...], axis: int = 0) -> None:
    pytest.importorskip("opacus")
    with torchfmri.token_gradients(model) as tokens:
        batch_loss(first_of(model(*inputs)), axis).backward()
    ours = {name: summed(tokens, name, axis) for name in tokens}
    assert tokens.coverage().residual < 1e-12
    model.zero_grad(set_to_none=True)
    expected = _grad_samples(model, inputs, axis)
    assert set(ours) == set(expected)
    for name, each in expected.items():
        assert_close(ours[name], each, name, 1e-11)


@pytest.mark.parametrize(
    ("name", "build", "shape"), _opacus_cases(), ids=[each[0] for each in _opacus_cases()]
)
def test_opacus(name: str, build: Any, shape: Any) -> None:
    case = Case(name, build, lambda: (numbers(*shape),))
    _against_opacus(case.model(), case.arguments())


def _opacus_layers() -> list[tuple[str, Any, Any]]:
    def ids() -> tuple[Tensor, ...]:
        return (torch.randint(5, (3, 4), generator=torch.Generator().manual_seed(2)),)

    def bags() -> tuple[Tensor, ...]:
        # No number twice in a bag: Opacus 1.6 counts it once.
        return torch.tensor([0, 1, 4, 3, 2, 0, 1]), torch.tensor([0, 3, 4])

    return [
        ("embedding", lambda layers: nn.Embedding(5, 3), ids),
        ("embedding bag", lambda layers: nn.EmbeddingBag(5, 3, mode="sum"), bags),
        ("DPRNN", lambda layers: layers.DPRNN(4, 3, 2, batch_first=True), None),
        ("DPGRU", lambda layers: layers.DPGRU(4, 3, batch_first=True), None),
        (
            "DPLSTM",
            lambda layers: layers.DPLSTM(4, 3, 2, bidirectional=True, batch_first=True),
            None,
        ),
        ("SequenceBias", lambda layers: layers.SequenceBias(4, batch_first=True), None),
    ]


@pytest.mark.parametrize(
    ("name", "build", "inputs"), _opacus_layers(), ids=[each[0] for each in _opacus_layers()]
)
def test_opacus_layers(name: str, build: Any, inputs: Any) -> None:
    """Opacus' own recurrent layers call a cell per step: the tokens of a step are samples."""
    pytest.importorskip("opacus")
    from opacus import layers

    case = Case(name, lambda: build(layers), inputs or (lambda: (numbers(3, 5, 4),)))
    _against_opacus(case.model(), case.arguments())


def test_opacus_attention() -> None:
    pytest.importorskip("opacus")
    from opacus import layers

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = layers.DPMultiheadAttention(4, 2)

        def forward(self, x: Tensor) -> Any:
            return self.attention(x, x, x, need_weights=False)[0]

    case = Case("attention", Attends, lambda: (numbers(5, 3, 4),))
    _against_opacus(case.model(), case.arguments(), axis=1)


_BACKPACK: list[tuple[str, Any, tuple[int, ...]]] = [
    ("linear", lambda: nn.Linear(4, 3), (3, 4)),
    ("linear 3-D", lambda: nn.Linear(4, 3), (3, 5, 4)),
    ("conv1d", lambda: nn.Conv1d(4, 6, 3, 2, 1, 1, 2), (3, 4, 6)),
    ("conv2d", lambda: nn.Conv2d(2, 3, 2, 1, 1, 2), (3, 2, 4, 4)),
    ("conv3d", lambda: nn.Conv3d(2, 2, 2), (2, 2, 3, 3, 2)),
    ("transposed 1d", lambda: nn.ConvTranspose1d(4, 6, 3, 2, 1, groups=2), (3, 4, 5)),
    ("transposed 2d", lambda: nn.ConvTranspose2d(2, 3, 2, 2), (3, 2, 3, 2)),
    ("transposed 3d", lambda: nn.ConvTranspose3d(2, 2, 2), (2, 2, 2, 2, 2)),
    ("batch norm", lambda: nn.BatchNorm1d(4).eval(), (3, 4)),
    ("batch norm 2d", lambda: nn.BatchNorm2d(4).eval(), (3, 4, 2, 3)),
]


@pytest.mark.parametrize(("name", "build", "shape"), _BACKPACK, ids=[each[0] for each in _BACKPACK])
def test_backpack(name: str, build: Any, shape: Any) -> None:
    backpack = pytest.importorskip("backpack")
    from backpack.extensions import BatchGrad

    case = Case(name, build, lambda: (numbers(*shape),))
    model, (x,) = case.model(), case.arguments()
    with torchfmri.token_gradients(model) as tokens:
        batch_loss(model(x), 0).backward()
    model.zero_grad(set_to_none=True)
    extended = backpack.extend(model)
    weight = torch.cos(torch.arange(extended(x)[0].numel(), dtype=x.dtype) + 1)
    output = extended(x)
    with backpack.backpack(BatchGrad()):
        (output.flatten(1) * (weight + 1.5)).sum().add(0.25 * output.square().sum()).backward()
    for key, parameter in model.named_parameters():
        assert_close(summed(tokens, key, 0), parameter.grad_batch, key, 1e-11)
