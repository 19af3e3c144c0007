"""The documentation names everything a user can reach, and its links lead somewhere."""

import argparse
import re
import tomllib
from pathlib import Path

import pytest

import torchfmri
from torchfmri import cli

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = {page: page.read_text(encoding="utf-8") for page in sorted(DOCS.rglob("*.md"))}
TEXT = "\n".join(PAGES.values())
LINK = re.compile(r"\]\((?!https?://|#)(?P<target>[^)#\s]+)(?:#[^)]*)?\)")


def is_documented(name: str) -> bool:
    return re.search(rf"(?<![\w]){re.escape(name)}(?![\w])", TEXT) is not None


@pytest.mark.parametrize("name", torchfmri.__all__)
def test_public_name_is_documented(name: str) -> None:
    assert is_documented(name), f"torchfmri.{name} does not appear in docs/"


@pytest.mark.parametrize(
    "name", [name for name in dir(torchfmri.Inspector) if not name.startswith("_")]
)
def test_method_of_inspector_is_in_the_guide(name: str) -> None:
    guide = PAGES[DOCS / "inspect.md"]
    assert re.search(rf"\b{name}\b", guide), f"Inspector.{name} does not appear in docs/inspect.md"


@pytest.mark.parametrize("name", [command.name for command in cli.COMMANDS])
def test_subcommand_is_documented(name: str) -> None:
    assert is_documented(f"torchfmri {name}"), f"`torchfmri {name}` does not appear in docs/"


@pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda command: command.name)
def test_option_of_subcommand_is_documented(command: cli.Command) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(cli.CommandOptions(parser))
    options = [option for action in parser._actions for option in action.option_strings]
    absent = [
        option
        for option in options
        if option.startswith("--") and option != "--help" and f"`{option}`" not in TEXT
    ]
    assert not absent, f"options of `torchfmri {command.name}` that docs/ does not name: {absent}"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    absent = [page.name for page in PAGES if page.relative_to(DOCS).as_posix() not in navigation]
    assert not absent, f"not in the navigation of mkdocs.yml: {absent}"


@pytest.mark.parametrize(
    "page",
    ["README.md", "README.zh.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"],
)
def test_links_lead_somewhere(page: str) -> None:
    targets = [match["target"] for match in LINK.finditer((ROOT / page).read_text("utf-8"))]
    broken = [target for target in targets if not (ROOT / target).exists()]
    assert not broken


def test_readmes_link_each_other_and_the_same_pages() -> None:
    def targets(page: str) -> set[str]:
        found = LINK.finditer((ROOT / page).read_text("utf-8"))
        return {match["target"] for match in found} - {"README.md", "README.zh.md"}

    assert targets("README.md") == targets("README.zh.md")


def test_examples_of_docstrings_are_shown_as_code() -> None:
    """The API page reads `Examples:`; it would show an `Example:` as a quotation."""
    files = sorted((ROOT / "src").rglob("*.py"))
    assert not [
        path for path in files if re.search(r"^ *Example:$", path.read_text("utf-8"), re.MULTILINE)
    ]


def test_every_extra_is_in_all_and_brings_something_that_the_package_uses() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    for_users = {*extras} - {"all", "benchmarks", "dev"}
    (everything,) = extras["all"]
    assert set(re.findall(r"\w+", everything.partition("[")[2])) == for_users
    sources = "\n".join(path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py"))
    for extra in sorted(for_users):
        packages = [re.split(r"[<>=;\[ ]", each)[0] for each in extras[extra]]
        assert any(re.search(rf"\b{each}\b", sources) for each in packages), extra


def test_the_oldest_versions_are_those_that_the_readme_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["scan"]]
    least = dict(each.split(">=") for each in wanted) | {"Python": project["requires-python"][2:]}
    for page in ("README.md", "README.zh.md"):
        text = (ROOT / page).read_text("utf-8")
        for name in ("Python", "torch", "transformers"):
            assert re.search(rf"\b{name}\W{{1,3}}{re.escape(least[name])}\b", text), (page, name)
