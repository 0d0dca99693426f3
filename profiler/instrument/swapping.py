"""Which models' calls are timed now, and the functions of the host's that are replaced meanwhile.

Rules
- A function that a module or a mapping holds is replaced from a recorded step until the next that is not, as calls of
  modules are: in a plain step the host's own runs. Methods stay replaced: with each attribute that is set, a class
  loses what the interpreter has learnt of it.
- Dynamo guards on which function it has seen. From when it begins to compile, and where it has before, they stay.
- What others put there meanwhile is left alone.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, MutableMapping
from types import CellType
from typing import TYPE_CHECKING, Any, NamedTuple

from cbtop.profiler.instrument.awaited import await_no_more, once_imported

if TYPE_CHECKING:
    from weakref import ref

    from cbtop.profiler.hot_path import HotPath
    from cbtop.profiler.instrument.capturing import Capture
    from cbtop.profiler.instrument.eager_stamps import Timing
    from cbtop.profiler.path import Path

DYNAMO = "torch._dynamo"
# The models whose calls are timed, and what times them; where there is none, nothing is recorded.
swapped_in: dict[ref[Any], HotPath | Path | Timing | Capture] = {}


def held(owner: Any, name: str) -> Any:
    """What `owner` itself has of that name: a class not what it inherits. A cell has its contents."""
    if isinstance(owner, CellType):
        return owner.cell_contents
    return owner.get(name) if isinstance(owner, MutableMapping) else vars(owner).get(name)


class Replaced(NamedTuple):
    """A function of the host's, and ours."""

    owner: Any
    name: str
    original: Callable[..., Any]
    wrapped: Callable[..., Any]

    def put(self, there: Any, instead: Any) -> None:
        """Let `owner` have `there` where it has `instead`."""
        if held(self.owner, self.name) is not instead:
            return
        if isinstance(self.owner, MutableMapping):
            self.owner[self.name] = there
        else:
            setattr(self.owner, self.name, there)


class Swaps:
    """The functions of this process that are replaced while the calls of a model are timed."""

    def __init__(self) -> None:
        # Also of the calls of models, which may share modules. A handler of the host's may call one where a signal
        # finds us in here.
        self.lock = threading.RLock()
        self._functions: list[Replaced] = []  # in the order they were replaced
        self._are_in: bool | None = False  # None: some of them may be
        self._stay = False
        self._watched: Any = None  # Dynamo's list of whom it tells that it begins to compile

    def add(self, function: Replaced) -> None:
        """Replace this one, too."""
        with self.lock:
            if not self._functions:
                once_imported(DYNAMO, self._watch)
            self._functions.append(function)
            if self._are_in is not False:
                function.put(function.wrapped, function.original)

    def has(self, owner: Any, name: str, original: Any) -> bool:
        """Whether that function is one of them."""
        return any([one.owner is owner and one.name == name and one.original is original for one in self._functions])

    def clear(self) -> None:
        """Put back all of them, and forget them."""
        with self.lock:
            self._stay = False
            self._swap(False)
            self._functions.clear()
            if self._watched is not None and self._compiles in self._watched:
                self._watched.remove(self._compiles)
            self._watched = None
            await_no_more(DYNAMO)

    def swap_in(self, model: ref[Any], times: HotPath | Path | Timing | Capture) -> None:
        """The calls of `model` are timed from now on."""
        with self.lock:
            swapped_in[model] = times
            if self._watched is not None and self._compiles not in self._watched:
                self._stay = True  # the host has reset Dynamo, which told us: it is compiling
            if self._are_in is not True:
                self._swap(True)

    def swap_out(self, model: ref[Any]) -> None:
        """The calls of `model` are timed no more."""
        with self.lock:
            swapped_in.pop(model, None)
            if not swapped_in and self._are_in is not False and not self._stay:
                self._swap(False)

    def _swap(self, are_in: bool) -> None:
        self._are_in = None
        for one in self._functions if are_in else reversed(self._functions):
            one.put(*(one.wrapped, one.original) if are_in else (one.original, one.wrapped))
        self._are_in = are_in

    def _watch(self) -> None:
        """Be told when Dynamo, which has been imported, begins to compile."""
        dynamo: Any = sys.modules[DYNAMO]
        self._watched = getattr(getattr(dynamo, "callback_handler", None), "start_callbacks", None)
        frames = getattr(sys.modules.get(f"{DYNAMO}.utils"), "counters", {}).get("frames")
        if self._watched is None or frames:
            self._compiles()
        if self._watched is not None:
            self._watched.append(self._compiles)

    def _compiles(self, *_: Any) -> None:
        with self.lock:
            self._stay = True
            if self._are_in is not True:
                self._swap(True)


swaps = Swaps()
