"""A viewer's socket: SUB, subscribed to everything live and to one join topic of its own."""

from __future__ import annotations

import secrets

import zmq

from cbtop.protocol import codec
from cbtop.protocol.endpoint import parse_endpoint
from cbtop.protocol.errors import DecodeError
from cbtop.protocol.messages import Message
from cbtop.protocol.publisher import CLOCK_PREFIX, JOIN_PREFIX, LIVE

RECEIVE_HIGH_WATER_MARK = 100


class Subscriber:
    """Connects to `endpoint`, and again whenever the daemon comes back. One thread owns it.

    Each time the link is made the daemon hears the join topic and answers with everything it knows.
    Raises EndpointError for an address that cannot be one.
    """

    def __init__(self, endpoint: str) -> None:
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
        self._socket.subscribe(LIVE)
        # The join topic comes last: when the daemon answers it, everything live already flows.
        self._socket.subscribe(JOIN_PREFIX + secrets.token_hex(8).encode())
        self._clock_topic = b""

    def receive(self, timeout_ms: int) -> list[Message]:
        """The messages of the next multipart message; empty when none came within `timeout_ms`.

        Raises DecodeError when one of them is not a message.
        """
        if not self._socket.poll(timeout_ms):
            return []
        try:
            _topic, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return []
        self.received += 1
        if not frames:
            raise DecodeError("a message of no frames")
        found = (codec.decode(frame) for frame in frames)
        return [message for message in found if message is not None]

    def ask_clock(self, number: int) -> None:
        """Ask the daemon for a ClockReading under `number`, and no more for the one before."""
        if self._clock_topic:
            self._socket.unsubscribe(self._clock_topic)
        self._clock_topic = CLOCK_PREFIX + secrets.token_hex(8).encode() + b"/%d" % number
        self._socket.subscribe(self._clock_topic)

    def close(self) -> None:
        """Close the socket."""
        self._context.destroy(linger=0)
