"""The error of a clock offset stays below its stated uncertainty, whatever delays the network adds."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.client.clock_offset import FIRST_EXCHANGES, REFRESH_S, ClockExchange
from cbtop.feeds.feed import Feed
from cbtop.protocol.endpoint import default_endpoint
from cbtop.protocol.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    ClockReading,
    DaemonHello,
    Heartbeat,
    HostHello,
    SourceCatalog,
)
from cbtop.protocol.publisher import CLOCK_PREFIX, JOIN_PREFIX, LIVE, Publisher
from tests.integration.hosts import eventually

DAY_NS = 86_400 * 10**9
delays = st.integers(0, 10**9)


@given(
    trips=st.lists(st.tuples(delays, delays), min_size=1, max_size=20),
    monotonic_ns=st.integers(-DAY_NS, DAY_NS),
    realtime_ns=st.integers(-DAY_NS, DAY_NS),
)
def test_the_error_is_never_larger_than_the_uncertainty(
    trips: list[tuple[int, int]], monotonic_ns: int, realtime_ns: int
) -> None:
    exchange, now_ns, realtime_less_monotonic_ns = ClockExchange(), 10**9, 5 * DAY_NS
    for there_ns, back_ns in trips:
        number, read_ns = exchange.ask(now_ns), now_ns + there_ns
        reading = ClockReading(number, read_ns + monotonic_ns, read_ns + realtime_less_monotonic_ns + realtime_ns)
        now_ns = read_ns + back_ns
        exchange.answer(reading, now_ns, now_ns + realtime_less_monotonic_ns)
    found = exchange.estimate(now_ns)
    assert found is not None
    assert abs(found.monotonic_ns - monotonic_ns) <= found.uncertainty_ns
    assert abs(found.realtime_ns - realtime_ns) <= found.uncertainty_ns


def test_it_asks_a_few_times_at_once_and_then_now_and_then() -> None:
    exchange, now_ns = ClockExchange(), 0
    for _ in range(FIRST_EXCHANGES):
        assert exchange.is_due(now_ns)
        exchange.answer(ClockReading(exchange.ask(now_ns), 0, 0), now_ns, 0)
    assert not exchange.is_due(now_ns)
    assert exchange.is_due(now_ns + round(REFRESH_S * 1e9))


def test_what_is_not_answered_is_given_up_and_its_answer_comes_too_late() -> None:
    exchange, later_ns = ClockExchange(), round(REFRESH_S * 1e9)
    first = exchange.ask(0)
    assert not exchange.is_due(later_ns - 1)
    assert exchange.is_due(later_ns)
    exchange.ask(later_ns)
    exchange.answer(ClockReading(first, 0, 0), later_ns, 0)
    assert exchange.estimate(later_ns) is None


def test_an_old_answer_is_trusted_less() -> None:
    exchange = ClockExchange()
    exchange.answer(ClockReading(exchange.ask(0), 0, 0), 1000, 0)
    fresh, old = exchange.estimate(1000), exchange.estimate(10**10)
    assert fresh is not None
    assert old is not None
    assert old.uncertainty_ns >= fresh.uncertainty_ns + 10**10 * 1e-4


@contextmanager
def daemon_elsewhere(endpoint: str, offset_ns: int, delay_s: float) -> Iterator[None]:
    """Run a daemon that looks like one on another machine.

    Its clocks are ahead by `offset_ns`, and it answers after `delay_s`.
    """
    publisher, stop = Publisher(endpoint), threading.Event()

    def clocks() -> tuple[int, int]:
        return time.perf_counter_ns() + offset_ns, time.time_ns() + offset_ns

    def serve() -> None:
        while not stop.is_set():
            publisher.hear(20)
            for topic in publisher.questions(CLOCK_PREFIX):
                time.sleep(delay_s)
                publisher.answer([topic], [ClockReading(int(topic.rsplit(b"/")[-1]), *clocks())])
            version = PROTOCOL_MAJOR, PROTOCOL_MINOR
            hello = HostHello(*version, 7, 1, "far", "another-boot", "x", "3.12", "python", *clocks(), rank=1)
            publisher.answer(publisher.questions(JOIN_PREFIX), [
                DaemonHello(*version, 1, "far", "another-boot", "0", *clocks()),
                SourceCatalog("far:7:1:0", complete=True, messages=(hello,)),
            ])  # fmt: skip
            publisher.send(LIVE, [Heartbeat(time.perf_counter_ns(), ())])
        publisher.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("offset_ms", [-3_600_000.0, 0.0, 12.5])
def test_the_clock_of_a_daemon_elsewhere_is_found_over_real_sockets(offset_ms: float) -> None:
    with daemon_elsewhere(default_endpoint(), round(offset_ms * 1e6), 0.005), Feed([default_endpoint()]) as feed:
        eventually(lambda: (feed.poll(20), (view := feed.view()) and view.clock)[1])
        view = feed.view()
    assert view is not None
    assert view.clock is not None
    for found_us in (view.clock.offset_us, view.clock.monotonic_offset_us):
        assert abs(found_us - offset_ms * 1e3) <= view.clock.uncertainty_us
    assert view.clock.uncertainty_us >= 2_500  # half of the round trip
