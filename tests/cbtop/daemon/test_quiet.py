"""Tests of when a process last made progress, and in which node it has been since then. The test moves the clock."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.daemon.quiet import LOOK_NS, MIN_QUIET_NS, QuietWatch
from cbtop.daemon.source import Source
from cbtop.profiler.hot_path import chosen
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol import codec
from cbtop.protocol.messages import Quiet, SourceState
from cbtop.protocol.ring import HELD, RingWriter
from cbtop.protocol.ring_reader import RingReader
from tests.cbtop.recorded import Clock, profiler_in

SECOND_NS = 1_000_000_000
SECOND_US = 1_000_000

compiled = pytest.mark.skipif(chosen().implementation != "compiled", reason="Python's does not say what it is in")


@pytest.fixture
def clock() -> Clock:
    """Return a clock for recorder and daemon that only the test moves.

    The clock starts one second ahead of the machine's.
    """
    return Clock(time.perf_counter_ns() + SECOND_NS)


@pytest.fixture
def profiler(runtime: Path, clock: Clock) -> Iterator[BrickProfiler]:
    profiler = profiler_in(runtime, clock)
    yield profiler
    profiler.close()


def about(time_ns: int) -> Any:
    """Compare times within 1 µs, because the daemon calculates in seconds with floats."""
    return pytest.approx(time_ns, rel=0, abs=1000)


def watched(directory: Path, clock: Clock) -> Source:
    (ring,) = directory.glob("*.ring")
    source = Source(ring, clock_s=lambda: clock.now_ns / 1e9)
    source.poll()
    return source


def quiet_of(source: Source) -> Quiet | None:
    source.poll()
    said = codec.decode(codec.encode(source.state_message()))
    assert isinstance(said, SourceState)
    return said.quiet


@contextmanager
def thread_that_waits(in_what: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Run a thread that enters the context `in_what()` and waits there until the test leaves this context."""
    let_go, waits = threading.Event(), threading.Event()

    def wait() -> None:
        with in_what():
            waits.set()
            let_go.wait()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    waits.wait()
    try:
        yield
    finally:
        let_go.set()
        thread.join()


def decode(profiler: BrickProfiler, clock: Clock, inside: Callable[[], object] = lambda: None) -> None:
    with profiler.step("decode", 1), profiler.layer(3):
        with profiler.brick("RmsNorm"):
            clock.sleep_us(100)
        with profiler.brick("AllReduce"):
            clock.sleep_us(100)
            inside()


def name_of(source: Source, node: int) -> str:
    return source.nodes[node].name


def test_a_process_that_goes_on_is_not_quiet(runtime: Path, clock: Clock, profiler: BrickProfiler) -> None:
    decode(profiler, clock)
    source = watched(runtime, clock)
    for _ in range(50):
        clock.sleep_us(SECOND_US / 2)
        decode(profiler, clock)
        assert quiet_of(source) is None


@compiled
def test_what_hangs_in_a_brick_is_named_with_its_age_from_when_it_began(
    runtime: Path, clock: Clock, profiler: BrickProfiler
) -> None:
    decode(profiler, clock)
    source = watched(runtime, clock)

    def hang() -> None:
        clock.sleep_us(32 * SECOND_US)
        quiet = quiet_of(source)
        assert quiet is not None
        assert name_of(source, quiet.in_flight) == "AllReduce"
        assert quiet.in_flight_ns == quiet.quiet_ns == about(32 * SECOND_NS + 100_000)
        assert (quiet.threads, quiet.is_suspended) == (1, False)

    decode(profiler, clock, hang)
    assert quiet_of(source) is None


@compiled
def test_who_comes_late_knows_at_once_for_how_long_it_has_hung(
    runtime: Path, clock: Clock, profiler: BrickProfiler
) -> None:
    def hang() -> None:
        clock.sleep_us(600 * SECOND_US)
        quiet = watched(runtime, clock).state_message().quiet
        assert quiet is not None
        assert quiet.quiet_ns == about(600 * SECOND_NS + 100_000)

    decode(profiler, clock, hang)


