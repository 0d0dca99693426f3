"""A damaged message does not affect the other messages of its batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cbtop.client import collector as collector_module
from cbtop.client.collector import Collector
from cbtop.client.store import Store
from cbtop.protocol import codec
from cbtop.protocol.messages import DaemonHello, Node, SourceCatalog, StatsUpdate, WireMessage
from cbtop.protocol.process import boot_id
from cbtop.protocol.publisher import JOIN_PREFIX, LIVE, RECORDS, Publisher
from cbtop.protocol.vocabulary import NodeKind
from tests.cbtop.recorded import Clock, profiler_in, source_of
from tests.integration.hosts import eventually
from tests.representatives import first_by_default

HELLO = DaemonHello(2, 0, 77, "here", "boot", "0.1.0", 0, 0)


def said_of(runtime: Path, key: str) -> list[WireMessage]:
    directory = runtime / key
    directory.mkdir()
    with profiler_in(directory, Clock()).brick("a"):
        pass
    source = source_of(directory)
    source.poll()
    return [replace(message, source=key) for message in source.snapshot()]


def uneven(update: WireMessage) -> WireMessage:
    assert isinstance(update, StatsUpdate)
    return replace(update, count=b"")


@first_by_default("broken", ["no message", "an update", "a catalog"])
def test_one_source_that_cannot_be_read_does_not_silence_those_after_it(runtime: Path, broken: str) -> None:
    bad, good = said_of(runtime, "bad"), said_of(runtime, "good")
    frames = [codec.encode(message) for message in bad]
    if broken == "no message":
        frames[1] = b"\xc1"
    elif broken == "an update":
        frames[1] = codec.encode(uneven(bad[1]))
    else:
        orphan = SourceCatalog("bad", complete=False, messages=(Node(2, 7, NodeKind.BRICK, "lost"),))
        frames[1] = codec.encode(orphan)
    endpoint = f"ipc://{runtime}/wire"
    publisher, collector = Publisher(endpoint), Collector(endpoint, Store())
    try:
        (asked,) = eventually(lambda: collector.poll() or publisher.hear(20) or publisher.questions(JOIN_PREFIX))
        publisher.answer_frames([asked], [codec.encode(HELLO), *frames, *map(codec.encode, good)])
        eventually(lambda: collector.poll(20) or "good" in collector.store.sources)
        assert collector.store.sources["good"].stats.received == 1
        assert collector.store.sources["good"].state is not None
        assert collector.store.sources["bad"].state is not None
        assert collector.damaged == 1
    finally:
        collector.close()
        publisher.close()


def catalog(key: str, first: int = 1) -> bytes:
    return codec.encode(SourceCatalog(key, True, (Node(first, None, NodeKind.BRICK, "a"),)))


def test_a_damaged_message_costs_the_sources_it_came_with_nothing(runtime: Path) -> None:
    endpoint, store = f"ipc://{runtime}/daemon.sock", Store()
    publisher, collector = Publisher(endpoint), Collector(endpoint, store)
    try:
        (asked,) = eventually(lambda: collector.poll() or publisher.hear(20) or publisher.questions(JOIN_PREFIX))
        frames = [codec.encode(HELLO), catalog("h:1:1:0"), b"\xc1", catalog("h:2:1:0", first=7), catalog("h:3:1:0")]
        publisher.answer_frames([asked], frames)
        eventually(lambda: collector.poll(20) or collector.damaged)
    finally:
        collector.close()
        publisher.close()
    assert collector.damaged == 2
    assert {"h:1:1:0", "h:3:1:0"} <= store.sources.keys()
    assert not collector.is_silent


def test_a_poll_that_took_its_time_leaves_the_rest_for_the_next(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector_module, "MAX_DRAIN_S", -1.0)
    monkeypatch.setattr(collector_module, "CLOCK_WAIT_S", 0.0)
    endpoint = f"ipc://{runtime}/wire"
    publisher, collector = Publisher(endpoint), Collector(endpoint, Store())
    try:
        (asked,) = eventually(lambda: collector.poll() or publisher.hear(20) or publisher.questions(JOIN_PREFIX))
        hello = codec.encode(replace(HELLO, boot_id=boot_id()))
        publisher.answer_frames([asked], [hello, *(catalog(f"h:{number}:1:0") for number in range(3))])
        eventually(lambda: collector.poll(20) or collector.store.daemon)
        found = []
        while collector.is_behind:
            collector.poll()
            found.append(len(collector.store.sources))
        assert found == [1, 2, 3]
        publisher.send_frames(LIVE, [catalog("h:4:1:0")])
        eventually(lambda: collector.poll(20) or "h:4:1:0" in collector.store.sources)
    finally:
        collector.close()
        publisher.close()


def test_records_come_only_while_they_are_followed(runtime: Path) -> None:
    directory = runtime / "one"
    directory.mkdir()
    clock = Clock()
    profiler = profiler_in(directory, clock)
    with profiler.step("decode"):
        clock.sleep_us(1)
    source = source_of(directory)
    source.poll()
    endpoint = f"ipc://{runtime}/wire"
    publisher, collector = Publisher(endpoint), Collector(endpoint, Store())

    def counted() -> int:
        record = collector.store.sources.get(source.key)
        return int(record.stats.column("count").sum()) if record else 0

    def say_another() -> int:
        """Record and publish one more step, and wait for its statistics. Return how many records the viewer has."""
        before = counted()
        with profiler.step("decode"):
            clock.sleep_us(1)
        source.poll()
        publisher.hear(5)
        publisher.send(RECORDS, source.records())
        publisher.send(LIVE, source.delta())
        eventually(lambda: collector.poll(20) or counted() > before)
        return len(collector.store.sources[source.key].recent)

    try:
        (asked,) = eventually(lambda: collector.poll() or publisher.hear(20) or publisher.questions(JOIN_PREFIX))
        publisher.answer_frames([asked], [codec.encode(message) for message in (HELLO, *source.snapshot())])
        eventually(lambda: collector.poll(20) or source.key in collector.store.sources)
        assert say_another() == 0  # When this message arrives, all of the earlier answer has arrived, too.
        received = collector.received
        assert say_another() == 0
        assert collector.received == received + 1  # only the statistics have arrived
        collector.follow_records(True)
        eventually(lambda: say_another() > 2)
        collector.follow_records(False)
        eventually(lambda: publisher.hear(20) or not publisher.has_recorder)
        assert say_another() == 0
        received = collector.received
        assert say_another() == 0
        assert collector.received == received + 1
    finally:
        collector.close()
        publisher.close()
