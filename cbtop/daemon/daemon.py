"""The daemon: finds every ring of this user, adds up what they hold and publishes it.

It runs as a process of its own (`cbtop daemon`) or in a thread of a viewer that found none, on the same path.
The profiled processes do not know it exists: it can come late, die and come back.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Self

from cbtop.daemon.history import MAX_HISTORY_S, History
from cbtop.daemon.source import Source, modified_s
from cbtop.protocol import codec
from cbtop.protocol.catalog import is_locked
from cbtop.protocol.endpoint import runtime_dir
from cbtop.protocol.keys import DaemonKeys
from cbtop.protocol.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    ClockReading,
    DaemonGoodbye,
    DaemonHello,
    Heartbeat,
    HistoryPiece,
    RecordBatch,
    SourceGone,
    WireMessage,
)
from cbtop.protocol.process import boot_id, process_start
from cbtop.protocol.publisher import CLOCK_PREFIX, HISTORY_PREFIX, JOIN_PREFIX, LIVE, RECORDS, Publisher
from cbtop.protocol.recording import FrameKind, encode_frame
from cbtop.protocol.vocabulary import SourceStatus
from cbtop.version import __version__

READ_S = 0.1  # a default ring holds a tenth of a second of 2.6 million records a second
PUBLISH_S = 0.1
DISCOVER_S = 0.2
JOIN_S = 0.1  # who joins within it is answered together
HEARTBEAT_S = 1.0
KEYFRAME_S = 5.0
SHUT_OUT_S = 0.5
LAST_WORD_S = 0.05  # closing at once would take back what is still on its way
RETRY_S = 5.0  # a file that could not be opened: it may be that a descriptor was lacking
KEEP_ENDED_S = 600.0  # an ended process stays readable this long
MAX_SOURCES = 256
RECORDS_TOGETHER_BYTES = 4 << 20  # about so much goes into one message
TOPICS = {FrameKind.LIVE: LIVE, FrameKind.RECORDS: RECORDS}

_FILE_NAME = re.compile(r"\d+-\d+-\d+\.(catalog|new)")
_RING_NAME = re.compile(r"\d+-\d+-\d+\.ring")  # pid, process start, serial
_log = logging.getLogger("cbtop.daemon")


class Daemon:
    """Serves `endpoint` from `directory` until it is stopped.

    It keeps what it has said in the last `history_s` seconds, for viewers that ask (0: nothing).
    Raises EndpointError when the address is taken, KeysError when it must not be served with these `keys`.
    """

    def __init__(
        self,
        endpoint: str,
        directory: Path | None = None,
        keys: DaemonKeys | None = None,
        history_s: float = MAX_HISTORY_S,
    ) -> None:
        self._directory = directory or runtime_dir()
        self._publisher = Publisher(endpoint, keys)
        self._sources: dict[Path, Source] = {}
        self._refused: dict[Path, float] = {}  # files that are no rings, and when to look at them again
        self._joins_due_s = 0.0
        self._history_s = history_s
        self._history = History(history_s)
        self._history_versions: dict[str, tuple[int, int]] | None = None  # at its last keyframe

    @property
    def endpoint(self) -> str:
        """The address that is served."""
        return self._publisher.endpoint

    def run(self, stop: threading.Event) -> None:
        """Read and publish until `stop` is set, then close the address."""
        due = _Timetable(
            {
                self._keyframe: KEYFRAME_S,
                self._discover: DISCOVER_S,
                self._read: READ_S,
                self._publish: PUBLISH_S,
                self._beat: HEARTBEAT_S,
                self._publisher.shut_out_revoked: SHUT_OUT_S,
            }
        )
        try:
            while not stop.is_set():
                for job in due.now():
                    job()
                self._publisher.hear(due.wait_ms())
                self._answer()
            # However late we are: viewers still hear how the host beside which we ran has ended.
            self._read()
            self._beat()
            self._publisher.send(LIVE, [DaemonGoodbye()])
            time.sleep(LAST_WORD_S)
        finally:
            self._publisher.close()

    def _discover(self) -> None:
        """Open new rings; let go of those that ended long ago, and of files whose process died too early."""
        try:
            names = set(os.listdir(self._directory))
        except OSError as error:  # it was removed, or no descriptor is left: what is open is served on
            _log.debug("%s", error)
            names = set()
        for name in sorted(names):
            path = self._directory / name
            if _FILE_NAME.fullmatch(name):
                if f"{path.stem}.ring" not in names and _is_left_over(path):
                    path.unlink(missing_ok=True)
            elif _RING_NAME.fullmatch(name) and path not in self._sources and len(self._sources) < MAX_SOURCES:
                self._open(path)
        for path, source in list(self._sources.items()):
            if _ended_before(source, KEEP_ENDED_S):
                self._say(FrameKind.LIVE, [SourceGone(source.key)])
                source.remove_files()
                del self._sources[path]

    def _open(self, path: Path) -> None:
        if time.monotonic() < self._refused.get(path, 0):
            return
        try:
            if _is_left_over(path):
                path.unlink(missing_ok=True)
                path.with_suffix(".catalog").unlink(missing_ok=True)
                return
            source = Source(path)
        except Exception as error:  # noqa: BLE001 - a hostile file must not keep the daemon from the others
            if path not in self._refused:
                _log.warning("%s", error)
            self._refused[path] = time.monotonic() + RETRY_S
            return
        source.poll()
        self._sources[path] = source
        self._say(FrameKind.RECORDS, source.records())
        self._say(FrameKind.LIVE, source.snapshot())
        source.delta()  # the snapshot held it

    def _read(self) -> None:
        for source in self._sources.values():
            source.poll()

    def _publish(self) -> None:
        """Say what is new, the records before the counters that tell of them: what is missing then was lost."""
        together: list[RecordBatch] = []
        size_bytes = 0
        for batch in (batch for source in self._sources.values() for batch in source.records()):
            together.append(batch)
            size_bytes += len(batch.columns)
            if size_bytes > RECORDS_TOGETHER_BYTES:
                self._say(FrameKind.RECORDS, together)
                together, size_bytes = [], 0
        self._say(FrameKind.RECORDS, together)
        for source in self._sources.values():
            self._say(FrameKind.LIVE, source.delta())

    def _beat(self) -> None:
        self._publish()
        self._say(FrameKind.LIVE, [self._heartbeat()])
        self._publisher.begin_second()

    def _keyframe(self) -> None:
        self._publish()
        for source in self._sources.values():
            if source.state is SourceStatus.LIVE:
                self._publisher.send(LIVE, source.keyframe())
        if not self._history_s:
            return
        lately = [source for source in self._sources.values() if not _ended_before(source, self._history_s)]
        versions = {source.key: source.version for source in lately}
        if versions != self._history_versions:  # else the last keyframe says it all
            self._history_versions = versions
            messages = [codec.encode(message) for message in self._snapshots(lately)]
            self._history.begin(encode_frame(FrameKind.KEYFRAME, time.perf_counter_ns(), messages), time.monotonic())

    def _answer(self) -> None:
        """Answer the viewers that ask for the time, for a piece of the history or, having joined, for everything."""
        for topic in self._publisher.questions(CLOCK_PREFIX):
            reading = ClockReading(_number(topic), time.perf_counter_ns(), time.time_ns())
            self._publisher.answer([topic], [reading])
        pieces = self._publisher.questions(HISTORY_PREFIX)
        if pieces:
            self._publish()
        for topic in pieces:
            first, frames = self._history.piece(_number(topic))
            hello = self._hello()
            head = HistoryPiece(first, self._history.end, hello.host, hello.monotonic_ns, hello.realtime_ns)
            self._publisher.answer_frames([topic], [codec.encode(head), *frames])
        if time.monotonic() < self._joins_due_s:
            return
        if joined := self._publisher.questions(JOIN_PREFIX):
            self._joins_due_s = time.monotonic() + JOIN_S
            self._publish()
            self._publisher.answer(joined, self._snapshots(self._sources.values()))

    def _say(self, kind: FrameKind, messages: Iterable[WireMessage]) -> None:
        """Send `messages` to all who follow that kind, and keep them."""
        frames = [codec.encode(message) for message in messages]
        if frames:
            self._publisher.send_frames(TOPICS[kind], frames)
            if self._history_s:
                self._history.add(encode_frame(kind, time.perf_counter_ns(), frames))

    def _snapshots(self, sources: Iterable[Source]) -> Iterator[WireMessage]:
        yield self._hello()
        for source in sources:
            yield from source.snapshot()
        yield self._heartbeat()

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(time.perf_counter_ns(), tuple(source.state_message() for source in self._sources.values()))

    def _hello(self) -> DaemonHello:
        return DaemonHello(
            protocol_major=PROTOCOL_MAJOR,
            protocol_minor=PROTOCOL_MINOR,
            pid=os.getpid(),
            host=socket.gethostname(),
            boot_id=boot_id(),
            version=__version__,
            monotonic_ns=time.perf_counter_ns(),
            realtime_ns=time.time_ns(),
        )


class DaemonInside:
    """A daemon in a thread of this process, for a viewer that found none running."""

    def __init__(self, endpoint: str, directory: Path | None = None) -> None:
        self._stop = threading.Event()
        self._daemon = Daemon(endpoint, directory)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="cbtop-daemon", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """The address that is served."""
        return self._daemon.endpoint

    def close(self) -> None:
        """Stop it and wait until its address is free."""
        self._stop.set()
        self._thread.join(timeout=5)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            self._daemon.run(self._stop)
        except Exception as error:  # noqa: BLE001 - nobody else would hear of it: the viewer shows it
            self.error = error


class _Timetable:
    """Jobs that come round at their own periods (s), in the order given."""

    def __init__(self, periods_s: dict[Callable[[], None], float]) -> None:
        self._periods_s = periods_s
        self._due_s = dict.fromkeys(periods_s, time.monotonic())

    def now(self) -> list[Callable[[], None]]:
        """The jobs that are due; each is next due a period from now (a late daemon does not hurry after)."""
        now_s = time.monotonic()
        jobs = [job for job, at_s in self._due_s.items() if at_s <= now_s]
        for job in jobs:
            self._due_s[job] = now_s + self._periods_s[job]
        return jobs

    def wait_ms(self) -> int:
        """How long nothing is due."""
        return max(0, int((min(self._due_s.values()) - time.monotonic()) * 1000) + 1)


def _number(topic: bytes) -> int:
    """What a question is about: its last part."""
    return int(topic.rpartition(b"/")[2])


def _ended_before(source: Source, seconds: float) -> bool:
    return source.ended_at_s is not None and time.monotonic() - source.ended_at_s > seconds


def _is_left_over(path: Path) -> bool:
    """Whether a ring's process ended so long ago that nobody asks for it any more."""
    pid, start, _serial = (int(part) for part in path.stem.split("-"))
    try:
        ended = process_start(pid) != start
    except OSError:  # no descriptor left to look with
        return False
    if not ended or time.time() - modified_s(path) <= KEEP_ENDED_S:
        return False
    return not is_locked(path.with_suffix(".catalog"))  # in another pid namespace it may well be alive
