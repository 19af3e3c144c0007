"""The state of all random generators, to run something again with the same numbers."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class RandomState(NamedTuple):
    """What the generators of this process would draw next.

    Attributes:
        torch: Of the CPU.
        cuda: Of the current CUDA device, where one is in use.
        python: Of the module `random`.
        numpy: Of NumPy's global generator, where NumPy is loaded: name, keys, position, and two
            numbers about a normal variate in store.
    """

    torch: Tensor
    cuda: Tensor | None
    python: Any
    numpy: Any

    def restore(self) -> None:
        """Let the generators go on from here."""
        torch.set_rng_state(self.torch)
        if self.cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.cuda)
        random.setstate(self.python)
        if self.numpy is not None:
            import numpy as np

            np.random.set_state(self.numpy)

    def to_data(self) -> dict[str, Any]:
        """The state in dicts, lists, numbers and tensors."""
        version, internal, gauss = self.python
        found: dict[str, Any] = {
            "torch": self.torch,
            "python": {"version": version, "internal": torch.tensor(internal), "gauss": gauss},
        }
        if self.cuda is not None:
            found["cuda"] = self.cuda
        if self.numpy is not None:
            name, keys, *rest = self.numpy
            keys = torch.from_numpy(keys.astype("int64"))
            found["numpy"] = {"name": name, "keys": keys, "rest": list(rest)}
        return found

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> RandomState:
        """The state that `to_data` gave."""
        python = data["python"]
        numpy_state = None
        if "numpy" in data:
            import numpy as np

            keys = data["numpy"]["keys"].numpy().astype(np.uint32)
            numpy_state = (data["numpy"]["name"], keys, *data["numpy"]["rest"])
        return cls(
            data["torch"],
            data.get("cuda"),
            (python["version"], tuple(python["internal"].tolist()), python["gauss"]),
            numpy_state,
        )


def random_state() -> RandomState:
    """The state now; waits for no device."""
    cuda = None
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        cuda = torch.cuda.get_rng_state()
    numpy_state = None
    if "numpy" in sys.modules:
        import numpy as np

        numpy_state = np.random.get_state()
    return RandomState(torch.get_rng_state(), cuda, random.getstate(), numpy_state)


def save_generators() -> list[Callable[[], None]]:
    """Functions that put back the random state of torch (all devices in use), Python and NumPy."""
    state = random.getstate()
    torch_state = torch.get_rng_state()
    restore: list[Callable[[], None]] = [
        lambda: random.setstate(state),
        lambda: torch.set_rng_state(torch_state),
    ]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        cuda = torch.cuda.get_rng_state_all()
        restore.append(lambda: torch.cuda.set_rng_state_all(cuda))
    if torch.backends.mps.is_available():
        mps = torch.mps.get_rng_state()
        restore.append(lambda: torch.mps.set_rng_state(mps))
    if "numpy" in sys.modules:
        import numpy as np

        numpy_state = np.random.get_state()
        restore.append(lambda: np.random.set_state(numpy_state))
    return restore
