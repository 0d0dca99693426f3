"""The calls during the capture of a CUDA graph: each module or function, and the nodes between which it was called.

Nothing runs then, so nothing is timed. A capture belongs to its thread: `captures` holds the current ones.
"""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cbtop.profiler.definitions import BrickDefinition
from cbtop.profiler.instrument.trouble import in_words, log_own_error
from cbtop.protocol.vocabulary import BrickCategory

if TYPE_CHECKING:
    from torch import nn

    from cbtop.profiler.instrument.phases import Call

MAX_CALLS = 20_000
OTHER = BrickDefinition("Other kernels", BrickCategory.OTHER, backend="torch on cuda", label="between bricks")

Mark = Any  # a call that began: what `begin` returns and `end` takes, of a kind of its own in each class
Last = list[int] | None  # the nodes that the next one would follow; None if the driver does not tell


@dataclass(slots=True, eq=False)  # a call is itself: `in` compares no fields
class CapturedCall:
    """A call between two places of the graph; `inside`: the calls in it."""

    key: Hashable
    module: nn.Module | None  # the called module; None for a function
    begin: Last
    end: Last = None
    elements: int = 0
    inside: list[CapturedCall] = field(default_factory=list)


class Capture:
    """A graph from the beginning of its capture to its end. Wrapped functions use it in place of a path."""

    def __init__(self, last: Callable[[], Last]) -> None:
        self.last = last  # the nodes that the next one would follow
        self.ended: Callable[[], None] = lambda: None  # called when it has ended
        self.steps: Any = None  # the ModelSteps of the model that is called in it
        self.calls: list[Call] = []  # of that model
        self.spans: list[CapturedCall] = []
        self.why_not = ""  # why its times would be wrong
        self.open: list[CapturedCall] = []  # running calls, outermost first
        self._count = 0

    def is_in_call_of(self, steps: object) -> bool:
        """Whether a call of that model is running."""
        return self.steps is steps and bool(self.open)

    def begin_model(self, steps: object, call: Call) -> Mark:
        """Begin a call of a model, described by `call`."""
        if self.steps not in (None, steps):
            self.why_not = "two models are called in it"
        self.steps = steps
        self.calls.append(call)
        return self.begin(None, None)

    def begin(self, key: Hashable, module: nn.Module | None) -> Mark:
        """Begin a call here. Returns None if it is not noted: outside of a model's call, or beyond MAX_CALLS."""
        if self._count >= MAX_CALLS or (key is not None and not self.open):
            return None
        self._count += 1
        span = CapturedCall(key, module, self.last())
        (self.open[-1].inside if self.open else self.spans).append(span)
        self.open.append(span)
        return span

    def end(self, span: Mark, elements: int = 0) -> None:
        """End that call here."""
        if span is not None:
            span.end, span.elements = self.last(), elements
            if span in self.open:
                del self.open[self.open.index(span) :]

    def add(self, spans: list[CapturedCall]) -> None:
        """Add calls that were made here, and have ended."""
        (self.open[-1].inside if self.open else self.spans).extend(spans)

    def now_in(self, node_of: Callable[[int], int]) -> None:
        """Replace the noted nodes by the same nodes of a copy of the graph."""
        found: dict[int, int] = {}

        def moved(last: Last) -> Last:
            if last is None:
                return None
            for node in last:
                if node not in found:
                    found[node] = node_of(node)
            return [found[node] for node in last]

        waiting = list(self.spans)
        while waiting:
            span = waiting.pop()
            span.begin, span.end = moved(span.begin), moved(span.end)
            waiting += span.inside

    def failed(self, error: Exception) -> None:
        """Note an error of ours: nothing of this graph is shown."""
        log_own_error(error, "a captured graph is not shown")
        self.why_not = in_words(error)

    @property
    def position(self) -> _Position:
        """Like a path's: the caller's position. Its step is None outside of this capture."""
        return _Position(self if capture_here() is self else None, self.open[-1].key if self.open else None)

    def start_brick(self, brick: Hashable, /) -> Mark:
        """Like a path's: begin a call here."""
        return self.begin(brick, None)

    def stop_brick(self, span: Mark, elements: int, failed: bool = False) -> None:
        """Like a path's: end that call."""
        self.end(span, elements)


class _Position:
    __slots__ = ("key", "scope", "step")

    def __init__(self, step: Capture | None, key: Hashable) -> None:
        self.step = step
        self.key = key
        self.scope = self


captures: dict[int, Capture] = {}  # by thread


def capture_here() -> Capture | None:
    """Return the capture of the calling thread."""
    return captures.get(get_ident()) if captures else None
