"""What becomes of tokens in one operation, by its kind; {name: rule}.

An operation moves entries, computes entry by entry, sums over axes, multiplies matrices, and so on.
The result of an operation of no known kind has unknown origins, with its name as the reason. To
teach a new operation, enter its name in one of the tables, or a rule in `_RULES`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from torchfmri._tokens.rules.moves import BY_IDS, MOVES, moved_like, tensors_in
from torchfmri._tokens.rules.numbers import (
    NOBODY,
    SEVERAL,
    compact,
    constant,
    is_constant_along,
)
from torchfmri._tokens.rules.operator_call import OperatorCall
from torchfmri._tokens.rules.origins import Origins
from torchfmri._tokens.rules.places import put_beside, written
from torchfmri._tokens.rules.step_uses import united
from torchfmri._torch import map_tensors

PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "mv", "_grouped_mm", "grouped_mm_fallback"})
WRITES = frozenset(
    {"scatter", "index_copy", "masked_scatter", "slice_scatter", "select_scatter",
     "diagonal_scatter", "index_put", "_index_put_impl", "index_add", "scatter_add",
     "scatter_reduce", "index_reduce"}
)  # fmt: skip
_REDUCTIONS = frozenset(
    {"sum", "mean", "amax", "amin", "max", "min", "var", "std", "norm", "linalg_vector_norm",
     "logsumexp", "prod", "any", "all", "argmax", "argmin", "var_mean", "std_mean", "nansum",
     "count_nonzero", "aminmax", "median", "nanmedian", "mode"}
)  # fmt: skip
# The result is at the place of the operand, though it may depend on others along some axes.
_IN_PLACE = frozenset(
    {"_softmax", "_log_softmax", "softmax", "log_softmax", "_safe_softmax", "cumsum", "cumprod",
     "cummax", "cummin", "logcumsumexp", "native_dropout", "_fused_dropout", "native_layer_norm",
     "_fused_rms_norm", "rms_norm", "native_group_norm", "native_batch_norm",
     "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "cudnn_batch_norm",
     "batch_norm_elemt", "_batch_norm_with_update", "_batch_norm_no_update", "miopen_batch_norm",
     "tril", "triu", "bernoulli", "renorm", "dropout", "masked_fill", "rrelu_with_noise",
     "fake_quantize_per_tensor_affine_cachemask", "fake_quantize_per_channel_affine_cachemask",
     "_prelu_kernel", "index_fill"}
)  # fmt: skip
NEW = frozenset(
    {"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like",
     "randint_like", "new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided",
     "zero", "fill", "uniform", "normal", "exponential", "random", "is_same_size",
     "_local_scalar_dense", "equal", "item", "resize", "set", "size", "stride"}
)  # fmt: skip
_ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "flex_attention")
_CELLS = frozenset({"_thnn_fused_lstm_cell", "_thnn_fused_gru_cell"})
_SEQUENCES = frozenset({"mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn"})


class TokenRules(OperatorCall):
    """One operation on data, and what becomes of its tokens."""

    def origins(self) -> list[Origins | None]:
        """The origins of every result."""
        name = self.name
        if name in MOVES:
            return self._moved()
        rule = _RULES.get(name)
        if rule is not None:
            return rule(self)
        if name in WRITES:
            return [self._written_into()]
        if name in _REDUCTIONS:
            return self._reduced()
        if name in _IN_PLACE:
            return self._same_place()
        if name.startswith(_ATTENTION):
            return self._attention()
        if "pool" in name or "upsample" in name:
            return [self._by_place(each) for each in self.results]
        tags = getattr(self.function, "tags", ())
        # torch 2.9 has no tag on hardtanh_.
        if torch.Tag.pointwise in tags or name in ("complex", "polar", "copy", "hardtanh"):
            return [self._entry_by_entry(each.shape) for each in self.results]
        return [self.unknown(each) for each in self.results]

    def _entry_by_entry(self, shape: torch.Size) -> Origins | None:
        operands = tensors_in(self.arguments, self.keywords)
        data = [(each, found) for each in operands if (found := self.of(each)) is not None]
        # A mask says which values count, and not whose they are.
        values = [found for each, found in data if each.is_floating_point() or each.is_complex()]
        several = values or [found for _, found in data]
        if self.name == "copy":
            several = [found for each, found in data if each is not operands[0]]
            if not several:
                return Origins(constant(NOBODY, operands[0]))
        for each in operands:
            if self.of(each) is None and self.trace.leaves(each):
                for found in several:
                    self.layouts.used_by_entry(found, each.shape)
        found = self.joins.join(several, shape, self.name)
        if found is not None and self.name != "copy" and self.has_constants(shape):
            found = found.but(has_begun=True)
            self.steps.meet_constants(found)
        return found

    def has_constants(self, rows: torch.Size) -> bool:
        """Whether there is a constant for each row and sample, as a state to begin with."""
        return any(
            each.ndim > 1 and each.shape[: len(rows)] == rows and each.is_floating_point()
            and self.of(each) is None and not self.trace.leaves(each)
            for each in tensors_in(self.arguments, self.keywords)
        )  # fmt: skip

    def _rows_of(self, operand: Tensor, axis: int = -1) -> Origins | None:
        """The origins of an operand, for a result with another length along one axis."""
        found = self.of(operand)
        if found is None:
            return None
        found = self.layouts.summed_by_layer(found, [axis]) or found
        found = self.sums.reduced(found, [axis % operand.ndim], self.name, are_features=True)
        return found.moved(lambda numbers: numbers.expand(self.results[0].shape))

    # -- moves -------------------------------------------------------------------------------

    def _moved(self) -> list[Origins | None]:
        operands = tensors_in(self.arguments, self.keywords)
        by_ids = self.name in BY_IDS
        moving = operands[:1] if by_ids else operands
        found = {id(each): origins for each in moving if (origins := self.of(each)) is not None}
        chosen = [self.of(each) for each in operands[1:]] if by_ids else []
        if not found:  # a table of constants or parameters, from which data chooses
            ids = [each for each in chosen if each is not None]
            return [self._chosen(ids[0], each) if ids else None for each in self.results]
        if self.name in ("cat", "stack"):
            beside = self._beside() if self._has_parameters() else None
            beside = beside or self._steps_beside(found.values())
            if beside is not None:
                return [beside]
        if not all(each.is_raw for each in found.values()):  # what is decided decides for all
            found = {
                key: self.layouts.settled(each, []) if each.is_raw else each
                for key, each in found.items()
            }
        first = {key: each.first for key, each in found.items()}
        if self.name in ("cat", "stack"):
            axis = self.named.get("dim", 0)
            lengths = [1] * len(operands)
            if self.name == "cat":  # also with an empty tensor of one axis
                lengths = [each.shape[axis] if each.numel() else 0 for each in operands]
            told = put_beside(self.steps, [found.get(id(each)) for each in operands], lengths)
            first = {id(e): new for e, new in zip(operands, told, strict=True) if new is not None}
        moved = self._move(first)
        second: list[Tensor | None] = [None] * len(moved)
        if any(each.second is not None for each in found.values()):
            others = {k: e.first if e.second is None else e.second for k, e in found.items()}
            second = [*self._move(others)]
        several = list(found.values())
        one = max(several, key=lambda each: len(each.chain))
        dynamic = any(each.is_dynamic for each in several) or chosen.count(None) < len(chosen)
        dynamic |= by_ids and not all(map(self.trace.is_fixed, operands[1:]))
        decided = all(each.is_decided for each in several)
        has_begun = self.name == "cat" and self.has_constants(self.results[0].shape[:-1])
        is_one = not self._is_sequence(moved[0])
        return [
            one.but(first=a, second=b, is_dynamic=dynamic, is_decided=decided,
                    is_raw=all(each.is_raw for each in several),
                    has_begun=one.has_begun or has_begun,
                    born=one.born if self.steps.is_step(one) else self.trace.count,
                    is_slice=is_one and (one.is_slice or self._is_slice()),
                    is_sample=is_one and (
                        all(each.is_sample for each in several) or self._is_sample()))
            for a, b in zip(moved, second, strict=True)
        ]  # fmt: skip

    def _move(self, numbers: Mapping[int, Tensor]) -> list[Tensor]:
        """The numbers of operands, by id, after the same move."""
        moved = moved_like(self.function, self.arguments, self.keywords, numbers)
        return [self.grids.cut(each) for each in moved] if self.name == "slice" else moved

    def _steps_beside(self, several: Collection[Origins]) -> Origins | None:
        """Steps side by side: a sequence of them, or the features of one step of a recurrence."""
        (result,) = self.results
        axis = self.named.get("dim", 0) % result.ndim
        if self.name == "stack" or axis != result.ndim - 1:
            return None
        if not all(map(self.steps.is_step, several)):
            return None
        is_joined = any(each.chain or each.seen for each in several)
        if not is_joined and not self.steps.is_position_of_sample(several):
            return self.steps.side_by_side(list(several), result.shape)
        narrow = [each.moved(lambda numbers: numbers.narrow(-1, 0, 1)) for each in several]
        joined = self.joins.join(narrow, torch.Size((*result.shape[:-1], 1)), self.name)
        is_open = joined is not None and not (joined.is_decided or joined.is_raw)
        if joined is None or is_open or bool((compact(joined.first) == SEVERAL).any()):
            return None  # two states, of which neither is the newer
        return joined.moved(lambda numbers: numbers.expand(result.shape))

    def _is_sequence(self, numbers: Tensor) -> bool:
        """Whether steps are put one after the other along the first axis.

        Those of one sample would otherwise look like one step of a batch: one position per row.
        """
        if self.name not in ("cat", "stack") or self.named.get("dim", 0) % numbers.ndim:
            return False
        samples = self.trace.sources.sample_of(compact(numbers))
        return self.name == "stack" or bool((samples == samples.flatten()[:1]).all())

    def _is_slice(self) -> bool:
        """Whether one position of each row is taken: x[:, t]."""
        axis = self.named.get("dim", 0)
        return self.name in ("select", "unbind") and axis % (self.results[0].ndim + 1) > 0

    def _is_sample(self) -> bool:
        """Whether one entry of the first axis is taken: x[t]."""
        result = self.results[0]
        axis = self.named.get("dim", 0)
        return self.name in ("select", "unbind") and result.ndim == 2 and axis % 3 == 0

    def _chosen(self, ids: Origins, result: Tensor) -> Origins:
        """Rows of a table belong to the tokens that chose them."""
        ids = ids.told()
        extra = result.ndim - ids.first.ndim
        if self.name in ("gather", "take") or extra < 0:
            return ids.but(first=ids.first.expand(result.shape), second=None)
        if tuple(result.shape[: ids.first.ndim]) != tuple(ids.first.shape):
            return self.unknown(result)
        numbers = ids.first[(..., *[None] * extra)]
        return ids.but(first=numbers.expand(result.shape), second=None)

    def _has_parameters(self) -> bool:
        return any(self.trace.leaves(each) for each in tensors_in(self.arguments, {}))

    def _beside(self) -> Origins | None:
        """Data beside parameters: a class token makes a longer sequence, features do not."""
        (result,) = self.results
        axis = self.named.get("dim", 0) % result.ndim
        data = [found for each in self.arguments[0] if (found := self.of(each)) is not None]
        if axis != result.ndim - 1 and all(map(self.steps.is_one_step, data)):
            return None  # the states of a recurrence, beside a learned first one
        for each in data if self.name == "cat" and axis != result.ndim - 1 else ():
            self.layouts.lengthened(each, axis)
        data = [self.layouts.settled(each, []) for each in data]
        if self.name == "stack" or any(bool((compact(e.first) < 0).any()) for e in data):
            return None
        numbers = torch.cat([each.first for each in data], axis)
        first = numbers.narrow(axis, 0, 1)
        dynamic = any(each.is_dynamic for each in data)
        if axis == result.ndim - 1 and is_constant_along(numbers, axis):
            return data[0].but(first=first.expand(result.shape), second=None, is_dynamic=dynamic)
        # Whatever has one number along the axis is one sample of the longer sequence.
        samples = torch.unique(compact(first), return_inverse=True)[1]
        place = torch.arange(result.shape[axis], device=result.device)
        place = place.view([-1 if k == axis else 1 for k in range(result.ndim)])
        keys = samples * result.shape[axis] + place
        fresh = self.grids.fresh(keys, samples.expand(keys.shape), numbers)
        return Origins(fresh.expand(result.shape), is_dynamic=dynamic)

    # -- writing -----------------------------------------------------------------------------

    def _written_into(self) -> Origins | None:
        """A tensor into which others are written at some places."""
        (result,) = self.results
        target = self.arguments[0]
        given = self.named.get("values", self.named.get("src", self.named.get("source")))
        if not isinstance(given, Tensor):
            return self._marked(result)
        old, new = self.of(target), self.of(given)
        values = constant(NOBODY, given)
        if new is not None:
            values = self.layouts.settled(new, []).told().first
        adds = self.name in ("index_add", "scatter_add", "index_reduce", "scatter_reduce")
        adds |= bool(self.named.get("accumulate"))
        base = constant(NOBODY, result) if adds or old is None else old.told().first
        first = self._write({id(given): values, id(target): base.contiguous()}, values)
        if adds:
            clash = self._clashes(first, values)
            several = [Origins(first), *([] if old is None else [old])]
            joined = self.joins.join(several, result.shape, self.name)
            first = first if joined is None else joined.told().first
            for each in (old, new) if bool((compact(first) == SEVERAL).any()) else ():
                if each is not None:
                    self.steps.lose(each)
            if clash:
                first = torch.where(first >= 0, torch.full_like(first, SEVERAL), first)
        elif new is not None:
            first = written(new, base, base, first, self.trace.sources)
        pieces, named = [each for each in (old, new) if each is not None], self.named
        chosen = [named.get("index"), named.get("mask"), *(named.get("indices") or ())]
        dynamic = any(each.is_dynamic for each in pieces)
        dynamic |= any(self.of(each) is not None for each in chosen)
        places = [each for each in chosen if isinstance(each, Tensor)]
        dynamic |= not all(map(self.trace.is_fixed, places))
        found = Origins(first, is_dynamic=dynamic, reason=self.name)
        for each in pieces:
            found.chain = united(found.chain, each.chain)
        filled = None if self.steps.is_one_step(new) else self.grids.filled(first)
        if filled is not None:
            found.first, found.is_dynamic = filled, False
        return found

    def _marked(self, result: Tensor) -> Origins | None:
        """A number written at places that data chooses, as in a one-hot code."""
        chooser = self.of(self.named.get("index"))
        if chooser is None:
            return self.of(self.arguments[0])
        chooser = chooser.told()
        axis = self.named.get("dim", 0) % result.ndim
        numbers = chooser.first.narrow(axis, 0, 1)
        shape = [1 if k == axis else size for k, size in enumerate(result.shape)]
        if list(numbers.shape) != shape or not is_constant_along(chooser.first, axis):
            return self.unknown(result)
        return chooser.but(first=numbers.expand(result.shape), second=None)

    def _write(self, numbers: Mapping[int, Tensor], values: Tensor) -> Tensor:
        """The same operation on numbers; values that are added to each other replace each other."""
        named, aten = self.named, torch.ops.aten

        def replaced(value: Tensor) -> Tensor:
            return numbers.get(id(value), value)

        base = replaced(self.arguments[0])
        found: Tensor
        if self.name in ("index_add", "index_reduce"):
            found = base.index_copy(named["dim"], named["index"], values.contiguous())
        elif self.name in ("scatter_add", "scatter_reduce"):
            found = base.scatter(named["dim"], named["index"], values)
        elif self.name in ("index_put", "_index_put_impl"):
            found = aten.index_put(base, list(named["indices"]), values, False)
        else:
            arguments = map_tensors(tuple(self.arguments), replaced)
            keywords = map_tensors(dict(self.keywords), replaced)
            found = getattr(aten, self.name)(*arguments, **keywords)
        return found

    def _clashes(self, placed: Tensor, values: Tensor) -> bool:
        """Whether values of different tokens are added at one place."""
        name, named = self.name, self.named
        if name in ("index_add", "index_reduce"):
            back = placed.index_select(named["dim"], named["index"])
        elif name in ("scatter_add", "scatter_reduce"):
            back = placed.gather(named["dim"], named["index"])
        else:
            back = torch.ops.aten.index(placed, list(named["indices"]))
        return not bool((back == values.expand(back.shape)).all())

    # -- axes --------------------------------------------------------------------------------

    def _reduced(self) -> list[Origins | None]:
        operand = self.arguments[0]
        found = self.of(operand)
        if found is None:
            return [None] * len(self.results)
        if len(tensors_in(self.arguments, {})) > 1:  # max(x, y)
            return [self._entry_by_entry(each.shape) for each in self.results]
        axes = self.named.get("dim")
        if axes is None or axes == []:
            axes = list(range(operand.ndim))
        axes = [each % max(1, operand.ndim) for each in ([axes] if isinstance(axes, int) else axes)]
        if not operand.ndim:
            return [found] * len(self.results)
        reduced = self.sums.reduced(found, axes, self.name)
        keeps = bool(self.named.get("keepdim", False))

        def squeezed(numbers: Tensor) -> Tensor:
            kept = tuple(0 if k in axes else slice(None) for k in range(numbers.ndim))
            return numbers if keeps else numbers[kept]

        return [reduced.moved(squeezed) for _ in self.results]

    def _same_place(self) -> list[Origins | None]:
        operand = self.arguments[0]
        found = self.of(operand)
        if found is None:
            return [self._entry_by_entry(each.shape) for each in self.results]
        axes: Any = self.named.get("dim", [])
        if "normalized_shape" in self.named:
            axes = range(operand.ndim - len(self.named["normalized_shape"]), operand.ndim)
        axes = [axes] if isinstance(axes, int) else list(axes)
        if "layer_norm" in self.name or "rms_norm" in self.name:
            found = self.layouts.summed_by_layer(found, axes) or found
            found = self.layouts.settled(found, axes, are_features=True)
        elif "norm" in self.name and operand.ndim > 1:
            found = self.layouts.by_channel(found)
        # A softmax is over keys: its result has both candidates still.
        return [found if each.shape == operand.shape else None for each in self.results]

    def _by_place(self, result: Tensor) -> Origins | None:
        """New tokens at the positions of a result (b, i, *positions)."""
        operand = self.arguments[0]
        found = self.of(operand)
        if found is None:
            return None
        if operand.ndim < 3 or result.ndim != operand.ndim:
            return self.unknown(result)
        found = self.layouts.by_channel(found).told()
        if not is_constant_along(found.first, 1):
            return self.unknown(result)
        numbers = found.first.narrow(1, 0, 1)
        if result.shape[2:] == operand.shape[2:]:
            return found.but(first=numbers.expand(result.shape), second=None, is_raw=False)
        return self._by_new_place(result, found, numbers)

    # -- products ----------------------------------------------------------------------------

    def _product(self) -> list[Origins | None]:
        (result,) = self.results
        shift = 1 if self.name in ("addmm", "baddbmm") else 0
        one, other = self.arguments[shift : shift + 2]
        shape = result.shape
        rows = self._summed(self.of(one), other, -1)
        columns = self._summed(self.of(other), one, -2)
        found = self._selected(one, other)
        if found is None:
            found = self.sums.product(rows, columns, shape, self.name)
            if found is not None and self.of(one) is None and result.ndim == 3:
                found = self._asked(one, found)
        bias = self.of(self.arguments[0]) if shift else None
        both = [each for each in (found, bias) if each is not None]
        return [self.joins.join(both, shape, self.name)]

    def _summed(self, factor: Origins | None, matrix: Tensor, axis: int) -> Origins | None:
        """The origins of a factor, with what a product with a parameter says about its layout."""
        names = self.trace.leaves(matrix)
        if not names:
            return factor
        is_free = names.isdisjoint(self.trace.of_layers)
        if is_free and matrix.shape[-1] == matrix.shape[-2]:
            return self.layouts.mixed_by_parameter(factor, axis)
        return self.layouts.summed_by_layer(factor, [axis])

    def _selected(self, one: Tensor, other: Tensor) -> Origins | None:
        """The rows that a product with a matrix of zeros and ones moves to other places.

        This is how some mixtures of experts send rows to their experts.
        """
        for matrix, rows, is_left in ((one, other, True), (other.mT, one.mT, False)):
            found = self.of(rows)
            if found is None or matrix.requires_grad:
                continue
            found = self.layouts.settled(found, [-2])
            if is_constant_along(found.first, -2):
                continue
            if not bool((((matrix == 0) | (matrix == 1)) & (matrix.sum(-1, True) <= 1)).all()):
                continue
            chosen = matrix.argmax(-1, keepdim=True)
            n = 1 if is_constant_along(found.first, -1) else found.first.shape[-1]
            numbers = found.first[..., :n].expand(*matrix.shape[:-2], -1, n)
            numbers = numbers.gather(-2, chosen.expand(*chosen.shape[:-1], n))
            numbers = torch.where(matrix.any(-1, keepdim=True), numbers, NOBODY)
            numbers = numbers if is_left else numbers.mT
            dynamic = found.is_dynamic or not self.trace.is_fixed(matrix)
            self.is_move = True
            first = numbers.expand(self.results[0].shape)
            return found.but(first=first, second=None, is_dynamic=dynamic)
        return None

    def _asked(self, queries: Tensor, found: Origins) -> Origins:
        """Scores (n, queries, keys) of learned queries: they belong to these, as others do."""
        learned = self._learned(queries, found) if found.second is None else None
        if learned is None:
            return found
        first = learned.expand(found.first.shape)
        return found.but(first=first, second=found.first, is_decided=True)

    def _learned(self, queries: Tensor, keys: Origins) -> Tensor | None:
        """The tokens of learned queries, (..., queries, 1), for the samples of the keys.

        None for other parameters: queries are the same for all samples, and were spread over them.
        """
        if not self.trace.is_state(queries):
            return None
        samples = compact(self.trace.sources.sample_of(keys.first))[..., :1, :1]
        samples = samples.expand(*queries.shape[:-1], 1)
        if not samples.numel() or bool((samples < 0).any()):
            return None
        count = queries.shape[-2]
        place = torch.arange(count, device=queries.device)[:, None]
        numbers = self.grids.fresh(samples * count + place, samples)
        if bool((numbers < 0).any()):
            return None
        self.trace.land(queries, self.trace.sources.present(numbers)[0])
        return numbers

    def _attention(self) -> list[Origins | None]:
        """Attention as one operation is at its queries."""
        queries = self.arguments[0]
        found = self._rows_of(queries)
        keys = self.of(self.arguments[1])
        if found is None and keys is not None:
            learned = self._learned(queries, keys)
            if learned is not None:
                found = keys.but(first=learned.expand(self.results[0].shape), second=None,
                                 is_decided=True, is_raw=False)  # fmt: skip
        return self.only_first(found)

    def _vector_product(self) -> list[Origins | None]:
        (result,) = self.results
        shift = 1 if self.name == "addmv" else 0
        one, other = self.of(self.arguments[shift]), self.of(self.arguments[shift + 1])
        if self.trace.leaves(self.arguments[shift + 1]):
            one = self.layouts.summed_by_layer(one, [-1])
        column = None if other is None else other.moved(lambda numbers: numbers[:, None])
        shape = torch.Size((*result.shape, 1))
        found = self.sums.product(one, column, shape, self.name)
        return [None if found is None else found.moved(lambda numbers: numbers[..., 0])]

    def _linear(self) -> list[Origins | None]:
        return [self._rows_of(self.arguments[0])]

    def _bilinear(self) -> list[Origins | None]:
        rows = [self._rows_of(each) for each in self.arguments[:3]]
        several = [each for each in rows if each is not None]
        return [self.joins.join(several, self.results[0].shape, self.name)]

    def _grouped_product(self) -> list[Origins | None]:
        (result,) = self.results
        first = self.arguments[0]
        if first.ndim != 2 or self.arguments[1].ndim != 3:
            return [self.unknown(result)]
        return [self._rows_of(first)]

    def _convolution(self) -> list[Origins | None]:
        (result,) = self.results
        operand = self.arguments[0]
        found = self.of(operand)
        if found is None:
            return [None]
        is_filter = operand.shape[1] == 1 and not self.trace.leaves(self.arguments[1])
        if is_filter and found.is_raw and result.shape == operand.shape:
            return [found]  # of each feature by itself: a later layer says which axis these are on
        found = self.layouts.by_channel(found).told()
        if found.second is not None and result.shape[2:] == operand.shape[2:]:
            # Over both axes of an argument: a later layer says which of them the positions are on.
            return [found.moved(lambda numbers: numbers.narrow(1, 0, 1).expand(result.shape))]
        stride = self.named.get("stride", [1])
        transposed = self.named.get("transposed", False)
        numbers, is_dense = found.first.narrow(1, 0, 1), all(each == 1 for each in stride)
        plain = is_dense and not transposed
        if not is_constant_along(found.first, 1):
            if bool((compact(found.first) < NOBODY).any()):
                return [self.unknown(result, found.reason)]
            found = found.but(first=self.sums.reduced(found, [1], self.name).first, second=None)
            numbers = found.first
        length, tokens = operand.shape[-1], compact(numbers)
        if plain and result.ndim == 3 and result.shape[-1] != length:
            here = numbers[0, 0]
            kept = here[here >= 0]
            if len(kept) == result.shape[-1] < length:  # zeros were put before the sequence
                at = (here >= 0).nonzero()[:, 0]
                if bool((numbers[:, 0, at] >= 0).all()):
                    return [found.but(first=numbers[:, :, at].expand(result.shape), second=None)]
            has_positions = length == 1 or not bool(self.trace.sources.is_sample(tokens).all())
            if result.shape[-1] > length and has_positions:
                grown = self._by_new_place(result, found, numbers)
                first = self.grids.longer(numbers, grown.first)
                return [found.but(first=first, second=None, grown=grown)]
        has_places = not bool(self.trace.sources.is_sample(tokens).all())
        if is_dense and result.shape[2:] == operand.shape[2:] and has_places:
            return [found.but(first=numbers.expand(result.shape), second=None, is_raw=False)]
        return [self._by_new_place(result, found, numbers)]

    def _by_new_place(self, result: Tensor, found: Origins, numbers: Tensor) -> Origins:
        fresh = self.grids.by_place(numbers, [len(result), 1, *result.shape[2:]])
        if bool((fresh < 0).any()):
            return self.unknown(result)
        return Origins(fresh.expand(result.shape), is_dynamic=found.is_dynamic)

    # -- others ------------------------------------------------------------------------------

    def _embedding(self) -> list[Origins | None]:
        ids = self.of(self.arguments[1])
        return [None if ids is None else self._chosen(ids, self.results[0])]

    def _embedding_bag(self) -> list[Origins | None]:
        """Every bag is a token."""
        ids = self.of(self.arguments[1])
        if ids is None:
            return [None] * len(self.results)
        result = self.results[0]
        numbers = self.trace.sources.whole_samples(len(result)).numbers(result.device)
        return self.only_first(ids.but(first=numbers.expand(result.shape), second=None))

    def _sorted(self) -> list[Origins | None]:
        """Entries in another order take their tokens along."""
        found = self.of(self.arguments[0])
        if found is None:
            return [None] * len(self.results)
        axis = self.named.get("dim", -1)
        axis = -1 if axis is None or isinstance(axis, bool) else axis
        indices = self.results[-1]
        moved = found.moved(lambda numbers: numbers.gather(axis, indices))
        return [moved] * len(self.results)

    def _nonzero(self) -> list[Origins | None]:
        found = self.of(self.arguments[0])
        (result,) = self.results
        if found is None:
            return [None]
        found = found.told()
        at = tuple(result.unbind(1))
        numbers = found.first[at] if at else found.first.reshape(1)
        shape = result.shape
        return [found.but(first=numbers[:, None].expand(shape), second=None, is_dynamic=True)]

    def _halves(self) -> list[Origins | None]:
        axis = self.named.get("dim", -1)
        found = self.of(self.arguments[0])
        if found is None:
            return [None]
        length = self.results[0].shape[axis]
        halves = [found.moved(lambda n, k=k: n.narrow(axis, k * length, length)) for k in (0, 1)]
        return [self.joins.join(halves, self.results[0].shape, self.name)]

    def _as_complex(self) -> list[Origins | None]:
        found = self.of(self.arguments[0])
        return [None if found is None else found.moved(lambda numbers: numbers[..., 0])]

    def _as_real(self) -> list[Origins | None]:
        found = self.of(self.arguments[0])
        return [
            None if found is None
            else found.moved(lambda numbers: numbers[..., None].expand(*numbers.shape, 2))
        ]  # fmt: skip

    def _cell(self) -> list[Origins | None]:
        """A step of a recurrent layer: gates of width k * h, a state of width h."""
        narrow = [
            found.moved(lambda numbers: numbers.narrow(-1, 0, 1))
            for each in tensors_in(self.arguments, self.keywords)
            if (found := self.of(each)) is not None
        ]
        shape = (*self.results[0].shape[:-1], 1)
        joined = self.joins.join(narrow, torch.Size(shape), self.name)
        return [
            None if joined is None else joined.moved(lambda n, to=each.shape: n.expand(to))
            for each in self.results
        ]

    def _sequence(self) -> list[Origins | None]:
        """A recurrent layer as one operation: (s, b, h), and the states that it ends with.

        These are (b, h), or (layers, b, h) where the operation has several layers and directions.
        """
        found = self._rows_of(self.arguments[0])
        if found is None:
            return [None] * len(self.results)
        steps, is_back = found.first, bool(self.named.get("reverse", False))
        made: list[Origins | None] = [found]
        for each in self.results[1:]:
            if steps.ndim != 3 or each.ndim not in (2, 3) or each.shape[-2] != steps.shape[1]:
                made.append(None)
                continue
            ends = steps[0 if is_back else -1]
            if each.ndim == 3 and self.named.get("bidirectional"):
                ends = torch.stack([steps[-1], steps[0]]).repeat(len(each) // 2, 1, 1)
            made.append(found.but(first=ends[..., :1].expand(each.shape), second=None))
        return made

    def _unfolded(self) -> list[Origins | None]:
        found = self.of(self.arguments[0])
        if found is None:
            return [None]

        def unfolded(numbers: Tensor) -> Tensor:
            made: Tensor = self.function(numbers.double() + 1, *self.arguments[1:], **self.keywords)
            return made.long() - 1

        return [found.moved(unfolded)]

    def _packed(self) -> list[Origins | None]:
        """Rows of a padded batch without the padding, step by step, or back."""
        found = self.of(self.arguments[0])
        if found is None:
            return [None] * len(self.results)
        found = self.layouts.settled(found, []).told()
        arguments = list(self.arguments[1:])
        if self.name == "_pad_packed_sequence":
            arguments[2] = NOBODY  # what is added is nobody's
        made, _ = self.function(found.first.contiguous(), *arguments, **self.keywords)
        dynamic = found.is_dynamic or not self.trace.is_fixed(self.arguments[1])
        return self.only_first(found.but(first=made, second=None, is_dynamic=dynamic))


def _frequencies(call: TokenRules) -> list[Origins | None]:
    """A Fourier transform along the features stays at its position, one along positions leaves."""
    found = call.of(call.arguments[0])
    (result,) = call.results
    axes = call.named["dim"]
    if found is not None and all(is_constant_along(found.first, axis) for axis in axes):
        for axis in axes:
            found = found.moved(lambda numbers, axis=axis: numbers.narrow(axis, 0, 1))
        return [found.moved(lambda numbers: numbers.expand(result.shape))]
    text = f"{call.name}, which returns frequencies and not positions"
    return [call.unknown(result, text)]


_RULES: dict[str, Callable[[TokenRules], list[Origins | None]]] = {
    "mm": TokenRules._product,
    "addmm": TokenRules._product,
    "bmm": TokenRules._product,
    "baddbmm": TokenRules._product,
    "mv": TokenRules._vector_product,
    "addmv": TokenRules._vector_product,
    "linear": TokenRules._linear,
    "_trilinear": TokenRules._bilinear,
    "_grouped_mm": TokenRules._grouped_product,
    "grouped_mm_fallback": TokenRules._grouped_product,
    "convolution": TokenRules._convolution,
    "embedding": TokenRules._embedding,
    "_embedding_bag": TokenRules._embedding_bag,
    "_embedding_bag_forward_only": TokenRules._embedding_bag,
    "sort": TokenRules._sorted,
    "topk": TokenRules._sorted,
    "nonzero": TokenRules._nonzero,
    "glu": TokenRules._halves,
    "view_as_complex": TokenRules._as_complex,
    "view_as_real": TokenRules._as_real,
    "im2col": TokenRules._unfolded,
    "_pack_padded_sequence": TokenRules._packed,
    "_pad_packed_sequence": TokenRules._packed,
    "reflection_pad1d": TokenRules._unfolded,
    "reflection_pad2d": TokenRules._unfolded,
    "replication_pad1d": TokenRules._unfolded,
    "replication_pad2d": TokenRules._unfolded,
    "_fft_r2c": _frequencies,
    "_fft_c2c": _frequencies,
    "_fft_c2r": _frequencies,
    **dict.fromkeys(_CELLS, TokenRules._cell),
    **dict.fromkeys(_SEQUENCES, TokenRules._sequence),
}
