"""The notebooks run, and are kept without what running them adds; one is kept with its outputs."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

NOTEBOOKS = Path(__file__).resolve().parent.parent / "docs" / "notebooks"
# SmolLM2 takes minutes: what it showed is kept.
WITH_OUTPUTS = "causes.ipynb"
# Names that are one token of the tiny model.
SHORT_NAMES = {
    "John": "Tom", "Mary": "Lily", "Tom": "Ben", "James": "Max", "Sarah": "Sue", "David": "Ann",
}  # fmt: skip


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.name)
def test_notebook_is_kept_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code" and path.name == WITH_OUTPUTS:
            assert cell.outputs
        elif cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
    assert set(notebook.metadata) == {"kernelspec", "language_info"}


def run(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, change: Any = None
) -> tuple[Any, list[Any]]:
    """The notebook after it has been run, and all its outputs; `change` edits a cell's source."""
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel chooses its own
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    for cell in notebook.cells if change is not None else ():
        cell.source = change(cell.source)
    client = nbclient.NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "error"]
    return notebook, outputs


@pytest.mark.slow
def test_inspecting_shows_what_it_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook, outputs = run("inspect.ipynb", tmp_path, monkeypatch)
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    plots = [cell for cell in notebook.cells if "inspector.plot_" in cell.source]
    assert len(pictures) == len(plots) == 5
    tables = [
        output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})
    ]
    assert any("all zero" in table for table in tables)
    text = "".join(output.get("text", "") for output in outputs)
    assert "the output of 'conv3': relative difference" in text


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.slow
def test_scanning_shows_what_it_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook, outputs = run("scan.ipynb", tmp_path, monkeypatch)
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    plots = [cell for cell in notebook.cells if "scan.plot_" in cell.source]
    assert len(pictures) == len(plots) == 3
    text = "".join(output.get("text", "") for output in outputs)
    assert "The capital of France is Paris." in text
    assert "' France'" in text  # the token of the question that the answer depends on most
    tables = [output.data for output in outputs if "text/html" in output.get("data", {})]
    assert len(tables) == 2
    assert tables[1]["text/plain"].startswith("<Scan: 1 sequence of tiny")


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.slow
def test_ten_cells_lead_to_a_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the tiny model in the place of SmolLM2."""

    def smaller(source: str) -> str:
        names = re.compile("|".join(SHORT_NAMES))
        return names.sub(lambda found: SHORT_NAMES[found[0]], source.replace("smollm2", "tiny"))

    kept = nbformat.read(NOTEBOOKS / WITH_OUTPUTS, as_version=4)
    assert sum(cell.cell_type == "code" for cell in kept.cells) == 10
    assert "L23H3  all tokens  0.506" in str(kept.cells)
    _, outputs = run(WITH_OUTPUTS, tmp_path, monkeypatch, smaller)
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    text = "".join(output.get("text", "") for output in outputs)
    assert len(pictures) == 2
    assert "on the direct way to logits" in " ".join(text.split())
    assert re.search(r"L4H3 +[+-]\d", text)  # the head of the tiny model, in the last table
