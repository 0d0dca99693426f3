"""The daemon: finds every ring of this user, adds up the records and publishes the totals.

It is a separate process (`cbtop daemon`). A viewer that finds none runs one in a thread. Profiled processes do not
know about it: it may start late, die and return.

Rules of discovery
- At most MAX_SOURCES processes are watched: running ones first, then those that ended last. Other files stay on the
  disk.
- The files of a process are deleted KEEP_ENDED_S after the daemon noticed its end. The oldest are deleted earlier if
  all ended processes together exceed the limits of `cbtop.protocol.ended`.
- Each round opens at most LOOKS_AT_ONCE new processes, those that probably run first. Listing the files takes at most
  one part in LISTING_SHARE of the time.
- Of a process that ended before the daemon began, only the header and the hello are read, until a viewer requests the
  rest.
- The log has a maximum length. A pipe without a reader would fill up and block the daemon.

Devices are sampled in separate threads while viewers listen (`cbtop.daemon.devices`).
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Self

from cbtop.daemon.devices import SAMPLERS
from cbtop.daemon.devices.sampling import NewestSamples
from cbtop.daemon.history import MAX_HISTORY_S, History
from cbtop.daemon.source import Source
from cbtop.protocol import codec
from cbtop.protocol.ended import MAX_ENDED, MAX_ENDED_BYTES, EndedProcess, beyond_bounds, left_by, rings_of, runs
from cbtop.protocol.endpoint import check_descriptors, runtime_dir
from cbtop.protocol.errors import RingError
from cbtop.protocol.keys import DaemonKeys
from cbtop.protocol.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    ClockReading,
    DaemonGoodbye,
    DaemonHello,
    Heartbeat,
    HistoryPiece,
    SourceGone,
    WireMessage,
)
from cbtop.protocol.process import boot_id, pid_namespace, running_pids
from cbtop.protocol.publisher import (
    CLOCK_PREFIX,
    ENDED_PREFIX,
    HISTORY_PREFIX,
    JOIN_PREFIX,
    LIVE,
    RECORDS,
    Publisher,
)
from cbtop.protocol.recording import FrameKind, encode_frame
from cbtop.protocol.vocabulary import SourceStatus
from cbtop.version import __version__

# Seconds between two reads of the rings. At 2.6 million records a second, a ring of default size overflows in this
# time.
LOOK_S = 0.1
PUBLISH_S = 0.25  # Seconds between two updates of the viewers. No screen is drawn more often.
# A daemon inside a viewer also waits until this viewer has drawn the last update, but at most this many seconds, for
# the sake of other viewers. Half of the updates of a screen that is drawn every 0.5 s would never be seen.
MAX_PUBLISH_INSIDE_S = 0.5
DISCOVER_S = 0.2
# If a job is due, other jobs that are almost due also run. Almost due means: at most this part of the period is left.
EARLY = 0.2
JOIN_S = 0.1  # Requests of new viewers within this many seconds are answered together.
HEARTBEAT_S = 1.0
KEYFRAME_S = 5.0
# Seconds between two keyframes of the history if only device samples are new. Old samples are dropped with their
# keyframe.
RESTING_KEYFRAME_S = 60.0
SHUT_OUT_S = 0.5
# Wait this long in seconds before closing the socket, because closing discards messages that are being sent.
LAST_WORD_S = 0.05
RETRY_S = 5.0  # Seconds until the next attempt to open a ring. File descriptors may be free by then.
KEEP_ENDED_S = 600.0  # A process's files are deleted this many seconds after its end.
MAX_SOURCES = 256
LOOKS_AT_ONCE = 256  # One round opens at most this many new processes.
REMOVED_AT_ONCE = 256  # One round deletes the files of at most this many processes.
LISTING_SHARE = 10
# The daemon logs at most this many lines. Together they fit into a pipe.
MAX_COMPLAINTS = 16
RECORDS_TOGETHER_BYTES = 4 << 20  # approximate maximum size in bytes of a message with records
# At most this many read records wait for publication. A record has 40 bytes.
MOST_WAITING = 1 << 16
TOPICS = {FrameKind.LIVE: LIVE, FrameKind.RECORDS: RECORDS}

_log = logging.getLogger("cbtop.daemon")


class Daemon:
    """Serves `endpoint` from the rings in `directory` until it is stopped.

    `run` calls each of the jobs `discover`, `update`, `read_filling`, `publish_devices`, `beat` and `keyframe` at its
    own period, and `answer` in between. Only one thread may call them.

    The messages of the last `history_s` seconds are stored in `history` for viewers (0: none). Raises EndpointError
    if the address is taken, and KeysError if it must not be served with these `keys`.
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
        self._devices = NewestSamples(SAMPLERS)
        self._pid_namespace = pid_namespace()
        self.sources: dict[Path, Source] = {}  # the watched processes; the key is the path of the ring
        self._refused: dict[str, float] = {}  # rings that could not be opened, with the time of the next attempt
        self._waiting: deque[str] = deque()  # names of listed rings that were not opened yet
        # names of the rings that existed when this daemon began
        self._there_before: frozenset[str] | None = None
        self._list_again_s = 0.0
        # ended processes, with the time when this daemon noticed the end
        self._left: dict[str, tuple[EndedProcess, float]] = {}
        self._complaints: set[str] = set()
        self._joins_due_s = 0.0
        self._read_ns = time.perf_counter_ns()  # all records that ended before this time were read
        # Set when the viewer in this process has drawn the last update. None without such a viewer.
        self.is_drawn: threading.Event | None = None
        self._updated_s = 0.0
        self._history_s = history_s
        self.history = History(history_s)
        # The version of each source at the last keyframe of the history.
        self._history_versions: dict[str, tuple[int, int]] | None = None
        self._history_keyframe_s = 0.0

    @property
    def endpoint(self) -> str:
        """The address that the daemon serves."""
        return self._publisher.endpoint

    def run(self, stop: threading.Event) -> None:
        """Read and publish until `stop` is set, then close the address."""
        due = _Timetable(
            {
                self.keyframe: KEYFRAME_S,
                self.discover: DISCOVER_S,
                self.read_filling: LOOK_S,
                self.update: PUBLISH_S,
                self.publish_devices: PUBLISH_S,
                self.beat: HEARTBEAT_S,
                self._publisher.shut_out_revoked: SHUT_OUT_S,
            }
        )
        try:
            while not stop.is_set():
                for job in due.now():
                    if not stop.is_set():
                        job()
                self._publisher.hear(due.wait_ms())
                self.answer()
            # Read the rings a last time. In a thread of a profiled process, viewers learn so how that process ended.
            self.read()
            self.beat()
            self._publisher.send(LIVE, [DaemonGoodbye()])
            time.sleep(LAST_WORD_S)
        finally:
            self.close()

    def close(self) -> None:
        """Close the address, the device samplers and the rings."""
        self._publisher.close()
        self._devices.close()
        for source in self.sources.values():
            source.close()

    def discover(self) -> None:
        """Open new rings, running processes first. Delete the files of processes that ended too long ago."""
        self._list()
        now_s = time.monotonic()
        due = [name for name, at_s in self._refused.items() if at_s <= now_s][:LOOKS_AT_ONCE]
        unread: list[Source] = []
        for name in due + [self._waiting.popleft() for _ in range(min(LOOKS_AT_ONCE, len(self._waiting)))]:
            try:
                source = self._look_at(name)
            except Exception as error:  # noqa: BLE001 - a hostile file must not keep the daemon from the others
                if name not in self._refused:
                    self._complain(str(error), str(error))
                self._refused[name] = time.monotonic() + RETRY_S
            else:
                self._refused.pop(name, None)
                if source is not None and source.is_left_unread:
                    unread.append(source)
                elif source is not None:
                    self._say(FrameKind.RECORDS, _frames_of(source, source.records))
                    self._introduce([source])
        # Publish all unread sources in one call. For fifty, single calls would take as long as opening their rings.
        self._introduce([source for source in unread if source.ring_path in self.sources])
        self._let_go()

    def _introduce(self, sources: Sequence[Source]) -> None:
        """Publish everything that is known about new `sources` together."""
        self._say(FrameKind.LIVE, [frame for source in sources for frame in _frames_of(source, source.snapshot)])
        for source in sources:
            # The snapshot contains this source's changes, so discard them.
            _frames_of(source, source.delta)

    def _list(self) -> None:
        """List the names of the ring files, unless they were listed recently."""
        begun_s = time.monotonic()
        if begun_s < self._list_again_s:
            return
        try:
            rings = rings_of(os.listdir(self._directory))
        except OSError as error:
            # The directory was removed, or no file descriptor is left. Go on with the open rings.
            _log.debug("%s", error)
            return
        watched = {path.name for path in self.sources}
        for known in (self._left, self._refused):
            for name in known.keys() - rings - watched:
                del known[name]
        if self._there_before is None:
            self._there_before = frozenset(rings)
        new = rings - self._left.keys() - self._refused.keys() - watched
        running = running_pids() if new else set()
        self._waiting = deque(sorted(new, key=lambda name: int(name.partition("-")[0]) not in running))
        self._list_again_s = begun_s + LISTING_SHARE * (time.monotonic() - begun_s)

    def _look_at(self, name: str) -> Source | None:
        """Open the ring `name` and watch its process. None if it is not watched."""
        path = self._directory / name
        left: EndedProcess | None = None
        if not runs(path):
            left = left_by(path)
            if left is None:
                raise RingError(f"ring {path}: it or its catalog is no file of this user")
            since_s = self._left[name][1] if name in self._left else time.monotonic()
            self._left[name] = left, since_s
            if time.time() - left.last_sign_s > KEEP_ENDED_S:
                return None
        if not path.exists() or not self._has_room_for(left):
            return None
        # Without free descriptors for a new viewer, libzmq would end the daemon. So raise an error while a few are
        # left.
        check_descriptors()
        had_ended = left is not None and self._there_before is not None and name in self._there_before
        source = Source(path, on_demand=had_ended)
        source.poll()
        self.sources[path] = source
        return source

    def _has_room_for(self, left: EndedProcess | None) -> bool:
        """Return whether one more source may be watched. At the limit, stop watching the process that ended first.

        `left` is None for a running process. It may replace any ended process. A newly ended process replaces only a
        process that ended earlier.
        """
        if len(self.sources) < MAX_SOURCES:
            return True
        ended = [self._left[path.name][0] for path in self.sources if path.name in self._left]
        oldest = min(ended, key=lambda each: each.last_sign_s, default=None)
        if oldest is None:
            self._complain("room", f"more than {MAX_SOURCES} processes run; the others are not shown")
            return False
        if left is not None and left.last_sign_s <= oldest.last_sign_s:
            return False
        self._complain("room", f"{MAX_SOURCES} processes are shown: those that ended first make room for others")
        self._forget(oldest.ring_path)
        return True

    def _let_go(self) -> None:
        now_s = time.monotonic()
        for path, source in self.sources.items():
            if source.ended_at_s is not None and path.name not in self._left:
                self._left[path.name] = left_by(path) or EndedProcess(path, time.time(), 0), now_s
        going = [left for left, since_s in self._left.values() if now_s - since_s > KEEP_ENDED_S]
        try:
            if not going and (going := beyond_bounds([left for left, _ in self._left.values()], self._directory)):
                self._complain(
                    "bounds",
                    f"ended processes left more than {MAX_ENDED} rings, {MAX_ENDED_BYTES >> 20} MiB or a quarter of "
                    f"the disk in {self._directory}: the oldest go",
                )
            for left in going[:REMOVED_AT_ONCE]:
                self._forget(left.ring_path)
                left.remove()
                del self._left[left.ring_path.name]
        except OSError as error:
            self._complain("remove", f"what ended processes left in {self._directory} stays: {error.strerror}")

    def _forget(self, path: Path) -> None:
        """Stop watching the process that wrote this ring."""
        source = self.sources.pop(path, None)
        if source is not None:
            self._say(FrameKind.LIVE, [codec.encode(SourceGone(source.key))])
            source.close()

    def _complain(self, about: str, line: str) -> None:
        """Log `line`, once for each subject `about`, and at most MAX_COMPLAINTS lines in all."""
        if about in self._complaints or len(self._complaints) > MAX_COMPLAINTS:
            return
        self._complaints.add(about)
        if len(self._complaints) > MAX_COMPLAINTS:
            line = "there is more to complain of, and nothing more is said"
        _log.warning("%s", line)

    def read(self) -> None:
        """Read all rings."""
        self._read_ns = time.perf_counter_ns()
        self._poll(self.sources.values())

    def read_filling(self) -> None:
        """Read rings that may overflow before the next regular read."""
        self._poll([source for source in self.sources.values() if source.is_filling])

    def _poll(self, sources: Iterable[Source]) -> None:
        waiting = sum(source.waiting for source in self.sources.values())
        for source in sources:
            before = source.waiting
            source.poll()
            waiting += source.waiting - before
            if waiting > MOST_WAITING:
                self.publish()
                waiting = 0

    def update(self) -> None:
        """Read all rings and publish the new data, unless the viewer in this process has not drawn the last data."""
        now_s = time.monotonic()
        if self.is_drawn is not None:
            if not self.is_drawn.is_set() and now_s - self._updated_s < MAX_PUBLISH_INSIDE_S * (1 - EARLY):
                return
            self.is_drawn.clear()
        self._updated_s = now_s
        self.read()
        self.publish()

    def publish(self) -> None:
        """Publish all new data.

        Records come before the totals that include them. A viewer with the totals but without the records counts
        these as lost.
        """
        if self._history_s or self._publisher.has_recorder:
            self._publish_records()
        else:
            for source in self.sources.values():
                source.pass_over_records()
        for source in self.sources.values():
            self._say(FrameKind.LIVE, _frames_of(source, source.delta))

    def _publish_records(self) -> None:
        together: list[bytes] = []
        size_bytes = 0
        for frame in (frame for source in self.sources.values() for frame in _frames_of(source, source.records)):
            together.append(frame)
            size_bytes += len(frame)
            if size_bytes > RECORDS_TOGETHER_BYTES:
                self._say(FrameKind.RECORDS, together)
                together, size_bytes = [], 0
        self._say(FrameKind.RECORDS, together)

    def publish_devices(self) -> None:
        """Publish new samples of devices. Pause the samplers if no viewer listens."""
        if not self._publisher.is_heard:
            self._devices.rest()
            return
        profiled = [pid for source in self.sources.values() if (pid := source.pid_in(self._pid_namespace))]
        # Viewers show the daemon's own cost, so sample this process, too.
        self._devices.listen([os.getpid(), *profiled])
        self._say(FrameKind.LIVE, [codec.encode(sample) for sample in self._devices.fresh()])

    def beat(self) -> None:
        """Publish all new data and a heartbeat. The publisher's limits per second then start anew."""
        self.publish()
        self._say(FrameKind.LIVE, [_heartbeat(self._read_ns, self.sources.values())])
        self._publisher.begin_second()
        _give_memory_back()

    def keyframe(self) -> None:
        """Publish the complete state of all live sources. If one has changed, it begins a new segment of the
        history.
        """
        self.publish()
        for source in self.sources.values():
            # The catalog of this source is still being read. The source is published once it is complete.
            if source.state is SourceStatus.LIVE and not source.is_behind:
                self._publisher.send_frames(LIVE, _frames_of(source, source.keyframe))
        if not self._history_s:
            return
        read = (each for each in self.sources.values() if not each.is_behind and not each.is_left_unread)
        recent = [source for source in read if not _ended_before(source, self._history_s)]
        versions = {source.key: source.version for source in recent}
        now_s = time.monotonic()
        is_old = bool(self._devices.latest()) and now_s - self._history_keyframe_s >= RESTING_KEYFRAME_S
        # Without changes, the history's last keyframe is still complete.
        if versions != self._history_versions or is_old:
            self._history_versions, self._history_keyframe_s = versions, now_s
            now_ns = time.perf_counter_ns()
            keyframe = encode_frame(FrameKind.KEYFRAME, now_ns, self._snapshots(recent))
            self.history.begin(keyframe, now_s)

    def answer(self) -> None:
        """Answer the requests of viewers: for clocks, for pieces of the history, for data of ended sources, and
        for snapshots.
        """
        for topic in self._publisher.questions(CLOCK_PREFIX):
            reading = ClockReading(_number(topic), time.perf_counter_ns(), time.time_ns())
            self._publisher.answer([topic], [reading])
        pieces = self._publisher.questions(HISTORY_PREFIX)
        if pieces:
            self.publish()
        for topic in pieces:
            first, frames = self.history.piece(_number(topic))
            hello = _hello()
            head = HistoryPiece(first, self.history.end, hello.host, hello.monotonic_ns, hello.realtime_ns)
            self._publisher.answer_frames([topic], [codec.encode(head), *frames])
        for topic in self._publisher.questions(ENDED_PREFIX):
            self._publisher.answer_frames([topic], self._what_ended(topic))
        if time.monotonic() < self._joins_due_s:
            return
        if joined := self._publisher.questions(JOIN_PREFIX):
            self._joins_due_s = time.monotonic() + JOIN_S
            # A new viewer's window begins now, and earlier records are outside of it. So read the rings now.
            self.read()
            self.publish()
            self._publisher.answer_frames(joined, [*self._snapshots(self.sources.values())])

    def _what_ended(self, topic: bytes) -> list[bytes]:
        """Return all data of the source that a viewer requested. If it was not read yet, read it and publish it to
        all viewers.
        """
        wanted = topic.rpartition(b"/")[2].decode().replace(":", "-")
        source = self.sources.get(self._directory / f"{wanted}.ring")
        if source is not None and source.is_left_unread:
            source.want()
            source.poll()
            self.publish()
        elif source is not None and not source.is_behind and (frames := _frames_of(source, source.snapshot)):
            return frames
        return [_heartbeat(self._read_ns, self.sources.values())]

    def _say(self, kind: FrameKind, frames: Sequence[bytes]) -> None:
        """Send messages to the viewers that subscribe to this kind, and add them to the history."""
        if frames:
            self._publisher.send_frames(TOPICS[kind], frames)
            if self._history_s:
                self.history.add(encode_frame(kind, time.perf_counter_ns(), frames))

    def _snapshots(self, sources: Iterable[Source]) -> Iterator[bytes]:
        yield codec.encode(_hello())
        for source in sources:
            yield from _frames_of(source, source.snapshot)
        yield from map(codec.encode, self._devices.latest())
        yield _heartbeat(self._read_ns, self.sources.values())


