"""Copied Python gives the view again, and the numbers that stand beside its crosshair."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browser import Page
from scans import make_anatomy, make_scan, make_sequence
from torch import nn

import torchfmri
from torchfmri import Monitor, Scan
from torchfmri.exceptions import InspectionError


def copied(page: Page, view: Any, layer: str, column: int) -> tuple[str, float]:
    """The code that a page gives at a cell, and the number that it shows there."""
    page.open(view.url)
    page.js(f"app.goTo({layer!r}, {column})")
    cell = f".details[data-row='{layer}'][data-column='{column}']:not([aria-busy])"
    page.page.wait_for_selector(cell)
    shown = np.float32(page.page.locator(".value b").get_attribute("title"))
    code = page.js("app.python()")
    page.page.goto("about:blank")  # so that it asks nothing of a server that is gone
    return code, shown


def run(code: str, **names: Any) -> Any:
    """What the code finds at the crosshair."""
    exec(code.replace("state=", "browser=False, state="), names)
    with names["view"] as view:
        return view.crosshair


def test_of_two_scans(page: Page, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    anatomy = make_anatomy(2)
    scans = [Scan(anatomy, [make_sequence(anatomy, 9, seed=at)], {"model": "m"}) for at in (1, 2)]
    paths = [tmp_path / "a.fmri", tmp_path / "b.fmri"]
    for scan, path in zip(scans, paths, strict=True):
        scan.save(path)
    layer = "model.layers.1.mlp"
    with torchfmri.view(*paths, browser=False) as view:
        code, shown = copied(page, view, layer, 4)
    found = run(code)
    before, after = (each.values("activation", pattern=layer).values[4, 0] for each in scans)
    assert found.value == shown == np.float32(after - before) != 0
    assert (found.layer, found.column, found.metric) == (layer, 4, "activation")
    assert found.curves["surprisal"] == scans[1].only.tokens.surprisal[4]
    assert f"layer='{layer}'" in capsys.readouterr().out, "it is printed"
    with torchfmri.view(*scans, browser=False) as view:
        code, _ = copied(page, view, layer, 4)
    assert "# before: the scan that this page shows, which is not saved" in code
    assert run(code, before=scans[0], after=scans[1]).value == found.value


def test_of_a_contrast(page: Page, tmp_path: Path) -> None:
    anatomy = make_anatomy(3)
    sequences = [
        make_sequence(anatomy, 6, metrics=["activation"], seed=at, condition="ab"[at % 2])
        for at in range(12)
    ]
    contrast = Scan(anatomy, sequences, {"model": "m"}).contrast("a", "b", level="voxel")
    contrast.save(tmp_path / "x.contrast")
    with torchfmri.view(tmp_path / "x.contrast", browser=False) as view:
        code, shown = copied(page, view, "mlp", 2)
    found = run(code)
    own = np.flatnonzero(contrast.columns.layer == f"model.layers.{found.text}.mlp")
    strongest = own[np.abs(contrast.statistic[own]).argmax()]
    assert found.value == shown == np.float32(contrast.g[strongest])
    for name in ("effect", "statistic", "p", "q"):
        assert found.values[name] == np.float32(getattr(contrast, name)[strongest])


def test_of_a_part_of_a_contrast_at_another_threshold(page: Page) -> None:
    anatomy = make_anatomy(3)
    sequences = [
        make_sequence(anatomy, 6, metrics=["activation"], seed=at, condition="ab"[at % 2])
        for at in range(12)
    ]
    contrast = Scan(anatomy, sequences, {"model": "m"}).contrast("a", "b", level="voxel")
    with torchfmri.view(contrast, browser=False) as view:
        part = str(view.board.names("mlp")[1])
        page.open(view.url)
        page.press("c")
        page.until("app.data.index === 1")
        page.js(f"app.goTo({part!r}, 2)")
        page.until(f"app.state.layer === {part!r}")
        code = page.js("app.python()")
        page.page.goto("about:blank")
    found = run(code, contrast=contrast)
    assert "# contrast: the contrast that this page shows" in code
    name = f"model.layers.{found.text}.mlp{part.removeprefix('mlp')}"
    assert found.value == np.float32(contrast.g[list(contrast.columns.names).index(name)])


def test_of_a_run(page: Page, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, folder=tmp_path / "run") as monitor:
        for _ in range(5):
            loss = model(torch.randn(16, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torchfmri.view(tmp_path / "run", browser=False) as view:
        code, shown = copied(page, view, "2", 3)
    found = run(code)
    names, values = monitor.history.matrix("activations", "rms")
    assert found.value == shown == np.float32(values[list(names).index("2"), 3])
    assert found.values["gradients"] > 0
    assert found.text == "3"


def test_a_view_without_a_crosshair_says_so() -> None:
    scan = make_scan(blocks=1)
    with torchfmri.view(scan, browser=False) as view:
        with pytest.raises(InspectionError, match=r"no crosshair.*Open the page"):
            view.crosshair  # noqa: B018
        view.state = {"layer": "model.layers.0", "column": 1}
        at = list(scan.layers).index("model.layers.0")
        assert view.crosshair.value == scan.values("activation").values[1, at]
