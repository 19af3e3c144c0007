"""The viewer as a widget: questions go through the kernel, and JupyterLab shows it."""

import base64
import io
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Page
from PIL import Image
from scans import make_scan

from torchfmri import Scan
from torchfmri._text import printable
from torchfmri._viewer.page import bundle
from torchfmri._viewer.still import shown_rows

pytest.importorskip("anywidget")
nbformat = pytest.importorskip("nbformat")


def ask(widget: Any, name: str, **given: str) -> tuple[dict[str, Any], list[bytes]]:
    """What the widget sends back when a page asks something."""
    sent: list[tuple[dict[str, Any], list[bytes]]] = []
    widget.send = lambda content, buffers=None: sent.append((content, buffers or []))
    widget._handle_custom_msg({"number": 7, "name": name, "given": given}, [])
    assert len(sent) == 1
    return sent[0]


def test_questions_are_answered_through_the_kernel() -> None:
    scan = make_scan(blocks=2, tokens=9)
    widget = scan.widget(height=500)
    assert widget.height == 500
    content, _ = ask(widget, "board")
    assert content["number"] == 7
    assert json.loads(content["json"])["layers"] == list(scan.layers)
    _, (values,) = ask(widget, "values", metric="activation", sequence="0", row="3")
    np.testing.assert_array_equal(
        np.frombuffer(values, "<f4"), scan.values("activation").values[:, 3]
    )
    content, _ = ask(widget, "tile", level="77")
    assert content == {"number": 7, "error": "There is no tile 0 of level 77."}
    content, _ = ask(widget, "nothing")
    assert "There is no question 'nothing'" in content["error"]


def test_where_no_widget_can_be_shown_there_is_a_picture() -> None:
    scan = make_scan(blocks=1, tokens=9, metrics=["activation"])
    data = scan.widget()._repr_mimebundle_()
    data = data[0] if isinstance(data, tuple) else data
    assert data["text/plain"] == "torchfmri viewer: test model"
    picture = Image.open(io.BytesIO(base64.b64decode(data["image/png"]))).convert("RGB")
    pixels = np.asarray(picture).astype(int)
    values = scan.values("activation").values
    high, wide = pixels.shape[0] // values.shape[1], pixels.shape[1] // values.shape[0]
    viridis = pytest.importorskip("matplotlib").colormaps["viridis"]
    for row in range(values.shape[1]):
        top = np.quantile(values[:, row], 0.995, method="lower")
        for token in range(len(values)):
            shown = pixels[row * high + high // 2, token * wide + wide // 2]
            wanted = np.array(viridis(min(1.0, values[token, row] / top))[:3]) * 255
            assert np.abs(shown - wanted).max() <= 16, (row, token)
    names = ["model.embed", *(f"layers.{at}{part}" for at in range(30) for part in ("", ".mlp"))]
    assert [names[row] for row in shown_rows(names)] == [
        name for name in names if not name.endswith(".mlp")
    ], "of many layers the blocks, and what is outside of them"
    assert shown_rows(names[:7]) == list(range(7))
    empty = Scan(scan.anatomy, [], {}).widget()
    assert empty.still == ""


CELL = """
import sys
sys.path[:0] = {path!r}
from scans import make_scan
widget = make_scan(blocks=4, tokens=30).widget()
widget
"""


def notebook_of() -> Any:
    """A notebook with a widget in its only cell."""
    return nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(CELL.format(path=[each for each in sys.path if each]))],
        metadata={
            "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}
        },
    )


@pytest.mark.slow
@pytest.mark.parametrize("is_stored", [True, False], ids=["with its state", "without it"])
def test_an_exported_notebook_shows_the_picture_offline(
    page: Page, tmp_path: Path, is_stored: bool
) -> None:
    nbconvert = pytest.importorskip("nbconvert")
    pytest.importorskip("ipykernel")
    from nbconvert.preprocessors import ExecutePreprocessor

    notebook = notebook_of()
    ExecutePreprocessor(timeout=120, store_widget_state=is_stored).preprocess(notebook, {})
    assert ("widgets" in notebook.metadata) == is_stored
    exporter = nbconvert.HTMLExporter(require_js_url="", mathjax_url="")
    text, _ = exporter.from_notebook_node(notebook)
    (tmp_path / "x.html").write_text(text)
    page.page.route("http*://**/*", lambda route: route.abort())  # there is no network
    page.page.goto((tmp_path / "x.html").as_uri())
    picture = page.page.locator("figure img")
    picture.wait_for(state="visible")
    assert picture.evaluate("each => each.naturalWidth") > 100
    assert picture.bounding_box()["width"] > 300
    drawing = base64.b64decode(picture.get_attribute("src").partition(",")[2]).decode()
    scan = make_scan(blocks=4, tokens=30)
    for text in [*scan.layers, *scan.tokens.pieces]:
        short = text.strip() if len(text) <= 28 else "…" + text[-27:]
        assert f">{escape(printable(short))}</text>" in drawing, text
    assert "30 tokens across, 35 layers down" in page.page.locator("figcaption").inner_text()
    foreign = [each for each in page.requests if each.startswith("http")]
    # The manager of widgets is what nbconvert itself asks for, where it finds their state.
    assert [each for each in foreign if "html-manager" not in each] == []
    assert bool(foreign) == is_stored
    page.errors.clear()  # what nbconvert did not get


