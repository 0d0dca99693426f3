"""Tests of the limits of a connection to a daemon. The daemon's publisher enforces these limits."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from cbtop.protocol import peers
from cbtop.protocol import publisher as publisher_module
from cbtop.protocol.messages import Heartbeat, SourceGone
from cbtop.protocol.publisher import HISTORY_PREFIX, JOIN_PREFIX, LIVE, Publisher
from cbtop.protocol.subscriber import Subscriber
from tests.integration import attackers
from tests.integration.attackers import connect, greet, question, word
from tests.integration.hosts import eventually
from tests.representatives import first_by_default

PIECE = [SourceGone("x" * 1000)] * 1000


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    publisher = Publisher("tcp://127.0.0.1:0")
    yield publisher
    publisher.close()


def subscribed(publisher: Publisher, *topics: bytes) -> socket.socket:
    """Return a socket that speaks ZeroMQ's protocol by hand and has subscribed to `topics`."""
    peer = connect(publisher.endpoint)
    with ThreadPoolExecutor() as thread:
        greeted = thread.submit(greet, peer)
        eventually(lambda: publisher.hear(5) or greeted.done())
    with suppress(ConnectionError):  # The publisher may close this connection because it has too many.
        greeted.result()
        peer.sendall(b"".join(word(topic) for topic in topics))
    return peer


def asked(publisher: Publisher, kind: bytes, how_many: int = 1) -> list[bytes]:
    """Wait until viewers have asked `how_many` questions of this kind. Returns the questions."""
    eventually(lambda: publisher.hear(20) or len(publisher.questions(kind)) == how_many)
    return publisher.questions(kind)


def is_cut_off(publisher: Publisher, peer: socket.socket) -> bool:
    """Return whether the other end has closed the connection.

    Data that is still unread is read and discarded first.
    """
    publisher.hear(5)
    peer.setblocking(False)
    try:
        while peer.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
    return True


def test_of_the_questions_of_a_connection_the_newest_of_a_kind_is_answered(publisher: Publisher) -> None:
    topics = [question(JOIN_PREFIX) for _ in range(3)]
    with subscribed(publisher, *topics):
        asked(publisher, JOIN_PREFIX)
        assert eventually(lambda: publisher.hear(20) or publisher.questions(JOIN_PREFIX) == topics[-1:])


def test_a_question_that_was_given_up_or_whose_viewer_left_is_forgotten(publisher: Publisher) -> None:
    topic = question(JOIN_PREFIX)
    with subscribed(publisher, topic) as gives_up, subscribed(publisher, question(HISTORY_PREFIX, b"/7")):
        asked(publisher, JOIN_PREFIX)
        asked(publisher, HISTORY_PREFIX)
        gives_up.sendall(word(topic, subscribe=False))
        asked(publisher, JOIN_PREFIX, 0)
    asked(publisher, HISTORY_PREFIX, 0)
    eventually(lambda: publisher.hear(20) or len(known(publisher)) == 0)


@pytest.mark.slow
def test_who_does_not_read_is_answered_no_more_until_he_does(publisher: Publisher) -> None:
    answered = 0
    with subscribed(publisher) as stuck:

        def ask() -> bytes:
            """Send a question and wait until it has arrived."""
            topic = question(HISTORY_PREFIX, b"/0")
            stuck.sendall(word(topic))
            eventually(lambda: publisher.hear(20) or any(topic in peer.topics for peer in known(publisher)))
            # Let the publisher run once more, because the previous answer may still be on its way.
            publisher.hear(20)
            return topic

        for _ in range(100):
            topic = ask()
            if publisher.questions(HISTORY_PREFIX):
                publisher.answer([topic], PIECE)
                answered += 1
            stuck.sendall(word(topic, subscribe=False))
        # Each answer has 1 MB. After fewer than 50 answers, the socket buffers of both ends are full.
        assert 0 < answered < 50
        topic = ask()
        eventually(lambda: is_cut_off(publisher, stuck) or publisher.questions(HISTORY_PREFIX) == [topic])


