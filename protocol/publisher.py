"""The daemon's socket: XPUB, so that it hears who joins; it never waits for a viewer.

A message goes out under a topic: LIVE reaches every viewer, RECORDS every recorder, a topic of its own (join,
history) only the viewer that subscribed to it: that is how a viewer asks. What belongs together travels as one
multipart message, which ZeroMQ counts once against the high-water mark and delivers whole or not at all. A viewer
that does not read loses messages, each viewer its own.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import zmq

from cbtop.protocol import codec
from cbtop.protocol.auth import ZapAuthenticator
from cbtop.protocol.endpoint import is_loopback, parse_endpoint, refuse_without_descriptors
from cbtop.protocol.errors import EndpointError, KeysError
from cbtop.protocol.filesystem import in_words
from cbtop.protocol.keys import DaemonKeys
from cbtop.protocol.messages import WireMessage

LIVE = b"live"
RECORDS = b"records"
JOIN_PREFIX = b"join/"
CLOCK_PREFIX = b"clock/"
HISTORY_PREFIX = b"history/"
QUESTIONS = (JOIN_PREFIX, CLOCK_PREFIX, HISTORY_PREFIX)
MAX_TOPIC_BYTES = 64
MAX_HEARD = 1000  # words of viewers a turn, so that a flood of them cannot hold up the daemon
SEND_HIGH_WATER_MARK = 32  # messages a viewer: three seconds at ten updates a second


class Publisher:
    """Binds `endpoint`. Raises EndpointError when it is in use or cannot be bound. One thread owns it.

    With `keys`, a tcp socket lets in only the viewers they allow. Raises KeysError where the address could be
    reached from other hosts and there are none, or where they let in nobody.
    """

    def __init__(self, endpoint: str, keys: DaemonKeys | None = None) -> None:
        self.endpoint = parse_endpoint(endpoint)
        refuse_without_descriptors()
        is_tcp = self.endpoint.startswith("tcp://")
        _check_keys(self.endpoint, keys if is_tcp else None, is_tcp)
        self._authenticator = ZapAuthenticator(keys) if keys and is_tcp else None
        self._lock = None if is_tcp else _lock_ipc(self.endpoint)
        self._open()

    def _open(self) -> None:
        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.IPV6, int("[" in self.endpoint))
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.MAXMSGSIZE, 1024)  # all a viewer ever says is a topic
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        if self._authenticator:
            self._authenticator.guard(self._socket)
            for asked in self._authenticator.sockets():
                self._poller.register(asked, zmq.POLLIN)
        try:
            self._bind()
        except zmq.ZMQError as error:
            self.close()
            raise EndpointError(f"{self.endpoint}: {error.strerror.lower()}") from error

    def _bind(self) -> None:
        if self._lock is None:
            self._socket.bind(self.endpoint)
            self.endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)  # port 0 is a free one
            return
        umask = os.umask(0o177)  # who may write to a socket's file may connect, from the moment it is there
        try:
            self._socket.bind(self.endpoint)
        finally:
            os.umask(umask)

    @property
    def refused(self) -> int:
        """How many handshakes failed, of those that keys were asked for."""
        return self._authenticator.refused if self._authenticator else 0

    def joined(self, timeout_ms: int) -> list[bytes]:
        """The topics of their own that viewers subscribed to; waits up to `timeout_ms` for the first."""
        topics: list[bytes] = []
        for turn in range(MAX_HEARD):
            ready = dict(self._poller.poll(0 if turn else timeout_ms))
            if not ready:
                break
            if self._authenticator and ready.keys() - {self._socket}:
                self._authenticator.answer()
            if self._socket in ready:
                said = self._socket.recv()
                is_question = said[:1] == b"\x01" and said[1:].startswith(QUESTIONS)
                if is_question and len(said) <= MAX_TOPIC_BYTES:
                    topics.append(said[1:])
        return topics

    def shut_out_revoked(self) -> None:
        """End the links of viewers that are not allowed any more.

        libzmq cannot end one link, so all end; who is still allowed is back within a second and hears everything
        anew. Raises EndpointError when somebody took the address in between.
        """
        if self._authenticator and self._authenticator.has_revoked():
            self._close_socket()
            self._open()

    def send(self, topic: bytes, messages: Iterable[WireMessage]) -> None:
        """Send `messages` together under `topic`; never waits, never fails for a viewer's sake."""
        self.send_frames(topic, [codec.encode(message) for message in messages])

    def send_frames(self, topic: bytes, frames: Sequence[bytes]) -> None:
        """The same, of messages that are encoded already."""
        if frames:
            self._socket.send_multipart([topic, *frames], zmq.NOBLOCK, copy=False)

    def close(self) -> None:
        """Close the socket and give up the address."""
        self._close_socket()
        if self._lock is not None:
            os.close(self._lock)

    def _close_socket(self) -> None:
        if self._context.closed:
            return
        if self._authenticator:
            self._authenticator.leave(self._socket)
        self._context.destroy(linger=0)


def _check_keys(endpoint: str, keys: DaemonKeys | None, is_tcp: bool) -> None:
    if keys and not keys.allowed():
        raise KeysError(
            f"{endpoint}: no viewer is allowed yet, so none could connect: cbtop keys allow NAME PUBLIC_KEY"
        )
    if is_tcp and not keys and not is_loopback(endpoint):
        raise KeysError(f"{endpoint}: other hosts are not served without keys: cbtop keys new daemon")


def _lock_ipc(endpoint: str) -> int:
    """The right to bind an ipc path: libzmq itself would let a second daemon steal it."""
    path = Path(endpoint.removeprefix("ipc://"))
    lock = path.with_suffix(".lock")
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise EndpointError(f"{lock}: {in_words(error)}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise EndpointError(f"{endpoint}: another cbtop daemon serves this address") from error
        raise EndpointError(f"{lock}: {in_words(error)}") from error
    return descriptor
