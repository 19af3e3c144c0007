"""The record that explains an exception, as text and as HTML.

`explain` returns it and errors of `explained` carry it. It is public: attributes and `kind`s must
stay, the wording may change. It holds only text and numbers, because a tensor or a frame in it
would keep the whole failed step alive.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from html import escape
from pathlib import Path

from torchfmri._explain.crash import SourceLine
from torchfmri._text import layer_label, printable, wrap

WIDTH = 100
_LONGEST_MESSAGE = 600


@dataclass(frozen=True)
class Explanation:
    """The explanation of an exception: what happened, in which layer, why, and the cure.

    It holds only text and numbers, no tensors and no frames. `print` shows it in 100 columns, and
    a notebook shows it as HTML.

    Attributes:
        kind: The short name of the failure, such as `"matrix_shape"`; `"unknown"` if it is not one
            of the known failures.
        error: The exception as Python prints it.
        what: What happened, in a sentence.
        why: What usually causes it.
        cure: What to do about it, most likely cure first.
        facts: What was read from tensors, layers and the graph.
        layer: The dotted name of the layer; `""` is the outermost module itself, None is unknown.
        module: The class of that layer.
        near: For a backward pass: the last layer before the operation, if its own is unknown.
        phase: `"forward"`, `"backward"`, `"optimizer step"`, `"loading"` or empty.
        source: The user's own line: file, number, function, code.
        operation: The line of a library that was called there and failed, if any.
        forward: For a backward pass: the line of the forward pass that belongs to it.

    Examples:
        >>> import torch, torchfmri
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(4, 2))
        >>> try:
        ...     model(torch.randn(3, 4))
        ... except RuntimeError as error:
        ...     explanation = torchfmri.explain(error)
        >>> explanation.kind, explanation.layer, explanation.module
        ('matrix_shape', '1', 'Linear')
        >>> explanation.facts[0]
        'The layer takes 4 features; the last size of (3, 8) is 8.'
    """

    kind: str
    error: str
    what: str
    why: str
    cure: tuple[str, ...]
    facts: tuple[str, ...] = ()
    layer: str | None = None
    module: str | None = None
    near: str | None = None
    phase: str = ""
    source: SourceLine | None = None
    operation: SourceLine | None = None
    forward: SourceLine | None = None

    @property
    def recognised(self) -> bool:
        """Whether the failure is known; if not, only its place is reported."""
        return self.kind != "unknown"

    def text(self, width: int = WIDTH) -> str:
        """Return the explanation for a terminal.

        Args:
            width: Columns.
        """
        message = "\n".join(wrap(_cut(self.error), width))
        return f"{message}\n\n{self.body(width)}"

    def body(self, width: int = WIDTH) -> str:
        """Return the explanation without the message of the exception.

        Args:
            width: Columns.
        """
        lines: list[str] = []
        for title, paragraphs in self._sections():
            bullet = "- " if title == "Cure" else ""
            for index, paragraph in enumerate(paragraphs):
                head = f"{title if index == 0 else '':<7}"
                lines += wrap(paragraph, width, head + bullet, " " * (7 + len(bullet)))
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr style="background:none"><th style="{_CELL};font-weight:600">{title}</th>'
            f'<td style="{_CELL}">{"<br>".join(map(_mark_up, paragraphs))}</td></tr>'
            for title, paragraphs in self._sections()
        )
        return (
            f'<div style="color:inherit"><pre style="white-space:pre-wrap">'
            f"{escape(_cut(self.error))}</pre>"
            f'<table style="border-collapse:collapse">{rows}</table></div>'
        )

    def _sections(self) -> list[tuple[str, list[str]]]:
        sections = [
            ("What", [self.what]),
            ("Where", self._where()),
            ("Facts", list(self.facts)),
            ("Why", [self.why] if self.why else []),
            ("Cure", list(self.cure)),
        ]
        return [(title, paragraphs) for title, paragraphs in sections if paragraphs]

    def _where(self) -> list[str]:
        during = f", {self.phase}" if self.phase in ("loading", "optimizer step") else ""
        during = f", {self.phase} pass" if self.phase in ("forward", "backward") else during
        lines = []
        if self.layer:
            lines.append(f"layer {self.layer!r} ({self.module}){during}")
        elif self.layer == "":
            lines.append(f"the outermost module itself ({self.module}){during}")
        elif self.near is not None:
            lines.append(f"after layer {layer_label(self.near)!r}{during}")
        elif self.module is not None:
            lines.append(f"{self.module}, which is not a layer of the model{during}")
        else:
            lines.append(f"the layer is not known{during}")
        lines += [_show_line("", self.source)] if self.source else []
        lines += [_show_line("which called ", self.operation)] if self.operation else []
        if self.forward:
            lines.append(_show_line("forward operation: ", self.forward))
        elif self.phase == "backward" and self.kind in _NEED_FORWARD_LINE:
            lines.append(
                "The line of the forward pass was not recorded; run it again with "
                "torchfmri.explained(model, detect=True)."
            )
        return lines


_CELL = "text-align:left;vertical-align:top;padding:2px 10px 2px 0;color:inherit;border:0"
_NEED_FORWARD_LINE = ("modified_in_place", "number_of_gradients", "gradient_shape", "nan_gradient")


def _show_line(before: str, line: SourceLine) -> str:
    code = f": {line.code}" if line.code else ""
    function = "" if line.function.startswith("<") else f" in {line.function}"
    return f"{before}{short_path(line.file)}:{line.number}{function}{code}"


def short_path(file: str) -> str:
    """Return a file's path relative to the working folder or to installed packages."""
    inside = re.split(r"[/\\](?:site|dist)-packages[/\\]", file)
    if len(inside) > 1:
        return inside[-1]
    here = str(Path.cwd()) + os.sep
    return file.removeprefix(here)


def _cut(message: str) -> str:
    text = printable(" ".join(message.split()))
    return text if len(text) <= _LONGEST_MESSAGE else text[: _LONGEST_MESSAGE - 4] + " ..."


def _mark_up(text: str) -> str:
    return re.sub(r"'([\w.]+)'", r"<code>\1</code>", escape(text, quote=False))
