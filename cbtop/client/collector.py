"""Read one daemon's messages into a store, and report the state of the connection."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from cbtop.client.clock_offset import SAME_CLOCK, ClockExchange, ClockOffset
from cbtop.client.store import Store
from cbtop.protocol import codec
from cbtop.protocol.errors import DecodeError, VersionError
from cbtop.protocol.keys import ViewerKeys
from cbtop.protocol.messages import ClockReading, DaemonGoodbye, DaemonHello
from cbtop.protocol.process import boot_id
from cbtop.protocol.publisher import RECORDS
from cbtop.protocol.subscriber import Subscriber

SILENT_AFTER_S = 3.0  # a daemon is silent after this many seconds without a message: three missed heartbeats
# Longest wait for the daemon's answer about its clocks. Otherwise the next poll would notice it too late, and its
# arrival time would be wrong.
CLOCK_WAIT_S = 0.2
# A request for an ended process's data is repeated after this many seconds, because the answer may be lost.
ASK_AGAIN_S = 2.0
MAX_DRAINED = 200  # One poll applies at most this many messages. More would block the screen.
# A poll stops applying messages after this many seconds. The catalog of 100,000 nodes takes a second.
MAX_DRAIN_S = 0.25


class Collector:
    """Applies the messages of the daemon at `endpoint` to `store`. Never blocks, unless a timeout is passed."""

    def __init__(
        self,
        endpoint: str,
        store: Store,
        clock_s: Callable[[], float] = time.monotonic,
        keys: ViewerKeys | None = None,
    ) -> None:
        self.store = store
        self.damaged = 0  # number of messages that could not be decoded
        self._clock_s = clock_s
        self._heard_s = clock_s()
        self._has_left = False
        self._exchange = ClockExchange()
        self._boot_id = boot_id()
        self._other_version = ""
        self._waiting: deque[bytes] = deque()  # messages that arrived and are not applied yet
        # the last request for the data of an ended process: the process's key and when it was asked for
        self._asked_for, self._asked_s = "", 0.0
        self._subscriber = Subscriber(endpoint, keys)

    @property
    def endpoint(self) -> str:
        return self._subscriber.endpoint

    @property
    def refused(self) -> str:
        """Why the daemon and this viewer will never accept each other (different versions or keys), or ""."""
        return self._other_version or (self.trouble if self._subscriber.is_refused else "")

    @property
    def trouble(self) -> str:
        """Why there is no connection to the daemon. "" if connected, or if the reason is unknown."""
        return self._subscriber.trouble

    @property
    def is_behind(self) -> bool:
        """Whether the last poll has left messages for the next, for example after a large snapshot."""
        return bool(self._waiting)

    @property
    def received(self) -> int:
        """Number of messages received from the daemon."""
        return self._subscriber.received

    @property
    def silent_s(self) -> float:
        """Seconds since the daemon's last message, or before the first since the collector was made."""
        return self._clock_s() - self._heard_s

    @property
    def is_silent(self) -> bool:
        """Whether the daemon has said goodbye, or has been silent for three heartbeat periods."""
        return self._has_left or self.silent_s > SILENT_AFTER_S

    @property
    def clock_offset(self) -> ClockOffset | None:
        """Difference between the clocks of the daemon's host and ours. None if not known yet."""
        if self._same_boot:
            return SAME_CLOCK
        return self._exchange.estimate(time.perf_counter_ns())

    def poll(self, timeout_ms: int = 0) -> None:
        """Apply the daemon's messages. Wait up to `timeout_ms` for the first."""
        self._drain(timeout_ms)
        daemon = self.store.daemon
        if daemon is None or self._same_boot or self.is_silent:
            return
        if self._exchange.is_due(time.perf_counter_ns()):
            self._ask_clock()

    def want(self, source: str) -> None:
        """Request an ended process's data, unless it was already read.

        Only one request is sent at a time. A later poll gets the answer.
        """
        is_waiting = self._is_unread(self._asked_for) and self._clock_s() - self._asked_s < ASK_AGAIN_S
        if self._is_unread(source) and not is_waiting:
            self._asked_for, self._asked_s = source, self._clock_s()
            self._subscriber.ask_ended(source)

    def _is_unread(self, source: str) -> bool:
        record = self.store.sources.get(source)
        return record is not None and record.is_unread

    def follow_records(self, on: bool) -> None:
        """Start or stop receiving every single record from the daemon. The store keeps the newest records of each
        source.
        """
        self._subscriber.follow(RECORDS, on)
        self.store.keep_records(on)

    @property
    def _same_boot(self) -> bool:
        daemon = self.store.daemon
        return daemon is not None and daemon.boot_id != "" and daemon.boot_id == self._boot_id

    def _ask_clock(self) -> None:
        asked_ns = time.perf_counter_ns()
        self._subscriber.ask_clock(self._exchange.ask(asked_ns))
        waited_s = 0.0
        while self._exchange.is_open and waited_s < CLOCK_WAIT_S:
            self._drain(round((CLOCK_WAIT_S - waited_s) * 1000))
            waited_s = (time.perf_counter_ns() - asked_ns) / 1e9

    def _drain(self, timeout_ms: int) -> None:
        until_s = time.monotonic() + timeout_ms / 1000 + MAX_DRAIN_S
        for _ in range(MAX_DRAINED):
            if not self._waiting:
                try:
                    _topic, frames = self._subscriber.receive_frames(timeout_ms)
                except DecodeError:
                    frames = [b""]  # not a cbtop message, but the daemon is alive
                self._waiting.extend(frames)
                timeout_ms = 0
            if not self._waiting:
                return
            self._has_left = False
            while self._waiting:
                self._take(self._waiting.popleft())
                # Applying a long message takes time, and more may arrive meanwhile. So read the clock after each
                # message.
                self._heard_s = self._clock_s()
                if time.monotonic() > until_s:
                    return

    def _take(self, frame: bytes) -> None:
        """Apply one message. If one is damaged, the following ones are still applied."""
        try:
            message = codec.decode(frame)
            if message is None:
                return
            if isinstance(message, DaemonGoodbye):
                self._has_left = True
            if isinstance(message, DaemonHello):
                self._other_version = ""
                if self.store.daemon and self.store.daemon.boot_id != message.boot_id:
                    # The daemon runs on a different host now, or the host was rebooted. Measure the clock offset
                    # again from the start.
                    self._exchange = ClockExchange()
            if isinstance(message, ClockReading):
                self._exchange.answer(message, time.perf_counter_ns(), time.time_ns())
            if not self._other_version:
                self.store.apply(message)
        except VersionError as error:
            self._other_version = str(error)
        except DecodeError:
            self.damaged += 1

    def close(self) -> None:
        """Close the socket."""
        self._subscriber.close()
