"""The daemon's socket: XPUB, so that it hears who joins; it never waits for a viewer.

A message goes out under a topic: LIVE reaches every viewer, a viewer's own join topic only that viewer. What
belongs together travels as one multipart message, which ZeroMQ counts once against the high-water mark and
delivers whole or not at all. A viewer that does not read loses messages, each viewer its own.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable
from pathlib import Path

import zmq

from cbtop.protocol import codec
from cbtop.protocol.endpoint import parse_endpoint
from cbtop.protocol.errors import EndpointError
from cbtop.protocol.messages import WireMessage

LIVE = b"live"
JOIN_PREFIX = b"join/"
CLOCK_PREFIX = b"clock/"
MAX_TOPIC_BYTES = 64
SEND_HIGH_WATER_MARK = 32  # messages a viewer: three seconds at ten updates a second


class Publisher:
    """Binds `endpoint`. Raises EndpointError when it is in use or cannot be bound. One thread owns it."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = parse_endpoint(endpoint)
        self._lock = _lock_ipc(self.endpoint) if self.endpoint.startswith("ipc://") else None
        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.MAXMSGSIZE, 1024)  # all a viewer ever says is a topic
        try:
            self._socket.bind(self.endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise EndpointError(f"{self.endpoint}: {error.strerror.lower()}") from error

    def joined(self, timeout_ms: int) -> list[bytes]:
        """The join and clock topics that viewers subscribed to; waits up to `timeout_ms` for the first."""
        topics: list[bytes] = []
        while self._socket.poll(0 if topics else timeout_ms):
            said = self._socket.recv()
            if (
                said[:1] == b"\x01"
                and said[1:].startswith((JOIN_PREFIX, CLOCK_PREFIX))
                and len(said) <= MAX_TOPIC_BYTES
            ):
                topics.append(said[1:])
        return topics

    def send(self, topic: bytes, messages: Iterable[WireMessage]) -> None:
        """Send `messages` together under `topic`; never waits, never fails for a viewer's sake."""
        frames = [codec.encode(message) for message in messages]
        if frames:
            self._socket.send_multipart([topic, *frames], zmq.NOBLOCK, copy=False)

    def close(self) -> None:
        """Close the socket and give up the address."""
        self._context.destroy(linger=0)
        if self._lock is not None:
            os.close(self._lock)


def _lock_ipc(endpoint: str) -> int:
    """The right to bind an ipc path: libzmq itself would let a second daemon steal it."""
    path = Path(endpoint.removeprefix("ipc://"))
    lock = path.with_suffix(".lock")
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise EndpointError(f"{lock}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise EndpointError(f"{endpoint}: another cbtop daemon serves this address") from error
        raise EndpointError(f"{lock}: {error.strerror}") from error
    return descriptor
