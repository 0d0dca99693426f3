"""The messages about an engine that serves requests: its requests, its load, and the parts of its time.

Times are in ns, on the clock of the records.
"""

from __future__ import annotations

from dataclasses import dataclass

from cbtop.protocol.attributes import MAX_QUANTITY
from cbtop.protocol.training_messages import MAX_STEP_PARTS, PartTime

MAX_SERVED = 256  # at most this many requests are kept; a new request replaces the oldest one
MAX_LOADS = 256  # at most this many loads are kept; a new load replaces the oldest one
MAX_ITERATIONS = 256  # iterations of an EngineTimes
MAX_LATENCIES = 4096  # at most this many latencies of each kind in an EngineTimes
FIRST_TOKEN = "first token"  # time from the arrival of a request to its first token
BETWEEN_TOKENS = "between tokens"  # time between two outputs of a request


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """One request. A later message with the same `number` replaces it.

    - `number` counts the requests of the process from 0.
    - `name` is the id that the engine gave it.
    - `arrived_ns` is the time when the engine's front end received the request. The other times are 0 until the event
      has happened. `first_token_ns` stays 0 if the request ended without a token.
    - `cached_tokens` of the prompt were found in the prefix cache.
    - `reason` is the engine's word for why the request ended.
    """

    number: int
    name: str
    arrived_ns: int
    scheduled_ns: int = 0
    first_token_ns: int = 0
    ended_ns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    reason: str = ""

    def __post_init__(self) -> None:
        known = [ns for ns in (self.arrived_ns, self.scheduled_ns, self.first_token_ns, self.ended_ns) if ns]
        if not self.arrived_ns or known != sorted(known) or not 0 < known[0] <= known[-1] < MAX_QUANTITY:
            raise ValueError(f"request {self.number}: its moments are {known} ns; expected them in order")
        counts = self.number, self.prompt_tokens, self.cached_tokens, self.output_tokens, self.preemptions
        if not 0 <= min(counts) <= max(counts) < MAX_QUANTITY:
            raise ValueError(f"request {self.number}: its counts are {counts}")


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The requests in an engine and the use of its KV cache at one moment. `number` counts these messages from 0.

    `cache_percent` is the share of the cache's blocks that are in use, or None if unknown.
    """

    number: int
    at_ns: int
    running: int
    waiting: int
    cache_percent: float | None = None

    def __post_init__(self) -> None:
        counts = self.number, self.at_ns, self.running, self.waiting
        if not 0 <= min(counts) <= max(counts) < MAX_QUANTITY:
            raise ValueError(f"load {self.number}: {self.running} requests run, {self.waiting} wait")
        if self.cache_percent is not None and not 0 <= self.cache_percent <= 100:
            raise ValueError(f"load {self.number}: {self.cache_percent} % of the cache are in use")


@dataclass(frozen=True, slots=True)
class Latencies:
    """Quantiles of the latest `measured` latencies of one kind: FIRST_TOKEN or BETWEEN_TOKENS."""

    name: str
    measured: int
    p50_ns: int
    p99_ns: int

    def __post_init__(self) -> None:
        if not 1 <= self.measured <= MAX_LATENCIES or not 0 <= self.p50_ns <= self.p99_ns < MAX_QUANTITY:
            raise ValueError(f"{self.measured} times of {self.name!r}: p50 {self.p50_ns} ns, p99 {self.p99_ns} ns")


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """The times of an engine: the parts of its newest `iterations` iterations, and its latencies. Replaces the
    previous message.

    An iteration begins when the iteration before it ends, and ends with the tokens of a step. The parts of an
    iteration add up to its time. Since the process began, `ended` requests have ended, and requests were stopped
    `preemptions` times to free the KV cache.
    """

    engine: str
    iterations: int
    wall_ns: int
    parts: tuple[PartTime, ...]
    ended: int
    latencies: tuple[Latencies, ...]
    preemptions: int = 0

    def __post_init__(self) -> None:
        counts = self.ended, self.preemptions
        if not 1 <= self.iterations <= MAX_ITERATIONS or not 0 <= min(counts) <= max(counts) < MAX_QUANTITY:
            raise ValueError(f"{self.iterations} iterations, {counts} requests; expected up to {MAX_ITERATIONS}")
        if len(self.parts) > MAX_STEP_PARTS or len({part.name for part in self.parts}) < len(self.parts):
            raise ValueError(f"{len(self.parts)} parts of an engine; expected up to {MAX_STEP_PARTS}, named once")
        if len({kind.name for kind in self.latencies}) < len(self.latencies):
            raise ValueError(f"{len(self.latencies)} kinds of latencies; expected each once")
        if not self.wall_ns or sum(part.sum_ns for part in self.parts) != self.wall_ns:
            raise ValueError(f"the parts of an engine do not add up to {self.wall_ns} ns")


@dataclass(frozen=True, slots=True)
class EngineWorker:
    """Says that the process `engine_pid` has started this process to run a model. Both have the same pid namespace.

    If this process has no engine, its engine is the one in the process `engine_pid`.
    """

    engine_pid: int

    def __post_init__(self) -> None:
        if not 0 < self.engine_pid < MAX_QUANTITY:
            raise ValueError(f"an engine in process {self.engine_pid}")


@dataclass(frozen=True, slots=True)
class EngineQueue:
    """The schedules of an engine after which requests still waited for `reason` (see QueueReason).

    `running` and `waiting` are sums over these schedules: the requests that ran, and the requests that waited.
    `cache_percent` is the mean use of the KV cache, or None if unknown.
    """

    reason: str
    schedules: int
    running: int
    waiting: int
    cache_percent: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.schedules <= min(MAX_ITERATIONS, self.waiting) or not 0 <= self.running < MAX_QUANTITY:
            raise ValueError(f"queue {self.reason!r}: {self.schedules} schedules, {self.running} requests ran")
        if self.waiting >= MAX_QUANTITY:
            raise ValueError(f"queue {self.reason!r}: {self.waiting} requests waited")
        if self.cache_percent is not None and not 0 <= self.cache_percent <= 100:
            raise ValueError(f"queue {self.reason!r}: {self.cache_percent} % of the cache are in use")


@dataclass(frozen=True, slots=True)
class EngineSchedules:
    """The newest `schedules` schedules of an engine that ran requests. Replaces the previous message.

    They ran `requests` requests in total, and stopped some `preemptions` times to free the KV cache. At most
    `max_running` requests run at a time (None: unknown). `queues` has one entry for each reason for which requests
    waited.
    """

    schedules: int
    requests: int
    preemptions: int
    max_running: int | None = None
    queues: tuple[EngineQueue, ...] = ()

    def __post_init__(self) -> None:
        counts = self.requests, self.preemptions, self.max_running or 0
        if not 1 <= self.schedules <= MAX_ITERATIONS or not 0 <= min(counts) <= max(counts) < MAX_QUANTITY:
            raise ValueError(f"{self.schedules} schedules; expected up to {MAX_ITERATIONS}, with {counts} >= 0")
        if len({queue.reason for queue in self.queues}) < len(self.queues) or self.schedules < sum(
            queue.schedules for queue in self.queues
        ):
            raise ValueError(f"{len(self.queues)} queues; expected each reason once, in {self.schedules} schedules")


ServingMessage = ServedRequest | EngineLoad | EngineTimes | EngineWorker | EngineSchedules
