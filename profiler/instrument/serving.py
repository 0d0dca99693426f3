"""Follows the requests of an engine, and where the engine's time goes between two steps of its model.

Rules
- The engine's file in this folder calls these methods. This file knows no engine.
- An iteration ends when the tokens of a step are known. The time of one thread is divided into parts (EnginePart)
  without gaps or overlap. cbtop's own time is left out.
- A request's first token comes when the engine's scheduler gets it. If the engine sends tokens to another process,
  its user gets the token later.
- Announcements are limited: each request once at its end, everything else once a second. The load is also announced
  when new requests run, because a step of long prompts may take a second.
- A request is steady while each iteration gives it one token. Steady requests are counted together, because a loop
  over 256 requests took 0.2 ms of each step.
"""

from __future__ import annotations

import statistics
import weakref
from _thread import get_ident
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol import clock
from cbtop.protocol.codec import MAX_NAME_CHARS
from cbtop.protocol.messages import CatalogMessage
from cbtop.protocol.serving_messages import (
    BETWEEN_TOKENS,
    FIRST_TOKEN,
    MAX_ITERATIONS,
    MAX_LATENCIES,
    EngineLoad,
    EngineQueue,
    EngineSchedules,
    EngineTimes,
    Latencies,
    ServedRequest,
)
from cbtop.protocol.training_messages import PartTime
from cbtop.protocol.vocabulary import EnginePart

TELL_NS = 1_000_000_000  # interval between two announcements of times and load
LOAD_NS = 100_000_000  # shortest interval between two announcements of the load because new requests run
MAX_TOLD = 64  # at most this many running requests in one announcement
MAX_OPEN = 65_536  # follow at most this many requests at a time, and ignore the others
# The positions of the parts in EnginePart. A dict with its members as keys takes ten times as long.
WAITING, SCHEDULER, MODEL, OUTPUTS, DETOKENISE, HOST = range(len(EnginePart))
# Returns the running requests, the waiting requests, and the percentage of the cache in use.
LoadOf = Callable[[], tuple[int, int, float | None]]


class Schedule(NamedTuple):
    """A decision of the scheduler: how many requests run, how many were stopped, and how many still wait.

    `reason` says why they wait (see QueueReason), and `cache_percent` the use of the KV cache then.
    """

    running: int
    preempted: int
    waiting: int = 0
    reason: str = ""
    cache_percent: float | None = None


@dataclass(slots=True)
class OpenRequest:
    """A request that has not ended."""

    number: int
    name: str
    arrived_ns: int
    prompt_tokens: int
    scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    is_told: bool = False  # whether this request was announced since it last changed

    def said(self, ended_ns: int = 0, reason: str = "") -> ServedRequest:
        return ServedRequest(
            self.number,
            self.name,
            self.arrived_ns,
            self.scheduled_ns,
            self.first_token_ns,
            ended_ns,
            self.prompt_tokens,
            self.cached_tokens,
            self.output_tokens,
            self.preemptions,
            reason[:MAX_NAME_CHARS],
        )