@compiled
def test_between_two_steps_nothing_is_in_flight_and_that_is_known(
    runtime: Path, clock: Clock, profiler: BrickProfiler
) -> None:
    decode(profiler, clock)
    source = watched(runtime, clock)
    clock.sleep_us(20 * SECOND_US)
    quiet = quiet_of(source)
    assert quiet is not None
    assert quiet.quiet_ns == about(20 * SECOND_NS)
    assert (quiet.in_flight, quiet.threads, quiet.is_watched) == (0, 0, True)
    assert name_of(source, quiet.last) == "decode"


@compiled
def test_a_step_that_begins_after_a_long_pause_is_as_old_as_itself(
    runtime: Path, clock: Clock, profiler: BrickProfiler
) -> None:
    decode(profiler, clock)
    source = watched(runtime, clock)
    for _ in range(60):
        clock.sleep_us(SECOND_US)
        quiet_of(source)

    def hang() -> None:
        assert quiet_of(source) is None
        clock.sleep_us(3 * SECOND_US)
        quiet = quiet_of(source)
        assert quiet is not None
        assert 2.9 * SECOND_NS < quiet.quiet_ns < 4 * SECOND_NS

    decode(profiler, clock, hang)


@compiled
def test_a_long_first_step_without_a_name_goes_on_while_bricks_begin_in_it(
    runtime: Path, clock: Clock, profiler: BrickProfiler
) -> None:
    decode(profiler, clock)
    source = watched(runtime, clock)
    with profiler.step() as step:
        for _ in range(60):
            with profiler.brick("AttentionScore"):
                clock.sleep_us(SECOND_US * 0.9)
                assert quiet_of(source) is None
        with profiler.brick("AttentionScore"):
            clock.sleep_us(SECOND_US)
            assert quiet_of(source) is None
            clock.sleep_us(5 * SECOND_US)
            quiet = quiet_of(source)
            assert quiet is not None
            assert (quiet.in_flight, quiet.quiet_ns) == (HELD, about(5 * SECOND_NS))
        step.name, step.tokens = "prefill", 4


@compiled
def test_of_several_threads_the_one_that_began_last_is_named(
    runtime: Path, clock: Clock, profiler: BrickProfiler
) -> None:
    decode(profiler, clock)
    source = watched(runtime, clock)

    @contextmanager
    def queue() -> Iterator[None]:
        with profiler.step("prefill", 1), profiler.brick("queue"):
            yield

    def hang() -> None:
        clock.sleep_us(5 * SECOND_US)
        quiet = quiet_of(source)
        assert quiet is not None
        assert (name_of(source, quiet.in_flight), quiet.threads) == ("AllReduce", 2)
        assert quiet.quiet_ns < 6 * SECOND_NS

    with thread_that_waits(queue):
        clock.sleep_us(5 * SECOND_US)
        decode(profiler, clock, hang)


@compiled
def test_a_hanging_step_is_named_even_if_a_thread_waits_outside_of_all_steps(
    runtime: Path, clock: Clock, profiler: BrickProfiler
) -> None:
    decode(profiler, clock)
    source = watched(runtime, clock)

    def hang() -> None:
        clock.sleep_us(5 * SECOND_US)
        with thread_that_waits(lambda: profiler.brick("wait for a request")):
            clock.sleep_us(4 * SECOND_US)
            quiet_of(source)
            clock.sleep_us(SECOND_US)
            quiet = quiet_of(source)
        assert quiet is not None
        assert (name_of(source, quiet.in_flight), quiet.threads) == ("AllReduce", 2)
        # One thread has waited in AllReduce for 10 s. The other thread made progress 5 s ago.
        assert quiet.quiet_ns == about(5 * SECOND_NS)
        assert quiet.in_flight_ns == about(10 * SECOND_NS + 100_000)

    decode(profiler, clock, hang)


