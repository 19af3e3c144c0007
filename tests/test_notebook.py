"""The notebook runs, and is kept without what running it adds."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

NOTEBOOK = Path(__file__).resolve().parent.parent / "docs" / "notebooks" / "inspect.ipynb"


def test_notebook_is_kept_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
    assert set(notebook.metadata) == {"kernelspec", "language_info"}


def test_notebook_runs_and_shows_what_it_promises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel chooses its own
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "error"]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    plots = [cell for cell in notebook.cells if "inspector.plot_" in cell.source]
    assert len(pictures) == len(plots) == 5
    tables = [
        output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})
    ]
    assert any("all zero" in table for table in tables)
    text = "".join(output.get("text", "") for output in outputs)
    assert "First difference: activations of 'conv3'" in text
