"""Draw tokens along the x axis: their text, which were generated, and how surprising each was.

`_brain` uses this; lens and attention pictures share `token_label`. A character that is spread over
several tokens stands at the last of them, and the others show "·". Control characters of a foreign
text are made visible, because they could damage a picture or a terminal. Sizes and colours may
change freely.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchfmri._text import display_width, printable, shorten, take
from torchfmri.visualization._figure import BLUE, GREY, escape, ink
from torchfmri.visualization._fonts import Fonts, fonts_for

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LONGEST, _LONGEST_RUN = 14, 22
_SMALLEST, _LARGEST = 5.6, 8.5
_PROMPT = "#b9b9b9"
_VISIBLE = {"\n": "↵", "\t": "⇥", "\r": "↵", " ": "␣"}
TRACK_INCHES = 0.42
STRIP_POINTS = 4.0
_AROUND = 3  # tokens before and after one that is shown in its context


class TokenTrack(NamedTuple):
    """The tokens of a picture.

    Attributes:
        pieces: The text of each; "" where a character ends in a later token.
        surprisal: (s,) in nats, nan where unknown.
        generated: (s,) whether the model wrote it.
        special: (s,) whether it is a special token.
    """

    pieces: Sequence[str]
    surprisal: npt.NDArray[np.floating[Any]]
    generated: npt.NDArray[np.bool_]
    special: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.surprisal)


def token_label(piece: str, longest: int = _LONGEST) -> str:
    r"""Return the text of a token for a tick: blanks visible, no longer than `longest`.

    Examples:
        >>> token_label(" Paris"), token_label("\n\n"), token_label(" "), token_label("")
        ('Paris', '↵↵', '␣', '·')
    """
    if not piece:
        return "·"
    text = piece.strip(" ") or "␣"
    text = "".join(_VISIBLE.get(each, each) if each != " " else each for each in text)
    text = printable(text)
    return text if display_width(text) <= longest else f"{take(text, longest - 1)}…"


def label_tokens(ax: Axes, tokens: TokenTrack, inches: float, remarks: Sequence[str] = ()) -> None:
    """Write the tokens below the axes; of too many, the text of several at one tick.

    Args:
        ax: Its x axis counts tokens.
        tokens: What to write.
        inches: How wide the axes are.
        remarks: What else to say below.
    """
    number = len(tokens)
    every = max(1, int(np.ceil(number * _SMALLEST / (72 * inches))))
    numbered = list(tokens.pieces) == [str(at) for at in range(number)]
    if numbered and every > 1:  # numbers say where they are: a few round ones are enough
        every = -(-every * 4 // 10) * 10
    places = list(range(0, number, every))
    if every == 1:
        texts = [token_label(piece) for piece in tokens.pieces]
        size = min(_LARGEST, max(_SMALLEST, 72 * inches / max(number, 1) * 0.86))
    else:
        several = 1 if numbered else every
        runs = ("".join(tokens.pieces[place : place + several]) for place in places)
        texts = [token_label(run, _LONGEST_RUN) for run in runs]
        size = min(6.5, 72 * inches / max(len(places), 1) * 0.86)
    fonts = fonts_for(texts)
    upright = 72 * inches / max(len(places), 1) < 2 * size
    look: dict[str, Any] = {"fontsize": size, "fontfamily": fonts.families, "rotation": 90}
    if not upright:
        look |= {"rotation": 55, "ha": "right", "rotation_mode": "anchor"}
    ax.set_xticks(places, [escape(fonts.writable(text)) for text in texts], **look)
    ax.tick_params(axis="x", length=0, pad=STRIP_POINTS + 3)
    for place, label in zip(places, ax.get_xticklabels(), strict=True):
        if every == 1 and tokens.special[place]:
            label.set_color(GREY)
            label.set_fontstyle("italic")
        elif tokens.generated[place]:
            label.set_color(BLUE)
    ax.set_xlabel(_reading_help(tokens, every, fonts, remarks), fontsize=7, color=GREY, loc="left")


def _reading_help(tokens: TokenTrack, every: int, fonts: Fonts, remarks: Sequence[str]) -> str:
    """Return what a reader has to know about the texts, line by line."""
    parts = []
    if every > 1:
        parts.append(f"{every} tokens per tick")
    elif tokens.special.any():
        parts.append("special tokens in grey italics")
    if every == 1 and any(not piece for piece in tokens.pieces):
        parts.append("·: a character that ends in a later token")
    return "\n".join(part for part in ("; ".join(parts), fonts.note(), *remarks) if part)


def draw_strip(ax: Axes, tokens: TokenTrack) -> None:
    """Draw a strip below the axes: grey for the prompt, blue for generated tokens."""
    from matplotlib.patches import Rectangle
    from matplotlib.transforms import blended_transform_factory

    place = blended_transform_factory(ax.transData, _inches_from(ax, 0))
    height = STRIP_POINTS / 72
    for start, end, generated in spans(tokens.generated):
        colour = BLUE if generated else _PROMPT
        look: dict[str, Any] = {"color": colour, "linewidth": 0, "clip_on": False}
        corner = (start - 0.5, -height - 1.5 / 72)
        ax.add_patch(Rectangle(corner, end - start, height, transform=place, **look))


def draw_surprisal(ax: Axes, tokens: TokenTrack) -> Axes:
    """Draw a thin track above the axes: surprisal as bars, and which part was generated."""
    from matplotlib.transforms import blended_transform_factory

    place = blended_transform_factory(ax.transAxes, _inches_from(ax, 1))
    track = ax.inset_axes((0, 0.06, 1, TRACK_INCHES), transform=place, sharex=ax)
    colours = [BLUE if each else _PROMPT for each in tokens.generated]
    heights = np.where(np.isfinite(tokens.surprisal), tokens.surprisal, 0.0)
    track.bar(np.arange(len(tokens)), heights, width=0.8, color=colours, linewidth=0)
    top = float(heights.max(initial=0.0))
    track.set_ylim(0, top * 1.05 or 1)
    track.set_yticks([0, _round_down(top)] if top else [0])
    track.tick_params(axis="y", labelsize=6.5, length=2, pad=1)
    track.tick_params(axis="x", length=0, labelbottom=False)
    track.spines[["top", "right", "bottom"]].set_visible(False)
    track.patch.set_visible(False)
    track.set_ylabel(
        "surprisal\n(nats)", fontsize=7, rotation=0, ha="right", va="center", labelpad=2
    )
    for start, end, generated in spans(tokens.generated):
        word = "generated" if generated else "prompt"
        if (end - start) * 25 >= len(tokens):
            colour, onto = BLUE if generated else GREY, track.get_xaxis_transform()
            track.text(
                start - 0.4, 1.0, word, fontsize=7, color=colour, va="bottom", transform=onto
            )
    return track


def _inches_from(ax: Axes, height: int) -> Any:
    """Return a transform in inches, from the lower (0) or the upper (1) edge of the axes."""
    from matplotlib.transforms import ScaledTranslation

    edges: Any = ax.transAxes
    return ax.figure.dpi_scale_trans + ScaledTranslation(0, height, edges)


def draw_boundaries(ax: Axes, tokens: TokenTrack) -> None:
    """Draw a line where the prompt ends."""
    for start, _, generated in spans(tokens.generated):
        if start and generated:
            ax.axvline(start - 0.5, color="white", linewidth=1.6)
            ax.axvline(start - 0.5, color=ink(ax), linewidth=0.7, linestyle=(0, (3, 2)))


def spans(flags: npt.NDArray[np.bool_]) -> list[tuple[int, int, bool]]:
    """Return (start, end, flag) of each run of equal flags.

    Examples:
        >>> spans(np.array([False, False, True]))
        [(0, 2, False), (2, 3, True)]
    """
    if not len(flags):
        return []
    edges = [0, *(np.flatnonzero(np.diff(flags.astype(np.int8))) + 1).tolist(), len(flags)]
    return [(start, end, bool(flags[start])) for start, end in pairwise(edges)]


def in_context(pieces: Sequence[str], index: int) -> str:
    """Return a token with those next to it, itself in brackets."""
    before = "".join(pieces[max(index - _AROUND, 0) : index])
    after = "".join(pieces[index + 1 : index + 1 + _AROUND])
    parts = [shorten(token_label(part, 40), 40) if part.strip() else "" for part in (before, after)]
    head = "… " if index > _AROUND else ""
    tail = " …" if index + 1 + _AROUND < len(pieces) else ""
    return f"{head}{parts[0]} [{token_label(pieces[index])}] {parts[1]}{tail}".strip()


def _round_down(value: float) -> float:
    """Return the largest of 1, 2, 5 times a power of ten that is not above the value."""
    power = 10.0 ** np.floor(np.log10(value))
    return float(max(digit * power for digit in (1, 2, 5) if digit * power <= value * 1.000001))
