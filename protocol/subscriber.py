"""A viewer's socket: SUB, subscribed to what it follows and to one topic of its own, by which it asks."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import zmq

from cbtop.protocol import codec
from cbtop.protocol.endpoint import parse_endpoint
from cbtop.protocol.errors import DecodeError
from cbtop.protocol.messages import Message
from cbtop.protocol.publisher import JOIN_PREFIX, LIVE

RECEIVE_HIGH_WATER_MARK = 100


class Subscriber:
    """Connects to `endpoint`, and again whenever the daemon comes back. One thread owns it.

    Each time the link is made the daemon hears what was asked last and answers: at first, with everything it knows.
    Raises EndpointError for an address that cannot be one.
    """

    def __init__(self, endpoint: str, topics: Sequence[bytes] = (LIVE,)) -> None:
        self.endpoint = parse_endpoint(endpoint)
        self.received = 0
        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.MAXMSGSIZE, codec.MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.connect(self.endpoint)
        for topic in topics:
            self._socket.subscribe(topic)
        # What asks comes last: when the daemon answers it, everything live already flows.
        self._asked = b""
        self.ask(JOIN_PREFIX)

    def ask(self, prefix: bytes, what: bytes = b"") -> bytes:
        """Ask the daemon for what `prefix` stands for, and no more for what was asked before; gives the topic."""
        if self._asked:
            self._socket.unsubscribe(self._asked)
        self._asked = prefix + secrets.token_hex(8).encode() + what
        self._socket.subscribe(self._asked)
        return self._asked

    def receive(self, timeout_ms: int) -> list[Message]:
        """The messages of the next multipart message; empty when none came within `timeout_ms`.

        Raises DecodeError when one of them is not a message.
        """
        _topic, frames = self.receive_frames(timeout_ms)
        found = (codec.decode(frame) for frame in frames)
        return [message for message in found if message is not None]

    def receive_frames(self, timeout_ms: int) -> tuple[bytes, list[bytes]]:
        """The topic and the frames of the next multipart message, not decoded; none when none came in time."""
        if not self._socket.poll(timeout_ms):
            return b"", []
        try:
            topic, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return b"", []
        self.received += 1
        if not frames:
            raise DecodeError("a message of no frames")
        return topic, frames

    def close(self) -> None:
        """Close the socket."""
        self._context.destroy(linger=0)
