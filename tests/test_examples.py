"""Every Python example that a reader can see runs.

The ```python blocks of a page share one namespace and run in order, in an empty folder. A block
that cannot run carries a comment with the reason on the line before it:

    <!-- not run: needs a GPU -->
"""

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

import torchfmri

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "README.zh.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w-]*)[^\n]*$")
NOT_RUN = re.compile(r"^<!-- not run: (?P<reason>.*\S) -->$")


@dataclass(frozen=True)
class Example:
    """A Python block of a page; `reason` says why it is not run, if it is not."""

    page: Path
    line: int
    code: str
    reason: str | None


def find_examples(page: Path) -> list[Example]:
    examples = []
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        opening = FENCE.match(lines[number])
        if opening is None:
            number += 1
            continue
        indent = opening["indent"]
        end = next(k for k in range(number + 1, len(lines)) if lines[k] == f"{indent}```")
        if opening["language"] == "python":
            before = next((text for text in reversed(lines[:number]) if text.strip()), "")
            skipped = NOT_RUN.match(before.strip())
            code = "\n".join(text.removeprefix(indent) for text in lines[number + 1 : end])
            examples.append(Example(page, number + 2, code, skipped["reason"] if skipped else None))
        number = end + 1
    return examples


EXAMPLES = {page: find_examples(page) for page in PAGES}
RUN = [page for page, examples in EXAMPLES.items() if any(e.reason is None for e in examples)]
SLOW = {"README.zh.md", "docs/compare.md", "docs/scan.md", "docs/token_gradients.md"}
SKIPPED = [example for examples in EXAMPLES.values() for example in examples if example.reason]


def name_page(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name, marks=[pytest.mark.slow] * (name in SLOW))
        for page, name in zip(RUN, map(name_page, RUN), strict=True)
    ],
)
def test_examples_of_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for example in EXAMPLES[page]:
        if example.reason is None:
            # Empty lines in front make a traceback point at the line of the page.
            source = "\n" * (example.line - 1) + example.code
            exec(compile(source, str(page), "exec"), namespace)
    importlib.import_module("matplotlib.pyplot").close("all")


if SKIPPED:

    @pytest.mark.parametrize("example", SKIPPED, ids=lambda e: f"{name_page(e.page)}:{e.line}")
    def test_example_not_run(example: Example) -> None:
        pytest.skip(f"{name_page(example.page)}:{example.line} is not run: {example.reason}")


def test_every_page_with_code_is_known() -> None:
    assert ROOT / "README.md" in RUN
    assert ROOT / "README.zh.md" in RUN
    assert ROOT / "docs" / "inspect.md" in RUN


def test_the_two_readmes_show_the_same_code() -> None:
    def without_comments(page: Path) -> list[str]:
        return [re.sub(r"\s*#.*", "", example.code) for example in EXAMPLES[page]]

    assert without_comments(ROOT / "README.md") == without_comments(ROOT / "README.zh.md")


@pytest.mark.parametrize("text", ["<!-- not run: -->", "<!-- not run -->"])
def test_not_run_needs_a_reason(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{text}\n```python\nx = 1\n```\n")
    (example,) = find_examples(page)
    assert example.reason is None
    assert example.line == 3


def list_modules() -> list[str]:
    found = pkgutil.walk_packages(torchfmri.__path__, "torchfmri.")
    return ["torchfmri", *(module.name for module in found if "__main__" not in module.name)]


@pytest.mark.parametrize("name", list_modules())
def test_doctests(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("torchfmri"):
            raise
        pytest.skip(f"{name} needs {error.name}, which is not installed here")
    monkeypatch.chdir(tmp_path)
    source = inspect.getsource(module)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in find_doctests(module, source):
        runner.run(test)
    assert runner.failures == 0
    assert runner.tries or ">>> " not in source, "examples that nobody ran"


def _parsed(source: str) -> ast.Module:
    """Parse a module.

    Python 3.11 raises SystemError where another thread compiles at the same moment, such as that of
    a page which an example opened (python/cpython#106905).
    """
    try:
        return ast.parse(source)
    except SystemError:
        return ast.parse(source)


def find_doctests(module: ModuleType, source: str) -> Iterator[doctest.DocTest]:
    """The examples of what a file defines; public names report another module than this one."""
    globs = vars(module).copy()
    yield doctest.DocTestParser().get_doctest(module.__doc__ or "", globs, "module", None, None)
    for node in _parsed(source).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            value = getattr(module, node.name)
            yield from doctest.DocTestFinder().find(value, node.name, module=False, globs=globs)


@pytest.mark.parametrize("name", torchfmri.__all__)
def test_public_class_has_an_example(name: str) -> None:
    value = getattr(torchfmri, name)
    if inspect.isclass(value) and not issubclass(value, Exception):
        assert ">>>" in (value.__doc__ or ""), f"torchfmri.{name} has no example in its docstring"
