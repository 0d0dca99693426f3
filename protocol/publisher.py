"""The daemon's socket. It is an XPUB socket, which reports subscriptions. It never waits for a viewer.

Every message has a topic. LIVE is sent to every viewer, and RECORDS to every viewer that records. To ask a question,
a viewer subscribes to a topic that no other viewer has (join, history, clock, ended). The answer has the same topic,
so only this viewer receives it.

Messages that belong together are sent as one multipart message. ZeroMQ delivers it completely or not at all, and
counts it once against the high-water mark. A viewer that does not read loses its own messages, but does not affect
other viewers. `cbtop.protocol.peers` has the limits of a viewer.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Iterable, Sequence

import zmq

from cbtop.protocol import codec
from cbtop.protocol.auth import ZapAuthenticator, monitor_event
from cbtop.protocol.endpoint import check_descriptors, is_loopback, lock_of, parse_endpoint, stopped_holder
from cbtop.protocol.errors import EndpointError, KeysError
from cbtop.protocol.filesystem import in_words
from cbtop.protocol.keys import DaemonKeys
from cbtop.protocol.messages import WireMessage
from cbtop.protocol.peers import Peers

LIVE = b"live"
RECORDS = b"records"
JOIN_PREFIX = b"join/"
CLOCK_PREFIX = b"clock/"
HISTORY_PREFIX = b"history/"
ENDED_PREFIX = b"ended/"
TOPICS = re.compile(
    rb"%b|%b|%b[0-9a-f]{16}|(?:%b|%b)[0-9a-f]{16}/\d{1,18}|%b[0-9a-f]{16}/(?:\d{1,20}:){2}\d{1,20}"
    % (LIVE, RECORDS, JOIN_PREFIX, CLOCK_PREFIX, HISTORY_PREFIX, ENDED_PREFIX)
)
# At most this many bytes of a message from a viewer. Handshakes are the largest messages. A topic has at most 85
# bytes.
MAX_MESSAGE_BYTES = 512
MAX_HEARD = 1000  # most subscriptions that are processed at a time, so that a large number does not delay the daemon
# At most this many viewers are let in at a time. A viewer may send many messages before it is disconnected.
MAX_LET_IN = 8
SOON_MS = 10
# Messages that may wait for a viewer. These are three seconds of live data at ten updates per second.
SEND_HIGH_WATER_MARK = 32
# Subscriptions of a viewer that may wait in libzmq's first queue. The second queue has no limit.
RECEIVE_HIGH_WATER_MARK = 16
# Size of the system's receive buffer. libzmq reads this buffer even after a connection is closed.
RECEIVE_BUFFER_BYTES = 4096
HANDSHAKE_MS = 10_000
HEARTBEAT_MS = 5_000
# A viewer is disconnected if it answers no heartbeat, or accepts no byte, for this long. It may connect again.
SILENT_MS = 30_000
MONITORED = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


class Publisher:
    """Binds `endpoint`. Raises EndpointError if the address is in use or cannot be bound. Only one thread may use it.

    With `keys`, a tcp socket accepts only viewers on the allow-list. Raises KeysError if the allow-list is empty, or
    if other hosts could reach the address without keys.
    """

    def __init__(self, endpoint: str, keys: DaemonKeys | None = None) -> None:
        self.endpoint = parse_endpoint(endpoint)
        is_tcp = self.endpoint.startswith("tcp://")
        _check_keys(self.endpoint, keys if is_tcp else None, is_tcp)
        self._authenticator = ZapAuthenticator(keys if is_tcp else None)
        check_descriptors()
        self._lock = None if is_tcp else _lock_ipc(self.endpoint)
        self._open()
        # pyzmq starts a thread for tracked frames, and this thread opens files. Start the thread now, while
        # descriptors are left.
        _tracked(b"")

    def _open(self) -> None:
        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.IPV6, int("[" in self.endpoint))
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RCVBUF, RECEIVE_BUFFER_BYTES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
        self._socket.setsockopt(zmq.TCP_MAXRT, SILENT_MS)
        self._authenticator.guard(self._socket)
        self._peers = Peers(TOPICS, lambda line: self._authenticator.log_once(line, line))
        self._socket.monitor("inproc://peers", MONITORED)
        self._monitor = self._context.socket(zmq.PAIR)
        # No limit for the monitor's queue. With a limit, libzmq would wait until we read events, while `close` waits
        # for libzmq.
        self._monitor.setsockopt(zmq.RCVHWM, 0)
        self._monitor.connect("inproc://peers")
        self._poller = zmq.Poller()
        for listened in (self._socket, self._monitor, self._authenticator.questions):
            self._poller.register(listened, zmq.POLLIN)
        try:
            self._bind()
        except zmq.ZMQError as error:
            self.close()
            raise EndpointError(f"{self.endpoint}: {error.strerror.lower()}") from error

    def _bind(self) -> None:
        if self._lock is None:
            self._socket.bind(self.endpoint)
            # if port 0 was requested, the system has chosen a free port
            self.endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)
            return
        # Any process that may write to the file of an ipc socket may connect. So the file must have the right mode
        # from the start.
        umask = os.umask(0o177)
        try:
            self._socket.bind(self.endpoint)
        finally:
            os.umask(umask)

    @property
    def refused(self) -> int:
        """Number of failed handshakes. They are counted only at a socket that requires keys."""
        return self._authenticator.refused

    def hear(self, timeout_ms: int) -> None:
        """Process new connections, questions and disconnections.

        If there are no messages yet, waits for the first one, at most `timeout_ms`.
        """
        if self._peers.is_waiting:
            timeout_ms = min(timeout_ms, SOON_MS)
        if not self._poller.poll(timeout_ms):
            return
        has_heard_all = self._hear_words()
        self._watch()
        # Let viewers in last, after all messages that were sent before.
        for _ in range(MAX_LET_IN if has_heard_all else 0):
            if self._authenticator.questions.poll(0):
                self._watch()  # process the monitor's event for the connection of this viewer
                self._authenticator.answer()

    def _hear_words(self) -> bool:
        """Process the viewers' subscriptions. Returns whether all were processed."""
        for _ in range(MAX_HEARD):
            try:
                said = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return True
            self._peers.said(_sender(said), said.bytes)
        return False

    def _watch(self) -> None:
        """Process the monitor's events: new connections, ended connections and failed handshakes."""
        while self._monitor.poll(0):
            event, value = monitor_event(self._monitor)
            if event == zmq.EVENT_ACCEPTED:
                self._peers.came(value)
            elif event == zmq.EVENT_DISCONNECTED:
                self._peers.left(value)
            else:
                self._authenticator.failed(value)

    @property
    def is_heard(self) -> bool:
        """Whether there is any viewer, recording or not."""
        return self._peers.follow((LIVE, RECORDS))

    @property
    def has_recorder(self) -> bool:
        """Whether any viewer has subscribed to RECORDS."""
        return self._peers.follow((RECORDS,))

    def questions(self, kind: bytes) -> list[bytes]:
        """Return the topics of the waiting questions of one kind. `answer` takes these topics.

        `kind` is the prefix of the topics.
        """
        return self._peers.questions(kind)

    def answer(self, topics: Iterable[bytes], messages: Iterable[WireMessage]) -> None:
        """Answer each of `topics` with `messages`. Memory holds the messages once, even if many viewers ask."""
        self.answer_frames(topics, [codec.encode(message) for message in messages])

    def answer_frames(self, topics: Iterable[bytes], frames: Sequence[bytes]) -> None:
        """Answer each of `topics` with messages that are encoded already."""
        shared = [zmq.Frame(frame) for frame in frames[:-1]]
        for topic in topics:
            last = _tracked(frames[-1])
            self._socket.send_multipart([topic, *shared, last], zmq.NOBLOCK, copy=False)
            self._peers.answered(topic, last.tracker)

    def begin_second(self) -> None:
        """Set the counts of messages to zero, because limits are per second and a new second begins."""
        self._peers.begin_second()

    def shut_out_revoked(self) -> None:
        """If a key has been revoked, end the connections of all viewers.

        It is not always known which connection uses the key. A viewer that is still allowed reconnects within a
        second and receives everything again. Raises EndpointError if another process took the address meanwhile.
        """
        if self._authenticator.has_revoked():
            self._close_socket()
            self._open()

    def send(self, topic: bytes, messages: Iterable[WireMessage]) -> None:
        """Send `messages` together under `topic`. Never waits, and never raises an error because a viewer is slow or
        gone.
        """
        self.send_frames(topic, [codec.encode(message) for message in messages])

    def send_frames(self, topic: bytes, frames: Sequence[bytes]) -> None:
        """Send `frames` together under `topic`. They are encoded messages."""
        if frames:
            self._socket.send_multipart([topic, *frames], zmq.NOBLOCK, copy=False)

    def close(self) -> None:
        """Close the socket and release the address."""
        self._close_socket()
        if self._lock is not None:
            os.close(self._lock)

    def _close_socket(self) -> None:
        if self._context.closed:
            return
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._authenticator.leave()
        self._context.destroy(linger=0)


