"""A viewer's SUB socket.

A viewer subscribes to the topics that it follows. To ask a question, it subscribes to a topic that no other viewer
has.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from enum import Enum

import zmq

from cbtop.protocol import codec
from cbtop.protocol.auth import monitor_event, not_allowed, why_not
from cbtop.protocol.endpoint import check_descriptors, is_loopback, parse_endpoint
from cbtop.protocol.errors import DecodeError, EndpointError, KeysError
from cbtop.protocol.keys import ViewerKeys
from cbtop.protocol.messages import Message
from cbtop.protocol.publisher import CLOCK_PREFIX, ENDED_PREFIX, JOIN_PREFIX, LIVE

RECEIVE_HIGH_WATER_MARK = 100
REDIAL_S = 0.5
LINK_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
)


class _Link(Enum):
    DOWN = "down"
    UP = "up"
    BROKEN = "broken"


class Subscriber:
    """Connects to `endpoint`, and reconnects when the daemon comes back. Only one thread may use it.

    After a reconnect, the latest question is asked again. The first question asks for everything that the daemon
    knows. Raises EndpointError if the address is not valid. Raises KeysError if the address belongs to a different
    host and `keys` is not given.
    """

    def __init__(self, endpoint: str, keys: ViewerKeys | None = None, topics: Sequence[bytes] = (LIVE,)) -> None:
        self.endpoint = parse_endpoint(endpoint)
        self._is_tcp = self.endpoint.startswith("tcp://")
        if self._is_tcp and not keys and not is_loopback(self.endpoint):
            raise KeysError(
                f"{self.endpoint}: another host is only talked to with keys: pass --server-key, or go through ssh -L"
            )
        check_descriptors()
        self.received = 0
        # Why the daemon cannot be reached over tcp; "" if the daemon can be reached, or is just restarting.
        self.trouble = ""
        self.is_refused = False  # whether waiting is useless, because the daemon refuses this viewer
        self._keys = keys if self._is_tcp else None
        self._topics = list(topics)
        self._asked = _question(JOIN_PREFIX)
        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        self._link = _Link.DOWN
        self._suspected = ""
        self._redial_s: float | None = None  # the time of the next attempt to connect; None while a socket is open
        try:
            self._dial()
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise EndpointError(f"{self.endpoint}: {error.strerror.lower()}") from error

    def _dial(self) -> None:
        # Questions that `_ask_beside` has asked on this socket: one for each prefix.
        self._beside: dict[bytes, bytes] = {}
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.IPV6, int("[" in self.endpoint))
        self._socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.MAXMSGSIZE, codec.MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if self._keys:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, self._keys.server)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.own.public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.own.secret)
        self._monitor = self._socket.get_monitor_socket(LINK_EVENTS) if self._is_tcp else None
        self._socket.connect(self.endpoint)
        for topic in self._topics:
            self._socket.subscribe(topic)
        # Subscribe to the question's topic last. So the viewer misses no live message that comes after the answer.
        self._socket.subscribe(self._asked)

    def ask(self, prefix: bytes, what: bytes = b"") -> bytes:
        """Ask the question `prefix` about `what`. The new question replaces the previous question of `ask`.

        Returns the topic of the question.
        """
        before, self._asked = self._asked, _question(prefix) + what
        if self._redial_s is None:  # if there is no socket now, `_dial` subscribes later
            self._socket.unsubscribe(before)
            self._socket.subscribe(self._asked)
        return self._asked

    def follow(self, topic: bytes, on: bool) -> None:
        """Subscribe to `topic` if `on`, otherwise unsubscribe."""
        if on == (topic in self._topics):
            return
        if on:
            self._topics.append(topic)
        else:
            self._topics.remove(topic)
        if self._redial_s is None:  # if there is no socket now, `_dial` subscribes later
            (self._socket.subscribe if on else self._socket.unsubscribe)(topic)

    def _hang_up(self) -> None:
        if self._monitor:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def receive(self, timeout_ms: int) -> list[Message]:
        """Return the messages of the next multipart message, or [] if none arrived within `timeout_ms`.

        Raises DecodeError if a frame is not a message.
        """
        _topic, frames = self.receive_frames(timeout_ms)
        found = (codec.decode(frame) for frame in frames)
        return [message for message in found if message is not None]

    def receive_frames(self, timeout_ms: int) -> tuple[bytes, list[bytes]]:
        """Return the topic and the encoded frames of the next multipart message. Returns b"" and [] after
        `timeout_ms`.
        """
        if self._redial_s is not None:
            wait_s = self._redial_s - time.monotonic()
            if wait_s > 0:
                time.sleep(min(wait_s, timeout_ms / 1000))
                return b"", []
            self._redial_s = None
            self._dial()
        is_ready = self._socket.poll(timeout_ms)
        if not self._has_link() or not is_ready:
            return b"", []
        try:
            topic, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return b"", []
        self.received += 1
        if not frames:
            raise DecodeError("a message of no frames")
        return topic, frames

    def _has_link(self) -> bool:
        """Update the link's state from the monitor's events. Returns whether the socket can be used.

        If the link failed, finds out why, closes the socket and connects again later. libzmq's own reconnecting is
        not enough: after some failures it gives up, and after others it tries twenty times per second.
        """
        is_allowed = True
        while self._monitor and self._monitor.poll(0):
            event, _value = monitor_event(self._monitor)
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._link, self.trouble, self.is_refused = _Link.UP, "", False
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                is_allowed = False
            elif self._link is _Link.UP:
                self._link = _Link.BROKEN
            elif self._link is _Link.BROKEN and event == zmq.EVENT_CONNECT_RETRIED:
                # the socket reconnects by itself, and its next event shows whether reconnecting succeeded
                self._link = _Link.DOWN
            else:
                self._note_failure(is_allowed)
                self._hang_up()
                self._redial_s = time.monotonic() + REDIAL_S
                return False
        return True

    def _note_failure(self, is_allowed: bool) -> None:
        if self._keys and not is_allowed:
            self.trouble, self.is_refused = not_allowed(self._keys), True
            return
        trouble, is_final = why_not(self.endpoint, self._keys)
        # A refusal may come from a daemon that is restarting. So a reason is final only if it is found twice in a
        # row.
        if not is_final or trouble == self._suspected:
            self.trouble, self.is_refused = trouble, is_final
        self._suspected = trouble

    def ask_clock(self, number: int) -> None:
        """Ask the daemon for a ClockReading with this `number`. Replaces the previous question of this kind."""
        self._ask_beside(CLOCK_PREFIX, b"%d" % number)

    def ask_ended(self, source: str) -> None:
        """Ask the daemon to read the files of the ended process `source`. This replaces the previous such question.

        All viewers receive the result. If the daemon has read the files before, only this viewer receives everything.
        """
        self._ask_beside(ENDED_PREFIX, ":".join(source.rsplit(":", 3)[1:]).encode())

    def _ask_beside(self, prefix: bytes, what: bytes) -> None:
        """Ask a question that is not repeated after a reconnect."""
        if self._redial_s is not None:
            return
        if before := self._beside.get(prefix):
            self._socket.unsubscribe(before)
        self._beside[prefix] = _question(prefix) + b"/" + what
        self._socket.subscribe(self._beside[prefix])

    def close(self) -> None:
        """Close the socket."""
        if self._redial_s is None:
            self._hang_up()
        self._context.destroy(linger=0)


def _question(prefix: bytes) -> bytes:
    """Return a topic that no other viewer uses."""
    return prefix + secrets.token_hex(8).encode()
