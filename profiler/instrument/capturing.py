"""Records which calls of modules and functions launch which nodes of a CUDA graph, while the graph is captured.

Nothing is timed, because the device runs nothing during a capture. A capture belongs to one thread.

A kernel belongs to the innermost call around its launch. If this is the call of a layer, a model or a module with
children, the kernel belongs to the module's own operations. These are a brick next to the bricks of the module's
children.
"""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cbtop.profiler.definitions import BrickDefinition, OwnOperations, own_operations
from cbtop.profiler.instrument.trouble import in_words, log_own_error
from cbtop.protocol.vocabulary import BrickCategory

if TYPE_CHECKING:
    from torch import nn

    from cbtop.profiler.instrument.phases import Call

MAX_CALLS = 20_000
#: The brick for kernels that no module's `forward` launched.
OTHER = BrickDefinition("Other kernels", BrickCategory.OTHER, backend="torch on cuda", label="between bricks")

Keys = tuple[Hashable, ...]  # keys of nested calls, outermost first; may begin with the key of the step or without it

Mark = Any  # returned by `begin` and passed to `end`; its type depends on the class
Last = list[int] | None  # the nodes that the next captured node will depend on; None if the driver does not tell


# Calls are compared by identity, because comparing all fields for `in` would be slow.
@dataclass(slots=True, eq=False)
class CapturedCall:
    """A call during a capture, from the graph node `begin` to `end`. `inside` are the calls that this call made."""

    key: Hashable
    module: nn.Module | None  # the module that was called; None for a function
    begin: Last
    end: Last = None
    elements: int = 0
    inside: list[CapturedCall] = field(default_factory=list)
    own: OwnOperations | None = None  # the brick of the model's own operations; only for the call of a model


class Capture:
    """A CUDA graph while the host captures it. Wrapped functions call its methods in place of a `Path`'s."""

    def __init__(self, last: Callable[[], Last]) -> None:
        self.last = last  # a function that returns the nodes that the next captured node will depend on
        self.ended: Callable[[], None] = lambda: None  # a function that is called when the capture has ended
        self.steps: Any = None  # the ModelSteps of the model that runs in this capture
        self.calls: list[Call] = []  # descriptions of the calls of the captured model
        self.spans: list[CapturedCall] = []
        # The GraphFlags of the captured calls, which the guard reads; None without a guard.
        self.guarded: list[Any] = []
        self.why_not = ""  # the reason why this graph cannot be timed correctly, or ""
        self.open: list[CapturedCall] = []  # calls that have begun and not ended, outermost first
        self._count = 0
        # the brick for the own operations of the model that is called next
        self.model_own: OwnOperations | None = None

    def is_in_call_of(self, steps: object) -> bool:
        """Whether a call of the model that belongs to `steps` is running."""
        return self.steps is steps and bool(self.open)

    def begin_model(self, steps: Any, call: Call) -> Mark:
        """Begin the call of a model. `call` describes it."""
        if self.steps not in (None, steps):
            self.why_not = "two models are called in it"
        self.steps = steps
        self.calls.append(call)
        self.model_own = steps.own
        return self.begin(None, None)

    def begin(self, key: Hashable, module: nn.Module | None) -> Mark:
        """Begin a call of `module`, or of a function if `module` is None.

        Returns None if no model is being called, or after MAX_CALLS calls.
        """
        if self._count >= MAX_CALLS or (key is not None and not self.open):
            return None
        self._count += 1
        span = CapturedCall(key, module, self.last(), own=self.model_own if key is None else None)
        (self.open[-1].inside if self.open else self.spans).append(span)
        self.open.append(span)
        return span

    def returned(self, span: Mark, result: Any) -> None:
        """The call `span` has returned `result`. Does nothing here, but a subclass may override it."""

    def end(self, span: Mark, elements: int = 0) -> None:
        """End the call `span`, which `begin` returned."""
        if span is not None:
            span.end, span.elements = self.last(), elements
            if span in self.open:
                del self.open[self.open.index(span) :]

    def add(self, spans: list[CapturedCall]) -> None:
        """Add finished calls to the innermost running call."""
        (self.open[-1].inside if self.open else self.spans).extend(spans)

    def now_in(self, node_of: Callable[[int], int]) -> None:
        """Replace all stored nodes by their copies, because the graph was copied. `node_of` returns the copy of a
        node.
        """
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
        """Log an error of cbtop. This graph will not be timed."""
        log_own_error(error, "a captured graph is not shown")
        self.why_not = in_words(error)

    @property
    def position(self) -> _Position:
        """The caller's position among the calls, like `Path.position`. Its step is None outside of this capture."""
        return _Position(self if capture_here() is self else None, self.innermost)

    @property
    def innermost(self) -> Hashable:
        """The key of the innermost call that has not ended, or None."""
        return self.open[-1].key if self.open else None

    def start_brick(self, brick: Hashable, /) -> Mark:
        """Begin a call during a capture. Takes the same arguments as `Path.start_brick`."""
        return self.begin(brick, None)

    def stop_brick(self, span: Mark, elements: int, failed: bool = False) -> None:
        """End a call during a capture. Takes the same arguments as `Path.stop_brick`."""
        self.end(span, elements)


class _Position:
    __slots__ = ("key", "scope", "step")

    def __init__(self, step: Capture | None, key: Hashable) -> None:
        self.step = step
        self.key = key
        self.scope = self


def keys_inside(around: Keys, key: Hashable) -> Keys:
    """Return the keys of a call that runs inside the call with the keys `around`.

    `key` is the call's own key, or None for the call of a model. Own operations contain no calls: if `around` ends
    with them, they are left out of the result.
    """
    if around and isinstance(around[-1], OwnOperations):
        around = around[:-1]
    return around if key is None else (*around, key)


def place(keys: Keys, model_own: OwnOperations | None = None) -> Keys:
    """Return the keys of the brick that the kernels of the innermost call in `keys` are counted for.

    `model_own` is the brick for kernels of the model itself.
    """
    if keys and not isinstance(keys[-1], tuple):
        return keys
    own = own_operations(keys[-1]) if keys else None
    return (*keys, own or model_own or OTHER)


captures: dict[int, Capture] = {}  # running captures, by id of the thread
# Id of a thread -> the ModelSteps and the call, for threads in which an engine makes a run without requests. None: do
# not time graphs captured in this run.
engine_runs: dict[int, tuple[Any, Call] | None] = {}


def capture_here() -> Capture | None:
    """Return the running capture of the calling thread, or None."""
    return captures.get(get_ident()) if captures else None
