"""The plan of the package: rooms with doors, one page that tells them, names that stay."""

import ast
import importlib
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchfmri
import torchfmri.routing
from torchfmri._torch import Hook

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "torchfmri"
ROOMS = sorted(each.parent.name for each in PACKAGE.glob("*/__init__.py"))
FILES = ["exceptions.py", "reference.py", "statistics.py"]
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")


def imports_of(source: str) -> Iterator[str]:
    """The modules of ours that a file imports from."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names)


def past_the_door(importer: Path, module: str) -> bool:
    """Whether a file imports from a file of a room that it is not in."""
    room, *inside = module.removeprefix("torchfmri.").split(".")
    if not module.startswith("torchfmri.") or not inside:
        return False
    is_door = (PACKAGE / room).joinpath(*inside, "__init__.py").exists()
    return not is_door and importer.parts[0] != room


@pytest.mark.parametrize("room", ["", *ROOMS])
def test_nothing_reaches_past_a_door(room: str) -> None:
    files = (PACKAGE / room).rglob("*.py") if room else PACKAGE.glob("*.py")
    found = [
        f"{path.relative_to(PACKAGE)}: {module}"
        for path in files
        for module in imports_of(path.read_text("utf-8"))
        if past_the_door(path.relative_to(PACKAGE), module)
    ]
    assert not found


@pytest.mark.parametrize(
    ("importer", "line", "reaches"),
    [
        ("_scan/run/live.py", "from torchfmri._model.layers import unwrap", True),
        ("_scan/run/live.py", "import torchfmri._model.layers as layers", True),
        ("__init__.py", "from torchfmri._model.layers import unwrap", True),
        ("_scan/run/live.py", "from torchfmri._model import unwrap", False),
        ("_scan/run/live.py", "from torchfmri._scan.record.anatomy import Anatomy", False),
        ("cli/routing.py", "from torchfmri.routing.experiment import Experiment", False),
        ("_scan/run/live.py", "from torchfmri.statistics import Statistics", False),
    ],
)
def test_an_import_past_a_door_is_seen(importer: str, line: str, reaches: bool) -> None:
    assert [past_the_door(Path(importer), each) for each in imports_of(line)] == [reaches]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_what_it_is_for(room: str) -> None:
    door = importlib.import_module(f"torchfmri.{room}")
    first, *rest = (door.__doc__ or "").strip().splitlines()
    assert first.endswith(".")
    assert 1 <= sum(bool(line.strip()) for line in rest) <= 6, "some five lines beneath the first"
    for name in getattr(door, "__all__", ()):
        assert hasattr(door, name)


def test_the_page_names_every_room_in_its_own_words() -> None:
    rows = dict(re.findall(r"^\| `(\w+(?:/|\.py))` \| (.*) \|$", PAGE, re.MULTILINE))
    modules = {f"{room}/": room for room in ROOMS} | {each: each[:-3] for each in FILES}
    said = {
        row: (importlib.import_module(f"torchfmri.{name}").__doc__ or "").strip().splitlines()[0]
        for row, name in modules.items()
    }
    assert rows == said


def test_the_page_is_one_screen() -> None:
    lines = PAGE.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 100


def test_places_that_the_page_names_exist() -> None:
    for place in re.findall(r"`([\w/]+\.py)`", PAGE):
        assert any((folder / place).exists() for folder in (PACKAGE, ROOT)), place


@pytest.mark.parametrize("module", [torchfmri, torchfmri.routing])
def test_public_names_report_the_public_module(module: object) -> None:
    names = {name: getattr(module, name) for name in module.__all__}  # type: ignore[attr-defined]
    assert {each.__module__ for each in names.values()} == {module.__name__}  # type: ignore[attr-defined]
    for value in names.values():
        assert pickle.loads(pickle.dumps(value)) is value


def test_a_file_saved_while_hooks_were_attached_still_loads() -> None:
    # What version 0.1 wrote before the rooms: protocol 0, `torchfmri._hooks.Hook(None)`.
    saved = b"ctorchfmri._hooks\nHook\n(NtR."
    assert type(pickle.loads(saved)) is Hook
    assert b"torchfmri._hooks" in pickle.dumps(Hook(print)), "and older versions read ours"
