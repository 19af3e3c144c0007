"""What a pass may depend on beside its arguments: the attributes of modules, and random numbers.

Tokens that an earlier pass has found are kept. A model that rolls its input by `self.step` takes
another way each time, with the same shapes: where one of its attributes has changed, the way is
compared (`rules/way.py`).
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Any

from torch import Tensor, nn

_INTERNAL = len(vars(nn.Module()))  # attributes that every module begins with, and `training`
_PLAIN = frozenset({bool, int, float, str, bytes, complex, type(None)})
_OWN = ("torch.nn.", "torch.jit.")  # modules that move nothing by attributes, and scripted ones
_LONGEST = 4096  # entries of a list or an array that are compared


def python_state(modules: Iterable[nn.Module]) -> list[object]:
    """The attributes of these modules that are no tensors, modules or functions, as values."""
    found: list[object] = []
    seen: set[int] = set()
    for module in modules:
        found.append(module.training)
        if type(module).__module__.startswith(_OWN):
            continue
        for value in islice(vars(module).values(), _INTERNAL, None):
            if type(value) in _PLAIN:
                found.append(value)
            elif not isinstance(value, (Tensor, nn.Module)) and id(value) not in seen:
                seen.add(id(value))  # a configuration, which all modules share
                found.append(_frozen(value, 3))
    return found


def _frozen(value: Any, depth: int) -> object:
    """A copy of a value that can be compared later; an object of its own where there is none."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if depth == 0 or isinstance(value, (Tensor, nn.Module)):
        return None
    if issubclass(kind, (list, tuple, set, frozenset, deque)):
        return len(value), [_frozen(each, depth - 1) for each in islice(value, _LONGEST)]
    if issubclass(kind, dict):
        pairs = islice(value.items(), _LONGEST)
        return len(value), [(repr(key), _frozen(each, depth - 1)) for key, each in pairs]
    if issubclass(kind, random.Random):
        return value.getstate()
    if hasattr(kind, "__next__"):
        return object()  # an iterator: nobody knows what it gives next
    if hasattr(kind, "tobytes") and hasattr(kind, "size"):  # an array of another library
        return value.tobytes() if value.size <= _LONGEST else None
    try:
        inner = vars(value)
    except TypeError:
        return None
    return [each for each in inner.values() if type(each) in _PLAIN]


def random_state() -> object:
    """The random numbers of Python and NumPy that come next."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate()
    kind, keys, *rest = numpy.random.get_state()
    return random.getstate(), kind, keys.tobytes(), rest
