"""Models named on the command line: found, made and checked, or refused with the next step."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from torchfmri import InspectionError
from torchfmri._model.factory import load_subject

SOURCE = """
from __future__ import annotations

import dataclasses
import sys

import torch
from torch import nn

import beside_the_file


@dataclasses.dataclass
class Sizes:  # looks its module up in sys.modules
    width: int = beside_the_file.WIDTH


class Example(nn.Linear):
    example_input_array = torch.zeros(2, 3)


class Dummy(nn.Linear):
    @property
    def dummy_inputs(self):
        return {"input": torch.ones(2, 3)}


def model(): return nn.Linear(Sizes().width, 2)
def example(): return Example(3, 2)
def dummy(): return Dummy(3, 2)
def pair(): return model(), torch.ones(1, 3)
def triple(): return model(), torch.ones(1, 3), torch.sum
def nothing(): return None
def numbers(): return 1, 2
def four(): return model(), 1, 2, 3
def none(): return model(), None
def wants(size): return model()
def fails(): raise ZeroDivisionError("mine")
instance = nn.Linear(3, 2)
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside_the_file.py").write_text("WIDTH = 3\n")
    path = tmp_path / "subjects_for_a_test.py"
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize("place", ["file", "relative", "module"])
def test_forms(file: Path, place: str) -> None:
    places = {"file": str(file), "relative": file.name, "module": file.stem}
    model, data, loss = load_subject(f"{places[place]}:triple")
    assert isinstance(model, nn.Linear)
    assert torch.equal(data, torch.ones(1, 3))
    assert loss is torch.sum
    assert load_subject(f"{places[place]}:pair").loss is None


def test_a_model_may_carry_its_own_example(file: Path) -> None:
    assert torch.equal(load_subject(f"{file}:example").data, torch.zeros(2, 3))
    assert torch.equal(load_subject(f"{file}:dummy").data["input"], torch.ones(2, 3))


def test_a_file_called_like_a_module_is_itself(tmp_path: Path, file: Path) -> None:
    namesake = tmp_path / "json.py"
    namesake.write_text(SOURCE)
    assert isinstance(load_subject(f"{namesake}:triple").model, nn.Linear)
    import json

    assert json.loads("1") == 1


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("subjects_for_a_test", "names no function"),
        ("subjects_for_a_test:", "names no function"),
        (":pair", "names no function"),
        ("absent.py:pair", "no file 'absent.py'"),
        ("absent_module:pair", "no module 'absent_module'"),
        ("absent_package.inner:pair", "no module 'absent_package'"),
        ("not-a-module:pair", "neither a module nor a .py file"),
        ("subjects_for_a_test:pairs", "It has 'pair'"),
        ("subjects_for_a_test:instance", "is a Linear, not a function"),
        ("subjects_for_a_test:nothing", "returned NoneType"),
        ("subjects_for_a_test:numbers", r"returned \(int, int\)"),
        ("subjects_for_a_test:four", "returned 4 things"),
        ("subjects_for_a_test:model", "without data"),
        ("subjects_for_a_test:none", "without data"),
    ],
)
def test_refusals_say_what_to_write(file: Path, spec: str, said: str) -> None:
    with pytest.raises(InspectionError, match=said):
        load_subject(spec)


def test_what_the_users_code_raises_passes_through(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="mine"):
        load_subject(f"{file}:fails")
    with pytest.raises(TypeError, match="size"):
        load_subject(f"{file}:wants")
    (tmp_path / "broken_import.py").write_text("import module_that_is_not_there\n")
    for spec in ("broken_import.py:x", "broken_import:x"):
        with pytest.raises(ModuleNotFoundError, match="module_that_is_not_there"):
            load_subject(spec)
    assert "_torchfmri_subject_broken_import" not in sys.modules
