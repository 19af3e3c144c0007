"""A dict that reads its values from its own attributes and cannot be changed.

`Histogram` and `Statistics` inherit from it. `json.dumps` must write it, which takes real dicts
only and skips empty ones without asking a method: hence the hidden entry, which must stay. Values
are computed when they are asked for, so that nothing is stored twice.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

if TYPE_CHECKING:  # the two disagree about signatures that are not used here
    _Base = Mapping[str, Any]
else:

    class _Base(Mapping, dict):
        """Reading as in a `Mapping`, and a dict for those who look at the type."""


class FrozenDict(_Base):
    """A read-only dict with the keys `KEYS`, whose values are computed when they are asked for.

    It is a real dict because `json.dumps` takes no other mapping. All methods that read are those
    of `Mapping`; those of dict that write are refused.
    """

    KEYS: ClassVar[tuple[str, ...]] = ()

    def __new__(cls, *_: Any, **__: Any) -> FrozenDict:
        """An object whose hidden entry tells `json`, which asks no method, that it is not empty."""
        self = super().__new__(cls)
        dict.__setitem__(self, "", None)  # type: ignore[index]
        return self

    @abstractmethod
    def __getitem__(self, key: str) -> Any: ...

    def __iter__(self) -> Iterator[str]:
        return iter(self.KEYS)

    def __len__(self) -> int:
        return len(self.KEYS)

    __ne__ = object.__ne__  # the opposite of __eq__, which that of dict is not

    def __or__(self, other: Any) -> Any:
        return {**self, **other} if isinstance(other, Mapping) else NotImplemented

    def __ror__(self, other: Any) -> Any:
        return {**other, **self} if isinstance(other, Mapping) else NotImplemented

    def copy(self) -> Any:
        """Itself: it never changes."""
        return self

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        # A dict would be filled entry by entry when it is read back.
        return _rebuild, (type(self), dict(vars(self)))

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be changed; dict(...) makes a copy that can."
        )

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse


def _rebuild(cls: type[FrozenDict], state: dict[str, Any]) -> FrozenDict:
    self = cls.__new__(cls)
    self.__dict__.update(state)
    return self
