"""Layers and model of torchfmri.routing: formulas, cache, positions, generation."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import torchfmri
from torchfmri.routing import (
    KeyValueCache,
    MoIETransformerBlock,
    RoutingConfig,
    RoutingLanguageModel,
    SparseProtoLinear,
    jensen_shannon,
    mas,
)
from torchfmri.routing.scaling import TOKENS_AND_UNITS, shares

pytestmark = pytest.mark.usefixtures("one_thread")


def build(blocks: int = 2, seed: int = 0) -> RoutingLanguageModel:
    torch.manual_seed(seed)
    return RoutingLanguageModel(RoutingConfig(13, hidden_size=16, blocks=blocks, heads=2)).double()


# -- MAS and the divergence ------------------------------------------------------------------


def slow_mas(x: Tensor) -> Tensor:
    """Row by row, entry by entry."""
    rows = []
    for row in x.reshape(-1, x.shape[-1]).tolist():
        largest = max(abs(value) for value in row)
        rows.append([max(value / largest, 0.0) if largest else 0.0 for value in row])
    return torch.tensor(rows, dtype=x.dtype).view(x.shape)


def slow_divergence(p: list[float], q: list[float]) -> float:
    """The mean of two relative entropies to the middle, term by term."""
    total = 0.0
    for one in (p, q):
        for value, first, second in zip(one, p, q, strict=True):
            if value > 0:
                total += value * math.log(value / ((first + second) / 2)) / 2
    return total


def test_mas_is_the_formula() -> None:
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    x[0, 0] = 0
    x[1, 1] = -x[1, 1].abs()
    torch.testing.assert_close(mas(x), slow_mas(x))
    whole = x.flatten().tolist()
    largest = max(map(abs, whole))
    expected = torch.tensor([max(each / largest, 0) for each in whole]).double().view_as(x)
    torch.testing.assert_close(mas(x, TOKENS_AND_UNITS), expected)


def test_mas_has_the_right_gradient() -> None:
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(mas, x)
    assert torch.autograd.gradcheck(lambda each: mas(each, TOKENS_AND_UNITS), x)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=8))
def test_divergence_is_the_definition(pairs: list[tuple[float, float]]) -> None:
    p, q = torch.tensor(pairs, dtype=torch.float64).T + torch.tensor([[1e-3], [1e-3]])
    p, q = p / p.sum(), q / q.sum()
    found = float(jensen_shannon(p, q))
    assert found == pytest.approx(slow_divergence(p.tolist(), q.tolist()), abs=1e-12)
    assert -1e-12 <= found <= math.log(2) + 1e-12


def test_divergence_of_disjoint_and_equal() -> None:
    p = torch.tensor([0.5, 0.5, 0.0, 0.0])
    assert float(jensen_shannon(p, p.flip(0))) == pytest.approx(math.log(2))
    assert float(jensen_shannon(p, p)) == 0


def test_divergence_has_the_right_gradient() -> None:
    """Numerically, through MAS and the division by the sum."""
    logits = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    q = shares(torch.randn(2, 3, 6, dtype=torch.float64))

    def value(x: Tensor) -> Tensor:
        return jensen_shannon(shares(x), q).sum()

    (found,) = torch.autograd.grad(value(logits), logits)
    flat, step = logits.detach().flatten(), 1e-6
    for index in range(len(flat)):
        moved = [flat.clone(), flat.clone()]
        moved[0][index] += step
        moved[1][index] -= step
        ahead, behind = (float(value(each.view_as(logits))) for each in moved)
        expected = (ahead - behind) / (2 * step)
        assert float(found.flatten()[index]) == pytest.approx(expected, abs=1e-7)


def test_shares_are_those_of_mas() -> None:
    x = torch.randn(4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[0] = -x[0].abs()  # nothing is on
    scaled = slow_mas(x)
    expected = (scaled / scaled.sum(-1, keepdim=True)).nan_to_num()
    assert expected[1:].sum(-1).tolist() == pytest.approx([1, 1, 1])
    torch.testing.assert_close(shares(x), expected)


# -- the layer -------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(6, 6), (6, 4)])
def test_layer_is_the_formula(sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    layer = SparseProtoLinear(*sizes).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    inherited = torch.randn(*sizes[::-1], dtype=torch.float64)
    match = x @ (layer.prototypes + inherited).T / math.sqrt(6)
    logits = match - slow_mas(x @ layer.gate.T)
    computed = x @ layer.computation.weight.T + layer.computation.bias
    computed = x + computed if sizes[0] == sizes[1] else computed
    torch.testing.assert_close(layer(x, inherited), computed * slow_mas(logits.detach()))
    found = layer.route(x, inherited)
    torch.testing.assert_close(found.logits, logits)
    off = found.weights == 0
    assert off.any()
    assert not off.all()
    assert (layer(x, inherited)[off] == 0).all()


def test_sizes_are_checked() -> None:
    with pytest.raises(torchfmri.InspectionError, match="in_features=0: give the number"):
        SparseProtoLinear(0, 3)
    with pytest.raises(torchfmri.InspectionError, match="even parts"):
        MoIETransformerBlock(hidden_size=12, heads=4)


def test_gradients_of_a_block_are_right() -> None:
    """Numerical derivatives of every layer, by the package's own verification."""
    torch.manual_seed(0)
    block = MoIETransformerBlock(8, 2).double()

    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x).hidden

    x = torch.randn(1, 4, 8, dtype=torch.float64)
    found = torchfmri.verify_gradients(Alone(), x, lambda out: out.square().sum())
    assert found.ok, found.table()


