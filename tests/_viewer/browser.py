"""A real browser for tests: Debian's chromium, driven by playwright."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--no-sandbox", "--headless", "--disable-background-networking", "--disable-sync",
    "--disable-component-update", "--no-first-run", "--force-device-scale-factor=1",
)  # fmt: skip
SWEEP = """async () => {
  const app = document.getElementById('viewer').viewer;
  // Not by animation frames: those that are measured are the page's own.
  const wait = () => new Promise(r => setTimeout(r, 16));
  let blank = 0;
  const heat = app.ui.heat, c = heat.getContext('2d');
  for (let step = 0; step < 120; step++) {
    const span = step < 60 ? 400 : 4000;
    const first = (step % 60) * (100000 - span) / 60;
    app.set({ first, last: first + span, column: Math.floor(first), follow: false });
    await wait(); await wait();
    const row = c.getImageData(0, 3 + 2 * app.scene.rowHeight, heat.width, 1).data;
    for (let x = 2; x < heat.width - 2; x += 7) {
      // A cell of the map is never grey; the hatching and the background are.
      const [r, g, b] = [row[4 * x], row[4 * x + 1], row[4 * x + 2]];
      if (Math.max(r, g, b) - Math.min(r, g, b) < 12) blank++;
    }
  }
  return { blank, held: app.plane('layers').held };
}"""
"""Goes over a scan of 100,000 tokens from end to end, and counts columns that are blank."""
APP = "document.getElementById('viewer').viewer"


def require_browser() -> Any:
    """Skip where there is no browser: on a desk without one; continuous integration has it."""
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    return pytest.importorskip("playwright.sync_api", reason="playwright is not installed")


class Page:
    """One page with the viewer in it.

    Attributes:
        page: Playwright's.
        requests: The addresses that were asked for.
        errors: What was thrown, and what the console says is wrong.
    """

    def __init__(self, page: Any) -> None:
        self.page = page
        self.requests: list[str] = []
        self.errors: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._console)

    def _console(self, message: Any) -> None:
        if message.type == "error":
            self.errors.append(message.text)

    def open(self, url: str, state: str = "drawn") -> Page:
        """Go there, and wait until the heat map is in a state."""
        self.page.goto(url)
        self.page.wait_for_selector(f".heat[data-state={state}]", timeout=20_000)
        self.settle()
        return self

    def settle(self) -> None:
        """Wait until what was asked for is drawn and nothing is missing."""
        frames = "() => new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))"
        self.page.wait_for_function(f"() => {APP}", timeout=20_000)
        self.page.evaluate(frames)  # only then is it known what is missing
        self.page.wait_for_function(
            f"() => {APP}.stats.missing === 0 && !!{APP}.plane('layers')?.header", timeout=20_000
        )
        self.page.evaluate(frames)

    def js(self, expression: str) -> Any:
        """The value of an expression in which `app` is the viewer."""
        return self.page.evaluate(f"() => {{ const app = {APP}; return {expression}; }}")

    def until(self, expression: str, timeout: int = 30_000) -> None:
        """Wait until an expression is true in which `app` is the viewer."""
        self.page.wait_for_function(
            f"() => {{ const app = {APP}; return {expression}; }}", timeout=timeout
        )

    def set(self, **state: Any) -> None:
        """Change the state, and wait until it is drawn."""
        self.js(f"app.set({json.dumps(state)})")
        self.settle()

    def press(self, *keys: str) -> None:
        """Press keys one after the other."""
        for key in keys:
            self.page.keyboard.press(key)

    @contextmanager
    def frames(self) -> Iterator[list[float]]:
        """Milliseconds of processor time of each animation frame inside the block."""
        line = self.page.context.new_cdp_session(self.page)
        events: list[dict[str, Any]] = []
        done: list[Any] = []
        found: list[float] = []
        line.on("Tracing.dataCollected", lambda each: events.extend(each["value"]))
        line.on("Tracing.tracingComplete", lambda each: done.append(each))
        options = {"categories": "devtools.timeline", "transferMode": "ReportEvents"}
        line.send("Tracing.start", options)
        yield found
        line.send("Tracing.end")
        while not done:
            self.page.wait_for_timeout(20)
        found += [
            each["tdur"] / 1000
            for each in events
            if each["name"] == "FireAnimationFrame" and "tdur" in each
        ]

    def text(self, selector: str) -> str:
        """What an element says."""
        return str(self.page.locator(selector).first.inner_text())

    def pixels(self, where: str = ".heat") -> Any:
        """(y, x, 3) the heat map, or another part of the page, as it is drawn."""
        import io

        import numpy as np
        from PIL import Image

        box = self.page.locator(where).bounding_box()
        shot = self.page.screenshot(clip=box)
        return np.asarray(Image.open(io.BytesIO(shot)).convert("RGB")).astype(int)


@contextmanager
def opened_page(browser: Any, **options: Any) -> Iterator[Page]:
    """A fresh page of its own profile."""
    options.setdefault("viewport", {"width": 1280, "height": 800})
    context = browser.new_context(**options)
    try:
        yield Page(context.new_page())
    finally:
        context.close()
