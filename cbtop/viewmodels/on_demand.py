"""Parts of a view that are made when something reads them: what no shown view needs costs nothing."""

# What is read later is of later: who keeps a view beyond the next poll of its feed holds it first (SourceView.held).

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")
V = TypeVar("V")


class Later(Generic[T]):
    """What `make` gives; it is called once at most, by whoever asks first."""

    __slots__ = ("_made", "_make")

    def __init__(self, make: Callable[[], T]) -> None:
        self._make: Callable[[], T] | None = make
        self._made: T

    @property
    def is_made(self) -> bool:
        """Whether anybody has asked."""
        return self._make is None

    def value(self) -> T:
        if self._make is not None:
            self._made = self._make()
            self._make = None  # and with it goes what this is made of
        return self._made


class OnDemand(Generic[T]):
    """A field of a dataclass (without slots) that is given as it is or as a `Later`, and read as it is."""

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
        if instance is None:  # the dataclass asks for its default
            if not self._default:
                raise AttributeError(self._name)
            return self._default[0]
        value: T | Later[T] = instance.__dict__[self._name]
        return value.value() if isinstance(value, Later) else value

    def __set__(self, instance: object, value: T | Later[T]) -> None:
        instance.__dict__[self._name] = value


def with_parts(view: V, **parts: Any) -> V:
    """As dataclasses.replace, which would make all that nobody has read yet. Raises TypeError on an unknown name."""
    if unknown := parts.keys() - view.__dict__.keys():
        raise TypeError(f"a {type(view).__name__} has no {', '.join(sorted(unknown))}")
    other = object.__new__(type(view))
    other.__dict__.update(view.__dict__, **parts)
    return other


def made(view: V) -> V:
    """`view`, after every part of it was made."""
    for field in fields(view):  # type: ignore[arg-type]
        getattr(view, field.name)
    return view
