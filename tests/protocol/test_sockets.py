"""Publisher and subscriber over real sockets."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from cbtop.protocol.endpoint import default_endpoint
from cbtop.protocol.errors import EndpointError
from cbtop.protocol.messages import Heartbeat, Message, SourceGone
from cbtop.protocol.publisher import LIVE, SEND_HIGH_WATER_MARK, Publisher
from cbtop.protocol.subscriber import Subscriber


def test_a_viewer_is_answered_on_its_own_topic_and_hears_what_is_live() -> None:
    publisher, first, second = Publisher(default_endpoint()), *(Subscriber(default_endpoint()) for _ in range(2))
    topics = []
    while len(topics) < 2:
        topics += publisher.joined(1000)
    publisher.send(topics[0], [SourceGone("only one of you"), SourceGone("hears this")])
    publisher.send(LIVE, [Heartbeat(1, ())])
    heard = sorted([_drain(first), _drain(second)], key=len)
    assert heard == [
        [Heartbeat(1, ())],
        [SourceGone("only one of you"), SourceGone("hears this"), Heartbeat(1, ())],
    ]
    for end in (publisher, first, second):
        end.close()


def test_a_second_daemon_on_the_same_path_is_refused() -> None:
    publisher = Publisher(default_endpoint())
    with pytest.raises(EndpointError, match="another cbtop daemon"):
        Publisher(default_endpoint())
    publisher.close()
    Publisher(default_endpoint()).close()


def test_a_second_daemon_on_the_same_port_is_refused() -> None:
    publisher = Publisher("tcp://127.0.0.1:45917")
    with pytest.raises(EndpointError, match="in use"):
        Publisher("tcp://127.0.0.1:45917")
    publisher.close()


def test_the_socket_file_of_a_dead_daemon_is_no_hindrance(runtime: Path) -> None:
    (runtime / "daemon.sock").write_bytes(b"")
    Publisher(default_endpoint()).close()


def test_a_viewer_that_does_not_read_costs_the_daemon_and_the_others_nothing() -> None:
    publisher = Publisher(default_endpoint())
    stuck, reading = Subscriber(default_endpoint()), Subscriber(default_endpoint())
    joined = 0
    while joined < 2:
        joined += len(publisher.joined(1000))
    payload, sent = [SourceGone("x" * 200)] * 200, 40 * SEND_HIGH_WATER_MARK
    counted: list[Message] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            counted.extend(reading.receive(20)[:1])

    reader = threading.Thread(target=read)
    reader.start()
    longest_s = 0.0
    for _ in range(sent):
        begun_s = time.perf_counter()
        publisher.send(LIVE, payload)
        longest_s = max(longest_s, time.perf_counter() - begun_s)
        time.sleep(0.001)
    deadline_s = time.monotonic() + 5
    while len(counted) < sent // 2 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    done.set()
    reader.join()
    assert len(counted) >= sent // 2
    assert longest_s < 1.0  # it never waited for the one that is stuck
    for end in (publisher, stuck, reading):
        end.close()


def _drain(subscriber: Subscriber) -> list[Message]:
    found: list[Message] = []
    while messages := subscriber.receive(300):
        found += messages
    return found
