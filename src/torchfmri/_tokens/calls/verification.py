"""A pass run again with one token changed: which rows of which calls change with it?

This uses nothing of what following the pass found but the result that is to be judged.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from torchfmri._model import compiled_code_as_eager, copy_of_data, spared_grad, unchanged
from torchfmri._tokens.algebra.verification import TokenVerification, TokenVerificationRow
from torchfmri._tokens.calls.passes import KeptPass
from torchfmri._tokens.calls.token_map import TokenRows, name_of
from torchfmri._tokens.rules import layer_rules as rules
from torchfmri._tokens.rules.arguments import given_origins
from torchfmri._tokens.rules.record import TokenRecord, Watched
from torchfmri._tokens.rules.rerun import SeenOutput, quiet
from torchfmri._tokens.rules.sources import CHANNELS_FIRST, Sources, TokenSource
from torchfmri._torch import flatten, flatten_arguments
from torchfmri.exceptions import InspectionError

_PRECISION = {torch.float64: 1e-10, torch.float32: 1e-5}
OWN, EARLIER, LATER, SAMPLE, COLUMN, OTHERS, UNKNOWN = range(7)  # what a row is to the token
_ON_STATE = "the state of a recurrence belongs to the step that reads it"
_BATCH_NORM = nn.modules.batchnorm._BatchNorm


class VerifiedCall(NamedTuple):
    """A call of a layer in a pass that is run again.

    Attributes:
        x: What it read; None where a token was changed.
        y: What it returned.
        is_batched: Statistics of the batch were used before: any sample may change any other.
        skips: A convolution before may leave out the position that it computes.
    """

    x: Tensor | None
    y: Tensor
    is_batched: bool
    skips: bool


Calls: TypeAlias = Mapping[str, Sequence[VerifiedCall]]


class Token(NamedTuple):
    """A token that is changed: its source, and its number there."""

    source: TokenSource
    number: int

    @property
    def place(self) -> tuple[int, int]:
        return divmod(self.number, self.source.grid[1])


class PassVerification:
    """Runs a pass again, and compares.

    Args:
        kept: The pass.
        watched: The layers.
        records: The calls of the pass, of layers with a rule: what is judged.
        seed: Of the tokens that are drawn, and what they are changed into.
    """

    def __init__(
        self,
        kept: KeptPass,
        watched: Mapping[str, Watched],
        records: Sequence[TokenRecord],
        seed: int,
    ) -> None:
        self._kept, self._watched = kept, watched
        self._records: dict[str, list[TokenRecord]] = defaultdict(list)
        for record in records:
            if record.within.number == kept.number:
                self._records[record.watched.layer].append(record)
        self._generator = torch.Generator().manual_seed(seed)
        tensors = [each.tensor for each in flatten_arguments(kept.arguments, kept.keywords)]
        if any(each.is_meta for each in (*tensors, *kept.module.parameters())):
            raise InspectionError(
                "The model or its arguments are on the meta device, which holds no numbers: there "
                "is nothing to compare. Run it on a real device."
            )

    def result(self, samples: int, reasons: Mapping[str, Exception]) -> TokenVerification:
        """The verdicts for some tokens; `reasons` are those of parameters without tokens."""
        before = self._run(None)
        self._check(before)
        tokens = self._drawn(samples, before)
        found: dict[str, list[TokenVerificationRow]] = defaultdict(list)
        for token in tokens:
            after = self._run(token)
            for layer in self._records:
                verdict, note = self._verdict(layer, token, before[layer], after.get(layer, ()))
                if verdict:
                    row = self._row(layer, token.place, name_of(token.source), verdict, note)
                    found[layer].append(row)
        rows: list[TokenVerificationRow] = []
        for layer, watched in self._watched.items():
            self._compare_steps(layer, found[layer])
            refused = [reasons[name] for name in watched.parameters.values() if name in reasons]
            if refused or not found[layer]:
                note = str(refused[0]) if refused else self._why_not(watched)
                found[layer] = [self._row(layer, None, "", "not judged", note)]
            rows += found[layer] if watched.parameters else ()
        return TokenVerification(rows)

    def _compare_steps(self, layer: str, found: list[TokenVerificationRow]) -> None:
        """Refute uses in a recurrence of which some read a state, and others their own position.

        A use on the state does not change with the token of its step. If one of as many uses as
        there are positions does, then all of them come after their steps.
        """
        calls = len(self._records.get(layer, ()))
        states = [row for row in found if row.note == _ON_STATE]
        others = [row for row in found if row.verdict in ("local", "first")]
        is_told = all(calls <= each.grid[1] for each in self._kept.tokens.given[:1])
        if states and others and is_told:
            note = "its uses come after the steps of a recurrence, and are at the next ones"
            found[:] = [replace(row, verdict="refuted", note=note) for row in found]

    def _row(
        self, layer: str, token: tuple[int, int] | None, of: str, verdict: str, note: str
    ) -> TokenVerificationRow:
        parameters = tuple(self._watched[layer].parameters.values())
        return TokenVerificationRow(
            layer=layer, parameters=parameters, token=token, of=of, verdict=verdict, note=note
        )

    def _why_not(self, watched: Watched) -> str:
        if watched.rule is None:
            return "it is run again as a whole, and has no rows of its own"
        if watched.layer not in self._records:
            return "it was not called in the last pass"
        return "nothing that it returns changes with these tokens"

    # -- running -----------------------------------------------------------------------------

    def _drawn(self, samples: int, before: Calls) -> list[Token]:
        """Tokens of those arguments whose tokens the layers have."""
        given = self._kept.tokens.given
        if not given:
            raise InspectionError("The last pass was handed no tensor that has tokens.")
        axes = {
            (rows.of, rows.grid)
            for layer, records in self._records.items()
            for record, call in zip(records, before[layer], strict=True)
            for rows in self._rows(record, call.y)
        }
        known = [each for each in given if (name_of(each), each.grid) in axes]
        tokens = [
            Token(each, number)
            for each in known or given[:1]
            for number in range(each.stop - each.start)
        ]
        order = torch.randperm(len(tokens), generator=self._generator, device="cpu")
        return [tokens[each] for each in order[:samples].tolist()]

    def _run(self, token: Token | None) -> dict[str, list[VerifiedCall]]:
        """The calls of the layers in the pass, with one token changed."""
        kept = self._kept
        arguments, keywords = copy_of_data((kept.arguments, dict(kept.keywords)))
        if token is not None:
            self._change(token, arguments, keywords)
        calls: dict[str, list[VerifiedCall]] = defaultdict(list)
        try:
            with self._listening(calls, token is None):
                kept.module(*arguments, **keywords)
        except Exception as error:
            what = "as it was" if token is None else f"with token {token.place} changed"
            raise InspectionError(
                f"The last pass could not be run again {what}: {type(error).__name__}: {error}"
            ) from error
        return calls

    @contextlib.contextmanager
    def _listening(
        self, calls: dict[str, list[VerifiedCall]], keeps_inputs: bool
    ) -> Iterator[None]:
        """The state in which the pass began, and our hooks alone; nothing of it stays."""
        module = self._kept.module
        is_batched = skips = False

        def note(layer: str | None, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            nonlocal is_batched, skips
            if isinstance(module, _BATCH_NORM):
                is_batched |= module.training or module.running_mean is None
            if isinstance(module, nn.modules.conv._ConvNd):
                sizes = zip(module.kernel_size, module.dilation, strict=True)
                skips |= any(size % 2 == 0 and dilation > 1 for size, dilation in sizes)
            tensors, outputs = flatten_arguments(args, kwargs), flatten(output)
            if layer is not None and layer in self._records and tensors and outputs:
                # Later operations may write into both: copies are compared.
                x = tensors[0].tensor.detach().clone() if keeps_inputs else None
                y = outputs[0].tensor.detach().clone()
                calls[layer].append(VerifiedCall(x, y, is_batched, skips))

        layers = {id(each.module): layer for layer, each in self._watched.items()}
        with contextlib.ExitStack() as stack:
            stack.enter_context(unchanged(module))
            stack.enter_context(spared_grad(module.parameters()))
            stack.enter_context(compiled_code_as_eager())
            stack.enter_context(quiet(module))
            stack.enter_context(self._kept.state.restored())
            stack.enter_context(torch.enable_grad())  # without it some layers take other ways
            for each in module.modules():
                layer = layers.get(id(each))
                if layer in self._records or isinstance(each, _BATCH_NORM):
                    hook = each.register_forward_hook(partial(note, layer), with_kwargs=True)
                    stack.callback(hook.remove)
            yield

    def _change(self, token: Token, arguments: Any, keywords: Any) -> None:
        """Write other data into the entries of one token."""
        number = token.source.start + token.number
        for tensor, origins in given_origins(Sources(), arguments, keywords):
            for numbers in (origins.first, origins.second):
                here = None if numbers is None else numbers == number
                if here is not None and bool(here.any()):
                    with torch.no_grad():
                        tensor[here] = self._other(tensor, tensor[here])
                    return

    def _other(self, tensor: Tensor, values: Tensor) -> Tensor:
        """Noise added to numbers; for ids, another one that occurs."""
        if tensor.is_floating_point() or tensor.is_complex():
            noise = torch.randn(
                values.shape, generator=self._generator, dtype=torch.float64, device="cpu"
            )
            return values + noise.to(values) * (tensor.std() if tensor.numel() > 1 else 1)
        old = values.flatten()[0]
        others: Tensor = torch.unique(tensor[tensor != old])
        if not len(others):
            return values + (1 if int(old) <= 0 else -1)
        drawn = int(torch.randint(len(others), (), generator=self._generator, device="cpu"))
        return others[drawn].expand_as(values)

    def _check(self, calls: Calls) -> None:
        """Refuse a pass that is not what it was."""
        for layer, records in self._records.items():
            found = calls.get(layer, ())
            if len(found) != len(records):
                raise _not_the_same(layer, f"was called {len(found)} times, not {len(records)}")
            for record, call in zip(records, found, strict=True):
                x, again = record.x, call.x
                if not isinstance(x, Tensor) or again is None or x.dtype != again.dtype:
                    continue  # not kept, or not as it was read
                is_kept = x.shape == again.shape and record.version in (None, x._version)
                if is_kept and not SeenOutput(x).equals(again):
                    raise _not_the_same(layer, "read something else")

    # -- judging -----------------------------------------------------------------------------

    def _verdict(
        self,
        layer: str,
        token: Token,
        before: Sequence[VerifiedCall],
        after: Sequence[VerifiedCall],
    ) -> tuple[str, str]:
        """What the changed rows of a layer say; nothing where none changed."""
        records, tokens = self._records[layer], self._kept.tokens
        pairs = list(zip(records, before, strict=True))
        values = [_values(record, call.y) for record, call in pairs]
        kinds = torch.cat([_kinds(self._rows(record, call.y), token) for record, call in pairs])
        is_moved = tokens.is_dynamic and any(each.rows for each in records)
        if is_moved or [each.y.shape for each in before] != [each.y.shape for each in after]:
            width = values[0].shape[1]
            if any(each.shape[1] != width for each in values) or any(map(_is_second, records)):
                return "not judged", "it computed other rows than before"
            new = torch.cat([values[0][:0], *(each.y.reshape(-1, width) for each in after)])
            changed = _gone(torch.cat(values), new, kinds == OWN)
        else:
            again = [_values(record, call.y) for record, call in zip(records, after, strict=True)]
            changed = torch.cat([~_same(*each).all(1) for each in zip(values, again, strict=True)])
        found = set(kinds[changed].tolist()) - {UNKNOWN}
        dead = torch.cat([_reads_nothing(*each) for each in pairs])
        is_missing = OWN not in found and bool(((kinds == OWN) & ~dead).any())
        may_mix = tokens.is_dynamic or any(each.is_batched for each in before)
        may_mix |= found == {OWN, COLUMN}  # positions on the first axis, samples on the second
        if not found:
            return "", ""
        if found & {COLUMN, OTHERS} and (is_missing or not may_mix):
            return "refuted", "rows of other samples change: wrong tokens, or samples are mixed"
        if is_missing and found & {EARLIER, LATER}:
            if any(each.is_step for each in tokens.calls.get(layer, ())):
                return "mixed", _ON_STATE
            if any(each.skips for each in before):
                return "mixed", "a convolution leaves out the position that it computes"
            return "refuted", "its rows do not change, and rows of other tokens do"
        if found == {OWN}:
            return "local", ""
        return ("first" if found == {OWN, LATER} else "mixed"), ""

    def _rows(self, record: TokenRecord, y: Tensor) -> Sequence[TokenRows]:
        """The tokens of the rows of a call, as the gradients have them."""
        if record.rows:
            return record.rows
        grid, of = record.grid_of(tuple(_attributed(record, y).shape)), record.of
        if _is_second(record) and record.watched.layer not in self._kept.tokens.calls:
            of = CHANNELS_FIRST  # the model itself is the layer, and nothing was followed
        numbers = torch.arange(grid.b * grid.s, device=y.device)
        return (TokenRows(numbers, grid.shape, record.stack, of),)


def _not_the_same(layer: str, what: str) -> InspectionError:
    return InspectionError(
        f"The last pass cannot be reproduced: run again, {layer!r} {what}. Call verify() before "
        "weights or arguments change (an optimizer's step); hooks of yours are left out, and a "
        "state that the model keeps makes another pass of it."
    )


def _is_second(record: TokenRecord) -> bool:
    return record.watched.rule in rules.CHANNELS_SECOND or record.is_second


def _values(record: TokenRecord, y: Tensor) -> Tensor:
    """What a call returned, row by row, (t, n)."""
    y = _attributed(record, y)
    grid = record.grid_of(tuple(y.shape))
    rows = grid.channels_of(y) if _is_second(record) else grid.rows_of(y, record.features)
    return rows.flatten(1)


def _attributed(record: TokenRecord, y: Tensor) -> Tensor:
    """The output without what a causal convolution computed beyond the sequence."""
    is_cut = record.watched.rule is rules.convolution and record.shape is not None
    return y[..., : record.shape[-1]] if is_cut and record.shape else y


def _reads_nothing(record: TokenRecord, call: VerifiedCall) -> Tensor:
    """Which rows are computed from zeros (dropout, ReLU), so that they need not change."""
    x, y = call.x, call.y
    count = len(_values(record, y))
    if _is_second(record) or x is None or x.shape[:-1] != y.shape[:-1] or record.features > 1:
        return torch.zeros(count, dtype=torch.bool, device=y.device)
    return (_values(record, x) == 0).all(1)


def _kinds(several: Sequence[TokenRows], token: Token) -> Tensor:
    """What each row is to a token."""
    (b, s), source = token.place, token.source
    found = torch.full_like(several[0].numbers, UNKNOWN)
    for numbers, grid, stack, of in several:
        here = numbers >= 0
        if grid[0] != source.grid[0]:
            continue
        sample = numbers // max(1, grid[1])
        found[here & (sample != b)] = OTHERS
        found[here & (sample != b) & (numbers % max(1, grid[1]) == s) & (grid[1] > 1)] = COLUMN
        same = here & (sample == b)
        found[same] = OWN if grid[1] == 1 else SAMPLE
        is_same = (of, grid) == (name_of(source), source.grid)
        if is_same and source.true.stack in ("", stack):
            found[same & (numbers < token.number)] = EARLIER
            found[same & (numbers > token.number)] = LATER
            found[same & (numbers == token.number)] = OWN
    return found


def _same(one: Tensor, other: Tensor) -> Tensor:
    """Which entries are the same but for rounding, relative to the largest one of the row."""
    if not one.is_floating_point() and not one.is_complex():
        return one == other
    scale = one.abs().nan_to_num().amax(-1, keepdim=True) if one.shape[-1] else one.abs()
    near = (one - other).abs() <= _PRECISION.get(one.dtype, 1e-2) * scale
    return near | (one == other) | (one.isnan() & other.isnan())


def _gone(before: Tensor, after: Tensor, own: Tensor) -> Tensor:
    """Which rows are not there any more, in whatever order they come.

    Of several equal rows it is that of the token which is gone.
    """
    left, twins = (
        torch.tensor([int(_same(row, several).all(-1).sum()) for row in before], device=own.device)
        for several in (after, before)
    )
    return torch.where(own, left < twins, left == 0)