def _tracked(data: bytes) -> zmq.Frame:
    """Return a frame with a tracker. The tracker reports when libzmq no longer needs the frame."""
    return zmq.Frame(data, track=True, copy=False, copy_threshold=0)


def _sender(said: zmq.Frame) -> int:
    """Return the descriptor of the connection that sent a message, or -1 if the connection has ended.

    If a connection has ended, libzmq itself sends messages that end its subscriptions.
    """
    try:
        return int(said.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


def _check_keys(endpoint: str, keys: DaemonKeys | None, is_tcp: bool) -> None:
    if keys and not keys.allowed():
        raise KeysError(
            f"{endpoint}: no viewer is allowed yet, so none could connect: cbtop keys allow NAME PUBLIC_KEY"
        )
    if is_tcp and not keys and not is_loopback(endpoint):
        raise KeysError(f"{endpoint}: other hosts are not served without keys: cbtop keys new daemon")


def _lock_ipc(endpoint: str) -> int:
    """Lock an ipc path and return the lock's descriptor.

    Without the lock, libzmq would let a second daemon use the path.
    """
    lock = lock_of(endpoint)
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise EndpointError(f"{lock}: {in_words(error)}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EAGAIN, errno.EACCES):
            who = stopped_holder(endpoint) or "another cbtop daemon serves this address"
            raise EndpointError(f"{endpoint}: {who}") from error
        raise EndpointError(f"{lock}: {in_words(error)}") from error
    return descriptor
