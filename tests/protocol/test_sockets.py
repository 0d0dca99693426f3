"""Tests of publisher and subscriber over real sockets."""

from __future__ import annotations

from pathlib import Path

import pytest

from cbtop.protocol.endpoint import default_endpoint
from cbtop.protocol.errors import EndpointError
from cbtop.protocol.messages import Heartbeat, Message, SourceGone
from cbtop.protocol.publisher import JOIN_PREFIX, LIVE, SEND_HIGH_WATER_MARK, Publisher
from cbtop.protocol.subscriber import Subscriber
from tests.integration.hosts import eventually


def test_a_viewer_is_answered_on_its_own_topic_and_hears_what_is_live() -> None:
    publisher, first, second = Publisher(default_endpoint()), *(Subscriber(default_endpoint()) for _ in range(2))
    topics = all_joined(publisher, 2)
    publisher.answer(topics[:1], [SourceGone("only one of you"), SourceGone("hears this")])
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
    publisher = Publisher("tcp://127.0.0.1:0")
    with pytest.raises(EndpointError, match="in use"):
        Publisher(publisher.endpoint)
    publisher.close()


def test_the_socket_file_of_a_dead_daemon_is_no_hindrance(runtime: Path) -> None:
    (runtime / "daemon.sock").write_bytes(b"")
    Publisher(default_endpoint()).close()


def test_a_viewer_that_does_not_read_costs_the_daemon_and_the_others_nothing() -> None:
    publisher = Publisher(default_endpoint())
    stuck, reading = Subscriber(default_endpoint()), Subscriber(default_endpoint())
    all_joined(publisher, 2)
    payload = [SourceGone("x" * 200)] * 200
    for _ in range(10 * SEND_HIGH_WATER_MARK):
        publisher.send(LIVE, payload)  # If sending waited for the viewer that does not read, it would never return.
        eventually(lambda: reading.receive(20) == payload)
    for end in (publisher, stuck, reading):
        end.close()


def all_joined(publisher: Publisher, viewers: int) -> list[bytes]:
    """Wait until this number of viewers has asked for all data. Returns the topics of their questions."""
    return eventually(
        lambda: publisher.hear(20) or (len(found := publisher.questions(JOIN_PREFIX)) == viewers and found)
    )


def _drain(subscriber: Subscriber) -> list[Message]:
    """Receive everything up to the heartbeat, which is sent last."""
    found: list[Message] = []
    while not found or not isinstance(found[-1], Heartbeat):
        found += subscriber.receive(100)
    return found
