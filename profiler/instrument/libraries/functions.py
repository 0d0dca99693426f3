"""A row of a table: where a library function is defined, its shown name, and its work."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from cbtop.profiler.checks import Check
from cbtop.profiler.instrument.libraries.amounts import AmountsOf, nothing


class KeyFrom(IntEnum):
    """The values that decide the brick and the work of a call."""

    NOTHING = 0  # each call is looked at
    ARGUMENTS = 1  # the shapes of arrays, and the values of other arguments
    RESULT = 2  # the shape of the result


@dataclass(frozen=True, slots=True)
class LibraryFunction:
    """A function of a library that becomes a brick.

    It is the attribute `path` (`Generator.normal`) of `module`, which is timed once `after` is imported ("": once
    `module` is). `name` is shown. `key_from` says what decides the work. `parts` are the attributes that
    describe an argument that is not an array, such as a sparse matrix. A ufunc or dispatcher is timed if an array has
    at least `smallest` elements. With `by_class`, `{}` in the name is the
    name of the class of `self`. `checks` are conditions on the result.
    """

    module: str
    path: str
    name: str
    amounts: AmountsOf = nothing
    smallest: int = 0
    after: str = ""
    key_from: KeyFrom = KeyFrom.ARGUMENTS
    parts: tuple[str, ...] = ()
    by_class: bool = False
    checks: tuple[Check, ...] = ()

    @property
    def awaited(self) -> str:
        """This function is available after the import of this module."""
        return self.after or self.module


def functions_of(module: str, amounts: AmountsOf, names: str, **options: Any) -> list[LibraryFunction]:
    """Return a row for each function of `module` in `names`, which are separated by spaces."""
    return [LibraryFunction(module, name, f"{module}.{name}", amounts, **options) for name in names.split()]
