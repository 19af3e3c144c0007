"""The grids of tokens of a pass.

Tokens are numbered over the whole pass. Each `TokenSource`, an argument of the model or a grid of
positions that a layer makes (a strided convolution), has a range of numbers, so a number says which
source, sample and position it stands for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchfmri._tokens.rules.numbers import compact

CHANNELS_FIRST = "channels first"  # the name of an argument's tokens when read that way


@dataclass(slots=True)
class Layout:
    """What the uses of an argument say about its layout: (b, s, d), or (b, d, s).

    Attributes:
        last: A layer sums over its last axis with a parameter: the features are last.
        second: One sums over its second axis: the features are second.
        by_channel: One is made for features that are second, such as a convolution.
        is_used: A parameter was used on it entry by entry, before any layer had decided.
        per_second: Such a parameter has an entry for each entry of the second axis, and one for the
            whole last axis.
        is_mixed: A square parameter that is no layer's sums over its second axis, as in w @ x. It
            mixes the positions of (b, s, d) or the features of (b, d, s): this tells nothing. Nor
            does a convolution in two dimensions over both axes.
        is_followed: The argument is also followed with its features second, beside this.
    """

    last: bool = False
    second: bool = False
    by_channel: bool = False
    is_used: bool = False
    per_second: bool = False
    is_mixed: bool = False
    is_followed: bool = False

    @property
    def is_told(self) -> bool:
        """Whether a layer has said anything."""
        return self.last or self.second or self.by_channel

    @property
    def is_second(self) -> bool:
        """Whether the features are second, without anything against it."""
        return (self.second or self.by_channel) and not self.last

    @property
    def is_assumed(self) -> bool:
        """Whether the features are taken to be last, and the layers do not say so."""
        either = self.last and self.second and not self.by_channel
        return either or (self.is_mixed and not self.is_told)

    @property
    def is_unclear(self) -> bool:
        """Whether a parameter suggests features second, and no layer says so or otherwise."""
        return self.per_second and not self.is_told

    @property
    def is_settled(self) -> bool:
        """Whether the reading with features second will not be asked for."""
        return self.last or (self.by_channel and not self.is_used)


class MadeOf(NamedTuple):
    """What a grid of positions was made of.

    Attributes:
        given: The numbers at which the arguments begin.
        key: The same for the same tokens of these.
    """

    given: frozenset[int]
    key: int


@dataclass(slots=True, eq=False)
class TokenSource:
    """A grid of tokens.

    Attributes:
        grid: (b, s).
        start: The number of its first token.
        name: The argument or layer that it comes from; "" for what the model was handed first.
        stack: "encoder" or "decoder" where the model has both.
        is_given: Whether it is an argument of the model.
        members: For tokens that others were merged into: by number, the token that it is part of.
        made_of: What it was made of, where that is known.
        before: For the rows of a convolution that made a sequence longer: the tokens of it, (b, s).
        same_as: The source whose tokens these are, found out later.
        layout: What layers say about the layout of the argument; None where there is no question.
    """

    grid: tuple[int, int]
    start: int
    name: str = ""
    stack: str = ""
    is_given: bool = False
    members: Tensor | None = None
    made_of: MadeOf | None = None
    before: Tensor | None = None
    same_as: TokenSource | None = None
    layout: Layout | None = None

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.grid)

    @property
    def true(self) -> TokenSource:
        """The source itself, or the one whose tokens these are."""
        return self if self.same_as is None else self.same_as.true

    def numbers(self, device: torch.device) -> Tensor:
        """The numbers of its tokens, (b, s)."""
        return torch.arange(self.start, self.stop, device=device).view(self.grid)


class Sources:
    """All sources of one pass, and which sample and position a number stands for."""

    def __init__(self) -> None:
        self.all: list[TokenSource] = []
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._samples: dict[int, TokenSource] = {}

    def add(
        self, grid: tuple[int, int], name: str = "", stack: str = "", is_given: bool = False
    ) -> TokenSource:
        """A new source."""
        start = self.all[-1].stop if self.all else 0
        source = TokenSource(grid, start, name, stack, is_given)
        self.all.append(source)
        self._tables.clear()
        return source

    @property
    def layouts(self) -> list[Layout]:
        """The layouts of the arguments that can be read in two ways, each once."""
        found = {id(each.layout): each.layout for each in self.all if each.layout is not None}
        return list(found.values())

    def copy(self) -> Sources:
        """Return a copy of these sources, to which others can be added."""
        found = Sources()
        found.all, found._samples = list(self.all), dict(self._samples)
        return found

    def whole_samples(self, b: int) -> TokenSource:
        """The source whose tokens are whole samples."""
        if b not in self._samples:
            self._samples[b] = self.add((b, 1), "samples")
        return self._samples[b]

    def sample_of(self, numbers: Tensor) -> Tensor:
        """The sample of each number; the codes stay as they are."""
        return torch.where(numbers < 0, numbers, self._table(numbers.device)[0][numbers.clamp(0)])

    def is_sample(self, numbers: Tensor) -> Tensor:
        """Whether each number stands for a whole sample, without a position."""
        return (numbers >= 0) & self._table(numbers.device)[1][numbers.clamp(0)]

    def _table(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._tables:
            samples = [
                torch.arange(e.grid[0], device="cpu").repeat_interleave(e.grid[1]) for e in self.all
            ]
            whole = [
                torch.full((math.prod(e.grid),), e.grid[1] == 1, device="cpu") for e in self.all
            ]
            tables = torch.cat([*samples, torch.zeros(1, dtype=torch.int64, device="cpu")]).to(
                device
            )
            self._tables[device] = (
                tables,
                torch.cat([*whole, torch.zeros(1, device="cpu").bool()]).to(device),
            )
        return self._tables[device]

    def present(self, numbers: Tensor) -> list[TokenSource]:
        """The sources that these numbers belong to."""
        found = compact(numbers)
        if not found.numel():  # no tokens are of the first source without any
            return [each for each in self.all if not math.prod(each.grid)][:1]
        return [
            each for each in self.all if bool(((found >= each.start) & (found < each.stop)).any())
        ]

    def local(self, source: TokenSource, numbers: Tensor) -> Tensor:
        """The numbers as those of one source alone, from 0; -1 for tokens of other sources."""
        inside = (numbers >= source.start) & (numbers < source.stop)
        return torch.where(inside, numbers - source.start, -1)