@compiled
def test_a_server_whose_threads_end_with_requests_is_known_to_be_in_no_step(
    runtime: Path, clock: Clock, profiler: BrickProfiler
) -> None:
    source: Source | None = None

    def look() -> None:
        nonlocal source
        source = source or watched(runtime, clock)
        source.poll()

    for _ in range(3):
        clock.sleep_us(SECOND_US / 2)
        thread = threading.Thread(target=decode, args=(profiler, clock, look))
        thread.start()
        thread.join()
    assert source is not None
    clock.sleep_us(20 * SECOND_US)
    gc.collect()
    quiet = quiet_of(source)
    assert quiet is not None
    assert (quiet.in_flight, quiet.threads, quiet.is_watched) == (0, 0, True)


def test_in_python_a_step_that_has_not_ended_is_known_by_what_ended_in_it(
    runtime: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CBTOP_PURE_PYTHON", "1")
    profiler = profiler_in(runtime, clock)
    assert profiler.implementation == "python"
    decode(profiler, clock)
    source = watched(runtime, clock)
    clock.sleep_us(5 * SECOND_US)
    idle = quiet_of(source)
    assert idle is not None
    # No phase and no thread is known to be running. The process may have begun a step, but the daemon cannot see
    # that.
    assert (idle.in_flight, idle.is_watched) == (0, False)

    def hang() -> None:
        clock.sleep_us(5 * SECOND_US)
        quiet_of(source)
        clock.sleep_us(5 * SECOND_US)
        quiet = quiet_of(source)
        assert quiet is not None
        assert [name_of(source, node) for node in (quiet.in_flight, quiet.last)] == ["decode", "RmsNorm"]
        assert (quiet.in_flight_ns, quiet.quiet_ns) == (None, about(10 * SECOND_NS + 100_000))

    decode(profiler, clock, hang)
    profiler.close()


def test_a_process_that_has_ended_is_not_quiet(runtime: Path, clock: Clock) -> None:
    profiler = profiler_in(runtime, clock)
    decode(profiler, clock)
    source = watched(runtime, clock)
    clock.sleep_us(30 * SECOND_US)
    assert quiet_of(source) is not None
    profiler.close()
    clock.sleep_us(30 * SECOND_US)
    assert quiet_of(source) is None
    assert source.state == "ended"


def test_on_a_clock_of_its_own_a_process_is_as_old_as_it_was_seen(runtime: Path) -> None:
    made = Clock()  # The process has its own clock, unrelated to the clock of the machine.
    profiler = profiler_in(runtime, made)
    with profiler.step("decode", 1):
        made.sleep_us(100)
    clock = Clock(time.perf_counter_ns())
    source = watched(runtime, clock)
    assert source.state_message().quiet is None
    clock.sleep_us(3 * SECOND_US)
    quiet = quiet_of(source)
    assert quiet is not None
    assert quiet.quiet_ns == about(3 * SECOND_NS)
    with profiler.step("decode", 1):
        for _ in range(2):
            clock.sleep_us(3 * SECOND_US)
            quiet = quiet_of(source)
    assert quiet is not None
    assert quiet.in_flight_ns is None
    assert quiet.quiet_ns in (about(3 * SECOND_NS), about(9 * SECOND_NS))
    profiler.close()


@given(waits_s=st.lists(st.floats(0, 30), min_size=1, max_size=10))
def test_the_age_grows_with_the_time_since_the_last_record_and_not_beyond_it(waits_s: list[float]) -> None:
    directory = Path(os.environ["CBTOP_RUNTIME_DIR"])
    writer = RingWriter(directory / "1-2-0.ring")
    reader = RingReader(writer.path)
    watch, now_ns = QuietWatch(reader), reader.monotonic_ns
    watch.recorded(now_ns, now_ns)
    before_ns = 0
    for wait_s in waits_s:
        now_ns += int(wait_s * SECOND_NS)
        watch.look(now_ns)
        quiet, since_ns = watch.quiet(now_ns, 0), now_ns - reader.monotonic_ns
        if since_ns < MIN_QUIET_NS:
            assert quiet is None
        assert quiet is not None or since_ns < MIN_QUIET_NS + LOOK_NS
        if quiet is not None:
            assert before_ns <= quiet.quiet_ns == since_ns
            before_ns = quiet.quiet_ns
    reader.close()
    writer.close()
    writer.path.unlink()
