"""The requests and iterations of an engine, on a clock that the tests move."""

from __future__ import annotations

import itertools
import random
import threading

import pytest

from cbtop.profiler.instrument import serving
from cbtop.profiler.instrument.serving import ServingLog
from cbtop.protocol.messages import CatalogMessage
from cbtop.protocol.serving_messages import EngineLoad, EngineTimes, Latencies, ServedRequest

MS = 1_000_000


class Engine:
    """An engine whose clock only moves by `runs`, and which announces after each iteration."""

    def __init__(self, load: tuple[int, int, float | None] = (2, 1, 25.0)) -> None:
        self.now_ns = 1_000 * MS
        self.said: list[CatalogMessage] = []
        self.log = ServingLog("vLLM", self.said.append, lambda: load, lambda: self.now_ns)

    def runs(self, part: int, ms: float) -> None:
        before = self.log.enter(part)
        self.passes(ms)
        self.log.leave(before)

    def passes(self, ms: float) -> None:
        self.now_ns += round(ms * MS)

    def step(self, *outputs: tuple[str, int, str | None]) -> None:
        """Take 1 ms to schedule, 5 ms for the model, 2 ms for updates, and 3 ms until the next step."""
        before = self.log.enter(serving.MODEL)
        self.runs(serving.SCHEDULER, 1)
        self.log.scheduled([(name, 16) for name, _, _ in outputs], ())
        self.passes(5)
        inner = self.log.enter(serving.OUTPUTS)
        self.passes(2)
        ended = [(name, reason) for name, _, reason in outputs if reason is not None]
        self.log.outputs([name for name, _, _ in outputs], [tokens for _, tokens, _ in outputs], ended)
        self.log.leave(inner)
        self.log.leave(before)
        self.passes(3)

    def all(self, kind: type[CatalogMessage]) -> list[CatalogMessage]:
        return [message for message in self.said if isinstance(message, kind)]

    def times(self) -> EngineTimes:
        self.log.tell(is_last=True)
        found = self.all(EngineTimes)[-1]
        assert isinstance(found, EngineTimes)
        return found


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_the_parts_of_an_iteration_add_up_to_the_time_of_the_thread(engine: Engine) -> None:
    engine.log.arrived("a", 0, 32)
    begun_ns = engine.now_ns
    engine.step(("a", 1, None))
    engine.step(("a", 1, "length"))
    engine.passes(40)
    engine.log.arrived("b", 0, 32)
    engine.step(("b", 1, "stop"))
    times = engine.times()
    assert {part.name: part.sum_ns / MS for part in times.parts} == {
        "waiting for requests": 43,
        "scheduler": 3,
        "model": 15,
        "request updates": 6,
        "between steps": 3,
    }
    assert times.wall_ns == engine.now_ns - 3 * MS - begun_ns
    assert (times.iterations, times.ended) == (3, 2)


def test_latencies_are_from_arrival_to_token_and_between_tokens(engine: Engine) -> None:
    engine.log.arrived("a", 4 * MS, 32)  # the request arrived 4 ms before the engine got it
    engine.step(("a", 1, None))
    engine.step(("a", 1, None))
    engine.step(("a", 2, "length"))
    assert engine.times().latencies == (
        Latencies("first token", 1, 12 * MS, 12 * MS),
        Latencies("between tokens", 2, 11 * MS, 11 * MS),
    )


def test_a_request_is_announced_with_all_its_moments_when_it_ends(engine: Engine) -> None:
    begun_ns = engine.now_ns
    engine.log.arrived("a", 0, 32)
    engine.step(("a", 1, None))
    engine.log.scheduled((), ["a"])
    engine.step(("a", 1, "stop"))
    assert engine.all(ServedRequest) == [
        ServedRequest(0, "a", begun_ns, begun_ns + MS, begun_ns + 8 * MS, begun_ns + 19 * MS, 32, 16, 2, 1, "stop")
    ]


def test_an_aborted_request_ends_without_a_token(engine: Engine) -> None:
    engine.log.arrived("a", 0, 32)
    engine.passes(5)
    engine.log.ended("a", "abort")
    (request,) = engine.all(ServedRequest)
    assert isinstance(request, ServedRequest)
    assert (request.first_token_ns, request.ended_ns, request.reason) == (0, engine.now_ns, "abort")
    assert engine.log.is_idle


