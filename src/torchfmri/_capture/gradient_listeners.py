"""Listeners for one gradient: of an output, an input through one call, a parameter.

`taps` creates them while the graph is built. A listener holds no part of that graph (or activations
would live on), and calls `emit` with the gradient and the number of the backward pass that brought
it; `None` withdraws what was emitted. In-place writes are the trap: they replace the node of a
view, so a view is watched at its base as well. The tests compare every case with dL/d of a zero
added at that place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor

from torchfmri._torch import Backwards, ViewGeometry, current_backward, own_copy, view_geometry

Emit: TypeAlias = Callable[[Tensor | None, int], None]
Note: TypeAlias = Callable[[str], None]
Slots: TypeAlias = list[tuple[int, bool]]

TAKEN_AT_BASE = (
    "its output, a view, was written in place: the gradient is taken at the view's base, with "
    "other readers of that base included if there are any"
)
NO_STRIDES = "its output, a view that strides do not describe, was written in place"


class OutputGradient:
    """dL/d one output tensor; for a view also watched at its base, which in-place writes spare.

    An in-place write to a view replaces the view's node, so the hook on it never fires, or fires
    with a part of the gradient only. The base keeps its node, and its gradient holds ours.
    """

    # It is a hook by itself, and the most frequent object of a recording: no dict, no partial.
    __slots__ = ("_backwards", "_base", "_call", "_failed", "_path", "_seen_in", "_sink", "_what")

    def __init__(
        self,
        sink: Any,
        call: Any,
        what: str,
        path: str,
        backwards: Backwards,
        failed: Callable[[Exception], None],
        base: BaseOfView | None,
    ) -> None:
        self._sink, self._call, self._what, self._path = sink, call, what, path
        self._backwards, self._failed, self._base = backwards, failed, base
        self._seen_in: int | None = None

    def __call__(self, gradient: Tensor | None) -> None:
        """Take the gradient that the output's own hook brought; None: autograd knows it is zero."""
        try:
            if self._base is not None:
                self._seen_in = current_backward()
            self._emit(gradient)
        except Exception as error:
            self._failed(error)

    def arrived_at_base(self, gradient: Tensor | None) -> None:
        """Take the base's gradient instead, where the output's own was lost or is a part only."""
        assert self._base is not None
        if gradient is None:
            return
        unseen = self._seen_in != current_backward()
        if self._base.was_written() or (unseen and self._base.is_read_through_memory):
            self._emit(self._base.part_of(gradient))

    def _emit(self, gradient: Tensor | None) -> None:
        found = None if gradient is None else own_copy(gradient).detach()
        where = (self._call, self._what, self._path)
        self._sink.gradient(*where, found, self._backwards.current())


class BaseOfView:
    """The base of a view that a module returned, watched without holding it.

    Args:
        view: The output.
        shared: Another input or output of the call lies in the same base, or the module may have
            read the base itself: its gradient may then hold more than ours.
        is_read_through_memory: The module wrote into its input and returned that.
        note: Called with a reservation in words.
        missed: Called if the view's part cannot be cut out of the base's gradient.
    """

    def __init__(
        self,
        view: Tensor,
        *,
        shared: bool,
        is_read_through_memory: bool,
        note: Note,
        missed: Note,
    ) -> None:
        self.geometry = view_geometry(view)
        self.is_read_through_memory = is_read_through_memory
        self._shared, self._note, self._missed = shared, note, missed
        # An alias that is given other memory keeps the version counter, and nothing else.
        self._probe = view.detach()
        self._probe.data = view.new_empty(0)
        self._version = self._probe._version

    def was_written(self) -> bool:
        """Whether somebody wrote into the view, its base or another view of it."""
        return self._probe._version != self._version

    def part_of(self, gradient: Tensor) -> Tensor | None:
        """Return the view's part of the base's gradient, with what has to be said about it."""
        if self.geometry is None:
            self._missed(NO_STRIDES)
            return None
        if self._shared:
            self._note(TAKEN_AT_BASE)
        return self.geometry.part_of(gradient)


