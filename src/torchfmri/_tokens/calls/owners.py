"""Calls of layers without a rule, which are run again when the backward pass is over.

So are layers that use the weights of modules below them without calling those. Their arguments and
the gradients of their outputs are kept, and each is run again by itself (`rerun.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from torchfmri._capture import Padding
from torchfmri._tokens.algebra.factors import device_of, dtype_of, probe
from torchfmri._tokens.calls.account import Account
from torchfmri._tokens.calls.passes import TokenPasses
from torchfmri._tokens.rules.record import Axis, UsePart, Watched
from torchfmri._tokens.rules.rerun import OwnerCall, RunState
from torchfmri._torch import NO_BACKWARD, current_backward, flatten_arguments, runs_checkpoint
from torchfmri.exceptions import InspectionError, UnsupportedLayerError

_Modules: TypeAlias = dict[int, dict[str, str]]
Parts: TypeAlias = dict[str, list[UsePart]]


class Owners:
    """The calls of these layers in the passes of one block.

    Args:
        watched: All layers that are watched.
        parameters: All parameters that are watched.
        passes: The pass that runs.
        padding: Which positions are padding.
        account: What came of each parameter.
        keeps_factors: Whether arguments inside a checkpoint are kept and not awaited.
    """

    def __init__(
        self,
        watched: Mapping[str, Watched],
        parameters: Mapping[str, nn.Parameter],
        passes: TokenPasses,
        padding: Padding,
        account: Account,
        keeps_factors: bool,
    ) -> None:
        self._watched, self._parameters = watched, parameters
        self._passes, self._padding, self._account = passes, padding, account
        self._keeps_factors = keeps_factors
        self._states: dict[str, RunState] = {}
        self._replayed: dict[str, list[Any]] = defaultdict(list)
        self._waiting: list[OwnerCall] = []

    # -- forward -----------------------------------------------------------------------------

    def begins(self, layer: str, *call: Any) -> None:
        """Keep the state that a call starts from, and in a replay its arguments."""
        if current_backward() == NO_BACKWARD:
            if layer:
                self._passes.module_begins(layer, *call)
            if self._passes.tracing is not None:
                self._passes.tracing.owner_begins(layer)
            self._states[layer] = self._passes.state()
        elif torch.is_grad_enabled() and not self._keeps_factors:
            _, arguments, keywords = call
            self._replayed[layer].append((arguments, dict(keywords), self._passes.state()))

    def wants(self, watched: Watched) -> bool:
        """Whether a call has to be looked at: not that of a container whose layers were called."""
        if watched.layer:
            self._passes.module_ends(watched.layer)
        if watched.parameters:
            return True
        all_called = watched.below.keys() <= self._passes.calls.keys()
        if all_called and not watched.reads_weights:  # as most containers are
            return False
        return any(map(bool, self._unaccounted(watched)))

    def called(
        self,
        watched: Watched,
        arguments: tuple[object, ...],
        keywords: Mapping[str, object],
        output: object,
        earlier: OwnerCall | None,
    ) -> OwnerCall | None:
        """Take in a call, or that a reentrant checkpoint runs an earlier one again."""
        if not flatten_arguments(arguments, keywords):
            return None  # it makes something of its parameters alone, which the module above uses
        if earlier is None:
            self._passes.calls[watched.layer] += 1
        modules, suspects = self._unaccounted(watched)
        if not modules and not suspects:
            return None
        recorded = torch.is_grad_enabled() and not self._waits_for_replay()
        run = earlier.axis.run if earlier else self._passes.current.number
        found = OwnerCall(
            layer=watched.layer,
            module=watched.module,
            modules=modules,
            arguments=arguments if recorded else (),
            keywords=keywords if recorded else {},
            output=output if recorded else (),
            state=self._states.get(watched.layer),
            axis=Axis(run, watched.stack, (0, 0)),
            mask=self._padding.current(),
            suspects=suspects,
        )
        if earlier is None:
            self._passes.owner_called(found, arguments, keywords, output)
            if isinstance(watched.module, nn.RNNBase) and self._passes.tracing is not None:
                self._passes.tracing.recurrent_called(output)
        else:
            found.tokens = earlier.tokens
        return found

    def _waits_for_replay(self) -> bool:
        return not self._keeps_factors and current_backward() == NO_BACKWARD and runs_checkpoint()

    def _unaccounted(self, watched: Watched) -> tuple[_Modules, _Modules]:
        """The modules whose weights a call used itself, and those called that it may use beside."""
        modules: _Modules = {id(watched.module): watched.parameters} if watched.parameters else {}
        suspects: _Modules = {}
        calls, homes = self._passes.calls, self._account.homes
        for layer, below in watched.below.items():
            if layer in calls:
                if watched.reads_weights and below.rule is not None:
                    suspects[id(below.module)] = below.parameters
            elif not any(
                each in calls for name in below.parameters.values() for each in homes[name]
            ):
                modules[id(below.module)] = below.parameters
        return modules, suspects

    # -- backward ----------------------------------------------------------------------------

    def gradient(self, owner: OwnerCall, path: str, gradient: Tensor | None) -> None:
        """Take in the gradient of one of a call's outputs."""
        owner.gradients[path] = gradient
        for name in owner.names:
            if hasattr(self._parameters[name], "to_local"):  # no hook fires on a shard
                self._account.layers.update(self._account.homes[name])
        if owner not in self._waiting:
            self._waiting.append(owner)

    def run_again(self, parts: Parts, known: Callable[[str], Sequence[UsePart]]) -> None:
        """Add what the calls of this backward pass bring to `parts`.

        Args:
            parts: Of parameters that are used several times, not reduced yet.
            known: The parts of a parameter that are.
        """
        owners, self._waiting = self._waiting, []
        handed = [self._handed(owner, owners) for owner in owners]
        given_away = {name for each in handed for several in each.values() for name in several}
        for owner, some in zip(owners, handed, strict=True):
            self._run_again(owner, owner.names, parts, handed=some, given_away=given_away)
        # A module that is called may be read beside that (a head tied by hand): the innermost
        # module whose code mentions its weight accounts for what the calls do not.
        for owner in sorted(owners, key=lambda each: -each.layer.count(".")):
            for name in owner.suspects:
                try:
                    is_incomplete = self._is_incomplete(name, [*parts.get(name, ()), *known(name)])
                except InspectionError:  # reading this parameter says so; the others go on
                    continue
                if is_incomplete:
                    self._run_again(owner, [name], parts, beside_calls=True)

    def _handed(self, owner: OwnerCall, owners: Sequence[OwnerCall]) -> dict[int, list[str]]:
        """Parameters that other layers have handed to this one, and that nobody else accounts for.

        Of a parameter of a layer around this one the re-run of that layer finds all uses.
        """
        around = {
            name
            for other in owners
            if other.layer != owner.layer and f"{owner.layer}.".startswith(_inside(other.layer))
            for name in other.names
        }
        names = self._account.received([*self._parameters])
        return owner.handed([n for n in names if n not in around and n not in owner.names])

    def _run_again(
        self,
        owner: OwnerCall,
        names: Sequence[str],
        parts: Parts,
        beside_calls: bool = False,
        handed: Mapping[int, Sequence[str]] | None = None,
        given_away: Collection[str] = (),
    ) -> None:
        account = self._account
        wanted = {
            name: self._parameters[name]
            for name in account.received(names)
            if name not in account.reasons
        }
        if not wanted and not handed:
            return
        replays = self._replayed.get(owner.layer)
        if replays and owner.has_no_arguments:
            owner.take_arguments(*replays.pop(0))  # replayed in the order in which gradients came
        try:
            found = owner.parts(wanted, beside_calls, handed, given_away)
        except Exception as error:  # not the user's fault: these parameters say why
            reason = f"running it again failed: {error}"
            if not isinstance(error, UnsupportedLayerError):
                name = next(chain(wanted, *(handed or {}).values()))
                error = UnsupportedLayerError(name, owner.layer, reason)
            if beside_calls:  # its calls are counted; what else it is used for is not
                account.noted(owner.layer, str(error))
            else:
                account.refuse([*wanted, *chain.from_iterable((handed or {}).values())], error)
            return
        for name, refusal in found.unsupported.items():
            account.refuse([name], refusal)
        for name, several in found.parts.items():
            parts[name] += several
            if any(dtype_of(term).itemsize < 4 for part in several for term in part.terms or ()):
                account.narrow.update(account.homes[name])

    def _is_incomplete(self, name: str, found: Sequence[UsePart]) -> bool:
        """Whether the calls of a parameter's modules do not account for its gradient."""
        brought = self._account.checks.brought(name)
        if brought is None:
            return False
        probes = [self._probes(name, part) for part in found]
        if not probes:
            return True
        total = sum((each.double().sum() for each in probes), start=torch.zeros_like(brought))
        scale = max(float(brought.abs()), *(float(each.double().norm()) for each in probes))
        return float((total - brought).abs()) > 1e-2 * scale

    def _probes(self, name: str, part: UsePart) -> Tensor:
        if part.reduced is not None:
            return part.reduced.probes()
        assert part.terms is not None
        checks, first = self._account.checks, part.terms[0]
        like = torch.empty(0, dtype=dtype_of(first), device=device_of(first))
        return probe(part.terms, checks.info(name).shape, checks.vectors(name, like))

    def forget(self) -> None:
        """Let go of everything that only the passes themselves need."""
        self._states.clear()
        self._replayed.clear()


def _inside(layer: str) -> str:
    """What the names of the layers inside of this one begin with."""
    return f"{layer}." if layer else ""
