"""CAPTURE: the gradients of the outputs of calls, kept or reduced as they arrive.

Between two products of matrices nothing of ours is in the processor's caches: gradients are put
aside and taken in several at once, because the second one costs a fraction of the first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchfmri._elements import flatten_arguments
from torchfmri._hooks import Hook
from torchfmri._kernels.cuda_rows import heaviest
from torchfmri._tokens import rules
from torchfmri._tokens.account import Account
from torchfmri._tokens.norms import Found, Reducer
from torchfmri._tokens.owners import Owners, Parts
from torchfmri._tokens.passes import Passes
from torchfmri._tokens.random_vectors import without_autocast
from torchfmri._tokens.record import Axis, Part, Record, Watched
from torchfmri._torch_private import NO_BACKWARD, current_backward, may_autocast
from torchfmri.exceptions import InspectionError, MemoryLimitError

_LESS = "Select fewer parameters, keep norms alone (keep='norms'), or allow more (max_bytes=...)."
_ARRIVALS = 16  # gradients that are put aside
_BYTES = 1 << 22  # that they keep alive on the CPU, where they should still be in a cache


class Listener:
    """The hook on the output of a call, which it lets go of when the block is over."""

    __slots__ = ("_arrivals", "_record")
    __torch_unserializable__ = True

    def __init__(self, arrivals: Arrivals, record: Record) -> None:
        self._arrivals: Arrivals | None = arrivals
        self._record: Record | None = record

    def __call__(self, gradient: Tensor) -> None:
        if self._arrivals is not None and self._record is not None:
            self._arrivals.arrived(self._record, gradient)

    def close(self) -> None:
        self._arrivals = self._record = None

    def __deepcopy__(self, memo: object) -> Hook:
        return Hook(None)

    def __reduce__(self) -> tuple[type[Hook], tuple[None]]:
        return (Hook, (None,))


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
        versions: Of each parameter's `.grad`, as the last backward pass left it.
        at_end: Asks to be called when the running backward pass is over; None outside of a block.
    """

    def __init__(
        self,
        watched: Mapping[str, Watched],
        parameters: Mapping[str, nn.Parameter],
        passes: Passes,
        account: Account,
        owners: Owners,
        keep: str,
        max_bytes: int,
    ) -> None:
        self._watched, self._parameters = watched, parameters
        self._passes, self._account, self._owners = passes, account, owners
        self._keeps_factors, self._max_bytes = keep == "factors", max_bytes
        self.records: list[Record] = []
        self._by_layer: dict[str, list[Record]] = {}
        self._sorted = 0  # how many of them are in it
        self.handles: list[Any] = []
        self.versions: dict[str, int] = {}
        self.at_end: Callable[[Callable[[int], None]], None] | None = None
        self._reducer = Reducer(account.checks, keep == "voxels")
        self._parts: Parts = defaultdict(list)  # of calls that were reduced together
        self._replayed: dict[str, list[Tensor]] = defaultdict(list)
        self._watching_replays: set[str] = set()
        self._parked: list[Record] = []
        self._waiting: list[tuple[Record, Tensor, int]] = []
        self._waiting_bytes = 0
        self._most, self._most_bytes = _ARRIVALS, _BYTES
        cuda = {each.device for each in parameters.values() if each.is_cuda}
        if self._keeps_factors:  # they stay alive anyway
            self._most, self._most_bytes = 16 * _ARRIVALS, max_bytes // 8
        elif cuda:
            self._most, self._most_bytes = 4 * _ARRIVALS, min(map(heaviest, cuda))
        self._expected = NO_BACKWARD  # the backward pass whose end we have asked for
        self._must_finish = False
        # Of the class: of the instance it would hold on to itself.
        self._at_once: Callable[[Arrivals, Record, Tensor, int], bool] | None
        self._at_once = Arrivals._keep_at_once if self._keeps_factors else Arrivals._reduce_at_once
        if cuda and not self._keeps_factors:  # they are launched together
            self._at_once = None
        self._bytes = 0
        self._stored: set[int] = set()
        self._uncounted: list[Record] = []  # certainly within the limit
        self._uncounted_bytes = 0  # more than they keep where they share an input

    # -- backward ----------------------------------------------------------------------------

    def arrived(self, record: Record, gradient: Tensor) -> None:
        """Put the gradient of a call's output aside; nothing raised here may pass."""
        if self.at_end is None:  # the block is over
            return
        try:
            backward = current_backward()
            if self._expected != backward:
                self._passes.has_gone_back = True
                self.expect_end()
            at_once = self._at_once
            if at_once is not None and at_once(self, record, gradient, backward):
                return
            self._waiting.append((record, gradient, backward))
            self._waiting_bytes += gradient.nbytes
            if (
                record.is_replayed  # its input is the last one that was replayed
                or len(self._waiting) >= self._most
                or self._waiting_bytes >= self._most_bytes
            ):
                self.take_in_all()
        except Exception as error:
            self._account.refuse(record.watched.parameters.values(), error)

    def _keep_at_once(self, record: Record, gradient: Tensor, backward: int) -> bool:
        """Keep the factors of a common call, while they certainly are within the limit."""
        x = record.x
        if (
            type(x) is not Tensor
            or record.is_replayed
            or record.spread_gradient is not None
            or record.shape is not None
            or record.watched.rule is rules.convolution
            or gradient.requires_grad
        ):
            return False
        record.let_go_of_graph()
        more = gradient.nbytes + x.untyped_storage().nbytes()
        if self._bytes + self._uncounted_bytes + more > self._max_bytes:
            return False
        self._uncounted_bytes += more
        self._uncounted.append(record)
        record.g, record.shape, record.backward = gradient, gradient.shape, backward
        self._account.layers.add(record.watched.layer)
        if gradient.itemsize < 4:
            self._account.narrow.add(record.watched.layer)
        return True

    def _reduce_at_once(self, record: Record, gradient: Tensor, backward: int) -> bool:
        """Reduce the gradient of a common call as it comes, if that is a pass of compiled code.

        Nothing is put aside then: what autograd lets go of next is where it will write next.
        """
        return self._reduce(record, gradient, backward, self._reducer.at_once)

    def _reduce(
        self,
        record: Record,
        gradient: Tensor,
        backward: int,
        reduce: Callable[[Record, Tensor], Found | None],
    ) -> bool:
        """Reduce the gradient of a common call the short way; False where that is not to be had."""
        watched, x = record.watched, record.x
        if (
            type(x) is not Tensor
            or record.is_replayed
            or record.spread_gradient is not None
            or record.shape is not None
            or record.version is None
            or watched.is_shared
            or watched.rule is rules.convolution
            or self._passes.calls.get(watched.layer, 0) > 1
            or x._version != record.version
        ):
            return False
        record.shape = gradient.shape
        found = reduce(record, gradient)
        if found is None:
            record.shape = None
            return False
        record.reduced, record.backward, record.x = found, backward, None
        self._account.layers.add(watched.layer)
        if gradient.itemsize < 4:
            self._account.narrow.add(watched.layer)
        return True

    def expect_end(self) -> None:
        """Have `_backward_is_over` called when the running backward pass is over."""
        self._expected = current_backward()
        if self.at_end is not None:
            self._account.checks.backward_begins()
            self.at_end(self._backward_is_over)

    def take_in_all(self) -> None:
        """Keep or reduce the gradients that were put aside."""
        arrivals, self._waiting = self._waiting, []
        self._waiting_bytes = 0
        autocasts, short = may_autocast(), None if self._keeps_factors else self._reducer.short
        with torch.no_grad():
            for record, gradient, backward in arrivals:
                try:
                    if autocasts or record.is_replayed or self._parked:
                        self._take_in_with_care(record, gradient, backward)
                    elif short is None or not self._reduce(record, gradient, backward, short):
                        self._take_in(record, gradient, backward)
                except Exception as error:
                    self._account.refuse(record.watched.parameters.values(), error)

    def _take_in_with_care(self, record: Record, gradient: Tensor, backward: int) -> None:
        with without_autocast(gradient):
            if self._parked:
                self._unpark()
            if record.is_replayed and record.x is None and not self._take_replayed(record):
                self._parked.append(record)  # the last layer's gradient comes before the replay
                record.g, record.backward = gradient.detach(), backward
                self._must_finish = True
                return
            self._take_in(record, gradient, backward)

    def _take_in(self, record: Record, gradient: Tensor, backward: int) -> None:
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
        elif watched.is_shared or self._passes.calls.get(watched.layer, 0) > 1:
            record.let_go_of_graph()
            self._must_finish = True
        else:
            record.check_input()
            record.reduced = self._reducer(record, gradient)
            record.x = record.g = None

    def _count(self, record: Record) -> None:
        """Add what a record keeps to the bill; beyond the limit it is let go."""
        uncounted, self._uncounted = self._uncounted, []
        self._uncounted_bytes = 0
        for each in uncounted:
            self._add_bytes(each)
        before = self._bytes
        self._add_bytes(record)
        if self._bytes > self._max_bytes:
            layer, needed = record.watched.layer, self._bytes - before
            error = MemoryLimitError(layer, needed, before, self._max_bytes, _LESS)
            for name in record.watched.parameters.values():
                self._account.reasons.setdefault(name, error)
            record.x = record.g = None

    def _add_bytes(self, record: Record) -> None:
        """Add what a record keeps; what several of them share counts once."""
        for tensor in (record.g, *(record.x if isinstance(record.x, tuple) else (record.x,))):
            if tensor is not None and (storage := tensor.untyped_storage()).data_ptr() not in (
                self._stored
            ):
                self._stored.add(storage.data_ptr())
                self._bytes += storage.nbytes()

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

    def _take_replayed(self, record: Record) -> bool:
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
        self._expected = NO_BACKWARD
        self.take_in_all()
        self._unpark()
        self._reducer.finish()
        self._account.checks.backward_is_over()
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self.versions[name] = parameter.grad._version
        if self._must_finish:
            self._must_finish = False
            self._finish()

    def _finish(self) -> None:
        """Run owners again, and reduce what had to wait."""
        parts: Parts = defaultdict(list)
        for record in [] if self._keeps_factors else self.records:
            if record.g is None:
                continue
            try:
                for key, part in record.parts(record.watched.parameters).items():
                    parts[record.watched.parameters[key]].append(part)
            except Exception as error:  # these parameters say why they are missing, no others
                self._account.refuse(record.watched.parameters.values(), error)
            record.x = record.g = None
        self._owners.run_again(parts, self.parts)
        for name, several in parts.items():
            self._parts[name] += several if self._keeps_factors else self._reduced(name, several)

    def _reduced(self, name: str, several: list[Part]) -> list[Part]:
        """The parts of one parameter on each token axis, reduced together."""
        axes: dict[Axis, list[Part]] = defaultdict(list)
        for part in several:
            axes[part.axis].append(part)
        result = []
        for axis, same in axes.items():
            found = [term for part in same for term in part.terms or ()]
            rule = " + ".join(dict.fromkeys(part.rule for part in same))
            reduced = self._reducer.terms(found, name)
            result.append(Part(axis, rule, same[0].mask, None, reduced))
        return result

    # -- the result --------------------------------------------------------------------------

    def parts(self, name: str) -> list[Part]:
        """All parts of a parameter."""
        found = list(self._parts[name]) if name in self._parts else []
        records = self._records_by_layer()
        for layer in self._account.homes[name]:
            for record in records.get(layer, ()):
                if record.reduced is not None or record.g is not None:
                    parameters = record.watched.parameters
                    keys = [key for key in parameters if parameters[key] == name]
                    found += record.parts(keys).values()
        return found

    def _records_by_layer(self) -> dict[str, list[Record]]:
        for record in self.records[self._sorted :] if self._sorted < len(self.records) else ():
            self._by_layer.setdefault(record.watched.layer, []).append(record)
        self._sorted = len(self.records)
        return self._by_layer

    def call_came_back(self, record: Record, gradient: Tensor, backward: int) -> None:
        """Take in a gradient that came the long way, at once."""
        self.take_in_all()
        with torch.no_grad():
            self._take_in_with_care(record, gradient, backward)

    def owner_came_back(self) -> None:
        """Run the owners again when the backward pass is over."""
        self._must_finish = True

    def forget(self) -> None:
        """Have everything computed, and let go of what only the passes themselves need."""
        self._replayed.clear()
        self.take_in_all()
        self._reducer.finish()
        self.at_end = None
        for record in self.records:
            if record.listener is not None:
                record.listener.close()  # it may stay on an output for as long as the user likes
            if record.g is None:  # nothing came back, and nothing will
                record.x = None


def is_cast(rule: object, x: Tensor) -> bool:
    """Whether autocast lets a layer multiply this input in another dtype."""
    kind = x.device.type
    if rule not in rules.AUTOCAST or not torch.is_autocast_enabled(kind):
        return False
    left_alone = (torch.float64, torch.get_autocast_dtype(kind))
    return x.is_floating_point() and x.dtype not in left_alone
