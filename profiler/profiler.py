"""BrickProfiler times bricks inside the profiled process, and writes a record of each into the ring.

Rules
- This module starts no thread, opens no socket and loads no NumPy. All that can grow (files, nodes) is bounded. A
  failure is counted or logged once. Only a wrong argument raises into the host.
- A timing is a record with a node. A node is defined once, under the scope of its first call.
- The profiler's path times bricks on the host's or a device's clock. At every brick, the host calls the path's own
  method, without a wrapper.
"""

from __future__ import annotations

import functools
import logging
import os
import random
import weakref

# From `_thread` instead of `threading`, because gevent replaces `threading.local`.
from _thread import _local as thread_local
from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from cbtop.profiler.analysis.graph.nodes import Function, Layer
from cbtop.profiler.brick_checks import BrickChecks
from cbtop.profiler.clocks import DeviceClock, HostClock
from cbtop.profiler.counts import amount_of_call, shown, whole
from cbtop.profiler.definitions import BrickDefinition
from cbtop.profiler.elapsed import ElapsedClock
from cbtop.profiler.graph_recorder import Brick, GraphRecorder, UsageError, checked
from cbtop.profiler.hot_path import Callbacks
from cbtop.profiler.parts import Parts, ProfilerListener
from cbtop.profiler.path import TimedBlock
from cbtop.profiler.paths import Paths
from cbtop.profiler.pending import MAX_PENDING, HostTime, Pending
from cbtop.profiler.places import Adopted, GraphPlace
from cbtop.profiler.read_back import ReadBack
from cbtop.profiler.recorder import Recorder, RingRecorder
from cbtop.profiler.scopes import Scopes
from cbtop.profiler.steps import ActiveStep, Steps
from cbtop.profiler.timed import timed
from cbtop.protocol import clock
from cbtop.protocol.attributes import Grid, Work
from cbtop.protocol.codec import EncodedNode
from cbtop.protocol.endpoint import parse_endpoint
from cbtop.protocol.messages import CatalogMessage
from cbtop.protocol.ring import FLAG_AMOUNTS, NO_NODE
from cbtop.protocol.signals import reraise_host_error
from cbtop.protocol.vocabulary import BrickCategory, SyncMode, TransferDirection

if TYPE_CHECKING:
    from cbtop.profiler.analysis.brick_stats import BrickStats, CategoryStats
    from cbtop.profiler.analysis.graph.execution_graph import ExecutionGraph
    from cbtop.profiler.session import Report

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

MAX_TURNS = 4096  # a thread counts the steps of at most this many names (see `sample_every`)

_log = logging.getLogger("cbtop")
_profilers: weakref.WeakSet[BrickProfiler] = weakref.WeakSet()


