"""A batch that is computed in parts: row by row, without padding, token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks._compare_models import batch, build
from torchfmri import Run, compare

pytestmark = pytest.mark.usefixtures("one_thread")
Call = Callable[[nn.Module, Any], Any]


def squares(output: Any) -> Tensor:
    return output["logits"].square().mean()


def at_once(model: nn.Module, data: Any) -> Any:
    return {"logits": model(**data)["logits"]}


def in_rows(size: int = 1, wrong: bool = False) -> Call:
    """Run the model on some rows at a time; `wrong` masks token 1 of the last one."""

    def call(model: nn.Module, data: Any) -> Any:
        found = []
        for first in range(0, 3, size):
            part = {name: value[first : first + size] for name, value in data.items()}
            if wrong and first == 2:
                part["attention_mask"] = part["attention_mask"].clone()
                part["attention_mask"][:, 1] = 0
            found.append(model(**part)["logits"])
        return {"logits": torch.cat(found)}

    return call


def data_of(name: str, padding: str | None = "right") -> dict[str, Any]:
    return {key: value for key, value in batch(name, padding).items() if key != "labels"}


@pytest.mark.parametrize("size", [1, 2], ids=["one row", "two rows"])
@pytest.mark.parametrize("name", ["llama", "bert", "vit"])
def test_rows_that_are_computed_apart_agree_forward_and_backward(name: str, size: int) -> None:
    run = Run(build(name), data_of(name), loss=squares)
    found = compare(replace(run, call=at_once), replace(run, call=in_rows(size)))
    assert found.agree, str(found.first)
    directions = {pair.direction for pair in found.pairs}
    assert directions == {"forward", "backward", "parameters"}
    compared = {pair.place.layer for pair in found.pairs if pair.direction == "forward"}
    leaves = {n for n, m in run.model.named_modules() if isinstance(m, nn.Linear)}
    assert leaves <= compared


def test_a_mistake_in_one_row_is_located() -> None:
    run = Run(build("llama"), data_of("llama"), loss=squares)
    first = compare(replace(run, call=at_once), replace(run, call=in_rows(wrong=True))).first
    assert first is not None
    assert (first.layer, first.row, first.token) == ("model.layers.0.self_attn", 2, 1)


def test_rows_without_their_padding_agree() -> None:
    def trimmed(model: nn.Module, data: Any) -> Any:
        with torch.no_grad():
            for row, mask in enumerate(data["attention_mask"].bool()):
                output = model(**{name: value[row : row + 1, mask] for name, value in data.items()})
        return output

    def whole(model: nn.Module, data: Any) -> Any:
        with torch.no_grad():
            return model(**data)

    for padding in ("right", "left"):
        run = Run(build("llama"), data_of("llama", padding))
        found = compare(replace(run, call=whole), replace(run, call=trimmed))
        assert found.agree, str(found.first)
        assert sum(pair.grid is not None for pair in found.pairs) > 40


def generated(rows: int, cached: bool, padded: bool = True) -> Call:
    """Generate for some rows at a time, with their padding or without it."""

    def call(model: nn.Module, data: Any) -> None:
        for at in range(0, 3, rows):
            part = {name: value[at : at + rows] for name, value in data.items()}
            if not padded:
                part = {
                    name: value[:, part["attention_mask"][0] > 0] for name, value in part.items()
                }
            with torch.no_grad():
                model.generate(**part, max_new_tokens=4, min_new_tokens=4, do_sample=False,
                               pad_token_id=0, use_cache=cached)  # fmt: skip

    return call


PROMPTS = {key: data_of("llama", "left")[key] for key in ("input_ids", "attention_mask")}


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("cached", [(True, True), (True, False), (False, False)])
def test_rows_that_are_generated_one_at_a_time_agree(
    cached: tuple[bool, bool], padded: bool
) -> None:
    run = Run(build("llama"), PROMPTS)
    sides = (generated(3, cached[0]), generated(1, cached[1], padded))
    found = compare(*(replace(run, call=each) for each in sides))
    assert found.agree, str(found.first)
    read = int(PROMPTS["attention_mask"].sum()) + 3 * 3  # the last token of a row is never read
    assert {len(pair.grid) for pair in found.pairs if pair.grid is not None} == {read}
    assert {p.place.call for p in found.pairs if p.place.layer == "lm_head"} == {0, 1, 2, 3}


@pytest.mark.parametrize("rows", [1, 3])
def test_generation_beside_one_pass_over_what_was_generated(rows: int) -> None:
    model, ids = build("llama"), batch("llama", None)["input_ids"]
    with torch.no_grad():
        whole = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)

    def once(model: nn.Module, data: Any) -> Any:
        with torch.no_grad():
            return model(**data, use_cache=False)

    def compared(b: nn.Module) -> Any:
        return compare(
            Run(model, {"input_ids": whole[:, :-1]}, call=once),
            Run(b, {"input_ids": ids}, call=generated(rows, True)),
        )

    found = compared(model)
    assert found.agree, str(found.first)
    assert any("laid out differently" in note and "lm_head" in note for note in found.notes)
    other = build("llama")
    other.model.layers[1].self_attn.scaling *= 1.1
    assert compared(other).first.layer == "model.layers.1.self_attn"


@pytest.mark.parametrize("layer", ["lm_head", "model.layers.1.mlp.up_proj"])
def test_a_mistake_in_rows_that_are_generated_one_at_a_time_is_located(layer: str) -> None:
    run = Run(build("llama"), PROMPTS, call=generated(3, True))
    other = replace(run, model=build("llama"), call=generated(1, True))
    with torch.no_grad():
        other.model.get_submodule(layer).weight.mul_(1.001)
    first = compare(run, other).first
    assert first is not None
    assert (first.layer, first.row) == (layer, 0)


class Shared(nn.Module):
    """Calls one layer three times, as ALBERT does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(20, 16), nn.Linear(16, 16)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for _ in range(3):
            x = torch.tanh(self.layer(x))
        return x


