"""The state of all random generators, to run something again with the same numbers."""

from __future__ import annotations

import random
import sys
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
        """The state that `to_data` gave, tried out on generators of its own.

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
                raise ValueError("it is no state of NumPy's generator")
            np.random.RandomState().set_state(numpy_state)
        internal = tuple(python["internal"].tolist())
        found = cls(
            data["torch"],
            data.get("cuda"),
            (python["version"], internal, python["gauss"]),
            numpy_state,
        )
        torch.Generator().set_state(found.torch)
        random.Random().setstate(found.python)
        if not (found.python[2] is None or isinstance(found.python[2], float)):
            raise TypeError("it is no state of Python's generator")
        if found.cuda is not None and (
            not isinstance(found.cuda, Tensor) or found.cuda.dtype != torch.uint8
        ):
            raise TypeError("it is no state of a CUDA generator")
        return found


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
