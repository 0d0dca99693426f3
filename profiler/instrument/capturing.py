"""What is called while a CUDA graph is captured: which module or function, between which of its nodes.

Nothing runs then, so nothing is timed. Whose capture it is, the thread says: `captures` holds those of now.
"""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cbtop.profiler.definitions import BrickDefinition
from cbtop.profiler.instrument.trouble import in_words, ours
from cbtop.protocol.vocabulary import BrickCategory

if TYPE_CHECKING:
    from torch import nn

    from cbtop.profiler.instrument.phases import Call

MAX_CALLS = 20_000
OTHER = BrickDefinition("Other kernels", BrickCategory.OTHER, backend="torch on cuda", label="between bricks")

Last = list[int] | None  # the nodes that the next one would follow; None where the driver does not tell


@dataclass(slots=True)
class Span:
    """A call between two places of the graph; `inside`: those made in it."""

    key: Hashable
    module: nn.Module | None  # whose call it is; None of a function
    begin: Last
    end: Last = None
    elements: int = 0
    inside: list[Span] = field(default_factory=list)


class Capture:
    """A graph from the beginning of its capture to its end; for wrapped functions it is what else a path is."""

    def __init__(self, last: Callable[[], Last]) -> None:
        self.last = last  # the nodes that the next one would follow
        self.ended: Callable[[], None] = lambda: None  # is called when it has
        self.steps: Any = None  # the ModelSteps whose model is called in it
        self.calls: list[Call] = []  # of that model
        self.spans: list[Span] = []
        self.why_not = ""  # its times would not be what they say they are
        self.open: list[Span] = []  # calls that go on, outermost first
        self._count = 0

    def is_in_call_of(self, steps: object) -> bool:
        """Whether a call of that model goes on."""
        return self.steps is steps and bool(self.open)

    def begin_model(self, steps: object, call: Call) -> Span | None:
        """A model is called, which `call` describes."""
        if self.steps not in (None, steps):
            self.why_not = "two models are called in it"
        self.steps = steps
        self.calls.append(call)
        return self.begin(None, None)

    def begin(self, key: Hashable, module: nn.Module | None) -> Span | None:
        """A call begins here; None where it is not noted: outside of a model's call, or beyond MAX_CALLS."""
        if self._count >= MAX_CALLS or (key is not None and not self.open):
            return None
        self._count += 1
        span = Span(key, module, self.last())
        (self.open[-1].inside if self.open else self.spans).append(span)
        self.open.append(span)
        return span

    def end(self, span: Span | None, elements: int = 0) -> None:
        """It ends here."""
        if span is not None:
            span.end, span.elements = self.last(), elements
            if span in self.open:
                del self.open[self.open.index(span) :]

    def add(self, spans: list[Span]) -> None:
        """These were called here, and have ended."""
        (self.open[-1].inside if self.open else self.spans).extend(spans)

    def now_in(self, node_of: Callable[[int], int]) -> None:
        """The graph was copied: let what was noted speak of the copy's nodes."""
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
        """Something of ours has: of this graph nothing is shown."""
        ours(error, "a captured graph is not shown")
        self.why_not = in_words(error)

    @property
    def position(self) -> _Position:
        """As of a path: where the caller is, whose step is None outside of this capture."""
        return _Position(self if capture_here() is self else None, self.open[-1].key if self.open else None)

    def start_brick(self, brick: Hashable, /) -> Span | None:
        """As of a path: what is called begins here."""
        return self.begin(brick, None)

    def stop_brick(self, span: Span | None, elements: int, failed: bool = False) -> None:
        """As of a path."""
        self.end(span, elements)


class _Position:
    __slots__ = ("key", "scope", "step")

    def __init__(self, step: Capture | None, key: Hashable) -> None:
        self.step = step
        self.key = key
        self.scope = self


captures: dict[int, Capture] = {}  # by thread


def capture_here() -> Capture | None:
    """The capture of the calling thread."""
    return captures.get(get_ident()) if captures else None