def test_a_layer_that_is_called_several_times_for_each_row() -> None:
    ids = torch.randint(0, 20, (3, 8))
    run = Run(Shared(), {"input_ids": ids}, loss=lambda y: y.square().mean())

    def rows(model: nn.Module, data: Any) -> Tensor:
        return torch.cat([model(each[None]) for each in data["input_ids"]])

    found = compare(run, replace(run, call=rows))
    assert found.agree, str(found.first)
    assert {p.place.call for p in found.pairs if p.place.layer == "layer"} == {0, 1, 2}


def test_accumulated_gradients_agree() -> None:
    def loss(model: nn.Module, data: Any, rows: int) -> Tensor:
        parts = [{n: x[at : at + rows] for n, x in data.items()} for at in range(0, 4, rows)]
        losses = [model(**part)["loss"] for part in parts]
        return torch.stack(losses).mean()

    ids = torch.randint(5, 60, (4, 9))
    run = Run(build("llama"), {"input_ids": ids, "labels": ids}, loss=lambda y: y)
    sides = [replace(run, call=lambda m, d, n=n: loss(m, d, n)) for n in (4, 1)]
    found = compare(*sides)
    assert found.agree, str(found.first)
    assert any("do not fit together" in note for note in found.notes), "the loss of each call"


def test_a_mistake_in_the_cache_comes_from_the_attention() -> None:
    """The inputs of `o_proj` differ only in later calls, which read one token each."""

    def plain(model: nn.Module, data: Any) -> Any:
        with torch.no_grad():
            return model(**data, use_cache=False)

    def cached(model: nn.Module, data: Any) -> Any:
        ids, cache = data["input_ids"], None
        with torch.no_grad():
            for part in (ids[:, :6], *ids[:, 6:].split(1, 1)):
                output = model(input_ids=part, past_key_values=cache, use_cache=True)
                if cache is None:
                    output.past_key_values.layers[1].keys[..., 2, :] = 0
                cache = output.past_key_values
        return output

    run = Run(build("llama"), {"input_ids": batch("llama", None)["input_ids"]}, call=plain)
    first = compare(run, replace(run, call=cached)).first
    assert first is not None
    assert (first.layer, first.token) == ("model.layers.1.self_attn", 6)
