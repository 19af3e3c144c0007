"""Write a contrast as one page: question, design, map, peaks, calibration.

`Contrast.report` returns a `ContrastReport`, whose methods have the names of nilearn's reports. The
page is one file that loads nothing from anywhere. Names of prompts and layers come from the user's
data: everything is escaped. Layout and words may change freely.
"""

from __future__ import annotations

import base64
import io
import tempfile
import webbrowser
from dataclasses import dataclass
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchfmri._arguments import check_file, few
from torchfmri._files import new_file

if TYPE_CHECKING:
    from torchfmri._contrast.record import Contrast

_SHOWN = 60
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem;"
    "color:#1a1a1a;background:#fff}img{max-width:100%}h2{margin-top:2rem;font-size:1.15rem}"
    "table.design{border-collapse:collapse}table.design td,table.design th{text-align:left;"
    "padding:.15rem .8rem .15rem 0;vertical-align:top}.small{color:#555;font-size:.9em}"
)


@dataclass(frozen=True, eq=False)
class ContrastReport:
    """The page of a contrast; shown by notebooks, saved, or opened in a browser.

    Attributes:
        contrast: What it is about.
        peaks: How many rows of the table it shows.

    Examples:
        >>> import torchfmri
        >>> report = torchfmri.ContrastReport(contrast=None, peaks=5)  # contrast.report(5)
        >>> report.peaks
        5
    """

    contrast: Contrast
    peaks: int = 20

    def html(self) -> str:
        """Return the page: one file that loads nothing from anywhere."""
        title = escape(f"{self.contrast.question} ({self.contrast.model or 'a model'})")
        return (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            f"<style>{_STYLE}</style></head><body>{self._body()}</body></html>"
        )

    def _body(self) -> str:
        contrast = self.contrast
        return (
            f"<h1>{escape(contrast.question)}</h1><p>{escape(contrast.summary)}.</p>"
            f"<h2>Design</h2>{self._design()}<h2>Map</h2>{self._map()}"
            f"<h2>Peaks</h2>{contrast.grid(self.peaks).html()}"
            f"<h2>Calibration</h2><p>{escape(self._calibration())}</p>"
        )

    def _design(self) -> str:
        rows = []
        for condition, weights in zip(
            self.contrast.conditions, self.contrast.weights.T, strict=True
        ):
            names = self.contrast.prompts[condition]
            weight = ", ".join(f"{each:+.3g}" for each in weights)
            rows.append(
                f"<tr><th>{escape(condition)}</th><td>{weight}</td><td>{len(names)}</td>"
                f'<td class="small">{escape(few(names, _SHOWN))}</td></tr>'
            )
        head = "<tr><th>condition</th><th>weight</th><th>prompts</th><th>names</th></tr>"
        return f'<table class="design">{head}{"".join(rows)}</table>'

    def _map(self) -> str:
        try:
            figure: Any = self.contrast.plot_contrast().figure
        except ImportError as error:  # no matplotlib: the page says how to get the map
            return f"<p>{escape(str(error))}</p>"
        data = io.BytesIO()
        figure.savefig(data, format="png", dpi=130)
        text = base64.b64encode(data.getvalue()).decode("ascii")
        return f'<img alt="map of the contrast" src="data:image/png;base64,{text}">'

    def _calibration(self) -> str:
        contrast = self.contrast
        if contrast.calibration is None:
            return (
                "Not checked. contrast.calibrate() shuffles the labels of these prompts and runs "
                "the whole path again, 200 times, to see how often it finds something in nothing."
            )
        return (
            "The labels of these prompts were shuffled and the whole path was run again. "
            f"{contrast.calibration}. A cautious test finds something in fewer."
        )

    def save_as_html(self, path: str | PathLike[str]) -> None:
        """Write the page into a file.

        Raises:
            OSError: The disk is full, or the like.
        """
        with new_file(check_file("path", path)) as new:
            new.write_text(self.html(), encoding="utf-8")

    def open_in_browser(self) -> Path:
        """Write the page into a temporary file, open it, and return where it is."""
        with tempfile.NamedTemporaryFile(
            "w", suffix=".html", prefix="torchfmri-", delete=False, encoding="utf-8"
        ) as file:
            file.write(self.html())
        page = Path(file.name)
        webbrowser.open(page.as_uri())
        return page

    def _repr_html_(self) -> str:
        return self._body()
