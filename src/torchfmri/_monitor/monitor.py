"""The Monitor: stays on while a model trains, and keeps the statistics of every step.

The user's loop, or a trainer's callback, drives it through `attach` or `step`. Hooks on the
optimizer tell it where a step ends (`OptimizerSteps`). A step is read when its numbers are there,
which on a GPU is some steps later, so nothing here may wait for the device while training goes on.
A failure of our own code ends the recording with one warning, and never the training.
"""

from __future__ import annotations

import math
import os
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

from torchfmri._arguments import (
    check_each,
    check_flag,
    check_number,
    check_scalar,
    check_scaler,
)
from torchfmri._diagnosis import LiveDiagnosis, Structure, describe
from torchfmri._incidents import (
    Hold,
    Incident,
    Incidents,
    IncidentSubject,
    check_action,
    check_incidents,
)
from torchfmri._model import (
    Concerns,
    OptimizerSteps,
    Pattern,
    StepCalls,
    check_optimizers,
    find_layers,
    kept_whole,
    leaf_layers,
    named_layers,
    switched_off,
    unwrap,
    whole_restorations,
)
from torchfmri._monitor import gather
from torchfmri._monitor.history_table import history_table
from torchfmri._monitor.plan import WHAT, WatchPlan
from torchfmri._monitor.step_hooks import StepHooks
from torchfmri._monitor.watched_step import StepSink, WatchedStep
from torchfmri._records import Finding, History, HistoryFolder, Series, Step
from torchfmri._torch import Attached
from torchfmri._viewer import RunView, View
from torchfmri.exceptions import MEANT_FOR_THE_USER, GuardError, InspectionError
from torchfmri.statistics import Statistics
from torchfmri.visualization import history_plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_JUDGED = 8
"""Watched steps between two looks at what is wrong, for whoever looks at the run."""
UNREAD = 8
"""How many steps may wait for an accelerator before it is waited for."""
Writer = Callable[[Step, Mapping[Series, Statistics]], None]


@runtime_checkable
class FindingsWriter(Protocol):
    """A writer that is told what was found wrong, too."""

    def __call__(self, step: Step, found: Mapping[Series, Statistics]) -> None:
        """Take one step."""

    def found(self, step: int, findings: Sequence[Finding]) -> None:
        """Take what was found since the last step, which has this number."""


class MonitorWarning(RuntimeWarning):
    """The Monitor, or a part of it, had to stop; training goes on without it."""


