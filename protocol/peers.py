"""The connections to a daemon's socket, and their limits.

Every process that can reach the address can connect. On a loopback port without keys, every user of the machine can.
So there are limits for each connection and for all connections together:

- Other users of this machine may have at most MAX_STRANGERS connections. They cannot keep the owner out, because all
  other connections (of the daemon's own user, root, other hosts, unknown users) have a separate limit,
  MAX_CONNECTIONS. Beyond a limit, the oldest connection without a subscription is closed. This may be the new one.
- A connection has at most MAX_SUBSCRIPTIONS subscriptions, and sends at most MAX_WORDS messages a second. They must
  be messages of a viewer. A connection that breaks a limit is closed.
- Only the newest question of each kind counts. It is answered when the previous answer has left our memory. So for a
  viewer that does not read, at most one answer waits, and at most SEND_HIGH_WATER_MARK live messages. All viewers
  share the memory of a live message.

The data of a connection is deleted when the connection ends.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field

import zmq

MAX_CONNECTIONS = 64
MAX_STRANGERS = 16
# At most this many subscriptions of a connection. A viewer needs five topics: live data, records, a question, the
# time and ended processes.
MAX_SUBSCRIPTIONS = 8
# Messages that a connection may send per second. A viewer that asks for a history of 64 MiB sends 130.
MAX_WORDS = 300

_NETLINK_SOCK_DIAG = 4  # this constant and the following ones are from sock_diag(7)
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
# Position of the user id in the answer of the kernel: 16 bytes of nlmsghdr, then 64 bytes into inet_diag_msg.
_UID_AT = 80


@dataclass(slots=True)
class _Peer:
    """One connection."""

    name: object  # the addresses of both ends of the connection's socket
    is_stranger: bool
    topics: set[bytes] = field(default_factory=set)
    words: int = 0  # number of messages received in this second
    # kind of question -> the newest question of this kind that this connection has asked
    asked: dict[bytes, bytes] = field(default_factory=dict)
    # Tracks the newest answer to this connection until libzmq has sent the answer.
    answer: zmq.MessageTracker | None = None


class Peers:
    """The connections of one socket, by their descriptors.

    A connection may subscribe to topics that match `topics`. When a connection is closed, `say` is called with the
    reason.
    """

    def __init__(self, topics: re.Pattern[bytes], say: Callable[[str], None]) -> None:
        self._topics = topics
        self._say = say
        self._peers: dict[int, _Peer] = {}

    def came(self, descriptor: int) -> None:
        """Add a new connection."""
        try:
            peer = _look_at(descriptor)
        except OSError:  # this connection has ended already, so its socket no longer has an address
            return
        self._peers[descriptor] = peer
        alike = [number for number, other in self._peers.items() if other.is_stranger == peer.is_stranger]
        most = MAX_STRANGERS if peer.is_stranger else MAX_CONNECTIONS
        if len(alike) > most:
            silent = next(number for number in alike if not self._peers[number].topics)
            whose = "other users have" if peer.is_stranger else "there are"
            self._cut_off(silent, f"{whose} more than {most} connections")

    def left(self, descriptor: int) -> None:
        """Remove a connection that has ended."""
        self._peers.pop(descriptor, None)

    def said(self, descriptor: int, word: bytes) -> None:
        """Process a message of a connection. The message begins or ends the subscription to a topic."""
        peer = self._peers.get(descriptor)
        if peer is None:
            return
        peer.words += 1
        topic = word[1:]
        kind = topic[: topic.find(b"/") + 1]
        if word[0] > 1 or not self._topics.fullmatch(topic):
            self._cut_off(descriptor, "it said what no viewer says")
            return
        if word[0]:
            peer.topics.add(topic)
            if kind:
                peer.asked[kind] = topic
        else:
            peer.topics.discard(topic)
            if peer.asked.get(kind) == topic:
                del peer.asked[kind]
        if len(peer.topics) > MAX_SUBSCRIPTIONS:
            self._cut_off(descriptor, f"it has more than {MAX_SUBSCRIPTIONS} subscriptions")
        elif peer.words > MAX_WORDS:
            self._cut_off(descriptor, f"it said more than {MAX_WORDS} words in a second")

    def begin_second(self) -> None:
        """Begin a new second: set the number of messages of every connection to 0."""
        for peer in self._peers.values():
            peer.words = 0

    def questions(self, kind: bytes) -> list[bytes]:
        """Return the topics of the questions of one kind that can be answered now."""
        return [peer.asked[kind] for peer in self._peers.values() if kind in peer.asked and not _is_busy(peer)]

    def follow(self, topics: Collection[bytes]) -> bool:
        """Whether any connection has subscribed to one of `topics`."""
        return any(not peer.topics.isdisjoint(topics) for peer in self._peers.values())

    @property
    def is_waiting(self) -> bool:
        """Whether a question waits until an earlier answer has been sent."""
        return any(peer.asked and _is_busy(peer) for peer in self._peers.values())

    def answered(self, topic: bytes, answer: zmq.MessageTracker) -> None:
        """Remove the question `topic`, because its `answer` is being sent."""
        for peer in self._peers.values():
            for kind in [kind for kind, asked in peer.asked.items() if asked == topic]:
                del peer.asked[kind]
                peer.answer = answer

    def _cut_off(self, descriptor: int, why: str) -> None:
        """Close a connection through the operating system, because libzmq has no function for it.

        libzmq notices that the connection has ended.
        """
        self._say(f"closed a connection: {why}")
        name = self._peers.pop(descriptor).name
        # The peer has disconnected, and the descriptor may already belong to a different connection.
        with suppress(OSError):
            connection = socket.socket(fileno=descriptor)
            try:
                if _name(connection) == name:
                    connection.shutdown(socket.SHUT_RDWR)
            finally:
                connection.detach()


def _is_busy(peer: _Peer) -> bool:
    return peer.answer is not None and not peer.answer.done


def _name(connection: socket.socket) -> object:
    return connection.getsockname(), connection.getpeername()


def _look_at(descriptor: int) -> _Peer:
    connection = socket.socket(fileno=descriptor)
    try:
        return _Peer(_name(connection), user_of(connection) not in (None, os.getuid(), 0))
    finally:
        connection.detach()


def user_of(connection: socket.socket) -> int | None:
    """Return the user id of the other end of a TCP connection from this machine, or None if not known."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or not hasattr(socket, "AF_NETLINK"):
        return None
    here, there = connection.getsockname(), connection.getpeername()
    # inet_diag_req_v2: ask for the socket of the other end, in any state and on any interface.
    packed = [
        socket.inet_pton(connection.family, host.partition("%")[0]).ljust(16, b"\0") for host in (there[0], here[0])
    ]
    question = struct.pack("=BBBBI", connection.family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF)
    question += struct.pack("!HH", there[1], here[1]) + b"".join(packed) + struct.pack("=I8s", 0, b"\xff" * 8)
    head = struct.pack("=IHHII", 16 + len(question), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as system:
            system.send(head + question)
            answer = system.recv(4096)
    except OSError:  # the process has no descriptor left, or the system does not support sock_diag(7)
        return None
    if len(answer) < _UID_AT + 4 or struct.unpack_from("=H", answer, 4) != (_SOCK_DIAG_BY_FAMILY,):
        return None
    found: int = struct.unpack_from("=I", answer, _UID_AT)[0]
    return found