WITHOUT_KERNEL = """
import viewer from "./viewer.js";
const values = {state: {}, height: 640, still: STILL};
const model = {get: (name) => values[name], set() {}, save_changes() {}, send() {}, on() {}};
viewer.render({model, el: document.getElementById("viewer")});
"""


def test_a_widget_without_a_kernel_shows_the_picture(page: Page) -> None:
    pytest.importorskip("starlette")
    widget = make_scan(blocks=1).widget()
    script = WITHOUT_KERNEL.replace("STILL", json.dumps(widget.still))
    html = f'<main id="viewer"></main><script type="module">{script}</script>'

    def answer(route: Any) -> None:
        if route.request.url.endswith("viewer.js"):
            route.fulfill(body=bundle(), content_type="text/javascript")
        else:
            route.fulfill(body=html, content_type="text/html")

    page.page.route("**/*", answer)
    page.page.goto("http://127.0.0.1/widget")
    page.page.wait_for_selector("img[alt*='heat map']", timeout=15_000)
    assert page.page.evaluate(
        "() => document.getElementById('viewer').shadowRoot.querySelector('img').naturalWidth"
    ) > 100  # fmt: skip


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[str]:
    """The address of a notebook in JupyterLab."""
    pytest.importorskip("jupyterlab", reason="jupyterlab is not installed")
    nbformat.write(notebook_of(), tmp_path / "x.ipynb")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}",
        "--IdentityProvider.token=test", "--ServerApp.port_retries=0", f"--notebook-dir={tmp_path}",
        "--LabApp.news_url=", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]  # fmt: skip
    environment = {**os.environ, "JUPYTER_CONFIG_DIR": str(tmp_path), "HOME": str(tmp_path)}
    log = (tmp_path / "log").open("w")
    server = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{address}/api?token=test", timeout=2)
                break
            except OSError:
                assert server.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.2)
        yield f"{address}/lab/tree/x.ipynb?token=test"
    finally:
        server.terminate()
        server.wait(20)
        log.close()


@pytest.mark.slow
def test_the_widget_renders_and_answers_in_jupyterlab(page: Page, lab: str) -> None:
    page.page.goto(lab)
    page.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
    page.page.get_by_text("| Idle").first.wait_for(timeout=90_000)  # before, cells are not run
    page.page.locator(".jp-Notebook .jp-InputArea-editor").first.click()
    page.press("Shift+Enter")
    page.page.wait_for_selector(".heat[data-state=drawn]", timeout=90_000)
    assert "30 tokens" in page.text(".viewer header")
    assert page.page.locator("figure img").count() == 1
    page.page.locator("figure img").wait_for(state="hidden")  # the widget works
    heat = page.page.locator(".heat")
    colours = heat.evaluate(
        """c => new Set(Array.from({length: 300}, (_, i) =>
        c.getContext('2d').getImageData(3 + i, 30, 1, 1).data.join())).size"""
    )
    assert colours > 10, "it is drawn"
    heat.click(position={"x": 200, "y": 100})
    details = page.page.locator("aside.details").bounding_box()
    assert details is not None
    assert details["width"] >= 200, "beside the map, as wide as the notebook allows"
    page.page.wait_for_function(
        """() => [...document.querySelectorAll('*')].some(e => e.viewer
        && e.viewer.ui.details.textContent.includes('this row'))"""
    )
    page.page.locator(".metrics button, .segments button", has_text="Gradient").first.click()
    page.page.wait_for_function(
        """() => [...document.querySelectorAll('*')].some(e => e.viewer
        && e.viewer.state.metric === 'gradient' && e.viewer.plane('layers').header)"""
    )
    page.errors.clear()  # JupyterLab's own, such as extensions that are not there
