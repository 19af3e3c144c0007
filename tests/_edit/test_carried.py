"""What holds the value of a layer is copied with the value changed, and never written to."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from torchfmri._edit.carried import change_arguments, change_output

VALUE = torch.arange(6.0).reshape(2, 3)
OTHER = torch.ones(2, 3)


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Output:
    ids: Tensor
    value: Tensor
    note: str = "kept"


@dataclass(frozen=True)
class WithLoss:
    loss: Tensor
    logits: Tensor
    count: int = field(default=1, init=False)


LOSS = torch.tensor(1.0)


def tenfold(value: Tensor) -> Tensor:
    return 10 * value


@pytest.mark.parametrize(
    ("output", "read"),
    [
        (VALUE, lambda found: found),
        ((VALUE, OTHER), lambda found: found[0]),
        ([VALUE, OTHER], lambda found: found[0]),
        (Pair(VALUE, OTHER), lambda found: found.first),
        (((VALUE, None), OTHER), lambda found: found[0][0]),
        ({"loss": torch.tensor(1.0), "logits": VALUE}, lambda found: found["logits"]),
        (OrderedDict(logits=VALUE), lambda found: found["logits"]),
        (Output(torch.arange(2), VALUE), lambda found: found.value),
        ((LOSS, VALUE), lambda found: found[1]),
        (Pair(LOSS, VALUE), lambda found: found.second),
        (WithLoss(LOSS, VALUE), lambda found: found.logits),
        ({"losses": torch.ones(2), "logits": VALUE}, lambda found: found["logits"]),
        ({"scores": torch.ones(2)}, lambda found: found["scores"]),
    ],
    ids=lambda each: type(each).__name__,
)
def test_the_first_value_of_an_output_is_changed_in_a_copy(output: Any, read: Any) -> None:
    before = read(output).clone()
    found = change_output(output, tenfold)
    assert type(found) is type(output)
    assert torch.equal(read(found), 10 * before)
    assert torch.equal(read(output), before), "the model's own is as it was"


@pytest.mark.parametrize("output", [None, "text", (), (None, VALUE), {"loss": LOSS}, (LOSS,)])
def test_an_output_without_a_value(output: Any) -> None:
    assert change_output(output, tenfold) is None


def test_the_first_value_of_the_arguments_is_changed() -> None:
    ids = torch.arange(2)
    found = change_arguments((ids, VALUE), {"other": OTHER}, tenfold)
    assert found is not None
    assert found[0][0] is ids
    assert torch.equal(found[0][1], 10 * VALUE)
    assert found[1]["other"] is OTHER
    found = change_arguments((ids,), {"mask": None, "hidden_states": VALUE}, tenfold)
    assert found is not None
    assert torch.equal(found[1]["hidden_states"], 10 * VALUE)
    assert change_arguments((ids,), {"mask": None}, tenfold) is None
