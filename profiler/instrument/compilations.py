"""Announces each compilation by Dynamo (torch's compiler) and the totals.

Dynamo calls callbacks at the begin and end of a compilation (torch._dynamo.callback). In between, the activity of the
process is "compiling", so that a waiting step is not reported as a hang.

Overlapping and nested compilations are reported as one. `torch._dynamo.reset` drops the callbacks. They are
registered again when the model is next checked for changes.

Dynamo counts graph breaks by reason. A break belongs to the innermost step, layer or brick that ran when the
compilation ended. The totals are also announced if nothing was compiled, so that viewers can show 0.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections import Counter
from typing import Any

from cbtop.profiler.instrument.awaited import once_imported
from cbtop.profiler.instrument.trouble import log_own_error
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.messages import Activity, Compilation
from cbtop.protocol.ring import NO_NODE
from cbtop.protocol.structure_messages import MAX_BREAKS, CompiledCode, GraphBreak

DYNAMO = "torch._dynamo"
COMPILING, MAIN_LOOP = Activity("compiling"), Activity("")
# The id of a compilation ("3/1"): the number of the frame, and how often the frame was compiled before. Compiled
# autograd adds a prefix ("!0/3/1"), and a new attempt adds a suffix ("3/1_1").
_ID = re.compile(r"(?:!\d+/)?\d+/(\d+)(?:_\d+)?")

_EXPLANATION = "Explanation: "  # a line of Dynamo's reason for a graph break begins like this


class Compilations:
    """Announces the compilations of this process to each profiler that shows a model."""

    def __init__(self) -> None:
        self._profilers: weakref.WeakSet[BrickProfiler] = weakref.WeakSet()
        self._number = 0
        self._begun_ns: dict[BrickProfiler, int] = {}  # profiler -> when the running compilation began, on its clock
        self._is_awaited = False
        self._recompilations = 0
        # (reason, node) -> number of graph breaks.
        self._breaks: weakref.WeakKeyDictionary[BrickProfiler, Counter[tuple[str, int]]] = weakref.WeakKeyDictionary()
        self._seen: Counter[str] = Counter()  # reason -> number of graph breaks that Dynamo has counted

    def tell(self, profiler: BrickProfiler) -> None:
        """Announce each compilation to `profiler` from now on. May be called again at any time."""
        self._profilers.add(profiler)
        is_new = profiler not in self._breaks
        if is_new:
            self._breaks[profiler] = Counter()
        if self._take_breaks() or is_new:
            self._announce_totals()
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
            self._recompilations += is_again
            self._take_breaks()
            for profiler, began_ns in begun_ns.items():
                profiler.announce(Compilation(number, began_ns, profiler.parts.now_ns(), is_again))
                profiler.announce(MAIN_LOOP)
            self._announce_totals()
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            log_own_error(error, "a compilation is not told of")

    def _take_breaks(self) -> bool:
        """Count the graph breaks since the last call, and assign them to the node that runs now. Returns whether
        there were any.
        """
        counters = getattr(sys.modules.get(f"{DYNAMO}.utils"), "counters", None) or {}
        now = Counter({str(reason): int(count) for reason, count in dict(counters.get("graph_break", {})).items()})
        before, self._seen = self._seen, now
        is_cleared = any([now[reason] < before[reason] for reason in before])
        new = now if is_cleared else now - before
        for profiler, breaks in self._breaks.items():
            node = _node_of(profiler) if new else NO_NODE
            for reason, count in new.items():
                breaks[_in_a_line(reason), node] += count
        return bool(new)

    def _announce_totals(self) -> None:
        for profiler, breaks in self._breaks.items():
            known = breaks.most_common()
            named = [GraphBreak(reason, count, node) for (reason, node), count in known[: MAX_BREAKS - 1]]
            if more := sum(count for _, count in known[MAX_BREAKS - 1 :]):
                named.append(GraphBreak("other reasons", more))
            profiler.announce(CompiledCode(self._number, self._recompilations, tuple(named)))


def _node_of(profiler: BrickProfiler) -> int:
    scope: Any = profiler.parts.paths.own.position.scope
    return max(NO_NODE, int(scope.node))


def _in_a_line(reason: str) -> str:
    """Return the first line of `reason` and Dynamo's explanation, in one line. Leaves out hints."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    explained = [line.removeprefix(_EXPLANATION) for line in lines[1:] if line.startswith(_EXPLANATION)]
    return ": ".join([*lines[:1], *explained[:1]]) or "a graph break"


compilations = Compilations()
