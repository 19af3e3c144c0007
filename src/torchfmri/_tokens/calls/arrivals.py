"""The gradients of the outputs of calls, kept or reduced as they arrive.

Between two products of matrices nothing of ours is in the processor's caches: gradients are put
aside and taken in several at once, because the second one costs a fraction of the first. On CUDA
the reductions of all that wait are one launch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchfmri._kernels import heaviest
from torchfmri._tokens.algebra.precision import without_autocast
from torchfmri._tokens.algebra.reduced import Reduced
from torchfmri._tokens.calls.account import Account
from torchfmri._tokens.calls.norms import Reducer
from torchfmri._tokens.calls.owners import Owners, Parts
from torchfmri._tokens.calls.passes import TokenPasses
from torchfmri._tokens.rules import layer_rules as rules
from torchfmri._tokens.rules.record import Axis, TokenRecord, UsePart, Watched
from torchfmri._torch import NO_BACKWARD, Hook, current_backward, flatten_arguments, may_autocast
from torchfmri.exceptions import InspectionError, MemoryLimitError

_LESS = "Select fewer parameters, keep norms alone (keep='norms'), or allow more (max_bytes=...)."
_CALLS = 64  # whose gradients wait for each other at most


def most_waiting(keep: str, devices: set[torch.device], max_bytes: int) -> tuple[int, int]:
    """How many calls wait for each other at most, and how many bytes of gradients."""
    if keep == "factors":  # which stay alive anyway
        return _CALLS, max_bytes // 8
    cuda = [each for each in devices if each.type == "cuda"]
    if cuda:  # they are launched together
        return _CALLS, min(map(heaviest, cuda))
    return 1, 0  # what autograd lets go of next is where it will write next


class Arrivals:
    """Takes in what comes back to the records of a block.

    Args:
        watched: The layers.
        parameters: The parameters that are watched.
        passes: The pass that runs.
        account: What came of each parameter.
        owners: The layers that are run again at the end of a backward pass.
        keep: "factors", "norms" or "voxels"; factors up to `max_bytes`.
        max_bytes: See `keep`.

    Attributes:
        records: The calls, as they came.
        handles: Of hooks that were added on the way.
        versions: Of each parameter's `.grad`, as the last backward pass left it; of factors only.
        at_end: Asks to be called when the running backward pass is over; None outside of a block.
        backward: The backward pass whose end we have asked for.
        waiting: Calls with the gradients of their outputs, and in which backward pass they came,
            that nobody has looked at; `most` of them, or until they have `most_bytes`.
    """

    def __init__(
        self,
        watched: Mapping[str, Watched],
        parameters: Mapping[str, nn.Parameter],
        passes: TokenPasses,
        account: Account,
        owners: Owners,
        keep: str,
        max_bytes: int,
    ) -> None:
        self._watched, self._parameters = watched, parameters
        self._passes, self._account, self._owners = passes, account, owners
        self._keeps_factors, self._max_bytes = keep == "factors", max_bytes
        self.records: list[TokenRecord] = []
        self._is_sorted = False
        self._reduced_parts: dict[str, list[UsePart]] = {}
        self._with_factors: dict[str, list[TokenRecord]] = {}
        self.handles: list[Any] = []
        self.versions: dict[str, int] = {}
        self.at_end: Callable[[Callable[[int], None]], None] | None = None
        self._reducer = Reducer(account.checks, keep == "voxels")
        self._parts: Parts = defaultdict(list)  # of calls that were reduced together
        self._replayed: dict[str, list[Tensor]] = defaultdict(list)
        self._watching_replays: set[str] = set()
        self._parked: list[TokenRecord] = []
        self.waiting: list[tuple[TokenRecord, Tensor, int]] = []
        self.waiting_bytes = 0
        self._keep = keep
        self.most = self.most_bytes = 0  # until the first one comes
        self.backward = NO_BACKWARD
        self._must_finish = False
        self._shapes: dict[torch.Size, torch.Size] = {}  # few, for many calls
        self._bytes = 0
        self._stored: set[int] = set()

    # -- backward ----------------------------------------------------------------------------

    def arrived(self, record: TokenRecord, gradient: Tensor | None) -> None:
        """The gradient of a call is there; little code, for this never runs in warm caches."""
        if gradient is None:  # it is zero, and autograd knows that
            return
        backward, waiting = current_backward(), self.waiting
        waiting.append((record, gradient, backward))
        self.waiting_bytes += gradient.nbytes
        if (
            self.backward != backward
            or len(waiting) >= self.most
            or self.waiting_bytes >= self.most_bytes
            or record.is_replayed  # its input is the last one that was replayed
        ):
            self._look()

    def _look(self) -> None:
        """Look at what has come; nothing raised here may pass."""
        if self.at_end is None:  # the block is over
            self.waiting.clear()
            return
        if not self.most:
            devices = {each.device for each in self._parameters.values()}
            self.most, self.most_bytes = most_waiting(self._keep, devices, self._max_bytes)
        try:
            if self.backward != current_backward():
                self._passes.has_gone_back = True
                self.expect_end()
            if (
                len(self.waiting) >= self.most
                or self.waiting_bytes >= self.most_bytes
                or self.waiting[-1][0].is_replayed
            ):
                self._take_in_all()
        except Exception as error:
            self._account.refuse(self._parameters, error)

    def expect_end(self) -> None:
        """Have `_backward_is_over` called when the running backward pass is over."""
        self.backward = current_backward()
        if self.at_end is not None:
            self._account.checks.backward_begins()
            self.at_end(self._backward_is_over)

    def _take_in_all(self) -> None:
        """Keep or reduce the gradients that wait."""
        arrived, self.waiting = self.waiting, []
        self.waiting_bytes = 0
        self._passes.count_calls()
        self._is_sorted = False
        autocasts = may_autocast()
        with torch.no_grad():
            for record, gradient, backward in arrived:
                try:
                    if autocasts or record.is_replayed or self._parked:
                        self._take_in_with_care(record, gradient, backward)
                    else:
                        self._take_in(record, gradient, backward)
                except Exception as error:
                    self._account.refuse(record.watched.parameters.values(), error)

    def _take_in_with_care(self, record: TokenRecord, gradient: Tensor, backward: int) -> None:
        with without_autocast(gradient):
            if self._parked:
                self._unpark()
            if record.is_replayed and record.x is None and not self._take_replayed(record):
                self._parked.append(record)  # the last layer's gradient comes before the replay
                record.g, record.backward = gradient.detach(), backward
                self._must_finish = True
                return
            self._take_in(record, gradient, backward)

    def _take_in(self, record: TokenRecord, gradient: Tensor, backward: int) -> None:
        watched = record.watched
        self._account.layers.add(watched.layer)
        if gradient.requires_grad:
            gradient = gradient.detach()
        if gradient.itemsize < 4:
            self._account.narrow.add(watched.layer)
        if record.spread_gradient is not None:
            gradient = record.before_broadcast(gradient)
        if watched.rule is rules.convolution:
            gradient = record.without_tail(gradient)
        if record.g is not None and record.backward != backward:
            gradient = record.g + gradient
        elif record.shape is not None and record.g is None:
            raise InspectionError(
                f"A second backward pass went through the same call of {watched.layer!r}, and of "
                "the first only norms were kept. Write token_gradients(..., keep='factors')."
            )
        record.g, record.shape, record.backward = gradient, gradient.shape, backward
        if self._keeps_factors:
            record.let_go_of_graph()
            self._count(record)
        elif not record.is_alone or record.rows:
            record.let_go_of_graph()
            self._must_finish = True
        else:
            record.check_input()
            record.reduced = self._reducer(record, gradient)
            record.x = record.g = None

    def _count(self, record: TokenRecord) -> None:
        """Add what a record keeps to the bill; beyond the limit it is let go."""
        before = self._bytes
        added = self._add_bytes(record)
        if self._bytes > self._max_bytes:
            layer, needed = record.watched.layer, self._bytes - before
            error = MemoryLimitError(layer, needed, before, self._max_bytes, _LESS)
            self._account.refuse(record.watched.parameters.values(), error)
            record.x = record.g = None
            self._bytes = before  # a smaller one may fit yet, in the same place
            self._stored.difference_update(added)

    def _add_bytes(self, record: TokenRecord) -> set[int]:
        """Add what a record keeps, at these addresses; what several of them share counts once."""
        added: set[int] = set()
        for tensor in (record.g, *(record.x if isinstance(record.x, tuple) else (record.x,))):
            if tensor is None:
                continue
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if address not in self._stored:
                self._stored.add(address)
                added.add(address)
                self._bytes += storage.nbytes()
        return added

    # -- inputs inside a checkpoint ------------------------------------------------------------

    def await_replay(self, watched: Watched) -> None:
        """Have a module's calls noticed that a checkpoint makes again in the backward pass."""
        if watched.layer not in self._watching_replays:
            self._watching_replays.add(watched.layer)
            hook = Hook(partial(self._replay, watched.layer))
            handle = watched.module.register_forward_pre_hook(hook, with_kwargs=True)
            self.handles.append(handle)

    def _replay(self, layer: str, *call: Any) -> None:
        """Keep an input that a checkpoint computes again, until its gradient comes: last first."""
        if current_backward() != NO_BACKWARD and torch.is_grad_enabled():
            x = flatten_arguments(call[1], call[2])[0].tensor
            if is_cast(self._watched[layer].rule, x):
                x = x.to(torch.get_autocast_dtype(x.device.type))
            self._replayed[layer].append(x.detach())

    def _take_replayed(self, record: TokenRecord) -> bool:
        """Give a record the input that a checkpoint computed again; the last one comes first."""
        waiting = self._replayed[record.watched.layer]
        if not waiting:
            return False
        record.x = waiting.pop()
        record.version = record.x._version
        if record.x.ndim == 4:
            record.strides = record.x.stride()
        return True

    def _unpark(self) -> None:
        """Finish the records whose replay is over: another gradient has come since."""
        parked, self._parked = self._parked, []
        for record in parked:
            if not self._take_replayed(record):
                self._parked.append(record)
                continue
            gradient, record.g = record.g, None
            assert gradient is not None
            self._take_in(record, gradient, record.backward)

    # -- the end of a backward pass --------------------------------------------------------------

    def _backward_is_over(self, backward: int) -> None:
        """Read the gradients as the backward pass left them: they may be changed later."""
        self.backward = NO_BACKWARD
        self._take_in_all()
        self._unpark()
        self._reducer.finish()
        self._account.checks.backward_is_over()
        for name, parameter in self._parameters.items() if self._keeps_factors else ():
            if parameter.grad is not None:
                self.versions[name] = parameter.grad._version
        if self._must_finish:
            self._must_finish = False
            self._finish()

    def _finish(self) -> None:
        """Run owners again, and reduce what had to wait."""
        self._is_sorted = False
        parts: Parts = defaultdict(list)
        for record in [] if self._keeps_factors else self.records:
            if record.g is None:
                continue
            try:
                for key, part in record.parts(record.watched.parameters):
                    parts[record.watched.parameters[key]].append(part)
            except Exception as error:  # these parameters say why they are missing, no others
                self._account.refuse(record.watched.parameters.values(), error)
            record.x = record.g = None
        self._owners.run_again(parts, self.parts)
        for name, several in parts.items():
            self._parts[name] += several if self._keeps_factors else self._reduced(name, several)

    def _reduced(self, name: str, several: list[UsePart]) -> list[UsePart]:
        """The parts of one parameter on each token axis, reduced together."""
        axes: dict[Axis, list[UsePart]] = defaultdict(list)
        for part in several:
            axes[part.axis].append(part)
        result = []
        for axis, same in axes.items():
            found = [term for part in same for term in part.terms or ()]
            rule = " + ".join(dict.fromkeys(part.rule for part in same))
            reduced = self._reducer.terms(found, name)
            result.append(UsePart(axis, rule, same[0].mask, None, reduced))
        return result

    # -- the result --------------------------------------------------------------------------

    def parts(self, name: str) -> list[UsePart]:
        """All parts of a parameter."""
        self._sort_records()
        found = [*self._parts.get(name, ()), *self._reduced_parts.get(name, ())]
        for layer in self._account.homes[name] if self._with_factors else ():
            for record in self._with_factors.get(layer, ()):
                parameters = record.watched.parameters
                keys = [key for key in parameters if parameters[key] == name]
                found += [part for _, part in record.parts(keys)]
        return found

    def numbers_on(self, names: Collection[str]) -> dict[Axis, list[Reduced]] | None:
        """The numbers of these parameters by their tokens, none of them padding.

        None unless each parameter has those of one call, or of several that were reduced together.
        That is how it is for most models; nothing is made of each call then.
        """
        found: dict[str, Reduced] = {}
        axes: dict[Axis, list[Reduced]] = defaultdict(list)
        alike: dict[tuple[object, ...], list[Reduced]] = {}
        for record in self.records:
            if record.reduced is None:
                if record.g is not None:
                    return None
                continue
            keys, grid = record.watched.parameters, record.grid()
            for key, each in record.reduced.items():
                name = keys.get(key)
                if name is None or name not in names:
                    continue
                if name in found or record.mask is not None:
                    return None
                found[name] = each
                table = id(each.numbers[0].all_products)  # whose lines have as many tokens
                kind = (record.within.number, record.stack, record.of, grid.b, grid.s, table)
                if kind not in alike:
                    alike[kind] = axes[record.axis(each.tokens, grid)]
                alike[kind].append(each)
        for name, several in self._parts.items():
            if name in names:
                part = several[0] if len(several) == 1 else None
                if part is None or part.reduced is None or part.mask is not None or name in found:
                    return None
                found[name] = part.reduced
                axes[part.axis].append(part.reduced)
        return axes if len(found) == len(names) else None

    def _sort_records(self) -> None:
        """Sort what the calls have left: by parameter, or by layer where that takes work yet."""
        if self._is_sorted:
            return
        self._is_sorted = True
        self._reduced_parts, self._with_factors = {}, {}
        for record in self.records:
            watched = record.watched
            if record.reduced is not None:
                for key, part in record.parts(watched.parameters):
                    self._reduced_parts.setdefault(watched.parameters[key], []).append(part)
            elif record.g is not None:
                self._with_factors.setdefault(watched.layer, []).append(record)

    def call_came_back(self, record: TokenRecord, gradient: Tensor, backward: int) -> None:
        """Take in a gradient that came the long way, at once."""
        self._take_in_all()
        with torch.no_grad():
            self._take_in_with_care(record, gradient, backward)

    def owner_came_back(self) -> None:
        """Run the owners again when the backward pass is over."""
        self._must_finish = True

    def forget(self) -> None:
        """Have everything computed, and let go of what only the passes themselves need."""
        self._replayed.clear()
        self._take_in_all()
        self._reducer.finish()
        self.at_end = None
        if self._must_finish:  # compiled autograd does not say when a backward pass is over
            self._must_finish = False
            self._account.checks.settle()
            self._finish()
        for record in self.records:
            if record.g is None:  # nothing came back, and nothing will
                record.x = None


def is_cast(rule: object, x: Tensor) -> bool:
    """Whether autocast lets a layer multiply this input in another dtype."""
    kind = x.device.type
    if rule not in rules.AUTOCAST or not torch.is_autocast_enabled(kind):
        return False
    left_alone = (torch.float64, torch.get_autocast_dtype(kind))
    return x.is_floating_point() and x.dtype not in left_alone
