"""Checks of what users hand in at public entry points; each returns what it was given."""

from __future__ import annotations

from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from torchfmri.exceptions import InspectionError


def require_module(model: Any, caller: str) -> nn.Module:
    """`model`, if it is a module.

    Raises:
        InspectionError: It is something else, or a class of modules.
    """
    if isinstance(model, nn.Module):
        return model
    found = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
    advice = " Pass the model's instance." if isinstance(model, type) else ""
    raise InspectionError(f"{caller} takes an nn.Module, not {found}.{advice}")


def require_tensor(value: Any, name: str, meaning: str) -> Tensor:
    """`value`, if it is a tensor.

    Raises:
        InspectionError: It is something else; `name` and `meaning` say what was expected.
    """
    if isinstance(value, Tensor):
        return value
    raise InspectionError(f"{name}={value!r} is no tensor. Pass {meaning}.")


def require_scalar(loss: Any) -> Tensor:
    """`loss`, if it is a tensor that holds one real number.

    Raises:
        InspectionError: It holds several, is complex, or is no tensor.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise InspectionError(f"The loss must be one number, but it is {found}. Take its mean().")
    if loss.is_complex():
        raise InspectionError(f"The loss must be a real number, but it is {loss.dtype}.")
    return loss


def require_scaler(scaler: Any) -> Any:
    """`scaler`, if it is None or works like a `torch.amp.GradScaler`.

    Raises:
        InspectionError: It does not.
    """
    methods = ("scale", "unscale_", "step", "update", "get_scale")
    if scaler is None or all(callable(getattr(scaler, name, None)) for name in methods):
        return scaler
    raise InspectionError(
        f"scaler={scaler!r} is no GradScaler. Pass torch.amp.GradScaler(...), or leave it out."
    )


def require_device(device: torch.device | str) -> torch.device:
    """The device, tried out.

    Raises:
        InspectionError: PyTorch knows no such device, or this machine has none.
    """
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        there = ", ".join(["cpu", *(f"cuda:{each}" for each in range(count))])
        reason = shorten(str(error), 200, placeholder=" ...").rstrip(".")
        raise InspectionError(
            f"device={str(device)!r} cannot be used: {reason}. Here are {there}."
        ) from error
    return place


def require_count(value: Any, name: str, least: int, meaning: str) -> int:
    """`value`, if it is a whole number of at least `least`.

    Raises:
        InspectionError: It is not; `meaning` says what the number does.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return value
    raise InspectionError(f"{name}={value!r}: give a whole number of at least {least}, {meaning}.")