@first_by_default("reads", [False, True])
def test_who_takes_nothing_or_answers_no_heartbeat_is_gone_after_a_while(
    monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    monkeypatch.setattr(publisher_module, "HEARTBEAT_MS", 100)
    monkeypatch.setattr(publisher_module, "SILENT_MS", 1000)
    publisher = Publisher("tcp://127.0.0.1:0")
    with subscribed(publisher, LIVE) as peer:
        eventually(lambda: publisher.hear(20) or any(other.topics for other in known(publisher)))

        def is_gone() -> bool:
            publisher.send(LIVE, PIECE[:1] if reads else PIECE)
            return is_cut_off(publisher, peer) if reads else publisher.hear(20) or not known(publisher)

        eventually(is_gone)
    publisher.close()


def known(publisher: Publisher) -> list[peers._Peer]:
    return list(publisher._peers._peers.values())


@pytest.mark.parametrize(
    "said",
    [
        word(b""),  # With this topic, a viewer would get the answers to all viewers.
        word(b"join/"),
        word(b"join/0123456789abcdef/7"),
        word(b"history/0123456789abcdef/" + b"9" * 19),
        word(bytes(400)),
        b"\x00\x05hello",
        attackers.random_subscriptions(),
        attackers.frames_too_large(),
        b"".join(word(question(JOIN_PREFIX)) for _ in range(peers.MAX_SUBSCRIPTIONS + 1)),
        word(LIVE) * (peers.MAX_WORDS + 1),
    ],
    ids=range(10),
)
def test_who_says_what_no_viewer_says_or_too_much_is_cut_off_and_no_other(publisher: Publisher, said: bytes) -> None:
    viewer = Subscriber(publisher.endpoint)
    asked(publisher, JOIN_PREFIX)
    with subscribed(publisher) as peer:
        with suppress(ConnectionError):  # The publisher may close the connection before everything was sent.
            peer.sendall(said)
        eventually(lambda: is_cut_off(publisher, peer))
    publisher.send(LIVE, [Heartbeat(1, ())])
    eventually(lambda: publisher.hear(5) or viewer.receive(20) == [Heartbeat(1, ())])
    viewer.close()


def test_a_zeromq_version_whose_messages_cannot_be_told_apart_is_cut_off(publisher: Publisher) -> None:
    with connect(publisher.endpoint) as peer:
        # the handshake of ZMTP 2.0, by a subscriber without a name
        peer.sendall(b"\xff" + bytes(8) + b"\x7f\x01\x02\x00\x00")
        eventually(lambda: is_cut_off(publisher, peer))


def test_the_oldest_silent_connection_makes_room_or_else_the_newcomer_goes(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "MAX_CONNECTIONS", 3)
    with subscribed(publisher, LIVE) as first, connect(publisher.endpoint) as silent:
        eventually(lambda: publisher.hear(20) or len(known(publisher)) == 2)
        with subscribed(publisher, LIVE) as second, subscribed(publisher, LIVE) as third:
            eventually(lambda: is_cut_off(publisher, silent))
            eventually(lambda: publisher.hear(20) or all(peer.topics for peer in known(publisher)))
            with connect(publisher.endpoint) as newcomer:
                eventually(lambda: is_cut_off(publisher, newcomer))
            assert not any(is_cut_off(publisher, peer) for peer in (first, second, third))


def test_other_users_of_the_machine_cannot_take_the_owners_room(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = os.getuid() + 1
    monkeypatch.setattr(peers, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(peers, "MAX_STRANGERS", 1)
    monkeypatch.setattr(peers, "user_of", lambda _connection: stranger)
    with subscribed(publisher, LIVE):
        eventually(lambda: publisher.hear(20) or any(peer.topics for peer in known(publisher)))
        with subscribed(publisher, LIVE) as too_many:
            eventually(lambda: is_cut_off(publisher, too_many))
        monkeypatch.undo()
        owner = Subscriber(publisher.endpoint)
        asked(publisher, JOIN_PREFIX)
        owner.close()


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_the_system_says_whose_a_connection_from_this_machine_is(family: socket.AddressFamily, host: str) -> None:
    with socket.create_server((host, 0), family=family) as server, socket.socket(family) as client:
        client.connect(server.getsockname())
        with server.accept()[0] as accepted:
            assert peers.user_of(accepted) == os.getuid()


def test_of_a_socket_file_the_system_is_not_asked() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert peers.user_of(ours) is None
