"""Bad calls: each ends with an error of ours that names the value and what to give instead.

What is checked is mechanical: the error is raised by a `raise` in our package, its message has the
value (or its type, or its shape) and a word that leads on, and the model is as it was before.
"""

import linecache
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_calls import BAD, CALLS, BadCall, World, bad_calls
from oracles import assert_same_state, state_of

import torchfmri

PACKAGE = str(Path(torchfmri.__file__).parent)
LEADS_ON = re.compile(
    r"\b(give|choose|write|use|such as|there (is|are)|one of|for example|takes?|needs?|nearest|"
    r"list|leave|make|call|name|map|watch|must|expected|between|neither|nor|or|only|how many|"
    r"for none|every|each|no function of|leading|has|have|is for|(tokens|ids) are|run again)\b",
    re.IGNORECASE,
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = World(tmp_path_factory.mktemp("world"))
    for name, value in vars(World).items():
        if isinstance(value, cached_property):
            getattr(found, name)  # making it may draw random numbers
    yield found
    torch.set_num_threads(threads)


def is_raised_by_us(error: BaseException) -> bool:
    """Whether the last frame is ours, and stands at a `raise`."""
    trace = error.__traceback__
    assert trace is not None
    while trace.tb_next is not None:
        trace = trace.tb_next
    file = trace.tb_frame.f_code.co_filename
    return file.startswith(PACKAGE) and linecache.getline(file, trace.tb_lineno).strip().startswith(
        "raise "
    )


def names_of(value: Any) -> list[str]:
    """The ways in which a message may name a value."""
    found = [repr(value), str(value), type(value).__name__]
    if isinstance(value, torch.Tensor):
        found += [str(tuple(value.shape)), str(list(value.shape)), str(value.dtype)]
        found += ["meta"] if value.is_meta else [str(value.flatten()[0].item())]
    if isinstance(value, type):
        found.append(value.__name__)
    if isinstance(value, (list, tuple, dict)) and value:
        inner = [*value.values(), *value] if isinstance(value, dict) else value
        found += [name for each in inner for name in names_of(each)]
    return [each for each in found if each]


@pytest.mark.one_in(10)
@pytest.mark.parametrize("bad", list(bad_calls()), ids=str)
def test_a_bad_call(bad: BadCall, world: World) -> None:
    before = state_of(world.model)
    with pytest.raises((Exception, SystemExit)) as caught:
        CALLS[bad.call](world, **{bad.argument: bad.value})
    error = caught.value
    assert is_raised_by_us(error), f"a raw {type(error).__name__}: {error}"
    message = str(error)
    assert any(name in message for name in names_of(bad.value)) or bad.argument in message, message
    assert LEADS_ON.search(message), message
    assert_same_state(before, state_of(world.model))


def test_the_table_covers_what_is_public() -> None:
    called = {name.partition(".")[0].rstrip("[]") for name in CALLS}
    functions = {
        name for name in torchfmri.__all__ if callable(getattr(torchfmri, name)) and name.islower()
    }
    assert functions - called == {"load_contrast"}  # tests/_contrast has its files
    assert len(list(bad_calls())) > 300
    assert set(BAD) <= set(CALLS)


@pytest.mark.parametrize("name", ["scan", "cost", "verify_gradients", "diagnose", "Anatomy"])
def test_the_calls_work_without_a_bad_value(name: str, world: World) -> None:
    assert CALLS[name](world) is not None
