"""Announces when Dynamo compiles, from Dynamo's callbacks at the begin and end (torch._dynamo.callback).

While Dynamo compiles, the activity of the process is "compiling". So a step that waits for the compiler is not
reported as a hang.

Compilations that overlap, in several threads or nested, are reported as one compilation. `torch._dynamo.reset` drops
the callbacks. They are registered again some recorded steps later, when the model is next checked for changes.
"""

from __future__ import annotations

import re
import sys
import weakref
from typing import Any

from cbtop.profiler.instrument.awaited import once_imported
from cbtop.profiler.instrument.trouble import log_own_error
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.messages import Activity, Compilation

DYNAMO = "torch._dynamo"
COMPILING, MAIN_LOOP = Activity("compiling"), Activity("")
# An id of a compilation: the number of the frame, and how often the frame was compiled before ("3/1"). Compiled
# autograd has a prefix ("!0/3/1"), a new attempt has a suffix ("3/1_1").
_ID = re.compile(r"(?:!\d+/)?\d+/(\d+)(?:_\d+)?")


class Compilations:
    """Announces the compilations of this process to each profiler that shows a model."""

    def __init__(self) -> None:
        self._profilers: weakref.WeakSet[BrickProfiler] = weakref.WeakSet()
        self._number = 0
        self._begun_ns: dict[BrickProfiler, int] = {}  # begin of the running compilation, by each profiler's clock
        self._is_awaited = False

    def tell(self, profiler: BrickProfiler) -> None:
        """Announce each compilation to `profiler` from now on. May be called again at any time."""
        self._profilers.add(profiler)
        if not self._is_awaited:
            self._is_awaited = True
            once_imported(DYNAMO, self._listen)
        elif DYNAMO in sys.modules:
            self._listen()

    def end(self) -> None:
        """Stop announcing compilations, to all profilers."""
        self._profilers.clear()
        self._begun_ns.clear()
        self._is_awaited = False
        for told, ours_ in self._lists():
            if ours_ in told:
                told.remove(ours_)

    def _listen(self) -> None:
        if self._profilers:
            for told, ours_ in self._lists():
                if ours_ not in told:
                    told.append(ours_)

    def _lists(self) -> list[tuple[Any, Any]]:
        handler = getattr(sys.modules.get(DYNAMO), "callback_handler", None)
        lists = getattr(handler, "start_callbacks", None), getattr(handler, "end_callbacks", None)
        if None in lists:
            return []
        return [(lists[0], self._begins), (lists[1], self._ended)]

    def _begins(self, *_: Any) -> None:
        try:
            self._begun_ns = {profiler: profiler.parts.now_ns() for profiler in self._profilers}
            for profiler in self._begun_ns:
                profiler.announce(COMPILING)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            log_own_error(error, "a compilation is not told of")

    def _ended(self, *told: Any) -> None:
        try:
            begun_ns, self._begun_ns = self._begun_ns, {}
            found = _ID.fullmatch(str(getattr(told[0], "compile_id", ""))) if told else None
            is_again = found is not None and int(found[1]) > 0
            number, self._number = self._number, self._number + 1
            for profiler, began_ns in begun_ns.items():
                profiler.announce(Compilation(number, began_ns, profiler.parts.now_ns(), is_again))
                profiler.announce(MAIN_LOOP)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            log_own_error(error, "a compilation is not told of")


compilations = Compilations()