class ServingLog:
    """The requests and iterations of the engine called `engine`, which are in one process and one thread.

    An engine without requests may go on in a new thread.

    `announce` gets each message. `load_of` reads the load before it is announced.
    """

    def __init__(
        self,
        engine: str,
        announce: Callable[[CatalogMessage], None],
        load_of: LoadOf,
        clock_ns: Callable[[], int] = clock.perf_counter_ns,
    ) -> None:
        self._engine, self._announce, self._load_of, self._now_ns = engine, announce, load_of, clock_ns
        self._thread = 0
        self._requests: dict[str, OpenRequest] = {}
        self._scheduled: set[str] = set()  # the names in `_requests` that were scheduled
        # Steady requests -> the value of `_steady_outputs` when they became steady. Their newest tokens came at
        # `_steady_ns`.
        self._steady: dict[str, int] = {}
        self._steady_outputs = self._steady_ns = 0
        self._arrived = self._ended = self._preempted = self._loads = 0
        self._part, self._since_ns = WAITING, 0
        self._parts_ns = [0] * len(EnginePart)  # of the running iteration
        self._iterations: deque[list[int]] = deque(maxlen=MAX_ITERATIONS)
        self._max_running: int | None = None
        self._schedules: deque[Schedule] = deque(maxlen=MAX_ITERATIONS)
        self._first_token_ns: deque[int] = deque(maxlen=MAX_LATENCIES)
        self._between_ns: deque[int] = deque(maxlen=MAX_LATENCIES)
        self._told_ns = self._load_told_ns = 0
        self._is_told_idle = False  # whether the newest announcement says that no request is in the engine
        self._is_untold = False  # whether an iteration has ended since the last announcement

    def begins(self, max_running: int) -> None:
        """Follow a new scheduler, which runs at most `max_running` requests at a time."""
        self._max_running = max_running
        self._schedules.clear()

    @property
    def is_idle(self) -> bool:
        """Whether no request is in the engine."""
        return not self._requests

    def follows(self, name: str) -> bool:
        """Return whether the request `name` has arrived and not ended."""
        return name in self._requests

    def unscheduled(self, names: Iterable[str]) -> set[str]:
        """Return those of `names` that have not arrived or were never scheduled."""
        return set(names) - self._scheduled

    def names(self) -> list[str]:
        """Return the names of all requests that have not ended."""
        return list(self._requests)

    def enter(self, part: int) -> int:
        """Begin `part` (a position in EnginePart). Returns the part that ran before, for `leave`."""
        before = self._part
        if get_ident() == self._thread:
            now_ns = self._now_ns()
            self._parts_ns[before] += now_ns - self._since_ns
            self._since_ns, self._part = now_ns, part
        return before

    def leave(self, before: int) -> None:
        """End the running part, and go on with the part `before`.

        If that part is waiting or idle, it depends on whether there are requests.
        """
        if before in (WAITING, HOST):
            before = HOST if self._requests else WAITING
        self.enter(before)

    def arrived(self, name: str, ago_ns: int, prompt_tokens: int) -> None:
        """Begin a request that arrived `ago_ns` ago."""
        now_ns = self._now_ns()
        thread = get_ident()
        if self._thread != thread and self.is_idle:  # the first request, or an engine that began a new thread
            self._told_ns, self._load_told_ns = self._told_ns if self._thread else now_ns, now_ns
            self._thread, self._since_ns, self._part = thread, now_ns, WAITING
        if len(self._requests) >= MAX_OPEN or name in self._requests:
            return
        arrived_ns = max(1, now_ns - max(0, ago_ns))
        self._requests[name] = OpenRequest(self._arrived, name[:MAX_NAME_CHARS], arrived_ns, prompt_tokens)
        self._arrived += 1
        if self._part == WAITING:
            self.enter(HOST)

    def scheduled(self, cached_tokens: Iterable[tuple[str, int]], preempted: Iterable[str]) -> None:
        """Store which requests a new schedule runs for the first time, and how many tokens of their prompts are
        cached.

        Requests in `preempted` were stopped to free memory.
        """
        now_ns, is_new = self._now_ns(), False
        for name, cached in cached_tokens:
            request = self._requests.get(name)
            if request is not None and not request.scheduled_ns:
                is_new = True
                request.scheduled_ns, request.cached_tokens, request.is_told = now_ns, cached, False
                self._scheduled.add(name)
        for name in preempted:
            if name in self._requests:
                self._requests[name].preemptions += 1
                self._preempted += 1
        if is_new and (self._is_told_idle or now_ns - self._load_told_ns >= LOAD_NS):
            self._tell_load(now_ns)

    def ran(self, schedule: Schedule) -> None:
        """Store a schedule that runs requests."""
        self._schedules.append(schedule)

    def outputs(self, names: Sequence[str], tokens: Sequence[int], ended: Iterable[tuple[str, object]] = ()) -> None:
        """End an iteration that gave the requests `names` new `tokens`. `ended` has ended ones, and the reason."""
        now_ns = self._now_ns()
        current = set(names)
        if tokens.count(1) == len(tokens) == len(current):
            self._settle(self._steady.keys() - current)
            self._between_ns.extend(repeat(now_ns - self._steady_ns, len(self._steady)))
            self._steady_outputs += 1
            for name in current - self._steady.keys():
                if self._got(name, 1, now_ns):
                    self._steady[name] = self._steady_outputs
            self._steady_ns = now_ns
        else:
            self._settle(list(self._steady))
            for name, count in zip(names, tokens, strict=True):
                self._got(name, count, now_ns)
        for name, reason in ended:
            self.ended(name, str(reason))
        self._end_iteration()

    def _got(self, name: str, tokens: int, now_ns: int) -> bool:
        """Give a request its new tokens. Returns whether the request is followed."""
        request = self._requests.get(name)
        if request is None or not tokens:
            return request is not None
        if request.first_token_ns:
            self._between_ns.append(now_ns - request.last_token_ns)
        else:
            request.first_token_ns, request.is_told = now_ns, False
            request.scheduled_ns = request.scheduled_ns or now_ns
            self._scheduled.add(name)
            self._first_token_ns.append(now_ns - request.arrived_ns)
        request.last_token_ns = now_ns
        request.output_tokens += tokens
        return True

    def _settle(self, names: Iterable[str]) -> None:
        """Give each of these requests the tokens that were counted for all steady requests together. They are no
        longer steady.
        """
        for name in names:
            request = self._requests[name]
            request.output_tokens += self._steady_outputs - self._steady.pop(name)
            request.last_token_ns = self._steady_ns

    def ended(self, name: str, reason: str) -> None:
        """End a request, for example because it was aborted."""
        if name in self._steady:
            self._settle((name,))
        request = self._requests.pop(name, None)
        if request is not None:
            self._scheduled.discard(name)
            self._ended += 1
            self._announce(request.said(self._now_ns(), reason))
        if self._part == HOST and not self._requests:
            self.enter(WAITING)

    def tell(self, *, is_last: bool = False) -> None:
        """Announce the load. Once a second, also announce times and running requests."""
        now_ns = self._now_ns()
        is_time = now_ns - self._told_ns >= TELL_NS or is_last
        if not is_time and not self.is_idle:
            return
        self._tell_load(now_ns)
        if is_time:
            self._loads += 1
            self._told_ns = now_ns
            self._tell_times()
            self._tell_schedules()
            self._tell_running()

    def _tell_load(self, now_ns: int) -> None:
        running, waiting, cache_percent = self._load_of()
        self._is_told_idle, self._load_told_ns = not running and not waiting, now_ns
        self._announce(EngineLoad(self._loads, now_ns, running, waiting, cache_percent))

    def _end_iteration(self) -> None:
        self.enter(self._part)
        if any(self._parts_ns):
            self._iterations.append(self._parts_ns)
            self._parts_ns = [0] * len(EnginePart)
            self._is_untold = True
        self.tell()
        self._since_ns = self._now_ns()  # cbtop's own time belongs to no part

    def _tell_times(self) -> None:
        if not self._is_untold:
            return
        self._is_untold = False
        found = []
        for part, each in zip(EnginePart, zip(*self._iterations, strict=True), strict=True):
            if any(each):
                found.append(PartTime(part, sum(each), round(statistics.median(each))))
        wall_ns = sum(part.sum_ns for part in found)
        kept = {FIRST_TOKEN: self._first_token_ns, BETWEEN_TOKENS: self._between_ns}
        latencies = tuple(_latencies(name, times_ns) for name, times_ns in kept.items() if times_ns)
        self._announce(
            EngineTimes(
                self._engine, len(self._iterations), wall_ns, tuple(found), self._ended, latencies, self._preempted
            )
        )

    def _tell_schedules(self) -> None:
        if not self._schedules:
            return
        queues: dict[str, list[Schedule]] = {}
        for one in self._schedules:
            if one.waiting:
                queues.setdefault(one.reason, []).append(one)
        self._announce(
            EngineSchedules(
                len(self._schedules),
                sum(one.running for one in self._schedules),
                sum(one.preempted for one in self._schedules),
                self._max_running,
                tuple(_queue(reason, found) for reason, found in queues.items()),
            )
        )

    def _tell_running(self) -> None:
        changed = [name for name, request in self._requests.items() if not request.is_told][:MAX_TOLD]
        self._settle([name for name in changed if name in self._steady])
        for name in changed:
            self._requests[name].is_told = True
            self._announce(self._requests[name].said())


def _queue(reason: str, found: list[Schedule]) -> EngineQueue:
    uses = [one.cache_percent for one in found if one.cache_percent is not None]
    return EngineQueue(
        reason,
        len(found),
        sum(one.running for one in found),
        sum(one.waiting for one in found),
        statistics.fmean(uses) if uses else None,
    )


def tell_at_end(profiler: BrickProfiler, log: ServingLog) -> None:
    """Announce the last times of `log` before `profiler` closes its files. Does not keep `log` alive."""
    found = weakref.ref(log)

    def tell_last() -> None:
        log = found()
        if log is not None:
            log.tell(is_last=True)

    recorder = profiler.parts.recorder
    if isinstance(recorder, RingRecorder):
        recorder.before_goodbye(tell_last)


def _latencies(name: str, times_ns: deque[int]) -> Latencies:
    ordered = sorted(times_ns)
    last = len(ordered) - 1
    return Latencies(name, len(ordered), ordered[round(0.5 * last)], ordered[round(0.99 * last)])