def _heartbeat(read_ns: int, sources: Iterable[Source]) -> bytes:
    return codec.encode(Heartbeat(read_ns, tuple(source.state_message() for source in sources)))


class DaemonInside:
    """A daemon in a thread of the viewer's process, for when no other is running."""

    def __init__(self, endpoint: str, directory: Path | None = None, history_s: float = MAX_HISTORY_S) -> None:
        self._stop = threading.Event()
        self._daemon = Daemon(endpoint, directory, history_s=history_s)
        self._daemon.is_drawn = self._is_drawn = threading.Event()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="cbtop-daemon", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """The address that the daemon serves."""
        return self._daemon.endpoint

    def tell_drawn(self) -> None:
        """Say that the viewer in this process has taken the last update, so the next one may come."""
        self._is_drawn.set()

    def close(self) -> None:
        """Stop the daemon, and wait until the daemon's address is free."""
        self._stop.set()
        self._thread.join(timeout=5)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            self._daemon.run(self._stop)
        except Exception as error:  # noqa: BLE001 - the viewer shows the error; nothing else would report it
            self.error = error


class _Timetable:
    """Repeated jobs, each with its own period in seconds.

    When a job is due, jobs that become due soon run, too, because waking up takes longer than most jobs.
    """

    def __init__(self, periods_s: dict[Callable[[], None], float]) -> None:
        self._periods_s = periods_s
        self._due_s = dict.fromkeys(periods_s, time.monotonic())

    def now(self) -> list[Callable[[], None]]:
        """Return the jobs to run now. Their next time is one period later. Missed periods are skipped."""
        now_s = time.monotonic()
        if min(self._due_s.values()) > now_s:
            return []
        jobs = [job for job, at_s in self._due_s.items() if at_s <= now_s + EARLY * self._periods_s[job]]
        for job in jobs:
            next_s = self._due_s[job] + self._periods_s[job]
            self._due_s[job] = next_s if next_s > now_s else now_s + self._periods_s[job]
        return jobs

    def wait_ms(self) -> int:
        """Return the milliseconds until the next job is due."""
        return max(0, int((min(self._due_s.values()) - time.monotonic()) * 1000) + 1)


def _hello() -> DaemonHello:
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


def _give_memory_back() -> None:
    """Return free memory to the system with malloc_trim(3). glibc would keep it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _frames_of(source: Source, say: Callable[[], Sequence[WireMessage]]) -> list[bytes]:
    """Return the encoded messages of `source`. If encoding fails, the source becomes faulty, and the result is []."""
    try:
        return [codec.encode(message) for message in say()]
    except Exception as error:  # noqa: BLE001 - errors provoked by a hostile file affect only its source
        source.fail(error)
        return []


def _number(topic: bytes) -> int:
    """Return the number at the end of the topic of a viewer's request."""
    return int(topic.rpartition(b"/")[2])


def _ended_before(source: Source, seconds: float) -> bool:
    return source.ended_at_s is not None and time.monotonic() - source.ended_at_s > seconds