class InputGradient:
    """dL/d one input through one call: the sum over the nodes of that call that read it."""

    def __init__(
        self, geometry: ViewGeometry | None, expected: int, backwards: Backwards, emit: Emit
    ) -> None:
        self._backwards, self._emit = backwards, emit
        self._geometry, self._expected = geometry, expected
        self._sums: dict[int, Tensor] = {}
        self._came: dict[int, int] = defaultdict(int)
        self._replaced: set[int] = set()

    def listener(self, slots: Slots) -> Callable[..., None]:
        """Return a node hook that adds what arrives in these slots (slot, is it the base's)."""

        def listen(gradients: tuple[Tensor | None, ...], _: object) -> None:
            for slot, at_base in slots:
                self._add(gradients[slot], at_base)

        return listen

    def returned_view(self, base: BaseOfView) -> Callable[[Tensor | None], None]:
        """Return a hook on the base of the input, where the call only returned a view of the input.

        Once somebody wrote into that view its node is bypassed: what reaches the view's place in
        the base is what reaches the input through the call.
        """

        def listen(gradient: Tensor | None) -> None:
            if gradient is None or not base.was_written():
                return
            backward = self._backwards.current()
            self._replaced.add(backward)
            ours = base.part_of(gradient)
            if ours is None or base.geometry is None:
                self._emit(None, backward)
                return
            whole = base.geometry.placed(ours)
            geometry = self._geometry
            self._emit(whole if geometry is None else geometry.part_of(whole), backward)

        return listen

    def _add(self, gradient: Tensor | None, at_base: bool) -> None:
        """Add what one reader sends; the sum is emitted once all have sent, or the pass is over."""
        backward = self._backwards.current()
        self._came[backward] += 1
        if gradient is not None:
            part = gradient
            if at_base and self._geometry is not None:
                part = self._geometry.part_of(gradient)
            last = self._sums.get(backward)
            if last is not None:
                self._sums[backward] = last + part
            else:  # until the sum is complete others may write into what they handed us
                self._sums[backward] = part if self._expected == 1 else part.clone()
        if self._came[backward] == self._expected:
            self._finish(backward)
        else:
            self._backwards.at_end(backward, self._finish)

    def _finish(self, backward: int) -> None:
        self._came.pop(backward, None)
        total = self._sums.pop(backward, None)
        if total is not None and backward not in self._replaced:
            self._emit(total, backward)


class ReturnedInputGradient:
    """dL/d an input that the call returns as it is: all readers but those before the call."""

    def __init__(self, backwards: Backwards, emit: Emit) -> None:
        self._backwards, self._emit = backwards, emit
        self._before: dict[int, Tensor] = {}

    def listener(self, slots: Slots) -> Callable[..., None]:
        """Return a node hook for a reader that ran before the call."""

        def listen(gradients: tuple[Tensor | None, ...], _: object) -> None:
            backward = self._backwards.current()
            for gradient in (gradients[slot] for slot, at_base in slots if not at_base):
                if gradient is not None:
                    last = self._before.get(backward)
                    self._before[backward] = gradient.clone() if last is None else last + gradient

        return listen

    def arrived(self, gradient: Tensor | None) -> None:
        """Take the gradient of the whole tensor, which comes after those of all its readers."""
        if gradient is None:
            return
        backward = self._backwards.current()
        before = self._before.pop(backward, None)
        self._emit(gradient if before is None else gradient - before, backward)

    def returned_view(self, base: BaseOfView) -> Callable[[Tensor | None], None]:
        """Return a hook on the base, for a view that somebody wrote into after the call."""

        def listen(gradient: Tensor | None) -> None:
            if gradient is not None and base.was_written():
                self._emit(base.part_of(gradient), self._backwards.current())

        return listen


class ParameterGradient:
    """The gradient that one backward pass brings to one parameter.

    A reentrant checkpoint runs backward passes inside the backward pass: the parameter then gets
    its gradient in parts, which are added up when the outer pass ends.
    """

    def __init__(self, backwards: Backwards, emit: Callable[[Tensor, int], None]) -> None:
        self._backwards, self._emit = backwards, emit
        self._parts: dict[int, Tensor] = {}

    def arrived(self, gradient: Tensor) -> None:
        """Take the gradient that the parameter's own hook brought."""
        backward = self._backwards.current()
        if not self._backwards.expects_nested:
            self._emit(gradient, backward)
            return
        part = self._parts.get(backward)
        self._parts[backward] = gradient.detach().clone() if part is None else part + gradient
        self._backwards.at_end(backward, self._finish)

    def _finish(self, backward: int) -> None:
        self._emit(self._parts.pop(backward), backward)
