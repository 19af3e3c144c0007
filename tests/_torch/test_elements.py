"""Tensors inside containers: all of them, in order, with the path that a reader would write."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchfmri._torch.elements import flatten, flatten_arguments, local_part, map_tensors

A, B, C = (torch.full((1,), float(value)) for value in range(3))
Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Bundle:
    hidden: Tensor
    extra: Any = None
    unset: Any = field(init=False)


CASES: dict[str, tuple[Any, list[tuple[str, Tensor]]]] = {
    "tensor": (A, [("", A)]),
    "tuple": ((A, B), [("0", A), ("1", B)]),
    "list": ([A, [B, C]], [("0", A), ("1.0", B), ("1.1", C)]),
    "none_counts_in_the_index": ((None, A), [("1", A)]),
    "dict": ({"b": A, "a": B}, [("b", A), ("a", B)]),
    "dict_of_lists": ({"x": [A, {"y": B}]}, [("x.0", A), ("x.1.y", B)]),
    "integer_keys": ({1: A, 0: B}, [("1", A), ("0", B)]),
    "ordered": (OrderedDict(z=A, y=B), [("z", A), ("y", B)]),
    "mapping": (UserDict(z=A), [("z", A)]),
    "namedtuple": (Pair(A, [B]), [("left", A), ("right.0", B)]),
    "dataclass": (Bundle(A, {"k": B}), [("hidden", A), ("extra.k", B)]),
    "parameter": (nn.Parameter(A), None),
    "same_tensor_twice": ((A, A), [("0", A), ("1", A)]),
    "none": (None, []),
    "number": (3.5, []),
    "text": ("text", []),
    "bytes": (b"bytes", []),
    "size": (torch.Size([1, 2]), []),
    "empty": ((), []),
    "class": (Bundle, []),
    "generator": ((each for each in [A]), []),
    "set": ({1, 2}, []),
    "module": (nn.Linear(1, 1), []),
}


@pytest.mark.parametrize(("value", "expected"), CASES.values(), ids=CASES)
def test_flatten(value: Any, expected: Any) -> None:
    found = flatten(value)
    if expected is None:
        expected = [("", value)]
    assert [each.path for each in found] == [path for path, _ in expected]
    assert all(one.tensor is other for one, (_, other) in zip(found, expected, strict=True))


def test_prefix() -> None:
    assert [each.path for each in flatten((A, {"k": B}), "out")] == ["out.0", "out.1.k"]
    assert flatten(A, "out")[0].path == "out"


def test_a_container_that_holds_itself() -> None:
    value: list[Any] = [A]
    value.append(value)
    assert [each.path for each in flatten(value)] == ["0"]


def test_a_container_that_stands_twice_is_not_a_cycle() -> None:
    part = [A]
    assert [each.path for each in flatten((part, part))] == ["0.0", "1.0"]


def test_generators_are_not_used_up() -> None:
    value = (each for each in [A, B])
    flatten(value)
    assert list(value) == [A, B]


def test_arguments_and_keywords() -> None:
    found = flatten_arguments((A, None, [B]), {"mask": C, "flag": True})
    assert [(each.path, each.tensor) for each in found] == [("0", A), ("2.0", B), ("mask", C)]
    assert flatten_arguments((), {}) == []


def test_model_output_and_batch_encoding() -> None:
    transformers = pytest.importorskip("transformers")
    output = transformers.modeling_outputs.BaseModelOutput(
        last_hidden_state=A, hidden_states=(B, C), attentions=None
    )
    assert [each.path for each in flatten(output)] == [
        "last_hidden_state",
        "hidden_states.0",
        "hidden_states.1",
    ]
    encoding = transformers.BatchEncoding({"input_ids": A, "attention_mask": B})
    assert [each.path for each in flatten(encoding)] == ["input_ids", "attention_mask"]


def test_key_value_cache_is_no_element() -> None:
    transformers = pytest.importorskip("transformers")
    assert flatten(transformers.DynamicCache()) == []


def test_packed_sequence() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(2, 1), torch.ones(1, 1)])
    assert [each.path for each in flatten(packed)][:2] == ["data", "batch_sizes"]


def test_tensor_subclasses_are_tensors() -> None:
    class Marked(Tensor):
        pass

    tensor = torch.ones(2).as_subclass(Marked)
    assert flatten((tensor,))[0].tensor is tensor


def test_map_tensors() -> None:
    """Containers are made anew, and what is no tensor is the same object."""
    pair, other = namedtuple("pair", "first second"), object()
    value = {
        "a": [torch.ones(2), (torch.zeros(1), other)],
        "b": pair(torch.ones(1), None),
        "c": torch.Size([2, 3]),
    }
    found = map_tensors(value, lambda tensor: tensor + 1)
    assert type(found["a"]) is list
    assert found["a"][0].tolist() == [2, 2]
    assert type(found["a"][1]) is tuple
    assert found["a"][1][0].tolist() == [1]
    assert found["a"][1][1] is other
    assert type(found["b"]) is pair
    assert found["b"].first.tolist() == [2]
    assert found["b"].second is None
    assert found["c"] is value["c"]
    assert value["a"][0].tolist() == [1, 1]


def test_local_part_of_a_plain_tensor() -> None:
    weight = nn.Parameter(torch.ones(2))
    assert not local_part(weight).requires_grad


def test_map_tensors_keeps_the_class_of_mappings() -> None:
    """A model may read the attributes of a ModelOutput or BatchEncoding that it was given."""
    transformers = pytest.importorskip("transformers")
    output = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=A, hidden_states=(B,))
    encoding = transformers.BatchEncoding({"input_ids": A})
    found = map_tensors((output, encoding, UserDict(z=A), MappingProxyType({"z": A})), add_one)
    assert [type(each) for each in found] == [type(output), type(encoding), UserDict, dict]
    assert found[0].last_hidden_state.item() == found[0]["last_hidden_state"].item() == 1
    assert found[0].hidden_states[0].item() == 2
    assert found[1].input_ids.item() == found[2]["z"].item() == found[3]["z"].item() == 1
    assert output.last_hidden_state is output["last_hidden_state"] is encoding.input_ids is A


def add_one(tensor: Tensor) -> Tensor:
    return tensor + 1
