"""Attackers of a daemon. These clients speak ZeroMQ's protocol (ZMTP 3.0, RFC 23) by hand and violate its rules."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from cbtop.protocol.endpoint import host_and_port
from cbtop.protocol.publisher import HISTORY_PREFIX, JOIN_PREFIX, LIVE, RECORDS

PATIENCE_S = 20.0

_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"


def connect(endpoint: str) -> socket.socket:
    """Connect to a daemon without sending anything. Return the connection."""
    return socket.create_connection(host_and_port(endpoint))


def greet(peer: socket.socket) -> None:
    """Connect as a subscriber does: send a handshake and wait for the answer.

    Raises OSError if the daemon rejects it.
    """
    peer.sendall(_GREETING + b"\x04" + bytes([len(_READY)]) + _READY)
    heard = peer.recv(len(_GREETING), socket.MSG_WAITALL)
    head = peer.recv(2, socket.MSG_WAITALL)
    if len(heard) < len(_GREETING) or len(head) < 2 or len(peer.recv(head[1], socket.MSG_WAITALL)) < head[1]:
        raise ConnectionResetError("not let in")


def word(topic: bytes, *, subscribe: bool = True) -> bytes:
    """Return a frame that subscribes to a topic, or unsubscribes from it."""
    said = bytes([subscribe]) + topic
    if len(said) > 255:
        return b"\x02" + len(said).to_bytes(8, "big") + said
    return b"\x00" + bytes([len(said)]) + said


def question(prefix: bytes, what: bytes = b"") -> bytes:
    return prefix + secrets.token_hex(8).encode() + what


def random_subscriptions() -> bytes:
    """Return 5,000 subscriptions to topics that no viewer uses."""
    return b"".join(word(secrets.token_bytes(40)) for _ in range(5_000))


def long_subscriptions() -> bytes:
    """Return subscriptions to topics that are as long as a handshake frame may be."""
    return b"".join(word(secrets.token_bytes(500)) for _ in range(500))


def questions_without_end() -> bytes:
    """Return 5,000 requests to join, as a new viewer sends them. The sender never cancels them."""
    return b"".join(word(question(JOIN_PREFIX)) for _ in range(5_000))


def joins_and_leaves() -> bytes:
    """Return 2,500 requests to join, as a new viewer sends them. Each request is cancelled at once."""
    topics = [question(JOIN_PREFIX) for _ in range(2_500)]
    return b"".join(word(topic) + word(topic, subscribe=False) for topic in topics)


def history_never_read() -> bytes:
    """Return subscriptions to everything, and 200 requests of the whole history.

    The sender never reads the answers.
    """
    topics = [question(HISTORY_PREFIX, b"/0") for _ in range(200)]
    asked = b"".join(word(topic) + word(topic, subscribe=False) for topic in topics[:-1])
    return word(LIVE) + word(RECORDS) + asked + word(topics[-1])


def frames_too_large() -> bytes:
    """Return the beginning of a frame that claims to have one gibibyte."""
    return b"\x02" + (1 << 30).to_bytes(8, "big") + b"\x01" + bytes(1 << 16)


ATTACKS: tuple[Callable[[], bytes], ...] = (
    random_subscriptions,
    long_subscriptions,
    questions_without_end,
    joins_and_leaves,
    history_never_read,
    frames_too_large,
)


class Attack:
    """Connections that send `words` again and again. If a connection is closed, the attacker connects again."""

    def __init__(self, endpoint: str, words: bytes, connections: int) -> None:
        self.said = 0  # how many times an attacker has sent the words
        self._endpoint = endpoint
        self._words = words
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(connections)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            with suppress(OSError), connect(self._endpoint) as peer:
                peer.settimeout(PATIENCE_S)
                greet(peer)
                peer.settimeout(0.2)  # The daemon may stop reading from this connection, so sending needs a timeout.
                while not self._stop.is_set():
                    with suppress(TimeoutError):
                        peer.sendall(self._words)
                    self.said += 1

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


@contextmanager
def attacking(endpoint: str, words: bytes, connections: int = 4) -> Iterator[Attack]:
    attack = Attack(endpoint, words, connections)
    try:
        yield attack
    finally:
        attack.close()


@contextmanager
def forwarding(here: str, there: str) -> Iterator[None]:
    """Forward connections of one socket file to another, as `ssh -L here.sock:there.sock` does."""
    stop = threading.Event()

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while said := source.recv(1 << 16):
                sink.sendall(said)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def connected(near: socket.socket) -> None:
        with near, socket.socket(socket.AF_UNIX) as far, suppress(OSError):
            # If nobody listens at the far end, the near end is closed, as ssh does.
            far.connect(there.removeprefix("ipc://"))
            back = threading.Thread(target=pump, args=(far, near))
            back.start()
            pump(near, far)
            back.join()

    def run() -> None:
        while not stop.is_set():
            with suppress(TimeoutError):
                near = server.accept()[0]
                near.setblocking(True)
                threading.Thread(target=connected, args=(near,)).start()

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(here.removeprefix("ipc://"))
        server.listen()
        server.settimeout(0.05)
        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