def test_running_requests_and_load_are_announced_once_a_second(engine: Engine) -> None:
    engine.log.arrived("a", 0, 32)
    for _ in range(300):  # 3.3 seconds
        engine.step(("a", 1, None))
    running = engine.all(ServedRequest)
    assert [message.output_tokens for message in running if isinstance(message, ServedRequest)] == [92]
    loads = engine.all(EngineLoad)
    assert [(one.number, one.running, one.waiting) for one in loads if isinstance(one, EngineLoad)] == [
        (0, 2, 1),
        (1, 2, 1),
        (2, 2, 1),
    ]
    assert len(engine.all(EngineTimes)) == 3


def test_an_engine_without_requests_announces_its_load_at_once() -> None:
    engine = Engine(load=(0, 0, 0.0))
    engine.log.arrived("a", 0, 32)
    engine.step(("a", 1, "stop"))
    (load,) = engine.all(EngineLoad)
    assert isinstance(load, EngineLoad)
    assert (load.running, load.waiting, load.cache_percent) == (0, 0, 0.0)


def test_another_thread_does_not_change_the_parts_of_the_engine(engine: Engine) -> None:
    engine.log.arrived("a", 0, 32)
    engine.log.enter(serving.MODEL)
    engine.passes(5)
    thread = threading.Thread(target=lambda: engine.log.enter(serving.DETOKENISE))
    thread.start()
    thread.join()
    engine.log.outputs(["a"], [1])
    assert [(part.name, part.sum_ns) for part in engine.times().parts] == [("model", 5 * MS)]


def test_requests_beyond_the_limit_are_not_followed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MAX_OPEN", 2)
    for name in "abc":
        engine.log.arrived(name, 0, 32)
    assert engine.log.names() == ["a", "b"]


def test_steady_requests_count_like_requests_taken_one_by_one(engine: Engine) -> None:
    """Requests join, leave, pause and end while others get one token in each iteration."""
    rng = random.Random(0)
    tokens: dict[str, list[int]] = {}  # by request: the times of its tokens
    gaps: list[int] = []
    numbers = itertools.count()
    for _ in range(200):
        if len(tokens) < 8 and rng.random() < 0.4:
            name = str(next(numbers))
            tokens[name] = []
            engine.log.arrived(name, 0, 4)
        running = [name for name in tokens if rng.random() < 0.9]
        counts = [2 if rng.random() < 0.02 else 1 for _ in running]
        ended = [(name, "stop") for name in running if rng.random() < 0.05]
        engine.passes(rng.choice((5, 7)))
        engine.log.outputs(running, counts, ended)
        for name, count in zip(running, counts, strict=True):
            gaps += [engine.now_ns - tokens[name][-1]] if tokens[name] else []
            tokens[name] += [engine.now_ns] * count
        for name, _ in ended:
            (said,) = [one for one in engine.all(ServedRequest) if one.name == name and one.ended_ns]
            moments = tokens.pop(name)
            assert (said.first_token_ns, said.output_tokens) == (moments[0], len(moments))
    between = next(one for one in engine.times().latencies if one.name == "between tokens")
    last = len(gaps) - 1
    assert (between.measured, between.p50_ns) == (len(gaps), sorted(gaps)[round(0.5 * last)])
    assert between.p99_ns == sorted(gaps)[round(0.99 * last)]


def test_the_load_is_announced_when_new_requests_run() -> None:
    load = (0, 0, 0.0)
    engine = Engine()
    engine.log = ServingLog("vLLM", engine.said.append, lambda: load, lambda: engine.now_ns)
    engine.log.arrived("a", 0, 32)
    engine.step(("a", 1, "stop"))
    newest = []
    for number, name in enumerate("bcd", 1):
        load = (number, 0, 3.0 * number)
        engine.log.arrived(name, 0, 32)
        engine.log.scheduled([(name, 0)], ())  # the step of this request may take long
        newest.append(engine.all(EngineLoad)[-1])
        engine.passes(60)
    # The idle engine has a request at once. The load is announced again after 100 ms, so with the third request.
    assert [(one.running, one.cache_percent) for one in newest if isinstance(one, EngineLoad)] == [
        (1, 3.0),
        (1, 3.0),
        (3, 9.0),
    ]
