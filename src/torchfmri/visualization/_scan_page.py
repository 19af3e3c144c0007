"""A page that shows one scanned sequence, in one file that loads nothing from anywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any


def render(data: Mapping[str, Any]) -> str:
    """The page for these data; see `scan_page.html` for how it reads them."""
    template = files("torchfmri.visualization").joinpath("scan_page.html").read_text("utf-8")
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Inside a script element "</script>" and "<!--" would end or hide what follows.
    safe = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    parts = {"{{title}}": escape(f"{data['model']}: scan"), "{{data}}": safe}
    # In one pass: what is put in may contain such a mark itself.
    return re.sub("|".join(map(re.escape, parts)), lambda mark: parts[mark[0]], template)
