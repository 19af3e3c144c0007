"""What a pass may depend on beside its tensors: attributes of modules, arguments, random numbers.

Tokens that an earlier pass has found are kept. A model that rolls its input by `self.step` takes
another way each time, with the same shapes: where one of its attributes has changed, the way is
compared (`rules/way.py`). So it is where nobody can say whether a value has changed.
"""

from __future__ import annotations

import enum
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

_INTERNAL = len(vars(nn.Module()))  # attributes that every module begins with, and `training`
_PLAIN: frozenset[type] = frozenset({bool, int, float, str, bytes, complex, type(None)})
_OWN = ("torch.nn.", "torch.jit.")  # modules that move nothing by attributes, and scripted ones
_LONGEST = 4096  # entries of a list or an array, and of everything together, that are compared
_LISTS = (list, tuple, set, frozenset, deque)
_MORE: tuple[type, ...] = (dict, OrderedDict, defaultdict, SimpleNamespace)
_VALUES = _PLAIN.union(_LISTS, _MORE)  # that attributes of classes are compared as
_FIXED = (
    type, enum.Enum, BuiltinFunctionType, ModuleType, ref,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


def modules_of(module: nn.Module) -> list[nn.Module]:
    """A module and all below it, each once; `modules()` also joins their names."""
    found, level = {id(module): module}, [module]
    while level:
        below = [each for above in level for each in above._modules.values() if each is not None]
        level = [
            each for each in {id(each): each for each in below}.values() if id(each) not in found
        ]
        found.update((id(each), each) for each in level)
    return list(found.values())


def python_state(modules: Iterable[nn.Module], arguments: Iterable[object] = ()) -> list[object]:
    """What these modules and arguments hold that is no tensor, module or function, as values."""
    modules = list(modules)
    copies = _Copies(set(map(id, modules)))
    found: list[object] = [copies.of(each) for each in arguments if type(each) not in _PLAIN]
    kinds: dict[type, None] = {}  # in order
    for module in modules:
        found.append(module.training)
        kind = type(module)
        if kind.__module__.startswith(_OWN):
            continue
        kinds[kind] = None
        values = islice(vars(module).values(), _INTERNAL, None)
        found += [value if type(value) in _PLAIN else copies.of(value) for value in values]
    found.append(copies.of_classes(kinds))
    return found


class _Copies:
    """Copies of values that can be compared later; each value is copied once.

    Args:
        known: The ids of modules that are looked at by themselves. Others, in a plain list or a
            closure, are objects like any other.
    """

    def __init__(self, known: Collection[int]) -> None:
        self._known = known
        self._seen: dict[int, object] = {}  # the values: an id is one as long as its value is there
        self._left = _LONGEST

    def of(self, value: Any) -> object:
        """A copy of a value; an object of its own, equal to nothing, where there is none."""
        if type(value) in _PLAIN:
            return value
        kind = type(value)  # `isinstance` asks the object too, which costs where it answers itself
        if issubclass(kind, Tensor):
            return None  # reading its values is noticed in the pass
        if issubclass(kind, _FIXED) or id(value) in self._seen or id(value) in self._known:
            return id(value)
        self._seen[id(value)] = value
        self._left -= 1
        return object() if self._left < 0 else self._of_object(value)

    def _of_object(self, value: Any) -> object:
        kind = type(value)
        if issubclass(kind, _LISTS):
            return kind, self._several(value)
        if issubclass(kind, Mapping):
            return kind, self._several(map(repr, value)), self._several(value.values())
        if issubclass(kind, random.Random):
            return value.getstate()
        if issubclass(kind, torch.Generator):
            return value.get_state().numpy().tobytes()
        if hasattr(kind, "bit_generator"):  # NumPy's random numbers
            return repr(value.bit_generator.state)
        if hasattr(kind, "__next__"):
            return object()  # an iterator: nobody knows what it gives next
        if issubclass(kind, partial):
            return self.of(value.func), self.of(value.args), self.of(value.keywords)
        if kind is MethodType:
            return self.of(value.__func__), self.of(value.__self__)
        if kind is FunctionType:
            return value.__code__, self._several(_contents(value))
        if hasattr(kind, "tobytes") and hasattr(kind, "size"):  # an array of another library
            return value.tobytes() if value.size <= _LONGEST else object()
        return self._of_attributes(value)

    def _several(self, values: Iterable[object]) -> list[object]:
        found = [self.of(each) for each in islice(values, max(0, self._left) + 1)]
        self._left -= len(found)
        return found if self._left >= 0 else [object()]

    def _of_attributes(self, value: Any) -> object:
        names = [name for kind in type(value).__mro__ for name in _slots(kind)]
        inner = getattr(value, "__dict__", None)
        if inner is None and not names:
            return object()  # written in another language
        slots = [getattr(value, name, None) for name in names]
        return self._several([*slots, *(inner or {}).values()])

    def of_classes(self, kinds: Iterable[type]) -> object:
        """The attributes of classes of modules, and of those above them, that are values."""
        several = dict.fromkeys(above for kind in kinds for above in kind.__mro__)
        found: list[object] = []
        for each in several:
            if not each.__module__.startswith("torch."):
                names = [name for name, value in vars(each).items() if type(value) in _VALUES]
                found += [vars(each)[name] for name in names if name[:2] != "__"]
        return self._several(found)


def _slots(kind: type) -> list[str]:
    """The names of what instances of a class hold without a dictionary."""
    names = vars(kind).get("__slots__", ())
    several = (names,) if isinstance(names, str) else names
    private = f"_{kind.__name__.lstrip('_')}"
    return [
        private + name if name.startswith("__") else name
        for name in several
        if not name.endswith("__")
    ]


def _contents(function: FunctionType) -> list[object]:
    """The defaults of a function, and the variables that it has closed over."""
    found: list[object] = [function.__defaults__, function.__kwdefaults__]
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # a variable that has no value yet
            found.append(None)
    return found


def random_state() -> object:
    """The random numbers of Python and NumPy that come next."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate()
    kind, keys, *rest = numpy.random.get_state()
    return random.getstate(), kind, keys.tobytes(), rest
