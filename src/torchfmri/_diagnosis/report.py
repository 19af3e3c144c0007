"""The result of a diagnosis: what was found, to read, to draw, and as data, and its notes.

`Diagnosis` is public. Its attributes, `to_dict` and the order of its findings (the worst first)
must stay. The wording of the report may be changed freely. `_checkup` and `registry.find` put their
own code inside `Notes.guard`: an error of ours must not end somebody's training nor stay hidden,
so it becomes a sentence of the report. Only `Exception` is caught there; `Lost` and Ctrl-C pass.
"""

from __future__ import annotations

import math
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchfmri._records import SEVERITIES, Finding
from torchfmri._text import (
    BOLD,
    DIM,
    RED,
    encodable,
    few,
    layer_label,
    line_width,
    output_style,
    plural,
    wrap,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from torchfmri._diagnosis.observation import Observation
    from torchfmri._records import History

_MOST_LAYERS = 4
_COLOURS = {"alarm": "#D55E00", "warn": "#B8860B", "inform": "#0072B2"}


class Notes:
    """Sentences about a run that are not findings; each is kept once."""

    def __init__(self) -> None:
        self._said: dict[str, None] = {}

    def add(self, sentence: str) -> None:
        """Note something."""
        self._said.setdefault(sentence)

    @contextmanager
    def guard(self, part: str) -> Iterator[None]:
        """Turn an error in the block into a note: `part` was not fully looked at.

        Only errors: what ends a step on purpose (Lost, Ctrl-C) passes through.
        """
        try:
            yield
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            said = str(error).strip().partition("\n")[0]
            self.add(
                f"{part} could not be looked at ({type(error).__name__}: {said}, "
                f"{Path(frame.filename).name}:{frame.lineno}): what is wrong there may be missing "
                "from this report. This is a fault of torchfmri."
            )

    @property
    def all(self) -> tuple[str, ...]:
        """All notes, oldest first."""
        return tuple(self._said)


@dataclass(frozen=True)
class Diagnosis(Sequence[Finding]):
    """The findings of one run, the worst first; print it to read it.

    Attributes:
        model: The class of the model.
        findings: The findings, each with its consequences.
        steps: How many steps were looked at.
        facts: Numbers about the run that are not findings, such as the loss at both ends.
        seconds: How long it took.
        history: The statistics behind it, for figures; None if there are none.
        observation: Everything that was observed; for those who write diagnoses.
        notes: Notes about the run itself, such as a part that could not be looked at.

    Examples:
        >>> import torch, torchfmri
        >>> from torch import nn
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
        >>> _ = nn.init.constant_(model[0].bias, -100)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        >>> batches = [(torch.randn(32, 8), torch.randn(32, 1)) for _ in range(12)]
        >>> diagnosis = torchfmri.diagnose(
        ...     model, batches, nn.MSELoss(), optimizer, steps=12, show=False
        ... )
        >>> diagnosis.ok, diagnosis[0].problem, diagnosis[0].layers
        (False, 'dead_units', ('1', '0'))
    """

    model: str
    findings: tuple[Finding, ...]
    steps: int = 0
    facts: Mapping[str, float] = field(default_factory=dict)
    seconds: float = math.nan
    history: History | None = field(default=None, repr=False, compare=False)
    observation: Observation | None = field(default=None, repr=False, compare=False)
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing was found that needs looking at; what only informs does not count."""
        return all(each.severity == "inform" for each in self.findings)

    @property
    def alarms(self) -> list[Finding]:
        """The findings with which training cannot go well."""
        return [each for each in self.findings if each.severity == "alarm"]

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def __getitem__(self, place: Any) -> Any:
        return self.findings[place]

    def __repr__(self) -> str:
        named = few(each.problem for each in self.findings) or "nothing found"
        return f"<Diagnosis of {self.model}: {named}, {plural(self.steps, 'step')}>"

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """Return the report in sentences, the worst first.

        Args:
            width: The width in characters; by default that of the terminal, at most 100.
        """
        room = min(100, line_width(None)) if width is None else line_width(width)
        style = output_style()
        lines = wrap(f"{self.model}: {self._verdict()}", room)
        for finding in self.findings:
            code = RED if finding.severity == "alarm" else BOLD
            lines += ["", style.paint(_headline(finding), code)]
            lines += [f"  {line}" for line in wrap(finding.text, room - 2)]
            lines += [f"  {line}" for line in wrap(f"What to do: {finding.advice}", room - 2)]
            for each in finding.consequences:
                said = f"Seen with it: {_headline(each)}. {each.text}"
                lines += [style.paint(f"    {line}", DIM) for line in wrap(said, room - 4)]
        if self.facts:
            said = ", ".join(f"{name} {value:.4g}" for name, value in self.facts.items())
            lines += ["", *(style.paint(line, DIM) for line in wrap(said, room))]
        for note in self.notes:
            lines += ["", *wrap(f"note: {note}", room)]
        return encodable("\n".join(lines))

    def _verdict(self) -> str:
        counts = Counter(each.severity for each in self.findings)
        nouns = zip(SEVERITIES, ("alarm", "warning", "remark"), strict=True)
        said = ", ".join(plural(counts[each], noun) for each, noun in nouns if counts[each])
        return f"{said or 'nothing found'} in {plural(self.steps, 'step')} ({self.seconds:.1f} s)"

    def _repr_html_(self) -> str:
        blocks = []
        for finding in self.findings:
            follows = "".join(
                f"<li>{escape(_headline(each))}. {escape(each.text)}</li>"
                for each in finding.consequences
            )
            blocks.append(
                f'<div style="border-left:4px solid {_COLOURS[finding.severity]};'
                f'padding:2px 12px;margin:10px 0"><strong>{escape(_headline(finding))}</strong>'
                f"<br>{escape(finding.text)}<br><em>{escape(finding.advice)}</em>"
                + (f"<ul>{follows}</ul>" if follows else "")
                + "</div>"
            )
        head = f"<p><strong>{escape(self.model)}: {escape(self._verdict())}</strong></p>"
        blocks += [f"<p>{escape(f'note: {note}')}</p>" for note in self.notes]
        return f'<div class="torchfmri">{head}{"".join(blocks)}</div>'

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        return {
            "model": self.model,
            "ok": self.ok,
            "steps": self.steps,
            "seconds": self.seconds,
            "findings": [each.to_dict() for each in self.findings],
            "facts": dict(self.facts),
            "notes": list(self.notes),
        }

    def plot(self, ax: Axes | None = None) -> Axes:
        """Return the run with its findings: sizes of gradients by layer and step, and the loss.

        Raises:
            InspectionError: There is no history to draw.
        """
        from torchfmri.visualization import plot_diagnosis

        return plot_diagnosis(self.history, self.findings, self.model, ax)


def _headline(finding: Finding) -> str:
    """Return a finding in one line: "alarm: dead units in 1 (forward, step 0)"."""
    named = few(map(layer_label, finding.layers), _MOST_LAYERS)
    where = f" in {named}" if named else ""
    when = "" if finding.step is None else f", step {finding.step}"
    name = finding.problem.replace("_", " ")
    return f"{finding.severity}: {name}{where} ({finding.phase}{when})"
