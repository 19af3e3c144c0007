"""An edit: what to do to a place in a model, and to which part of it.

`Edit` is public and frozen; `at` returns a narrower copy. `attached` reads an edit with `edit_of`,
`bound` carries it out, and `_inspect` and `_lesion` make edits too. A new kind of edit is a
constructor here and a branch of `BoundEdit._new`; the names in `kind` are read there and in
`attached`. Whatever can be checked without the model is checked when an edit is made, so that an
error names the user's line and not a hook. Lists are copied for the same reason that the class is
frozen: a list that the user changes later must not change the edit. Words of errors are free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchfmri._arguments import check_number, check_real, check_tensor, is_whole, require
from torchfmri.exceptions import InspectionError

Numbers: TypeAlias = "int | slice | Sequence[int] | range | None"
Spec: TypeAlias = "Edit | str | Tensor | Callable[[Tensor], Tensor]"

_WHERE = "give a number, a slice, or a list of numbers"


@dataclass(frozen=True, eq=False)
class Edit:
    """A change of what a layer takes or returns; made by the methods below, `at` narrows it.

    An edit changes a copy: tensors of the model are never written to, and gradients flow through.

    Attributes:
        kind: "zero", "scale", "add", "replace", "mean", "resample" or "function".
        values: The direction, the donor, or the function.
        factor: The factor of "scale" and "add".
        seed: The seed of "resample".
        heads: The heads; None for all.
        units: The units; None for all.
        voxels: The voxels; None for all.
        tokens: The positions in the sequence; None for all.
        rows: The rows of the batch; None for all.
        source: The positions in the donor that stand for `tokens`; None for the same ones.

    Examples:
        >>> import torch, torchfmri
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh())
        >>> x = torch.randn(2, 4)
        >>> with torchfmri.edited(model, {"0": torchfmri.Edit.scale(2.0).at(units=[0, 2])}):
        ...     changed = model(x)
        >>> torch.equal(changed[:, 1], model(x)[:, 1]), torch.equal(changed, model(x))
        (True, False)
    """

    kind: str
    values: Any = None
    factor: float = 1.0
    seed: int = 0
    heads: Numbers = None
    units: Numbers = None
    voxels: Numbers = None
    tokens: Numbers | Tensor = None
    rows: Numbers = None
    source: Sequence[int] | None = None

    @staticmethod
    def zero() -> Edit:
        """Put zeros there."""
        return Edit(kind="zero")

    @staticmethod
    def scale(factor: float) -> Edit:
        """Multiply by a factor."""
        _check_factor(factor)
        return Edit(kind="scale", factor=factor)

    @staticmethod
    def add(direction: Tensor, factor: float = 1.0) -> Edit:
        """Add a direction (steering).

        Args:
            direction: (w,) over the units, or of the shape of the layer's value. If it requires
                grad, it gets its gradient.
            factor: How much of it.
        """
        _check_factor(factor)
        return Edit(kind="add", values=_finite("direction", direction), factor=factor)

    @staticmethod
    def replace(donor: Any, source: Sequence[int] | None = None) -> Edit:
        """Put values of another run there (patching).

        Args:
            donor: The layer's value in the other run, of the same shape (or with one row, for
                all); an `Inspection` that kept tensors; or (w,), one value for each unit.
            source: With `at(tokens=...)`: the positions in the donor, one for each token.
        """
        is_donor = isinstance(donor, (Tensor, Mapping))
        require(is_donor, "donor", donor, "give a tensor, or an Inspection that kept tensors")
        if isinstance(donor, Tensor):
            _finite("donor", donor)
        if source is not None:
            several = is_selection(source) and isinstance(source, (list, tuple, range))
            require(several, "source", source, "give a list of positions in the donor")
            _check_source(source, donor)
        return Edit(kind="replace", values=donor, source=_copied(source))

    @staticmethod
    def mean(values: Any) -> Edit:
        """Put the mean of values there, unit by unit (mean ablation).

        Args:
            values: Values of the layer over many tokens, (..., w), or an `Inspection` with them.
        """
        return Edit(kind="mean", values=_donor(values))

    @staticmethod
    def resample(values: Any, seed: int = 0) -> Edit:
        """Put values of tokens drawn at random there (resample ablation).

        The draw depends on seed, row and position alone: a pass that is run again, as
        checkpointing does, or a token that is generated with a cache gets the same.

        Args:
            values: Values of the layer over many tokens, (..., w), or an `Inspection` with them.
            seed: The seed of the draw.
        """
        check_number("seed", seed, 0, "give a number from 0 upwards")
        return Edit(kind="resample", values=_donor(values), seed=seed)

    @staticmethod
    def function(act: Callable[[Tensor], Tensor]) -> Edit:
        """Replace the value by what a function returns for it.

        Args:
            act: Is given the selected part, (rows, tokens, ..., units), and returns a tensor of the
                same shape. At `blocks.9.attn.hook_z`, `hook_q`, `hook_k` and `hook_v` it is given
                (rows, tokens, head, d), as in TransformerLens; at one head, `L9H6`, (rows, tokens,
                d). Under checkpointing it is called again and has to return the same.
        """
        is_function = callable(act) and not isinstance(act, type)
        require(is_function, "act", act, "give a function of a tensor")
        return Edit(kind="function", values=act)

    @staticmethod
    def without_features(dictionary: Any, features: Sequence[int]) -> Edit:
        """Take features of a dictionary (a sparse autoencoder) out of the value.

        What the dictionary does not reconstruct stays: the value changes by the difference of its
        reconstructions without and with these features.

        Args:
            dictionary: An object with `encode(values)` and `decode(features)`.
            features: The numbers of the features.
        """
        encode, decode = (getattr(dictionary, name, None) for name in ("encode", "decode"))
        meaning = "give an object with encode(values) and decode(features)"
        require(callable(encode) and callable(decode), "dictionary", dictionary, meaning)
        # Taken out of the argument once: it may be a generator, or a list that is changed later.
        chosen = list(features) if isinstance(features, Iterable) else []
        require(is_selection(chosen), "features", features, "give a list of numbers of features")
        assert callable(encode)
        assert callable(decode)

        def act(value: Tensor) -> Tensor:
            found: Tensor = encode(value)
            count = found.shape[-1]
            for each in chosen:
                if not -count <= each < count:
                    raise InspectionError(
                        f"There is no feature {each}: the dictionary has {count}, 0 to {count - 1}."
                    )
            left = found.clone()
            left[..., chosen] = 0
            new: Tensor = value + decode(left) - decode(found)
            return new

        return Edit.function(act)

    def at(
        self,
        *,
        tokens: Numbers | Tensor = None,
        heads: Numbers = None,
        units: Numbers = None,
        voxels: Numbers = None,
        rows: Numbers = None,
    ) -> Edit:
        """Return this edit on a part of the place only.

        Called again with other arguments, it narrows further; an argument is given once.

        Args:
            tokens: Positions in the sequence, from 0. While generating with a cache they count on
                from the prompt; negative ones count from the end of what was fed so far. A bool
                tensor (b, s) selects for each row.
            heads: Heads, if the place has them.
            units: Units (features, channels).
            voxels: Voxels as a scan has them: heads in q/k/v projections, 64 units in other layers.
            rows: Rows of the batch.
        """
        given: dict[str, Any] = {"heads": heads, "units": units, "voxels": voxels, "rows": rows}
        for name, value in given.items():
            require(is_selection(value), name, value, _WHERE)
        for name, value in {"tokens": tokens, **given}.items():
            if value is not None and getattr(self, name) is not None:
                raise InspectionError(
                    f"{name} were chosen already: {getattr(self, name)!r}, now {value!r}. "
                    f"Combine the two selections in one .at({name}=...)."
                )
        is_mask = isinstance(tokens, Tensor) and tokens.dtype == torch.bool and tokens.ndim == 2
        require(is_mask or is_selection(tokens), "tokens", tokens, f"{_WHERE}, or a bool (b, s)")
        chosen = [
            name
            for name in ("heads", "units", "voxels")
            if given[name] is not None or getattr(self, name) is not None
        ]
        if len(chosen) > 1:
            raise InspectionError(
                f"{' and '.join(chosen)} both select units. Give one of them: two edits, one for "
                "each, can stand in the same block."
            )
        if self.source is not None and tokens is not None:
            count = len(self.source)
            several = list(tokens) if isinstance(tokens, (list, tuple, range)) else []
            meaning = f"source names {count} positions; give as many different tokens, in a list"
            require(len(several) == len({*several}) == count, "tokens", tokens, meaning)
        kept = {name: _copied(value) for name, value in given.items() if value is not None}
        return replace(self, tokens=self.tokens if tokens is None else _copied(tokens), **kept)

    def __repr__(self) -> str:
        where = [
            f"{name}={getattr(self, name)!r}"
            for name in ("tokens", "heads", "units", "voxels", "rows")
            if getattr(self, name) is not None
        ]
        return f"<Edit {self.kind}{' at ' if where else ''}{', '.join(where)}>"


def edit_of(spec: Any, name: str) -> Edit:
    """Return the edit that a user's value for a place means.

    Raises:
        InspectionError: The value is not an edit.
    """
    if isinstance(spec, Edit):
        return spec
    if isinstance(spec, str) and spec == "zero":
        return Edit.zero()
    if isinstance(spec, Tensor):
        return Edit.replace(spec)
    if callable(spec) and not isinstance(spec, type):
        return Edit.function(spec)
    raise InspectionError(
        f"The edit of {name!r} is {spec!r}. Give 'zero', a torchfmri.Edit such as Edit.scale(0.5) "
        "or Edit.mean(values), a tensor to put there, or a function of the value."
    )


def is_selection(value: object) -> bool:
    """Whether a value selects numbers: one, several, a slice, or None for all."""
    if value is None or isinstance(value, (slice, range)) or is_whole(value):
        return True
    return isinstance(value, (list, tuple)) and bool(value) and all(map(is_whole, value))


def _check_factor(factor: Any) -> None:
    check_real("factor", factor, "give a number")
    require(math.isfinite(factor), "factor", factor, "give a finite number")


def _check_source(source: Sequence[int], donor: Any) -> None:
    """Raise if a donor that is a tensor does not have the positions that `source` names."""
    if not isinstance(donor, Tensor):
        return  # an Inspection: which of its tensors is meant is known when the edit is bound
    meaning = "source names positions of the donor, so the donor has to be (b, s, ...)"
    require(donor.ndim >= 3, "donor", tuple(donor.shape), meaning)
    count = donor.shape[1]
    there = all(-count <= each < count for each in source)
    require(there, "source", source, f"the donor has {count} positions, 0 to {count - 1}")


def _copied(value: Any) -> Any:
    """Return a selection that does not change if the user's list or mask does."""
    if isinstance(value, Tensor):
        return value.clone()
    return list(value) if isinstance(value, list) else value


def _finite(name: str, value: Any) -> Tensor:
    check_tensor(name, value, "of finite values")
    tensor: Tensor = value
    require(not tensor.is_complex(), name, tensor, "give real values")
    wrong = int((~torch.isfinite(tensor.detach())).sum()) if tensor.is_floating_point() else 0
    if wrong:
        raise InspectionError(
            f"{name} has {wrong} of {tensor.numel()} values that are NaN or infinite: everything "
            "after the edit would be too. Give finite values."
        )
    return tensor


def _donor(values: Any) -> Any:
    if isinstance(values, Tensor):
        is_full = values.ndim > 0 and values.numel() > 0
        require(is_full, "values", tuple(values.shape), "give values of the layer, (..., w)")
        return _finite("values", values)
    meaning = "give a tensor (..., w) or an Inspection"
    require(isinstance(values, Mapping), "values", values, meaning)
    return values
