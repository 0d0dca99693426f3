"""Parts of a view that are made when they are first read, so that unused parts cost nothing."""

# A part has the data of the time when it is made. To keep a view unchanged, call SourceView.held before the next
# poll.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")
V = TypeVar("V")


class LazyValue(Generic[T]):
    """A value that is made when it is first read. `make` returns it, and is called at most once."""

    __slots__ = ("_made", "_make")

    def __init__(self, make: Callable[[], T]) -> None:
        self._make: Callable[[], T] | None = make
        self._made: T

    @property
    def is_made(self) -> bool:
        """Whether the value exists, because `make` was called."""
        return self._make is None

    def value(self) -> T:
        if self._make is not None:
            self._made = self._make()
            self._make = None  # Drop `make`, so that the objects it uses can be freed.
        return self._made


class Lazy(Generic[T]):
    """A field of a dataclass without slots. It is set to a value or a `LazyValue`, and reads as the value."""

    def __init__(self, *default: T) -> None:
        self._default = default
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> T: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> T: ...
    def __get__(self, instance: object | None, owner: type | None = None) -> T:
        # Read from the class, as a dataclass does to find the default.
        if instance is None:
            if not self._default:
                raise AttributeError(self._name)
            return self._default[0]
        value: T | LazyValue[T] = instance.__dict__[self._name]
        return value.value() if isinstance(value, LazyValue) else value

    def __set__(self, instance: object, value: T | LazyValue[T]) -> None:
        instance.__dict__[self._name] = value


def with_parts(view: V, **parts: Any) -> V:
    """Return a copy of `view` with some fields replaced. Raises TypeError for an unknown name.

    dataclasses.replace would make all lazy parts.
    """
    if unknown := parts.keys() - view.__dict__.keys():
        raise TypeError(f"a {type(view).__name__} has no {', '.join(sorted(unknown))}")
    other = object.__new__(type(view))
    other.__dict__.update(view.__dict__, **parts)
    return other


def made(view: V) -> V:
    """Make every part of `view`, then return `view`."""
    for field in fields(view):  # type: ignore[arg-type]
        getattr(view, field.name)
    return view
