"""The connections to a daemon's socket, and the limits of each.

Every process that can reach the address can connect: on a loopback port without keys, that is every user of the
machine. So everything is bounded, for each connection and for all of them:

- MAX_CONNECTIONS at once for the daemon's own user (and root, other hosts, and users that the system does not name).
  MAX_STRANGERS more for the machine's other users, who thus cannot keep the owner out. If there is no room, the
  connection that has been silent the longest goes; if all have spoken, the newcomer.
- A connection has at most MAX_SUBSCRIPTIONS, sends at most MAX_WORDS a second, and only what a viewer sends. One that
  does more is cut off.
- Only the newest question of each kind counts. It is answered when the previous answer has left our memory. So at
  most one answer waits for a viewer that does not read, and SEND_HIGH_WATER_MARK of the messages to all, which are
  shared.

The data of a connection is forgotten when it ends.
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
MAX_SUBSCRIPTIONS = 8  # a viewer has five: live, records, a question, the time and what ended
MAX_WORDS = 300  # a second; asking for a history of 64 MiB takes 130

_NETLINK_SOCK_DIAG = 4  # sock_diag(7), from here on
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_UID_AT = 80  # in the answer: 16 bytes of nlmsghdr, then idiag_uid of inet_diag_msg


@dataclass(slots=True)
class _Peer:
    """One connection."""

    name: object  # of its socket
    is_stranger: bool
    topics: set[bytes] = field(default_factory=set)
    words: int = 0  # in this second
    asked: dict[bytes, bytes] = field(default_factory=dict)  # the newest question of each kind
    answer: zmq.MessageTracker | None = None  # the newest, on its way


class Peers:
    """The connections of one socket, by their descriptors.

    They may subscribe to topics that match `topics`. `say` gets the reason why one was cut off.
    """

    def __init__(self, topics: re.Pattern[bytes], say: Callable[[str], None]) -> None:
        self._topics = topics
        self._say = say
        self._peers: dict[int, _Peer] = {}

    def came(self, descriptor: int) -> None:
        """Add a new connection."""
        try:
            peer = _look_at(descriptor)
        except OSError:  # it has left
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
        """Note that a connection has subscribed to a topic, or given one up."""
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
        """Reset every connection's count of messages."""
        for peer in self._peers.values():
            peer.words = 0

    def questions(self, kind: bytes) -> list[bytes]:
        """Return the topics of the questions of a kind that can be answered now."""
        return [peer.asked[kind] for peer in self._peers.values() if kind in peer.asked and not _is_busy(peer)]

    def follow(self, topics: Collection[bytes]) -> bool:
        """Whether any connection has subscribed to one of `topics`."""
        return any(not peer.topics.isdisjoint(topics) for peer in self._peers.values())

    @property
    def is_waiting(self) -> bool:
        """Whether a question waits until the answer before has left."""
        return any(peer.asked and _is_busy(peer) for peer in self._peers.values())

    def answered(self, topic: bytes, answer: zmq.MessageTracker) -> None:
        """Note that the question `topic` has an answer, which is on its way."""
        for peer in self._peers.values():
            for kind in [kind for kind, asked in peer.asked.items() if asked == topic]:
                del peer.asked[kind]
                peer.answer = answer

    def _cut_off(self, descriptor: int, why: str) -> None:
        """End a connection. libzmq cannot do this, but it notices that the system has."""
        self._say(f"closed a connection: {why}")
        name = self._peers.pop(descriptor).name
        with suppress(OSError):  # it has left, and its descriptor may be a different connection's already
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
    """Return the user at the other end of a TCP connection from this machine, or None if it is not known."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or not hasattr(socket, "AF_NETLINK"):
        return None
    here, there = connection.getsockname(), connection.getpeername()
    # inet_diag_req_v2, about the other end's own socket, in any state and on any interface.
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
    except OSError:  # no descriptor, or a system that does not tell
        return None
    if len(answer) < _UID_AT + 4 or struct.unpack_from("=H", answer, 4) != (_SOCK_DIAG_BY_FAMILY,):
        return None
    found: int = struct.unpack_from("=I", answer, _UID_AT)[0]
    return found
