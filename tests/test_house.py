"""The plan of the package: rooms with doors, one page that tells them, names that stay."""

import ast
import importlib
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import torchfmri
import torchfmri.routing
from torchfmri._torch import Hook

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "torchfmri"
ROOMS = sorted(each.parent.name for each in PACKAGE.glob("*/__init__.py"))
FILES = ["exceptions.py", "reference.py", "statistics.py"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
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


def test_what_the_security_page_says_about_pickles_is_true() -> None:
    page = " ".join((ROOT / "SECURITY.md").read_text("utf-8").split())
    calls = [
        (path.relative_to(PACKAGE).as_posix(), ast.unparse(node))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and re.search(r"\bload\w*$", ast.unparse(node.func))
    ]
    assert not [call for call in calls if re.search(r"\b(pickle|marshal|shelve|dill)\b", call[1])]
    torchs = [call for call in calls if call[1].startswith("torch.load")]
    assert [path for path, _ in torchs] == ["routing/experiment/training_run.py"]
    assert all("weights_only=True" in text for _, text in torchs)
    assert all("allow_pickle=False" in text for _, text in calls if text.startswith("np.load"))
    for said in ("`torch.load(weights_only=True)`", "`pytorch_model.bin`", "all_gather_object"):
        assert said in page
    assert "tells damage by accident, not by intent" in page


IMPORTED = """
import sys
import torchfmri
heavy = ("triton", "numba", "matplotlib", "transformers", "pandas", "xarray", "IPython")
assert not [name for name in heavy if name in sys.modules], "by import torchfmri"
rooms = [name for name in sys.modules if name.startswith("torchfmri.")]
assert not rooms, rooms
assert {*torchfmri.__all__, "statistics", "reference"} <= set(dir(torchfmri))
for name in torchfmri.__all__:
    getattr(torchfmri, name)
assert not [name for name in heavy if name in sys.modules], "by all names together"
for name in ("exceptions", "reference", "routing", "statistics", "visualization"):
    assert getattr(torchfmri, name).__name__ == "torchfmri." + name
assert not hasattr(torchfmri, "Inspektor")
"""

RESULT = """
import torch, torchfmri
inspection = torchfmri.Inspector(torch.nn.Linear(2, 2)).run_inspection(torch.ones(1, 2))
result = type(inspection), type(inspection[""]), type(inspection[""].statistics())
print(*(f"{each.__module__}.{each.__name__}" for each in result))
"""


def test_import_is_light_and_names_come_when_they_are_used() -> None:
    subprocess.run([sys.executable, "-c", IMPORTED], check=True, env=ENVIRONMENT)


IN_THREADS = """
import sys, threading, torchfmri
sys.setswitchinterval(1e-5)
names = ["verify_gradients", "cost", "scan", "diagnose", "Monitor", "token_gradients", "advise"]
together, wrong = threading.Barrier(len(names)), []

def use(name):
    together.wait()
    try:
        assert getattr(torchfmri, name).__module__ == "torchfmri"
    except BaseException as error:
        wrong.append((name, error))

threads = [threading.Thread(target=use, args=(name,)) for name in names]
[each.start() for each in threads]
[each.join() for each in threads]
assert not wrong, wrong
"""


def test_names_are_first_used_in_several_threads() -> None:
    subprocess.run([sys.executable, "-c", IN_THREADS], check=True, env=ENVIRONMENT)


def test_results_of_names_not_yet_used_report_the_public_module_too() -> None:
    found = subprocess.run(
        [sys.executable, "-c", RESULT], check=True, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert found.stdout.split() == [
        "torchfmri.Inspection",
        "torchfmri.Record",
        "torchfmri.Statistics",
    ]


def test_every_name_has_one_room() -> None:
    rooms = torchfmri._ROOM_OF
    assert sorted(rooms) == sorted(torchfmri.__all__)
    for name, room in rooms.items():
        assert hasattr(importlib.import_module(f"torchfmri.{room}"), name)


def test_a_file_saved_while_hooks_were_attached_still_loads() -> None:
    # What version 0.1 wrote before the rooms: protocol 0, `torchfmri._hooks.Hook(None)`.
    saved = b"ctorchfmri._hooks\nHook\n(NtR."
    assert type(pickle.loads(saved)) is Hook
    assert b"torchfmri._hooks" in pickle.dumps(Hook(print)), "and older versions read ours"


def test_the_version_stands_in_one_place() -> None:
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited is not None
    assert cited[1] == torchfmri.__version__
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text()


class Sizes(NamedTuple):
    """How large the house is. The ceilings of `CEILINGS` may only fall."""

    longest_file: int
    files_over_400: int
    longest_function: int
    functions_over_50: int
    most_arguments: int
    long_records: int  # constructor calls with more than five positional arguments
    laid_by_hand: int  # "# fmt: skip"
    repeated_class_names: int
    one_line_docstrings: int  # files of which a docstring of one line is all that is said


CEILINGS = Sizes(
    longest_file=760,
    files_over_400=20,
    longest_function=97,
    functions_over_50=35,
    most_arguments=19,
    long_records=0,
    laid_by_hand=88,
    repeated_class_names=0,
    one_line_docstrings=0,
)
PUBLIC_TWICE = {"MonitorCallback"}  # the same callback for Lightning and for transformers


FEWEST_COMMENTS = 0.0162  # lines with a comment, of all lines; may only rise


def long_records(sources: dict[Path, str]) -> list[str]:
    """Return `file:line: Class` of the constructor calls with more than five positional arguments.

    Six values in a row are easily swapped: give them by keyword.
    """
    return [
        f"{path}:{node.lineno}: {node.func.id}"
        for path, text in sources.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and (node.func.id == "cls" or node.func.id.lstrip("_")[:1].isupper())
        and len(node.args) > 5
    ]


def repeated_class_names(sources: dict[Path, str]) -> list[str]:
    """Return `Class: file, file` of the classes that share their name: one word, one meaning."""
    files: dict[str, list[str]] = {}
    for path, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                files.setdefault(node.name, []).append(str(path))
    return [
        f"{name}: {', '.join(of)}"
        for name, of in sorted(files.items())
        if len(of) > 1 and name not in PUBLIC_TWICE
    ]


# A file is often opened alone, from a traceback or a search. One line says what it is about, and
# leaves open who calls it, what may change and what must not. Files with fewer than 15 lines of
# code show that themselves (doors that import nothing, `__main__`), so they are exempt.
LINES_THAT_NEED_WORDS = 15


def one_line_docstrings(sources: dict[Path, str]) -> list[str]:
    """Return the files with code enough to need words, and with at most one line of them."""
    found = []
    for path, text in sources.items():
        tree = ast.parse(text)
        code = {node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt)}
        words = (ast.get_docstring(tree) or "").splitlines()
        if len(code) >= LINES_THAT_NEED_WORDS and len(words) < 2:
            found.append(str(path))
    return found


def sizes_of(sources: dict[Path, str]) -> Sizes:
    files = [len(text.splitlines()) for text in sources.values()]
    nodes = [node for text in sources.values() for node in ast.walk(ast.parse(text))]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    lengths = [node.end_lineno - node.lineno + 1 for node in functions if node.end_lineno]
    arguments = [len(node.args.args) + len(node.args.kwonlyargs) for node in functions]
    return Sizes(
        longest_file=max(files),
        files_over_400=sum(each > 400 for each in files),
        longest_function=max(lengths),
        functions_over_50=sum(each > 50 for each in lengths),
        most_arguments=max(arguments),
        long_records=len(long_records(sources)),
        laid_by_hand=sum(text.count("# fmt: skip") for text in sources.values()),
        repeated_class_names=len(repeated_class_names(sources)),
        one_line_docstrings=len(one_line_docstrings(sources)),
    )


def test_the_house_does_not_grow_out_of_its_sizes() -> None:
    sources = {
        path.relative_to(PACKAGE): path.read_text(encoding="utf-8")
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    sizes = sizes_of(sources)
    grown = {
        name: f"{size}, at most {ceiling}"
        for name, size, ceiling in zip(Sizes._fields, sizes, CEILINGS, strict=True)
        if size > ceiling
    }
    named = [
        *long_records(sources),
        *repeated_class_names(sources),
        *one_line_docstrings(sources),
    ]
    assert not grown, "\n".join([str(grown), *named])
    text = "".join(sources.values())
    comments = len(re.findall(r"^\s*#|  # (?!fmt:)", text, re.MULTILINE))
    assert comments / text.count("\n") > FEWEST_COMMENTS


def test_sizes_are_counted() -> None:
    method = "    def f(self, a, *, b): return A(1, 2, 3, 4, 5, 6)  # fmt: skip\n"
    source = f"class A: ...\nclass A:\n{method}"
    long = "def g(): ...\n" + "\n" * 400
    few, many = "x = 1\n" * 5, "x = 1\n" * 20
    terse, told = f'"""One line."""\n{many}', f'"""One line.\n\nAnd why."""\n{many}'
    sizes = sizes_of({Path("a.py"): source, Path("b.py"): long, Path("c.py"): terse})
    assert sizes == Sizes(
        longest_file=401,
        files_over_400=1,
        longest_function=1,
        functions_over_50=0,
        most_arguments=3,
        long_records=1,
        laid_by_hand=1,
        repeated_class_names=1,
        one_line_docstrings=1,
    )
    assert long_records({Path("a.py"): source}) == ["a.py:3: A"]
    assert repeated_class_names({Path("a.py"): source}) == ["A: a.py, a.py"]
    texts = {"terse.py": terse, "silent.py": many, "told.py": told, "small.py": few}
    found = one_line_docstrings({Path(name): text for name, text in texts.items()})
    assert found == ["terse.py", "silent.py"]