def _unless_it_fails(
    default: Result,
) -> Callable[
    [Callable[Concatenate[BrickProfiler, Arguments], Result]],
    Callable[Concatenate[BrickProfiler, Arguments], Result],
]:
    """Decorate a method to return `default` if cbtop's code fails.

    The failure is logged once and ends recording. A UsageError passes through, because it is the caller's error.
    """

    def guard(
        method: Callable[Concatenate[BrickProfiler, Arguments], Result],
    ) -> Callable[Concatenate[BrickProfiler, Arguments], Result]:
        @functools.wraps(method)
        def guarded(self: BrickProfiler, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            try:
                return method(self, *args, **kwargs)
            except UsageError:
                raise
            except Exception as error:  # noqa: BLE001 - a failed recorder, ring or clock must not stop the host
                self._give_up(error)
                return default

        return guarded

    return guard


class BrickProfiler:
    """Times bricks, layers and steps, and records them for the daemon to show.

    By default, `clock_ns` is the host's monotonic clock, and `recorder` writes this process's ring. With a
    `device_clock`, bricks are timed on its device. Each thread, asyncio or trio task and greenlet has its own
    position in the graph.

    `graph` records work that the caller has timed. `stats` reads the records back. Many methods here only call one of
    these. `parts` is for the instrumentation of models.
    """

    #: Start timing a BrickId, a BrickDefinition or a name: `timer = profiler.start_brick(BrickId.RMS_NORM)`.
    start_brick: Callable[[Hashable], Any]
    #: Record the timed brick and its number of elements: `profiler.stop_brick(timer, elements, failed=False)`.
    stop_brick: Callable[..., None]
    #: Time a block: `with profiler.brick(BrickId.RMS_NORM, elements=4096):`. An exception marks it as failed.
    brick: Callable[..., TimedBlock]
    #: Put a block into layer 3: `with profiler.layer(3):`. A named stack is the second argument: `layer(3,
    #: "encoder")`.
    layer: Callable[..., TimedBlock]

    def __init__(
        self,
        *,
        enabled: bool = True,
        sample_every: int = 1,
        clock_ns: Callable[[], int] = clock.perf_counter_ns,
        recorder: Recorder | None = None,
        device_clock: DeviceClock | None = None,
        sync_mode: SyncMode = SyncMode.DEFERRED,
    ) -> None:
        if not hasattr(sample_every, "__index__") or sample_every < 1:
            raise ValueError(f"sample_every={sample_every!r}; 1 records every step, k every k-th")
        self.sample_every = sample_every
        self._enabled = enabled
        self._ended_why = ""  # why recording ended; "" if it has not
        self._said: set[str] = set()
        self._now_ns = clock_ns
        self._elapsed = ElapsedClock(clock_ns, self._give_up)
        self._turns = thread_local()
        # A separate random generator leaves the host's random numbers as they are.
        self._chance = random.Random()
        self._recorder: Recorder = RingRecorder() if recorder is None else recorder
        self._scopes = Scopes(self._announce_nodes)
        callbacks = Callbacks(
            define=self._scopes.define,
            record=self._hand_over,
            uncounted=self._uncounted,
            amounts=self._amounts,
            give_up=self._give_up,
        )
        self._clock: DeviceClock = HostClock(clock_ns) if device_clock is None else device_clock
        self._pending = Pending(self._clock, callbacks.record)
        self._paths = Paths(
            callbacks, clock_ns, device_clock, sync_mode, self._pending, self._scopes, self._recorder.flush
        )
        self._path = self._paths.own
        self.start_brick, self.stop_brick = self._path.start_brick, self._path.stop_brick
        self.brick, self.layer = self._path.brick, self._path.layer
        show = self._recorder.open if isinstance(self._recorder, RingRecorder) else lambda: None
        self._steps = Steps(self._path, self._scopes, self._is_sampled, self._give_up, self._recorder.flush, show)
        self.graph = GraphRecorder(self._path, callbacks, self._scopes, self.announce)
        self.stats = ReadBack(
            self._recorder, self.graph, self._scopes, clock_ns, sample_every, lambda: self._ended_why, self._paths
        )
        self._checks = BrickChecks(self.announce)
        self.parts = Parts(self._recorder, self._clock, clock_ns, self._scopes, self._paths, self._steps)
        self._set_recording()
        if isinstance(self._recorder, RingRecorder):
            self._recorder.add_listener(
                ProfilerListener(
                    self._path.implementation, self.sample_every, self._paths.host.attach, self.finalize, self._ended
                )
            )
            self._recorder.before_goodbye(self._checks.announce_last)
        _profilers.add(self)

    @property
    def implementation(self) -> str:
        """The hot path that runs at every brick: `compiled` or `python`."""
        return self._path.implementation

    # Each step reads both properties below. attrgetter runs no Python code.
    enabled = property(attrgetter("_enabled"), doc="Whether anything is recorded.")
    recording = property(
        attrgetter("_path.recording"),
        doc="Whether what the caller starts now is timed: not while disabled, nor in a step that is not sampled.",
    )

    def enable(self) -> None:
        """Record from now on. If a failure has ended recording, start again like a new process."""
        if self._ended_why and isinstance(self._recorder, RingRecorder):
            self._recorder.forget()
        self._enabled, self._ended_why = True, ""
        self._set_recording()

    def enable_graph(self) -> None:
        """Record from now on, like `enable`. The graph has no separate switch."""
        self.enable()

    def disable(self) -> None:
        """Stop recording. Bricks that are running now are not recorded."""
        self._enabled = False
        self._set_recording()

    @property
    def sync_mode(self) -> SyncMode:
        """When the profiler waits for the device, see SyncMode."""
        return self._paths.sync_mode

    def set_sync_mode(self, mode: SyncMode) -> None:
        """Set when to wait for the device. First, all deferred records are written."""
        self.finalize()
        self._paths.set_sync_mode(mode)
        self._set_recording()

    @property
    def pending_count(self) -> int:
        """Number of timings that wait for their times from the device."""
        return len(self._pending)

    def finalize(self, end_ns: int | None = None) -> None:
        """Wait for the device once and record all deferred timings, each with its own start and end.

        `end_ns` is for callers of cbtop's predecessor, and changes no timing. A value later than `elapsed_ns` now
        raises ValueError, after the timings are recorded.
        """
        self._finalize()
        if end_ns is not None:
            self._on_host("an end", end_ns)

    @_unless_it_fails(None)
    def _finalize(self) -> None:
        self._paths.settle(True)
        self._pending.finalize()

    def timed(
        self, brick: Brick, elements: int | Callable[Arguments, int] = 1
    ) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
        """Time every call of a function: `@profiler.timed(BrickId.RMS_NORM, elements=lambda x: x.numel())`.

        `elements` is a number or a function of the call's arguments. Raises TypeError for coroutines and generators,
        because other code runs while they wait. Inside these, use `with profiler.brick(...)`.
        """

        return timed(self._path, brick, elements, self._checks, self._evaluate)

    def check(self, definition: BrickDefinition, output: Any, *args: Any, **kwargs: Any) -> None:
        """Run the checks of a definition on `output`, the result of a call with these arguments.

        `timed` does this by itself. After `with profiler.brick(definition):`, call it yourself. Does nothing if the
        step is not recorded, or while the checks have used up their share of the time (brick_checks.py).
        """
        if self.recording and definition.checks and self._checks.is_due(definition):
            self._evaluate(definition, output, args, kwargs)

    @_unless_it_fails(None)
    def _evaluate(
        self, definition: BrickDefinition, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._checks.evaluate(definition, output, args, kwargs)

    @_unless_it_fails(None)
    def reset(self) -> None:
        """Clear the statistics, the graph, the checks, the timings that wait for `finalize`, the epoch and the step
        count.

        Settings and positions stay. The daemon keeps its totals, because they belong to the process.
        """
        self._pending.discard()
        self._paths.discard_kept()
        self._elapsed.forget()
        self._turns = thread_local()
        self._chance = random.Random()  # a separate generator (see __init__), seeded anew
        self._checks.forget()
        self._scopes.dropped = 0
        self.graph.reset()
        self.stats.reset()

    @_unless_it_fails(None)
    def announce(self, message: CatalogMessage) -> None:
        """Announce a fact about this process: its model (Manifest), a Ceiling, a CheckResult or an Activity."""
        self._recorder.announce(message)

    @_unless_it_fails(None)
    def _announce_nodes(self, nodes: Sequence[EncodedNode]) -> None:
        self._recorder.announce_nodes(nodes)

    def close(self, reason: str = "closed") -> None:
        """Stop recording, and send a goodbye. Records can still be read. The interpreter's exit does this, too."""
        self.finalize()
        self.disable()
        self._close_recorder(reason)

    @_unless_it_fails(None)
    def _close_recorder(self, reason: str) -> None:
        self._recorder.close(reason)

    def serve(self, endpoint: str) -> None:
        """Start a daemon for remote viewers at `endpoint` (`tcp://127.0.0.1:5555`), for `cbtop --connect`.

        Viewers on this machine do not need it. The daemon is a separate process, and ends with this one. Returns at
        once. Raises EndpointError if `endpoint` is not an address. If the address is in use or not allowed, the
        daemon says so on stderr.
        """
        from cbtop.profiler.sidecar import start_sidecar

        start_sidecar(parse_endpoint(endpoint))

    def step(self, name: str | None = None, tokens: int = 0, model: str = "") -> ActiveStep:
        """Time one forward pass: `with profiler.step("decode", tokens=1):`. Only here are tokens counted.

        Values that are known only inside the block are set there: `with profiler.step() as step:` … `step.name =
        "decode"`. `model` tells apart the steps of several models. With `sample_every=k`, each thread records the
        bricks of every k-th step of a name. It times the other steps as a whole.
        """
        return ActiveStep(self._steps, checked(name, "step"), tokens, checked(model, "model"))

    def place(self) -> GraphPlace:
        """Return the caller's step, layer and brick, for `adopt` in a different thread or task."""
        return GraphPlace(self._path.position)

    def adopt(self, place: GraphPlace) -> Adopted:
        """Assign the work of this thread or task to the step and layer of `place`: `with profiler.adopt(place):`.

        Its times are added up in a separate node, outside of the step's wall time. A place ends with its step. Work
        that goes on after that is outside of steps.
        """
        if not isinstance(place, GraphPlace):
            raise UsageError(f"a {type(place).__name__} is no place; profiler.place() gives one")
        return Adopted(self._path, self._scopes, self._give_up, place)

    def add_tokens(self, tokens: int) -> None:
        """Add `tokens` to the caller's step, for example if they are known only after the pass.

        Raises RuntimeError outside of a step.
        """
        step: Any = self._path.position.step
        if step is None:
            if self.recording:
                raise RuntimeError("add_tokens outside a step; `with profiler.step(name):` is one forward pass")
            return
        # The sum of 8-bit NumPy integers would overflow.
        step.tokens = whole(step.tokens) + whole(tokens)

    def reset_epoch(self) -> None:
        """Restart `elapsed_ns` at 0."""
        self._elapsed.restart()

    def elapsed_ns(self) -> int:
        """Return the time since `reset_epoch`, or since this method was first called."""
        return self._elapsed.now_ns()

    # --- records of work timed elsewhere, see GraphRecorder --------------------------------------------------------

    @_unless_it_fails(None)
    def record_elapsed(self, brick: Brick, duration_ns: int, elements: int = 1) -> None:
        """Record a brick that took `duration_ns` and ends now.

        The times of two bricks overlap if both are recorded at the end. For a brick that ended earlier, use
        `record_deferred`.
        """
        self.graph.record_elapsed(checked(brick), duration_ns, elements)

    @_unless_it_fails(None)
    def record_deferred(self, brick: Brick, start_ns: int, elements: int = 1, end_ns: int | None = None) -> None:
        """Record a brick at the next `finalize`. It ran from `start_ns` to `end_ns`, two times of `elapsed_ns`.

        Without `end_ns`, it ends when the device reaches this point. Without a device, it ends now. Raises ValueError
        for a time before 0 or later than now.
        """
        if not self.recording:
            return
        key, start_ns = checked(brick), self._on_host("a start", start_ns)
        # Mark the end first: the first use of a place defines its node, which takes up to some milliseconds.
        end = self._clock.mark() if end_ns is None else HostTime(self._on_host("an end", end_ns))
        position = self._path.position
        scope: Any = position.scope.children.get(key) or self._scopes.define(position.scope, key)
        if scope.node < 0:
            self._path.emit(scope, position, HostTime(start_ns), end, elements, position.lane)
            return
        self._pending.defer((scope.node | position.lane, HostTime(start_ns), end, elements))
        if len(self._pending) >= MAX_PENDING:
            self._pending.finalize()

    @_unless_it_fails(None)
    def graph_push_scope(self, scope: Layer | Function) -> None:
        """Enter `scope` and time it. Later records of the caller belong to it."""
        self.graph.push_scope(scope)

    @_unless_it_fails(None)
    def graph_pop_scope(self) -> None:
        """Leave the scope and record its duration. Raises ValueError if the caller has pushed no scope."""
        self.graph.pop_scope()

    @property
    def graph_is_scope_balanced(self) -> bool:
        """Whether the caller has left every scope that it pushed."""
        return self.graph.is_scope_balanced

    @_unless_it_fails(NO_NODE)
    def graph_record_brick(self, brick: Brick, duration_ns: int, elements: int = 1) -> int:
        """Record a brick that took `duration_ns` and ends now. Kernels recorded after it are its launches."""
        return self.graph.record_brick(checked(brick), duration_ns, elements)

    @_unless_it_fails(NO_NODE)
    def graph_record_kernel(
        self,
        name: str,
        ptx_hash: int | None = None,
        grid: Grid | None = None,
        block: Grid | None = None,
        shared_memory_bytes: int | None = None,
        duration_ns: int | None = None,
        backend: str = "",
        elements: int = 1,
    ) -> int:
        """Record a kernel launch of the running brick, or of the last brick of this scope if none is running."""
        return self.graph.record_kernel(
            name, ptx_hash, grid, block, shared_memory_bytes, duration_ns, backend, elements
        )

    @_unless_it_fails(NO_NODE)
    def graph_record_transfer(
        self,
        source: str,
        destination: str,
        size_bytes: int,
        direction: TransferDirection,
        duration_ns: int | None = None,
        stream: int | None = None,
    ) -> int:
        """Record a copy between memories. Without `duration_ns`, its time is n/a.

        On a `stream`, a copy counts as parallel to other work of its scope. Call `graph_add_dependency` for each node
        that needs the copied data.
        """
        return self.graph.record_transfer(source, destination, size_bytes, direction, duration_ns, stream)

    @_unless_it_fails(NO_NODE)
    def graph_record_poll(self, name: str, duration_ns: int, *, is_done: bool) -> int:
        """Record one poll of the async task `name`."""
        return self.graph.record_poll(name, duration_ns, is_done=is_done)

    @_unless_it_fails(None)
    def graph_add_dependency(self, first: int, then: int) -> None:
        """Declare that the node `then` cannot start before the node `first` has ended."""
        self.graph.add_dependency(first, then)

    # --- statistics of the records, see ReadBack -------------------------------------------------------------------

    def report(self, window_s: float | None = None) -> Report:
        """Return a report on all records, or on the last `window_s` seconds. `print` shows the report as text."""
        return self.stats.report(window_s)

    def stats_for(self, brick: Brick) -> BrickStats | None:
        """Return the statistics of one brick over all layers, or None if the brick did not run."""
        return self.stats.stats_for(brick)

    def category_stats(self) -> dict[BrickCategory, CategoryStats]:
        """Return the statistics of each category. If a category did not run, its statistics are zeros."""
        return self.stats.category_stats()

    @property
    def total_ns(self) -> int:
        """The time in ns spent in bricks. No nanosecond counts twice."""
        return self.stats.total_ns

    @property
    def total_tokens(self) -> int:
        """The number of tokens of all recorded and plain steps."""
        return self.stats.total_tokens

    @property
    def tokens_per_sec(self) -> float | None:
        """Tokens per wall-clock second from the first step's start to the last step's end. None without steps."""
        return self.stats.tokens_per_sec

    def execution_graph(self) -> ExecutionGraph:
        """Return the graph of this process, with the mean time of each node and with the dependencies."""
        return self.stats.execution_graph()

    def graph_to_dot(self) -> str:
        """Return `execution_graph()` in the language of Graphviz."""
        return self.execution_graph().to_dot()

    # ------------------------------------------------------------------------------------------------------------

    def _set_recording(self) -> None:
        on = self._enabled and not self._ended_why and self._paths.sync_mode is not SyncMode.NONE
        self._steps.turn(on)
        self._paths.set_recording(on)

    def _is_replay_sampled(self, key: tuple[object, ...]) -> bool:
        """Return whether to record the replay of a captured graph that begins now."""
        return self._is_sampled(key)

    def _is_sampled(self, key: object) -> bool:
        """Return whether to record this thread's next step of this `key`: the first and then every k-th."""
        if self.sample_every <= 1 or not self._enabled:
            return True
        try:
            turns: dict[object, int] = self._turns.turns
        except AttributeError:
            turns = self._turns.turns = {}
        # A host may use a new name for each request, so the number of names is bounded.
        if len(turns) >= MAX_TURNS:
            turns.clear()
        # Steps without a name are chosen at random. Taking turns might always skip the same kind of step.
        if key is None:
            return self._chance.random() * self.sample_every < 1
        turn = turns.get(key, 0)
        turns[key] = (turn + 1) % self.sample_every
        return turn == 0

    def _on_host(self, what: str, elapsed_ns: int) -> int:
        return self._elapsed.on_host(what, elapsed_ns, lambda: bool(self._ended_why))

    def _hand_over(self, tag: int, start_ns: int, end_ns: int, elements: int) -> None:
        self._recorder.record(tag, start_ns, end_ns, elements)

    def _amounts(self, scope: Any, elements: Any) -> None:
        """Record the FLOP and bytes of a call. A function of the brick's definition computes them from `elements`."""
        try:
            work: Work = scope.work(elements)
            flops, bytes_ = (amount_of_call(amount(1, elements)) for amount in (work.flops, work.bytes))
        except Exception as error:  # noqa: BLE001 - a host's function failed: the work of these calls is unknown
            reraise_host_error(error)
            name, why = getattr(scope.key, "name", scope.key), f"{type(error).__name__}: {error}"
            self._say_once("work", "the work of some calls of %s is unknown: %s", name, why)
        else:
            try:
                self._hand_over(scope.node | FLAG_AMOUNTS, flops, bytes_, 0)
            except Exception as error:  # noqa: BLE001 - a recorder that fails must not reach the host
                self._give_up(error)

    def _uncounted(self, elements: object) -> None:
        what = "%s is no number of elements; such calls are timed, and counted apart"
        self._say_once("elements", what, shown(elements))

    def _say_once(self, about: str, what: str, *arguments: object) -> None:
        if about not in self._said:
            self._said.add(about)
            _log.warning(f"cbtop: {what}", *arguments)

    def _give_up(self, error: Exception) -> None:
        """End recording, and log the reason once. Viewers see the error, too, and the host continues.

        An exception that a signal handler of the host raised in our code is raised again.
        """
        try:
            reraise_host_error(error)
        except BaseException:
            self._set_recording()
            raise
        if isinstance(error, RecursionError):
            self._set_recording()  # the host's stack is full, so only this brick is lost
            return
        if self._ended_why:
            return
        why = f"{type(error).__name__}: {error}"
        self._ended(why)
        self._say_once(why, "nothing is recorded from here on in process %d: %s", os.getpid(), why)
        self._close_recorder(f"recording ended: {why}")

    def _ended(self, why: str) -> None:
        self._ended_why = why
        self._set_recording()

    def _after_fork(self) -> None:
        """In a forked child, start recording anew, outside of the parent's bricks and steps."""
        self._scopes.after_fork()
        self._pending.after_fork()
        self._checks.after_fork()  # the child has no results, and no thread that runs checks
        self._ended_why = ""
        try:
            self._steps.after_fork()
            for path in self._paths:
                path.after_fork()
        except Exception as error:  # noqa: BLE001 - the host's clock may raise any error
            self._give_up(error)
        self._set_recording()


def _after_fork() -> None:
    for profiler in list(_profilers):
        profiler._after_fork()


os.register_at_fork(after_in_child=_after_fork)
