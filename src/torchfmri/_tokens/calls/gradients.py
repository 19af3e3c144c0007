"""`TokenGradients`: attach to a model, let the user's passes run, detach, and read the results.

`token_gradients(per="position")` and the gradient pass of a scan make it. Its first part attaches
hooks and removes them however the block ends; the rest reads, adds up over parameters (`select`,
`norm`, `gram`), and proves (`coverage`, `verify`). Methods and their errors are public. Numbers
that are compared with autograd (`coverage`) stay on the device and are fetched once together,
because each transfer waits for the GPU. A parameter without token gradients must raise or be
listed, never count as zero.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchfmri._arguments import check_number, require
from torchfmri._capture import Padding, Taps
from torchfmri._model import (
    Pattern,
    compiled_code_as_eager,
    match_names,
    not_found,
    switched_off,
    watched,
)
from torchfmri._tokens.algebra.coverage import Coverage, CoverageRow
from torchfmri._tokens.algebra.gradient import TokenGradient
from torchfmri._tokens.algebra.parameter import VOXEL
from torchfmri._tokens.algebra.precision import in_full
from torchfmri._tokens.algebra.reduced import (
    Reduced,
    probes_together,
    squares_together,
    summed_squares,
)
from torchfmri._tokens.algebra.selection import TokenSelection
from torchfmri._tokens.algebra.verification import TokenVerification
from torchfmri._tokens.calls.capture import Capture, target_of
from torchfmri._tokens.calls.passes import PartHook
from torchfmri._tokens.calls.plans import plan_of
from torchfmri._tokens.calls.runs import Masks, joined
from torchfmri._tokens.calls.verification import PassVerification
from torchfmri._tokens.rules.record import Axis
from torchfmri._torch import Attached, Deferred, Hook, HookSet
from torchfmri.exceptions import (
    InspectionError,
    MissingTokensWarning,
    UnsupportedLayerError,
)


class TokenGradients(Attached):
    """The gradients of a model's parameters, token by token; see `token_gradients`.

    Examples:
        >>> import torch, torchfmri
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> x = torch.randn(2, 5, 4)
        >>> with torchfmri.token_gradients(model) as tokens:
        ...     model(x).mean().backward()
        >>> tokens.names
        ['0.weight', '0.bias', '2.weight', '2.bias']
        >>> tokens.norm().shape
        torch.Size([2, 5])
    """

    def __init__(
        self,
        model: nn.Module,
        pattern: Pattern = "*",
        *,
        keep: str = "factors",
        max_bytes: int = 1 << 34,
        voxel: int = VOXEL,
        channels: str | None = None,
    ) -> None:
        if keep not in ("factors", "norms", "voxels"):
            raise InspectionError(f"keep={keep!r}: choose 'factors', 'norms' or 'voxels'.")
        if channels not in (None, "last", "first"):
            raise InspectionError(
                f"channels={channels!r}: choose 'last' for (b, s, d) or 'first' for (b, d, s), "
                "or leave it out to find out from the layers."
            )
        check_number("voxel", voxel, 1, "give a number of units, 1 or more")
        check_number("max_bytes", max_bytes, 0, "give a number of bytes, such as 1 << 34")
        plan = self._plan = plan_of(model, pattern, voxel)
        self._keep = keep
        self._parameters, self._aliases, self._infos = plan.parameters, plan.aliases, plan.infos
        self._padding = Padding(plan.masked)
        self._capture = Capture(plan, self._padding, keep, max_bytes, channels)
        self._handles: list[Any] = []
        self._hooks = HookSet()
        self._found: dict[str, dict[Axis, TokenGradient]] = {}
        self._masks: Masks = {}
        self._had_gradients: set[str] = set()

    # -- attaching ---------------------------------------------------------------------------

    def _attach(self, stack: contextlib.ExitStack) -> None:
        if switched_off():
            return
        self._had_gradients = {
            name for name, each in self._parameters.items() if each.grad is not None
        }
        stack.enter_context(watched(self._plan.model))
        stack.callback(self._capture.forget)
        stack.callback(self._capture.passes.broadcasts.detach)
        stack.enter_context(compiled_code_as_eager())
        stack.callback(self._remove_handles)
        self._add_handles()
        stack.enter_context(self._tapped())
        stack.callback(self._padding.detach)
        self._padding.attach()

    def _tapped(self) -> Taps:
        """The taps of a block, made for it: what listens and what is told form a cycle."""
        capture, plan = self._capture, self._plan
        targets = [target_of(each) for each in plan.owners]
        short = capture.short_way(plan)
        taps = Taps(targets, capture, capture.wants, short, capture.called)
        capture.listen(taps.at_end_of_backward)
        return taps

    def _add_handles(self) -> None:
        capture, handles = self._capture, self._handles
        model, stacks = self._plan.model, self._plan.stacks
        if not isinstance(model, torch.jit.ScriptModule):
            hook = Hook(capture.passes.model_is_called, model)
            handles.append(model.register_forward_pre_hook(hook, with_kwargs=True, prepend=True))
            after = Hook(capture.passes.model_returns, model)
            handles.append(model.register_forward_hook(after, always_call=True))
        capture.account.checks.attach(self._parameters, self._hooks, capture.failed)
        for owner in self._plan.owners:
            hook = Hook(partial(capture.owners.begins, owner.layer))
            self._hooks.before((owner.module,), hook, first=True)
        passes = capture.passes
        part = PartHook(passes, self._plan.by_module)
        handles.append(part)
        self._hooks.before(self._plan.parts, part, first=True)
        for name, module in stacks.items():
            stack = name.rpartition(".")[2]
            if stack == "encoder":
                hook = Hook(passes.encoder_has_run, module)
                handles.append(module.register_forward_hook(hook))
            begins = Hook(partial(passes.stack_begins, stack))
            handles.append(module.register_forward_pre_hook(begins, with_kwargs=True))

    def _remove_handles(self) -> None:
        self._hooks.remove()
        for handles in (self._handles, self._capture.arrivals.handles):
            while handles:
                handles.pop().remove()

    # -- reading -----------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """The parameters that received a gradient, in model order."""
        return self._capture.account.received(self._parameters)

    @property
    def notes(self) -> dict[str, list[str]]:
        """Reservations about what was captured, each with the layers that it concerns."""
        return {text: list(layers) for text, layers in self._capture.account.notes.items()}

    def __repr__(self) -> str:
        return (
            f"TokenGradients({len(self.names)} of {len(self._parameters)} parameters, "
            f"keep={self._keep!r})"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return self._aliases.get(str(name), name) in self.names

    def __getitem__(self, name: str) -> TokenGradient:
        """The token gradients of one parameter.

        Raises:
            LayerNotFoundError: There is no such parameter.
            UnsupportedLayerError: They cannot be had exactly; the error says why.
            InspectionError: No gradient reached it, or its tokens are on several axes.
        """
        found = self._gradients(self._known(name))
        if len(found) > 1:
            texts = self._texts()
            axes = ", ".join(repr(texts[axis]) for axis in found)
            raise InspectionError(
                f"{name!r} is used on {len(found)} token axes: {axes}. Choose one: "
                f"tokens.on({texts[next(iter(found))]!r})[{name!r}]."
            )
        return next(iter(found.values()))

    def _gradients(self, name: str) -> dict[Axis, TokenGradient]:
        """The token gradients of one parameter, by its first name, on each of its token axes."""
        if name in self._found:
            return self._found[name]
        capture = self._capture
        if name in capture.account.reasons:
            raise self._reason(name)  # no variable: it would keep this frame, and be kept by it
        parts = capture.arrivals.parts(name)
        if not parts and not capture.account.received([name]):
            raise InspectionError(
                f"No gradient reached {name!r}: run forward and backward inside the `with` block, "
                "and check that the loss depends on it."
            )
        if not parts:
            raise UnsupportedLayerError(
                name,
                self._infos[name].layer,
                "its gradient came through no call of a layer (a weight penalty in the loss, or a "
                "use outside of the model): it is unattributed.",
            )
        try:
            found = joined(self._infos[name], parts, self._masks)
        except InspectionError:
            raise
        except RuntimeError as error:  # of torch: whatever it is, other parameters stay readable
            reason = f"what its uses brought cannot be put together: {error}"
            raise UnsupportedLayerError(name, self._infos[name].layer, reason) from error
        if self._stack is None:  # else more may come
            self._found[name] = found
        return found

    def _reason(self, name: str) -> Exception:
        """Why a parameter has no token gradients, as an error of ours."""
        error = self._capture.account.reason(name)
        if isinstance(error, InspectionError):
            return error
        layer, text = self._infos[name].layer, f"{type(error).__name__}: {error}"
        return UnsupportedLayerError(name, layer, f"following its layer failed, {text}")

    def _known(self, name: str) -> str:
        found = self._aliases.get(name) if isinstance(name, str) else None
        if found is None:
            raise not_found(name, self._parameters, "tokens.names", "parameter")
        return found

    # -- over parameters ---------------------------------------------------------------------

    @property
    def axes(self) -> dict[str, list[str]]:
        """The token axes by name, such as "2 x 128", each with its parameters.

        Axes of the same size that are not the same tokens are named after what they belong to:
        "2 x 128 of memory".
        """
        texts = self._texts()
        return {texts[axis]: names for axis, names in self._by_axis().items()}

    def _by_axis(self) -> dict[Axis, list[str]]:
        found: dict[Axis, list[str]] = defaultdict(list)
        for name in self.names:
            try:
                axes = self._gradients(name)
            except InspectionError:
                continue  # it has no tokens; coverage() says why
            for axis in axes:
                found[axis].append(name)
        return dict(found)

    def _texts(self) -> dict[Axis, str]:
        """The names of all axes."""
        axes = list(self._by_axis())
        counts = Counter(map(str, axes))
        return {
            each: f"{each} of {each.of}" if counts[str(each)] > 1 and each.of else str(each)
            for each in axes
        }

    def on(self, axis: str) -> TokenSelection:
        """The token gradients on one token axis, by its name in `axes`."""
        texts, by_axis = self._texts(), self._by_axis()
        chosen = [each for each, text in texts.items() if text == axis]
        if not chosen:
            known = ", ".join(map(repr, texts.values()))
            raise InspectionError(f"There is no token axis {axis!r}; there are {known}.")
        (only,) = chosen
        return TokenSelection(axis, {name: self._gradients(name)[only] for name in by_axis[only]})

    def select(self, pattern: str = "*") -> TokenSelection:
        """The token gradients of the parameters that match, which must share their tokens.

        Raises:
            InspectionError: They have different token axes; the error names them.
            UnsupportedLayerError: None of them has token gradients.

        Parameters without token gradients are left out, with a `MissingTokensWarning`.
        """
        known = self.names
        names = match_names(pattern, known)
        if not names:
            raise not_found(pattern, known, "tokens.names", "parameter")
        by_axis: dict[Axis, dict[str, TokenGradient]] = defaultdict(dict)
        missing: dict[str, str] = {}  # texts: an error would keep what its frames have seen
        for name in names:
            try:
                gradients = self._gradients(name)
            except UnsupportedLayerError as error:
                missing[name] = str(error)
                continue
            for axis, each in gradients.items():
                by_axis[axis][name] = each
        if missing and not by_axis:
            self._gradients(next(iter(missing)))  # raises
        if len(by_axis) == 1:
            ((axis, several),) = by_axis.items()
            _warn_of(missing)
            return TokenSelection(str(axis), several)
        texts = self._texts()
        found = {texts[axis]: several for axis, several in by_axis.items()}
        text = "; ".join(
            f"{axis!r} ({len(several)} parameters, such as {next(iter(several))!r})"
            for axis, several in found.items()
        )
        first = max(found, key=lambda axis: len(found[axis]))
        raise InspectionError(
            f"These parameters have different token axes, which cannot be added: {text}. Choose "
            f"one, as in tokens.on({first!r}).norm(), or a narrower pattern."
        )

    @in_full
    def norm(self, pattern: str = "*") -> Tensor:
        """The norm of each token's gradient over all parameters that match, (b, s)."""
        found = self._norm_of_calls(pattern)
        return self.select(pattern).norm() if found is None else found

    def _norm_of_calls(self, pattern: str) -> Tensor | None:
        """The same where every parameter has the numbers of one call, all on the same tokens."""
        names = frozenset(match_names(pattern, self.names))
        if not self._capture.account.reasons.keys().isdisjoint(names):
            return None
        found = self._capture.arrivals.numbers_on(names)
        if found is None or len(found) != 1:
            return None
        ((axis, numbers),) = found.items()
        total, dtype = summed_squares(numbers)
        return total.sqrt_().to(dtype).view(axis.grid)

    def gram(self, pattern: str = "*") -> Tensor:
        """The inner product of every two tokens' gradients over them, (b * s, b * s)."""
        return self.select(pattern).gram()

    def project(self, k: int, seed: int = 0, pattern: str = "*") -> Tensor:
        """Each token's gradient over them under a random linear map to k numbers, (b, s, k)."""
        return self.select(pattern).project(k, seed)

    def dot(self, direction: Mapping[str, Tensor]) -> Tensor:
        """The inner product of each token's gradient with a direction per parameter, (b, s)."""
        meaning = "map names of parameters to tensors: {'fc.weight': tensor}"
        require(isinstance(direction, Mapping), "direction", direction, meaning)
        gradients = {name: self[name] for name in direction}
        shapes = {each.shape[:2] for each in gradients.values()}
        if len(shapes) > 1:
            raise InspectionError(f"These parameters have different token axes: {sorted(shapes)}.")
        return TokenSelection("", gradients).dot(direction)

    # -- proof -------------------------------------------------------------------------------

    @in_full
    def coverage(self) -> Coverage:
        """Every parameter that received a gradient: by which rule, and how well it adds up."""
        texts = self._texts()
        together = self._compared_together()
        compared = {name: together.get(name) or self._compared(name) for name in self.names}
        # Fetched together: each transfer from a GPU waits for it.
        waiting = [each.sizes for each in compared.values() if isinstance(each, _Compared)]
        numbers = iter(Deferred(waiting).read())
        residuals = {
            name: _residual(*next(numbers)) if isinstance(each, _Compared) else None
            for name, each in compared.items()
        }
        return Coverage([
            self._covered(name, texts, each, residuals[name]) for name, each in compared.items()
        ])  # fmt: skip

    def verify(self, samples: int = 8, seed: int = 0) -> TokenVerification:
        """Run the last pass again with one token changed at a time, and see which rows change.

        The verdict on a layer and a token is "local" (no row of another token changes), "first"
        (none of an earlier position or another sample), "mixed" (earlier ones change too: nothing
        is proved) or "refuted" (the rows that it is said to have do not change, or those of other
        samples do). The model stays as it is; the outputs of its layers are held twice.

        Args:
            samples: How many tokens are changed.
            seed: Which they are, and what they are changed into.

        Raises:
            InspectionError: There is no pass, it cannot be reproduced, or the block is not over.
        """
        kept = self._capture.passes.last
        if self._stack is not None:
            raise InspectionError("Call verify() after the `with` block: it runs the model again.")
        if kept is None:
            raise InspectionError(
                "No pass was made: run the model, with gradients, inside the `with` block."
            )
        if not isinstance(samples, int) or samples < 1:
            raise InspectionError(f"samples={samples!r}: give a number of tokens, 1 or more.")
        proof = PassVerification(kept, self._plan.watched, self._capture.arrivals.records, seed)
        return proof.result(samples, self._capture.account.reasons)

    def _covered(
        self, name: str, texts: Mapping[Axis, str], compared: object, residual: float | None
    ) -> CoverageRow:
        if isinstance(compared, str):
            return CoverageRow(name, "none", note=compared)
        found = self._gradients(name)
        rule = " + ".join(dict.fromkeys(each.rule for each in found.values()))
        axes = tuple(texts[axis] for axis in found)
        check = compared.check if isinstance(compared, _Compared) else ""
        note = self._capture.account.checks.unread.get(name, "")
        if residual is None and not note:
            note = "nothing to compare with: the gradient reached the parameter unseen (sharded?)"
        if residual is not None and residual > self._tolerance(name):
            note = f"{residual:.1%} of its gradient is unattributed: it came through no layer call"
        return CoverageRow(
            name=name, rule=rule, tokens=axes, residual=residual, check=check, note=note
        )

    def _of_one_call(self) -> dict[str, Reduced]:
        """What is left of the parameters that have the numbers of one call: most of them."""
        found = {}
        for name in self.names:
            with contextlib.suppress(InspectionError):  # it has no tokens; coverage() says why
                several = list(self._gradients(name).values())
                if len(several) == 1 and several[0].reduced is not None:
                    found[name] = several[0].reduced
        return found

    def _compared_together(self) -> dict[str, _Compared]:
        """What `_compared` finds, of many parameters in few operations."""
        reduced = self._of_one_call()
        names, numbers = list(reduced), list(reduced.values())
        brought = self._capture.account.checks.brought_together(names) if names else None
        if brought is None:
            return {}
        found: dict[str, _Compared] = {}
        for (places, squares), (_, probes) in zip(
            squares_together(numbers), probes_together(numbers), strict=True
        ):
            probes, own = probes.double(), brought[places].to(probes.device)
            parts = probes.square().sum(1)
            of_tokens = squares.flatten(1).sum(1, dtype=torch.float64)
            narrow = [self._is_narrow(names[place]) for place in places]
            parts = parts + of_tokens * torch.tensor(narrow, device=parts.device)
            sizes = torch.stack([(probes.sum(1) - own).abs(), own.abs(), parts.sqrt()], 1)
            for place, row in zip(places, sizes, strict=True):
                found[names[place]] = _Compared(row, "probe")
        return found

    @in_full
    def squares_by_voxel(self) -> dict[str, Tensor]:
        """The squared norms by voxel, (b, s, voxels), of parameters that have those of one call.

        With keep="voxels" these are most. They are read in few operations, which counts on a GPU;
        `tokens[name].norm(by="voxel")` has those of any parameter.
        """
        reduced = {name: each for name, each in self._of_one_call().items() if each.is_by_voxel}
        names, found = list(reduced), {}
        for places, squares in squares_together(list(reduced.values())):
            for place, own in zip(places, squares, strict=True):
                (gradient,) = self._gradients(names[place]).values()
                kept = own if gradient.mask is None else own * gradient.mask.view(-1, 1)
                found[names[place]] = kept.view(*gradient.shape[:2], -1)
        return found

    def _compared(self, name: str) -> _Compared | str | None:
        """The tokens' sum beside autograd's gradient; why there are no token gradients, as text."""
        try:
            found = list(self._gradients(name).values())
        except Exception as error:
            return str(error)  # an error would keep what its frames have seen
        brought = self._capture.account.checks.brought(name)
        gradient = self._whole_gradient(name) if self._keep == "factors" else None
        if gradient is not None:
            total = sum((each.total() for each in found), start=torch.zeros_like(gradient))
            # Where tokens cancel, rounding is of the order of theirs, not of their sum.
            sizes = torch.cat([each.norm().flatten() for each in found])
            return _Compared.of(total.to(gradient) - gradient, gradient, sizes, "sum")
        if brought is None:
            return None
        vectors = self._capture.account.checks.vectors(name, found[0].norm())
        probes = torch.cat([each.probes(vectors).double() for each in found])
        # Of the same part of the parameter: of a head over many words the probe sees a sliver. In
        # 16 bits that sliver is rounded as the whole is, so there the whole is what counts.
        sizes = probes
        if self._is_narrow(name):
            sizes = torch.cat([probes, *(each.norm().flatten().to(probes) for each in found)])
        return _Compared.of(probes.sum() - brought, brought, sizes, "probe")

    def _whole_gradient(self, name: str) -> Tensor | None:
        """`.grad`, if it holds what the block brought and nothing else."""
        gradient = self._parameters[name].grad
        brought = self._capture.account.checks.brought(name)
        if gradient is None or brought is None or name in self._had_gradients or gradient.is_sparse:
            return None
        if self._capture.arrivals.versions.get(name) != gradient._version:
            return None
        # DDP has averaged it over the processes: then it is not what this one brought.
        here = float(self._capture.account.checks.between(name, gradient.detach()))
        rounding = 1e-2 if gradient.itemsize < 4 else 1e-4
        near = abs(here - float(brought)) <= rounding * max(abs(here), abs(float(brought)))
        return gradient.detach() if near else None

    def _is_narrow(self, name: str) -> bool:
        """Whether a parameter or its gradients have 16 bits."""
        return self._infos[name].dtype.itemsize < 4 or self._capture.account.is_narrow(name)

    def _tolerance(self, name: str) -> float:
        """Above this a residual is more than rounding."""
        if self._is_narrow(name):
            return 5e-2
        return 1e-6 if self._infos[name].dtype == torch.float64 else 1e-3


def _warn_of(missing: Mapping[str, str]) -> None:
    """Say which parameters a result is without."""
    if missing:
        name, reason = next(iter(missing.items()))
        others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        text = f"This is without {name!r}{others}, listed in coverage().missing. {reason}"
        warnings.warn(text, MissingTokensWarning, stacklevel=4)


class _Compared(NamedTuple):
    """What is needed for a residual, still on the device, and how it was compared.

    Attributes:
        sizes: The lengths of the difference, of the whole gradient and of the tokens' parts.
        check: "sum" or "probe".
    """

    sizes: Tensor
    check: str

    @classmethod
    def of(cls, difference: Tensor, whole: Tensor, parts: Tensor, check: str) -> _Compared:
        """Measure all three."""
        lengths = [torch.linalg.vector_norm(each.double()) for each in (difference, whole, parts)]
        return cls(torch.stack([each.to(difference.device) for each in lengths]), check)


def _residual(difference: float, whole: float, parts: float) -> float:
    """How far the tokens' sum is from autograd's gradient, relative."""
    return difference / max(whole, parts, torch.finfo(torch.float32).tiny)