# -- the model -------------------------------------------------------------------------------


def test_prototypes_build_upon_those_of_the_block_before() -> None:
    model = build(blocks=3)
    inherited = None
    for number, block in enumerate(model.blocks):
        inherited = block.prototypes(inherited)
        expected = sum(each.value.prototypes for each in model.blocks[: number + 1])
        torch.testing.assert_close(inherited.value, expected)
    ids = torch.randint(13, (1, 5))
    before = model(ids).logits
    with torch.no_grad():
        model.blocks[0].value.prototypes.add_(torch.randn(16, 16))
    reached = torch.autograd.grad(
        model.blocks[1]
        .value.route(torch.randn(1, 3, 16).double(), model.blocks[0].prototypes().value)
        .weights.sum(),
        model.blocks[0].value.prototypes,
    )
    assert reached[0].abs().sum() > 0
    assert not torch.equal(before, model(ids).logits)


def test_it_is_causal() -> None:
    model, ids = build(), torch.randint(13, (2, 7))
    other = ids.clone()
    other[:, 4:] = (other[:, 4:] + 1) % 13
    torch.testing.assert_close(model(ids).logits[:, :4], model(other).logits[:, :4])


def test_attention_depends_on_distance_only() -> None:
    """Rotary: shifting all positions changes nothing."""
    model, ids = build(), torch.randint(13, (1, 5))
    padded = torch.cat((torch.zeros(1, 3, dtype=torch.long), ids), 1)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    torch.testing.assert_close(model(padded, mask).logits[:, 3:], model(ids).logits)


def test_loss_is_that_of_the_next_token() -> None:
    model, ids = build(), torch.randint(13, (2, 6))
    labels = ids.clone()
    labels[:, :3] = -100
    out = model(ids, labels=labels)
    chances = out.logits.log_softmax(-1)
    expected = [-chances[b, s - 1, ids[b, s]] for b in range(2) for s in range(3, 6)]
    torch.testing.assert_close(out.loss, torch.stack(expected).mean())


@pytest.mark.parametrize("parts", [(1,) * 7, (3, 4), (5, 1, 1)])
def test_cache_gives_the_same_logits(parts: tuple[int, ...]) -> None:
    model, ids = build(), torch.randint(13, (2, 7))
    cache = KeyValueCache()
    found = [model(part, past_key_values=cache).logits for part in ids.split(list(parts), dim=1)]
    torch.testing.assert_close(torch.cat(found, 1), model(ids).logits)
    assert cache.length == 7


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_generation_with_and_without_cache(sampled: bool, padded: bool) -> None:
    model, ids = build(), torch.randint(13, (3, 5))
    mask = None
    if padded:
        mask = torch.ones_like(ids)
        mask[0, :2] = 0
    options = {"do_sample": sampled, "temperature": 0.8, "top_k": 5} if sampled else {}
    found = [
        model.generate(
            ids,
            12,
            attention_mask=mask,
            use_cache=use_cache,
            generator=torch.Generator().manual_seed(3),
            **options,
        )
        for use_cache in (True, False)
    ]
    assert torch.equal(*found)
    assert found[0].shape == (3, 17)
    assert torch.equal(found[0][:, :5], ids)


def test_greedy_takes_the_likeliest() -> None:
    model, ids = build(), torch.randint(13, (2, 4))
    found = model.generate(ids, 5)
    chosen = model(found).logits.argmax(-1)
    assert torch.equal(found[:, 4:], chosen[:, 3:-1])


def test_sampling_follows_the_chances() -> None:
    model = build()
    ids = torch.randint(13, (1, 4)).expand(4000, -1)
    chances = model(ids[:1]).logits[0, -1].softmax(-1)
    drawn = model.generate(ids, 1, do_sample=True, generator=torch.Generator().manual_seed(0))[
        :, -1
    ]
    found = torch.bincount(drawn, minlength=13) / 4000
    assert (found - chances).abs().max() < 5 * 0.5 / math.sqrt(4000)


def test_generation_ends() -> None:
    model, ids = build(), torch.randint(13, (2, 4))
    free = model.generate(ids, 6)
    end = int(free[0, 5])
    found = model.generate(ids, 6, eos_token_id=end, pad_token_id=0)
    assert int(found[0, 5]) == end
    assert (found[0, 6:] == 0).all()


def test_generation_leaves_no_trace() -> None:
    model, ids = build(), torch.randint(13, (2, 4))
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    model.train()
    model.generate(ids, 3)
    assert model.training
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"do_sample": True, "temperature": 0.0}, "temperature"),
        ({"do_sample": True, "top_k": 0}, "top_k"),
        ({"attention_mask": torch.tensor([[1, 1, 0]])}, "on the right"),
    ],
)
def test_wrong_generation_says_so(options: dict[str, object], text: str) -> None:
    with pytest.raises(torchfmri.InspectionError, match=text):
        build().generate(torch.zeros(1, 3, dtype=torch.long), **options)


def test_mask_of_another_size_says_so() -> None:
    with pytest.raises(torchfmri.InspectionError, match="attention_mask has the shape"):
        build()(torch.zeros(1, 3, dtype=torch.long), torch.ones(1, 2))
