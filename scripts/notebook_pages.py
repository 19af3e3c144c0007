"""A hook of mkdocs: every notebook of the documentation becomes a page with its outputs.

Most notebooks are kept without outputs, so that a change of one can be read. They are executed when
the documentation is built, and again only when they or the package have changed. A notebook that is
kept with its outputs, because it takes minutes, is shown as it is.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.structure.files import File, Files
from nbclient import NotebookClient
from nbconvert import HTMLExporter

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "notebooks"


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each notebook; mkdocs calls this."""
    for path in sorted(Path(config["docs_dir"], "notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.stem}.html", content=page_of(path)))
    return files


def page_of(path: Path) -> str:
    """The notebook with its outputs as HTML that loads nothing from elsewhere."""
    sources = [path, *sorted((ROOT / "src").rglob("*.py"))]
    digest = hashlib.sha256(b"".join(each.read_bytes() for each in sources)).hexdigest()[:16]
    kept = CACHE / f"{path.stem}-{digest}.html"
    if not kept.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        for old in CACHE.glob(f"{path.stem}-*.html"):
            old.unlink()
        kept.write_text(render(path), encoding="utf-8")
    return kept.read_text("utf-8")


def render(path: Path) -> str:
    """Execute a notebook and convert it."""
    notebook = nbformat.read(path, as_version=4)
    folder = CACHE / "work"
    folder.mkdir(parents=True, exist_ok=True)
    # Without the state of widgets, a page shows their still pictures.
    client = NotebookClient(
        notebook, timeout=300, kernel_name="python3", store_widget_state=False,
        resources={"metadata": {"path": str(folder)}},
    )  # fmt: skip
    if not any(cell.get("outputs") for cell in notebook.cells):
        client.execute()
    exporter = HTMLExporter(
        mathjax_url="", require_js_url="", jquery_url="", mermaid_js_url="", widget_renderer_url=""
    )
    page, _ = exporter.from_notebook_node(
        notebook, resources={"metadata": {"name": title_of(notebook)}}
    )
    return str(page)


def title_of(notebook: Any) -> str:
    """The first heading."""
    first: str = notebook.cells[0].source
    return first.splitlines()[0].lstrip("# ")