class Monitor(Attached):
    """Follows a training loop and keeps the statistics of each layer at each watched step.

    Either `with monitor.step():` around each step of the loop, or `monitor.attach()` once: a step
    then ends when the optimizer has stepped. A failure of the Monitor ends the recording with one
    warning and never stops training; `on_nonfinite` works on. If that cannot work, a warning says
    so, and "raise" raises. Forward passes without gradients (evaluation) do not count.

    Args:
        model: The model as it is trained (wrapped in DDP or compiled, if it is).
        optimizer: The optimizer or optimizers; by default whichever one steps this model's
            parameters is noticed by itself. With several, the last one ends a step.
        watch: Which layers, as for `Inspector.layers`; by default all leaf layers, and the
            parameters of all layers.
        what: activations, gradients (dL/d output), parameters and parameter_gradients (both as
            the optimizer finds them), updates (update / weight ratio).
        every: Watch one step in so many. The others run without any hook, and compiled.
        histogram: Also keep histograms and quantiles.
        history: How many watched steps to remember.
        loss: The loss module, if the loop uses one; else `step.loss(loss)` or the output's `.loss`.
        scaler: The GradScaler, if one is used: gradients are then reported unscaled.
        max_bytes: How many bytes of CUDA tensors may be referenced before they are reduced; by
            default one 64th of the device's memory.
        on_nonfinite: What to do before the optimizer applies a NaN or infinite loss or gradient:
            "raise" a NonFiniteError, "skip" the step, or "continue" with a warning. Looked at in
            every step, whatever `every` is; by default not at all.
        incidents: A folder to write such steps to, or `Incidents` for more options; with it
            on_nonfinite is "continue" by default.
        folder: A folder to write every watched step to while the model trains, for
            `torchfmri.History.load`, `torchfmri.compare` and `torchfmri view`; one run per folder.
            Of several processes only the first writes, and only the first shows a page.
        view: Whether to show the run in a browser while it goes on (extra `viewer`). Another
            process can show it from `folder`, with `torchfmri view`.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> monitor = Monitor(model, optimizer)
        >>> for _ in range(3):
        ...     with monitor.step() as step:
        ...         loss = model(torch.randn(16, 4)).square().mean()
        ...         step.loss(loss)
        ...         optimizer.zero_grad()
        ...         loss.backward()
        ...         optimizer.step()
        >>> monitor.history.values("0", "gradients", "rms").shape
        (3,)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        watch: Pattern | None = None,
        *,
        what: str | Sequence[str] = WHAT,
        every: int = 1,
        histogram: bool = False,
        history: int = 1000,
        loss: nn.Module | None = None,
        scaler: Any = None,
        max_bytes: int | None = None,
        on_nonfinite: str | None = None,
        incidents: str | Path | Incidents | None = None,
        folder: str | Path | None = None,
        view: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InspectionError(f"Monitor takes an nn.Module, not {type(model).__name__}.")
        check_number("every", every, 1, "1 watches each step, 10 one in ten")
        check_number("history", history, 1, "give the number of steps to remember, at least 1")
        check_flag("histogram", histogram)
        if max_bytes is not None:
            check_number("max_bytes", max_bytes, 0, "a number of bytes, or None for no limit")
        if loss is not None and not isinstance(loss, nn.Module):
            raise InspectionError(
                f"loss={loss!r} is no module such as nn.CrossEntropyLoss(). With a function, tell "
                "the monitor its result: step.loss(loss) in a step, or monitor.loss(loss)."
            )
        check_scaler(scaler)
        self.model, self.every = model, every
        layers = named_layers(model)
        names = leaf_layers(layers) if watch is None else find_layers(layers, watch)
        modules = {name: layers[name] for name in names}
        owners = layers if watch is None else modules
        self._plan = WatchPlan(
            modules=modules,
            owners=owners,
            what=_check_whats(what),
            histogram=histogram,
            max_bytes=max_bytes,
            scaler=scaler,
        )
        self._history = History(history)
        self._writers: list[Writer] = []
        self._number = 0
        self._attached = self._stopped = self._in_step = False
        self._unread: deque[WatchedStep] = deque()
        calls = self._calls = StepCalls(model, loss, scaler)
        self._sink = StepSink(self._plan, self._history, calls, self._stop_recording)
        self._hooks = StepHooks(calls, self._plan, self._sink, self._left_out)
        self._optimizer_steps = OptimizerSteps(model, check_optimizers(optimizer), self)
        action = check_action(on_nonfinite) or ("continue" if incidents is not None else None)
        subject = IncidentSubject(
            model=model,
            loss=loss,
            scaler=scaler,
            history=self._history_of_incident,
            failed=self._stop_guard,
            unwatched=calls.resting,
        )
        self._hold = Hold(calls, subject, action, check_incidents(incidents)) if action else None
        self._guards = self._hold is not None
        given = check_optimizers(optimizer)
        # What is written at exit must not keep the model alive, and is written without it.
        self._describe = partial(describe, model, given or None)
        described = weakref.ref(self._describe)

        def structure() -> Structure:
            ask = described()
            assert ask is not None, "only a living monitor adds steps"
            return ask()

        live = self._live = LiveDiagnosis(structure)
        held = [] if self._hold is None else self._hold.incidents

        def findings() -> list[Finding]:
            return live.findings([each.finding for each in held])

        self._told: set[tuple[str, tuple[str, ...]]] = set()
        self._folder = (
            HistoryFolder(folder, findings) if folder is not None and _is_first() else None
        )
        if self._folder is not None:
            self._writers.append(self._folder)
        self._view = self._open_view(view)

    def __repr__(self) -> str:
        state = "stopped" if self._stopped else "attached" if self._attached else "not attached"
        kind, layers = type(unwrap(self.model)).__name__, len(self._plan.modules)
        return f"<Monitor of {kind}: {layers} layers, {state}, {self._number} steps>"

    def _open_view(self, view: bool) -> RunView | None:
        check_flag("view", view)
        if not view or switched_off() or not _is_first():
            return None
        model = unwrap(self.model)
        types = {name: type(module).__name__ for name, module in named_layers(model).items()}
        return RunView(type(model).__name__, types)

    @property
    def view(self) -> View | None:
        """The page of this run; None without `view=True`."""
        return self._view.view if self._view is not None else None

    def _show(self, step: Step, found: Mapping[Series, Statistics]) -> None:
        if self._view is None:
            return
        self._looking(lambda view: view(step, found))
        if len(self._history) % _JUDGED == 0 or (step.has_loss and not math.isfinite(step.loss)):
            self._looking(lambda view: view.find(self._live.findings()))

    def _looking(self, act: Callable[[RunView], None]) -> None:
        """Show something; a failure ends the showing, and nothing else."""
        if self._view is None:
            return
        try:
            act(self._view)
        except Exception as error:
            self._view = None
            self._warn("shows this run no longer; training goes on.", error)

    # -- following the loop ------------------------------------------------------------------

    @kept_whole
    def attach(self) -> Monitor:
        """Follow the loop by the optimizer's steps, until `detach`; returns the monitor itself.

        Raises:
            InspectionError: It is attached already, or inside of a `step()`.
        """
        if self._attached or self._in_step:
            where = "attached" if self._attached else "inside of a step"
            raise InspectionError(f"This monitor is {where} already. Call detach() first.")
        if not switched_off() and self._is_working:
            self._attached = True
            self._attach_to_optimizer()
            self._begin()
        return self

    def detach(self) -> None:
        """Remove every hook and finish; the history stays, a step that is under way does not.

        Waits for numbers that are still being computed, so that writers get them.
        """
        self._take_off()
        self._drain(wait=True)
        if self._folder is not None:
            self._safely(self._folder.end)
        self._looking(lambda view: view.find(self._live.findings()))
        self._looking(lambda view: view.end())

    @kept_whole
    def _take_off(self) -> None:
        self._attached = False
        self._calls.trained.release()
        self._optimizer_steps.detach()
        self._abandon()
        if self._hold is not None:
            self._hold.detach()

    def _attach(self, stack: ExitStack) -> None:
        stack.enter_context(whole_restorations())
        self.attach()
        stack.callback(self.detach)

    @contextmanager
    def step(self) -> Iterator[MonitoredStep]:
        """Follow one step: forward, backward, optimizer. A step that raises is not recorded.

        Raises:
            InspectionError: The monitor is attached, and follows the optimizer by itself.
        """
        if self._attached or self._in_step:
            inside = "attached and follows the optimizer" if self._attached else "in a step already"
            raise InspectionError(
                f"This monitor is {inside}. Use either attach() or step(), one step at a time."
            )
        active = not switched_off() and self._is_working
        with whole_restorations():
            self._in_step = True
            try:
                if active:
                    self._begin()
                hold = self._hold if active and self._guards else None
                if self._sink.step is not None or hold is not None:
                    self._attach_to_optimizer()
                yield MonitoredStep(self._sink.step, hold)
                if hold is not None:
                    self._guard(hold.end)
            except BaseException:
                self._abandon()
                raise
            finally:
                self._in_step = False
                self._calls.trained.release()
                self._optimizer_steps.detach()
                if self._hold is not None:
                    self._hold.detach()
            if active:
                self._end()

    def loss(self, loss: Tensor | float) -> None:
        """Tell the loss of the step that is under way; with several, their mean is kept."""
        MonitoredStep(self._sink.step, self._hold).loss(loss)

    def batch(self, batch: Any) -> None:
        """Tell the batch of the step that is under way, to be kept if the step is an incident."""
        MonitoredStep(self._sink.step, self._hold).batch(batch)

    @property
    def _is_working(self) -> bool:
        return self._guards or not self._stopped

    def _attach_to_optimizer(self) -> None:
        try:
            self._optimizer_steps.attach()
        except Exception as error:
            self.failed(error)

    def _begin(self) -> None:
        hold = self._hold
        self._calls.begin()
        if hold is not None:
            self._guard(hold.attach)
            self._guard(lambda: hold.begin(self._number))
        self._safely(self._begin_recording)

    def _begin_recording(self) -> None:
        if self._number % self.every == 0:
            self._sink.step = WatchedStep(self._number, self._plan, self._sink)
            self._hooks.attach()

    def _end(self) -> None:
        step = self._sink.step
        waits = step is not None and step.scale is not None and not step.has_stepped
        self._put_away(waits and not self._attached and self._calls.scaler_went_on())
        if not self._attached or self._number % self.every:
            self._hooks.detach()
        self._drain(wait=len(self._unread) > UNREAD)

    def _put_away(self, skipped: bool = False) -> None:
        """Take leave of the step under way, whose numbers are read once they are there."""
        step, self._sink.step = self._sink.step, None
        self._number += 1
        self._safely(self._hooks.next_step)
        if step is not None:
            self._safely(partial(self._finish, step, skipped))

    def _finish(self, step: WatchedStep, skipped: bool) -> None:
        step.finish(skipped)
        self._unread.append(step)

    def _abandon(self) -> None:
        self._sink.step = None
        self._hooks.detach()

    def _left_out(self) -> None:
        """The GradScaler went on without the optimizer, which did not end the step."""
        step = self._sink.step
        if self._attached and step is not None and step.scale is not None:
            self._put_away(skipped=True)
            self._sink.step = WatchedStep(self._number, self._plan, self._sink)

    # -- failures ----------------------------------------------------------------------------

    def _safely(self, act: Callable[[], None]) -> None:
        """Run code that records; a failure of it ends the recording and is only warned of."""
        if self._stopped:
            return
        try:
            act()
        except Exception as error:
            self._stop_recording(error)

    def _guard(self, act: Callable[[], None]) -> None:
        """Run code that looks for NaN; if it fails the user is told at once, or stopped."""
        if not self._guards:
            return
        try:
            act()
        except MEANT_FOR_THE_USER:
            raise
        except Exception as error:
            self._stop_guard(error)

    def _stop_recording(self, error: Exception) -> None:
        """Record nothing more because of `error`, with one warning; steps are still held."""
        if self._stopped:
            return
        self._stopped = True
        self._writers.clear()
        self._abandon()
        if self._guards:
            rest = f"recording at step {self._number}; {self._guard_state()}"
        else:
            self._take_off()
            rest = f"at step {self._number} and is detached"
        self._warn(f"stopped {rest}; training goes on.", error)

    def _stop_guard(self, error: Exception) -> None:
        """Say that a step could not be looked at.

        Raises:
            GuardError: With on_nonfinite="raise"; later steps are looked at again.
        """
        assert self._hold is not None
        if self._hold.action == "raise":
            raise GuardError(self._number, f"{type(error).__name__}: {error}") from error
        if not self._guards:
            return
        self._guards = False
        self._hold.detach()
        if self._stopped:
            self._take_off()
        self._warn(f"stopped guarding at step {self._number}: {self._guard_state()}.", error)

    def _guard_state(self) -> str:
        assert self._hold is not None
        if self._guards:
            return f"on_nonfinite={self._hold.action!r} still looks at every step"
        return f"on_nonfinite={self._hold.action!r} is off, and NaN can reach the weights"

    def failed(self, error: Exception) -> None:
        """The optimizer cannot be followed: neither recording nor holding works."""
        self._stop_recording(error)
        if self._guards:
            self._stop_guard(error)

    def _warn(self, what: str, error: Exception) -> None:
        text = f"torchfmri.Monitor {what} {type(error).__name__}: {error}"
        warnings.warn(text, MonitorWarning, stacklevel=3)

    # -- the optimizer -----------------------------------------------------------------------

    def before_update(self, concerns: Concerns) -> None:
        """The optimizer is about to step; called by its hooks."""
        step = self._sink.step
        if step is not None:
            self._safely(lambda: step.before_update(concerns))

    def has_gradients(self, concerns: Concerns, optimizer: Optimizer) -> None:
        """The gradients are as the optimizer finds them; called by its hooks."""
        step = self._sink.step
        if step is not None:
            self._safely(lambda: step.read_gradients(concerns, optimizer))
            self._safely(step.collector.flush)  # what follows writes into what was referenced
        self._guard(lambda: self._check(optimizer))

    def _check(self, optimizer: Optimizer) -> None:
        """Hold the step if it is not finite."""
        assert self._hold is not None
        known = len(self._hold.incidents)
        try:
            left_out = self._hold.check(optimizer)
        except Exception:
            if self._hold.action == "raise":
                self._leave_step()
            raise
        if self._sink.step is not None and len(self._hold.incidents) > known:
            self._sink.step.was_held(left_out)

    def _leave_step(self) -> None:
        """An error ends the step here."""
        if self._attached:  # the user may go on after the error
            self._begin()
        else:  # a trainer may never come back to end the step
            self._abandon()
            self._optimizer_steps.detach()
            if self._hold is not None:
                self._hold.detach()

    def _history_of_incident(self, ends: bool) -> History:
        """The history, with the step under way if it ends here."""
        if ends:
            if self._sink.step is not None:
                self._sink.step.was_held(left_out=True)
            self._put_away()
        return self.history

    @property
    def incidents(self) -> list[Incident]:
        """The steps with a NaN or infinite loss or gradient, as far as `on_nonfinite` looks."""
        if self._hold is None:
            return []
        hold = self._hold
        self._guard(lambda: hold.read_pending(wait=True))
        return list(hold.incidents)

    def after_update(self, is_last: bool) -> None:
        """The optimizer has stepped; called by its hooks."""
        if self._sink.step is not None:
            self._safely(self._sink.step.after_update)
        if self._hold is not None:
            self._guard(self._hold.after_update)
        if self._attached and is_last:
            self._end()
            if self._attached:
                self._begin()

    # -- reading -----------------------------------------------------------------------------

    @property
    def history(self) -> History:
        """What was seen so far; waits for numbers that are still being computed."""
        self._drain(wait=True)
        return self._history

    def _drain(self, wait: bool) -> None:
        while self._unread and (wait or self._unread[0].ready()):
            try:
                self._record(self._unread.popleft())
            except Exception as error:
                self._stop_recording(error)

    def _record(self, watched: WatchedStep) -> None:
        step, found = watched.read()
        self._history.append(step, found)
        if not watched.is_left_out:  # its gradients, and the lack of an update, say nothing
            self._live.add(step, self._history.series)
        for write in self._writers:
            write(step, found)
        self._show(step, found)
        self._tell_findings(step.number)

    def _tell_findings(self, step: int) -> None:
        """Hand what was found since the last step to the writers that take findings."""
        held = [] if self._hold is None else [each.finding for each in self._hold.incidents]
        found = [*self._live.known(), *held]
        fresh = [each for each in found if (each.problem, each.layers) not in self._told]
        self._told.update((each.problem, each.layers) for each in fresh)
        for write in self._writers if fresh else ():
            if isinstance(write, FindingsWriter):
                write.found(step, fresh)

    @property
    def findings(self) -> list[Finding]:
        """What is wrong so far, the worst first, each with what follows from it."""
        self._drain(wait=True)
        return self._live.findings([each.finding for each in self.incidents])

    def new_findings(self) -> list[Finding]:
        """What was found since this was last asked; for callbacks, which ask at every step.

        Steps are looked at every now and then (at the latest after eight), so a finding may
        name a step before the current one. Waits for nothing.
        """
        held = [] if self._hold is None else [each.step for each in self._hold.incidents]
        return self._live.take_fresh(held)

    def add_writer(self, write: Writer) -> None:
        """Have `write(step, statistics by series)` called for each watched step once it is read.

        A writer with a method `found(step, findings)` is told what is found wrong as well.

        Raises:
            InspectionError: It cannot be called.
        """
        self._writers.append(check_writer(write))

    def gather(self) -> History:
        """The histories of all processes merged into one, on every process.

        All processes must call it. Activations and gradients are those of the whole batch;
        gradients are of the mean of the processes' losses, which is what data-parallel training
        follows. Parameters that every process holds whole are counted once, and layers that only
        some processes have (a pipeline) are those of these.
        """
        parameters = self._plan.parameters()
        shares = {name: gather.share_of(each) for name, each in parameters.items()}
        return gather.gather(self.history, self._plan.modules.keys(), shares)

    def table(self, step: int = -1, *, fold: bool | None = None) -> str:
        """A table of one step (the latest by default) for the terminal.

        Args:
            step: Which of the steps kept; -1 for the latest.
            fold: One line for layers whose names differ only in numbers; by default from 100 rows
                on.

        Raises:
            InspectionError: There is no such step.
        """
        kinds = {name: type(module).__name__ for name, module in self._plan.owners.items()}
        return history_table(self.history, kinds, type(unwrap(self.model)).__name__, step, fold)

    def plot(self, field: str = "rms", what: str = "activations", **options: Any) -> Axes:
        """A statistic over the steps: all layers as a heat map, or `layers=` some as lines."""
        return history_plots.plot_history(self.history, field, what, **options)

    def export(self, path: str | Path) -> Path:
        """Write the history to a .csv, .jsonl or .parquet file."""
        return self.history.export(path)


def check_writer(write: Writer) -> Writer:
    """`write`, if it can be one.

    Raises:
        InspectionError: It cannot be called.
    """
    if not callable(write):
        raise InspectionError(
            f"A writer is a function of a step and its statistics, not {write!r}. Options of a "
            "Monitor, such as watch=nn.Linear, are handed over by name."
        )
    return write


def check_options(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """`options`, if a Monitor takes them all.

    Raises:
        InspectionError: It does not.
    """
    known = signature(Monitor).parameters.keys()
    for name in options:
        if name not in known:
            raise InspectionError(f"A Monitor has no option {name!r}: {', '.join(known)}.")
    return options


class MonitoredStep:
    """One step of the loop, as `with monitor.step() as step:` gives it."""

    def __init__(self, step: WatchedStep | None, hold: Hold | None = None) -> None:
        self._step, self._hold = step, hold

    @property
    def watched(self) -> bool:
        """Whether this step is one of those that are watched."""
        return self._step is not None

    def loss(self, loss: Tensor | float) -> None:
        """Tell the loss of this step; with several (micro-batches), their mean is kept."""
        if isinstance(loss, Tensor) or not hasattr(loss, "__float__"):
            check_scalar(loss)
        if self._step is not None:
            self._step.was_told_loss(loss)
        if self._hold is not None:
            self._hold.tell_loss(loss)

    def batch(self, batch: Any) -> None:
        """Tell the batch of this step, to be kept if the step turns out to be an incident."""
        if self._hold is not None:
            self._hold.tell_batch(batch)


def _check_whats(what: str | Sequence[str]) -> frozenset[str]:
    return frozenset(check_each("what", what, WHAT, "a Monitor can watch"))


def _is_first() -> bool:
    """Whether this is the first of the processes that `torchrun` started, or the only one."""
    return os.environ.get("RANK", "0") == "0"
