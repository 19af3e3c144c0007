"""Proof beside the numbers: does what the tokens add up to equal the gradient that autograd found?

While the backward pass runs, every gradient that reaches a watched parameter is read once, between
two fixed random vectors, u^T (dL/dW) v; the tokens' sum must give the same number. Two tokens mixed
up, a call missed or a factor of the wrong call all move it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from torchfmri._kernels import Form, bilinear_forms, can_read_forms
from torchfmri._tokens.algebra.parameter import ParameterInfo
from torchfmri._tokens.algebra.precision import without_autocast
from torchfmri._tokens.algebra.random_vectors import RandomVectors, block
from torchfmri._torch import (
    NO_BACKWARD,
    Hook,
    HookSet,
    current_backward,
    has_post_accumulate_hooks,
    runs_grad,
)

_NO_GRAD = "it left no .grad to compare with (autograd.grad on a GPU, or it was taken away)"


def _has_others(parameters: Collection[nn.Parameter]) -> bool:
    """Whether `.grad` of any will not simply be what one backward pass brings."""
    return (
        set(map(type, parameters)) != {nn.Parameter}
        or any(each.grad is not None for each in parameters)
        or any(map(has_post_accumulate_hooks, parameters))
    )


class _Same(NamedTuple):
    """Gradients of parameters that are alike.

    Attributes:
        kind: Their dtype and device, and whether they are contiguous.
        gradients: By name.
        form: What compiled code is told of the first, its address apart; None where it cannot read
            them.
    """

    kind: tuple[object, ...]
    gradients: dict[str, Tensor]
    form: Form | None


class Checks(RandomVectors):
    """The random vectors, and what autograd's gradients are between them.

    Args:
        infos: What is known of the parameters.
        alike: Their names, those together that are read alike; see `alike_of`.

    Attributes:
        received: Parameters that a gradient reached.
        unread: Parameters whose gradient could not be read, with the reason.
        on_backward: Called when the first gradient of a backward pass reaches a parameter.
    """

    def __init__(self, infos: Mapping[str, ParameterInfo], alike: list[list[str]]) -> None:
        super().__init__(infos)
        self._alike = alike
        self._brought: dict[str, list[Tensor]] = defaultdict(list)
        self._tables: list[tuple[dict[str, int], Tensor]] = []  # of many parameters, with places
        self.unread: dict[str, str] = {}
        self.on_backward: Callable[[], None] | None = None
        self._backward = NO_BACKWARD
        self._parameters: Mapping[str, nn.Parameter] = {}
        self._reads_at_once = self._reads_now = False
        self.received: set[str] = set()
        self._came: dict[str, Tensor | None] = {}
        self._listen: Callable[[], None] | None = None  # what is left to be done to listen
        self._counted: set[str] = set()
        self._without_gradient: set[str] = set()

    # -- what autograd brings ------------------------------------------------------------------

    def attach(
        self,
        parameters: Mapping[str, nn.Parameter],
        hooks: HookSet,
        failed: Callable[..., None],
    ) -> None:
        """Begin to watch the gradients of the parameters.

        `.grad` is read when the backward pass is over, all of them in a row. Where there was none
        before, that is all; else hooks note what was there when a gradient came. Among several
        processes, where it is then averaged, each hook reads the gradient of its own process at
        once; so it does for torch.autograd.grad, which leaves no `.grad`.
        """
        self._parameters = parameters
        self._without_gradient = {name for name, each in parameters.items() if each.grad is None}
        self._reads_at_once = (
            torch.distributed.is_available() and torch.distributed.is_initialized()
        )

        def listen() -> None:
            self._listen = None
            for name, parameter in parameters.items():
                hooks.gradient(parameter, _Probe(self, name, failed))

        if self._reads_at_once or _has_others(parameters.values()):
            listen()
        else:
            self._listen = listen
            self._counted.clear()

    def backward_begins(self) -> None:
        """Listen to a pass whose gradients are added to others, or are not left in `.grad`."""
        if self._listen is None:
            return
        if any(each.grad is not None for each in self._parameters.values()) or runs_grad():
            listen = self._listen
            self.settle()
            listen()
        else:
            self._counted.clear()

    def settle(self) -> None:
        """Read the gradients that are there, of whatever pass, unless hooks were told of them."""
        if self._listen is None:
            return
        counted, plain = self._counted, {}
        for name, parameter in self._parameters.items():
            if name in counted or (gradient := parameter.grad) is None:
                continue
            if type(gradient) is Tensor and not gradient.is_sparse:
                plain[name] = gradient
            else:
                self._came[name] = None
        counted.update(plain, self._came)
        self.received.update(plain, self._came)
        self._read_plain(plain)
        self._read_all()

    def detach(self) -> None:
        """Read what is left; nothing here holds on to the block any more."""
        self.settle()
        for name in self._without_gradient - self.received:
            if self._parameters[name].grad is not None:  # whichever way it came
                self.received.add(name)
                self.unread[name] = "its gradient was not seen when it came"
        self._listen = self.on_backward = None

    def backward_is_over(self) -> None:
        """Read the gradients that this backward pass brought; to all later ones hooks listen."""
        listen = self._listen
        if listen is None:
            self._read_all()
        else:
            self.settle()
            listen()

    def _read_all(self) -> None:
        if not self._came:
            return
        came, self._came = self._came, {}
        plain: dict[str, Tensor] = {}
        for name, before in came.items():
            gradient = self._parameters[name].grad
            if gradient is None:
                self.unread[name] = _NO_GRAD
                continue
            if before is not None:
                self._brought[name].append(before.neg())
            if gradient.is_sparse or type(gradient) is not Tensor:
                self._brought[name].append(self._read(name, gradient))
            else:
                plain[name] = gradient
        self._read_plain(plain)

    def _read_plain(self, plain: dict[str, Tensor]) -> None:
        compiled: dict[tuple[object, ...], list[_Same]] = defaultdict(list)
        for same in self._sorted(plain):
            if same.form is not None:
                compiled[same.kind].append(same)
            else:
                self._note(same.gradients, self._read_alike(same.gradients))
        for several in compiled.values():
            self._read_compiled(several)

    def _note(self, names: Iterable[str], found: Tensor) -> None:
        self._tables.append(({name: place for place, name in enumerate(names)}, found))

    def _sorted(self, gradients: Mapping[str, Tensor]) -> list[_Same]:
        """The gradients by what has to be known of them to read them."""
        found: list[_Same] = []
        for names in self._alike:
            kinds: dict[tuple[object, ...], dict[str, Tensor]] = defaultdict(dict)
            for name in names:
                if name in gradients:
                    each = gradients[name]
                    kinds[each.dtype, each.get_device(), each.is_contiguous()][name] = each
            for kind, same in kinds.items():
                name, like = next(iter(same.items()))
                able = kind[-1] and like.numel() > 0 and can_read_forms(like)
                found.append(_Same(kind, same, self.form(name, like) if able else None))
        return found

    def _read_compiled(self, several: list[_Same]) -> None:
        """Read gradients of one dtype on one device in one pass, or those of each shape."""
        several.sort(key=lambda each: each.form.rows if each.form else 0)  # few launches
        gradients = {name: each for same in several for name, each in same.gradients.items()}
        forms = np.empty((len(gradients), len(Form._fields)), np.int64)
        forms[:, 0] = [each.data_ptr() for each in gradients.values()]
        start = 0
        for same in several:
            assert same.form is not None
            rows = forms[start : start + len(same.gradients)]
            rows[:, 0] += same.form.matrix
            rows[:, 1:] = same.form[1:]
            start += len(rows)
        found = bilinear_forms(forms, next(iter(gradients.values())))
        if found is not None:
            self._note(gradients, found)
            return
        for same in several:
            self._note(same.gradients, self._read_alike(same.gradients))

    def _read_alike(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The gradients of parameters of one shape between their vectors, in few operations."""
        name, first = next(iter(gradients.items()))
        vectors = self.vectors(name, first)
        with torch.no_grad(), without_autocast(first):
            parts = [self.part(name, each) for each in gradients.values()]
            whole = torch.stack(parts).to(vectors[0].dtype)
            if len(vectors) == 1:
                return whole @ vectors[0]
            if self._infos[name].output.first == 0:
                return (whole @ vectors[1]) @ vectors[0][block(len(vectors[0]))]
            return (whole @ vectors[1][block(len(vectors[1]))]) @ vectors[0]

    def _read(self, name: str, gradient: Tensor) -> Tensor:
        with without_autocast(gradient):
            return self.between(name, gradient.detach())

    def brought(self, name: str) -> Tensor | None:
        """What autograd's gradient is between the vectors; None if it was not read."""
        found = list(self._brought.get(name, ()))
        found += [table[places[name]] for places, table in self._tables if name in places]
        if not found:
            return None
        device = found[0].device
        return torch.stack([each.double().to(device) for each in found]).sum()

    def brought_together(self, names: Sequence[str]) -> Tensor | None:
        """Return autograd's gradients between the vectors, (n,); None if one was not read once."""
        whole: dict[str, int] = {}
        rows = 0
        for places, table in self._tables:
            if not whole.keys().isdisjoint(places):
                return None
            whole |= {name: rows + place for name, place in places.items()}
            rows += len(table)
        if not all(name in whole and name not in self._brought for name in names):
            return None
        device = self._tables[0][1].device
        tables = torch.cat([table.double().to(device) for _, table in self._tables])
        return tables[torch.tensor([whole[name] for name in names], device=device)]

    def arrived(self, name: str, gradient: Tensor) -> None:
        """Take note of a gradient that reaches a parameter."""
        if self._backward != current_backward():
            self._backward = current_backward()
            self._reads_now = self._reads_at_once or runs_grad()
            if self.on_backward is not None:
                self.on_backward()
        self.received.add(name)
        if type(gradient) is not Tensor and hasattr(gradient, "to_local"):
            self.unread[name] = "sharded over processes: the check needs the whole gradient"
        elif self._reads_now:
            self._brought[name].append(self._read(name, gradient))
        elif name not in self._came:
            earlier = self._parameters[name].grad  # of passes before: this one is added to it
            self._came[name] = None if earlier is None else self._read(name, earlier)


def alike_of(infos: Mapping[str, ParameterInfo]) -> list[list[str]]:
    """The names of parameters, those together that have one shape and its output on one side."""
    found: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for name, info in infos.items():
        found[info.shape, info.output.first].append(name)
    return list(found.values())


class _Probe:
    """The hook on one parameter."""

    __slots__ = ("_checks", "_failed", "_name")
    __torch_unserializable__ = True

    def __init__(self, checks: Checks, name: str, failed: Callable[..., None]) -> None:
        self._checks, self._name, self._failed = checks, name, failed

    def __call__(self, gradient: Tensor) -> None:
        try:
            self._checks.arrived(self._name, gradient)
        except Exception as error:
            self._failed(self._name, error, backward=True)

    def __deepcopy__(self, memo: object) -> Hook:
        return Hook(None)

    def __reduce__(self) -> tuple[type[Hook], tuple[None]]:
        return (Hook, (None,))
