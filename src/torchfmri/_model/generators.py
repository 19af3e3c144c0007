"""The state of all random generators, to run something again with the same numbers.

Each run of ours restores it at its end, and an incident stores it to run the step again. `to_data`
and `from_data` are a stored format: what older versions wrote (`cuda`, of one device) must still be
read, and what is read is tried out before it is believed. Only devices that somebody has used are
asked, since asking would set up the others. Another kind of device is an entry of `_KINDS`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class RandomState(NamedTuple):
    """What the generators of this process would draw next.

    Attributes:
        torch: The state of torch's generator for the CPU.
        devices: Kind of device ("cuda") -> the state for each device of that kind that is in use.
        python: The state of the module `random`.
        numpy: The state of NumPy's global generator, if NumPy is loaded: name, keys, position, and
            two numbers about a normal variate in store.
    """

    torch: Tensor
    devices: Mapping[str, Sequence[Tensor]]
    python: Any
    numpy: Any

    def restore(self) -> None:
        """Let the generators go on from here."""
        torch.set_rng_state(self.torch)
        for kind, states in self.devices.items():
            _set_states(kind, states)
        random.setstate(self.python)
        if self.numpy is not None:
            import numpy as np

            np.random.set_state(self.numpy)

    def to_data(self) -> dict[str, Any]:
        """Return the state in dicts, lists, numbers and tensors."""
        version, internal, gauss = self.python
        found: dict[str, Any] = {
            "torch": self.torch,
            "python": {
                "version": version,
                "internal": torch.tensor(internal, device="cpu"),
                "gauss": gauss,
            },
        }
        if self.devices:
            found["devices"] = {kind: list(states) for kind, states in self.devices.items()}
        if self.numpy is not None:
            name, keys, *rest = self.numpy
            keys = torch.from_numpy(keys.astype("int64"))
            found["numpy"] = {"name": name, "keys": keys, "rest": list(rest)}
        return found

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> RandomState:
        """Return the state that `to_data` gave, tried out on generators of its own.

        Raises:
            ValueError, TypeError, LookupError, RuntimeError: It gave something else.
        """
        python = data["python"]
        numpy_state = None
        if "numpy" in data:
            import numpy as np

            keys = data["numpy"]["keys"].numpy().astype(np.uint32)
            numpy_state = (data["numpy"]["name"], keys, *data["numpy"]["rest"])
            # NumPy does not look whether the position lies among the numbers.
            if numpy_state[0] != "MT19937" or not 0 <= numpy_state[2] <= len(keys) == 624:
                raise ValueError("it is not a state of NumPy's generator")
            np.random.RandomState().set_state(numpy_state)
        before = {"cuda": [data["cuda"]]} if "cuda" in data else {}  # of older files: one device
        found = cls(
            data["torch"],
            data.get("devices", before),
            (python["version"], tuple(python["internal"].tolist()), python["gauss"]),
            numpy_state,
        )
        torch.Generator().set_state(found.torch)
        random.Random().setstate(found.python)
        if not (found.python[2] is None or isinstance(found.python[2], float)):
            raise TypeError("it is not a state of Python's generator")
        for kind, states in found.devices.items():
            _check_states(kind, states)
        return found


def random_state() -> RandomState:
    """Return the state now; waits for no device."""
    devices = {kind: states for kind in _KINDS if (states := _states(kind))}
    numpy_state = None
    if "numpy" in sys.modules:
        import numpy as np

        numpy_state = np.random.get_state()
    return RandomState(torch.get_rng_state(), devices, random.getstate(), numpy_state)


_KINDS = ("cuda", "xpu", "mps")


def _states(kind: str) -> list[Tensor]:
    """Return the states of the devices of a kind; an empty list if none has been used yet."""
    module: Any = getattr(torch, kind, None)
    if kind == "mps":
        return [module.get_rng_state()] if torch.backends.mps.is_available() else []
    if module is None or not module.is_available() or not module.is_initialized():
        return []
    return list(module.get_rng_state_all())


def _check_states(kind: str, states: Any) -> None:
    """Raise if these cannot be states of devices of a kind; they are tried out if there is one."""
    if kind not in _KINDS or not isinstance(states, list) or not states:
        raise ValueError(f"it holds no states of generators of {kind!r}")
    for state in states:
        if not isinstance(state, Tensor) or state.dtype != torch.uint8:
            raise TypeError(f"it is not a state of a generator of {kind!r}")
        if _states(kind):
            torch.Generator(kind).set_state(state)


def _set_states(kind: str, states: Sequence[Tensor]) -> None:
    """Set as many devices of a kind as there are: the states may be from another machine."""
    present = len(_states(kind))
    module: Any = getattr(torch, kind, None)
    if present and kind == "mps":
        module.set_rng_state(states[0])
    elif present:
        module.set_rng_state_all(list(states[:present]))
