"""The recorder writes this process's ring and catalog files. It opens them on first use, and again in a forked child.

Rules
- No public method raises into the host. A failure is logged once and counted. Only exceptions that are not an
  Exception (KeyboardInterrupt, SystemExit) pass through.
- The number of keys is bounded, and only the newest message of each key is stored. Messages beyond the bound are left
  out, and counted in the ring's header.
- An update is appended to the catalog, after the message that it replaces. The first FREE_UPDATE_BYTES of updates are
  written immediately. After that, a pause follows each write, so that updates do not fill the disk. After the pause,
  the next announcement, `flush` or `close` writes the newest message of each key. The pause doubles with every
  PAUSE_DOUBLES_BYTES of updates. So even constant announcements take four years to fill half the catalog.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import platform
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from cbtop.profiler.analysis.graph.node_table import MAX_NODES
from cbtop.protocol import clock, codec
from cbtop.protocol.announcements import MAX_ANNOUNCED, Announcement, Announcements, Key, key_of
from cbtop.protocol.catalog import CatalogWriter
from cbtop.protocol.codec import EncodedNode
from cbtop.protocol.ended import SWEPT_AT_ONCE, sweep
from cbtop.protocol.endpoint import runtime_dir
from cbtop.protocol.errors import ProtocolError, RingError
from cbtop.protocol.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    CatalogMessage,
    Goodbye,
    HostHello,
    Node,
)
from cbtop.protocol.process import RUNS_VARIABLE, boot_id, command_pid, pid_namespace, process_start
from cbtop.protocol.ranks import ranks_of
from cbtop.protocol.ring import DEFAULT_RING_BYTES, Record, RingWriter
from cbtop.protocol.ring_reader import Batch, RingReader
from cbtop.protocol.signals import reraise_host_error, suppressed

# Read the clock this often. It is enough to find the smallest difference between two readings.
CLOCK_READINGS = 256
FREE_UPDATE_BYTES = 1 << 20
UPDATE_PAUSE_NS = 100_000_000  # time in ns between two reads of the catalog by the daemon
# The pause grows by this time per written byte, so at most a kilobyte per second is written.
UPDATE_NS_PER_BYTE = 1_000_000
PAUSE_DOUBLES_BYTES = 2 << 20
NOT_ASKED = (0,)

_log = logging.getLogger("cbtop")
_serial = itertools.count()
_openings = itertools.count()  # how often this process has opened files
_recorders: weakref.WeakSet[RingRecorder] = weakref.WeakSet()


class Recorder(Protocol):
    """The destination of records and catalog messages."""

    def record(self, tag: int, start_ns: int, end_ns: int, elements: int, /) -> None: ...

    def announce(self, message: CatalogMessage, /) -> None: ...

    def announce_nodes(self, nodes: Sequence[EncodedNode], /) -> None: ...

    def flush(self) -> None: ...

    def close(self, reason: str, /) -> None: ...


class RingListener(Protocol):
    """Called when a ring opens, or with the reason why none could be opened. It may write records into the ring."""

    @property
    def implementation(self) -> str: ...

    @property
    def sample_every(self) -> int: ...

    def attach(self, ring: RingWriter | None, /) -> Record: ...

    def finish(self) -> None: ...

    def ended(self, why: str, /) -> None: ...


class Failures:
    """Counts failed calls, and logs the first failure of each kind. No failure reaches the host."""

    def __init__(self) -> None:
        self.count = 0
        self._logged: set[str] = set()

    def log_once(self, about: str, line: str) -> None:
        """Log `line`, unless a line about the same was logged before."""
        if about not in self._logged:
            self._logged.add(about)
            _log.warning("%s", line)

    def note(self, what: str, error: Exception) -> None:
        """Count and log that cbtop failed to do `what`."""
        self.count += 1
        self.log_once(what, f"cbtop could not {what}: {str(error) or type(error).__name__}")

    @contextmanager
    def kept_from_the_host(self, what: str) -> Iterator[None]:
        """Log an error of the block, and continue after it: `with failures.kept_from_the_host("announce"):`."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - no public method raises into the host
            reraise_host_error(error)
            self.note(what, error)


class RingRecorder:
    """Writes records into this process's ring, and messages into its catalog.

    No file is opened before the first record. If files cannot be made (no room, no safe runtime directory), nothing
    is recorded. One warning is logged, and the host continues. A forked child opens its own files at its first
    record, and repeats its parent's announcements there.

    The first opening removes some files if ended processes have left too many (see `cbtop.protocol.ended`).
    """

    record: Record

    def __init__(
        self,
        directory: Path | None = None,
        ring_bytes: int = DEFAULT_RING_BYTES,
        clock_ns: Callable[[], int] = clock.monotonic_ns,
    ) -> None:
        self._failures = Failures()
        self.left_out = 0  # number of announcements beyond the limits, which were left out
        self._directory = directory
        self._ring_bytes = ring_bytes
        self._clock_ns = clock_ns
        self._nodes: list[Node] = []
        self._announced: Announcements[bytes] = Announcements()
        self._updates: dict[Key, None] = {}  # keys of newest messages that were not written yet
        self._update_bytes = 0  # bytes of updates in the open catalog
        self._pause_until_ns = 0
        self._written_nodes = 0  # number of nodes in the open catalog
        self._is_writing_nodes = False
        self._lost_a_node = False  # True if the catalog had no room for a node, so no later node is written
        self._opening = threading.RLock()
        self._ring: RingWriter | None = None
        # The word with the request of a command, which the property `asked` returns. Each step reads it directly,
        # because this runs no Python code.
        self.asked_word: Sequence[int] | memoryview = NOT_ASKED
        self._catalog: CatalogWriter | None = None
        self._is_opening = False
        self._closed = False
        #: The file of the ring. None before it is open. It stays after `close`, because the ring can still be read.
        self.path: Path | None = None
        self._reader: RingReader | None = None
        self._listeners: list[RingListener] = []
        self._last_words: list[Callable[[], None]] = []
        #: These functions are called at each `flush`, for example to announce figures that change all the time.
        self.at_flush: list[Callable[[], None]] = []
        self._answer = 0
        self.record = self._first_record
        _recorders.add(self)

    @property
    def failures(self) -> int:
        """Number of failed calls. None of them has raised into the host."""
        return self._failures.count

    def open(self) -> None:
        """Open the files, so that viewers see this process before its first record."""
        if self._catalog is None:
            self._open()

    def add_listener(self, listener: RingListener) -> None:
        """Call `listener.attach` with each ring that opens, and with None when it is gone."""
        with self._opening, self._failures.kept_from_the_host("write beside the hot path"):
            self._listeners.append(listener)
            if self._ring:
                self.record = listener.attach(self._ring)

    def before_goodbye(self, announce: Callable[[], None]) -> None:
        """Call `announce` once before the files are closed, for example when the interpreter exits."""
        self._last_words.append(announce)

    def announce(self, message: CatalogMessage) -> None:
        """Write `message` into the catalog instead of the message with the same key. An invalid message is logged."""
        with self._opening, self._failures.kept_from_the_host("announce"):
            try:
                payload = codec.encode(message)
                # The daemon drops a source that sends an invalid message. So decode it here first, as the daemon will
                # do.
                said = codec.decode(payload)
                if not isinstance(said, Announcement):
                    raise TypeError("a host announces no such thing")
            except (TypeError, ValueError, OverflowError, ProtocolError) as error:
                reraise_host_error(error)
                kind = type(message).__name__
                self._leave_out(kind, f"cbtop cannot say a {kind}: {error}")
                return
            if isinstance(message, Node):
                self._announce_nodes([(message, payload)])
            else:
                self._announce_newest(key_of(said), payload)
            self._write_updates()

    def announce_nodes(self, nodes: Sequence[EncodedNode]) -> None:
        """Announce nodes that `codec.encode_node` has encoded."""
        with self._opening, self._failures.kept_from_the_host("announce"):
            self._announce_nodes(nodes)
            self._write_updates()

    def flush(self) -> None:
        """Write the announcements that wait, if their pause has ended.

        This costs almost nothing if none are waiting.
        """
        for announce in self.at_flush:
            announce()
        if self._updates or (self._catalog is not None and self._catalog.is_behind):
            with self._opening, self._failures.kept_from_the_host("write what waits"):
                self._write_updates()

    def close(self, reason: str) -> None:
        """Send a goodbye. The files stay, so that the daemon can read them to the end."""
        for listener in self._listeners:
            with self._failures.kept_from_the_host("record what waits for a device"):
                listener.finish()
        while self._last_words:
            with self._failures.kept_from_the_host("announce its last figures"):
                self._last_words.pop()()
        with self._opening:
            with self._failures.kept_from_the_host("write what waits"):
                self._pause_until_ns = 0
                self._write_updates()
            catalog, self._catalog = self._catalog, None
            if catalog:
                self._let_files_go.detach()
                with self._failures.kept_from_the_host("say goodbye"):
                    catalog.write(Goodbye(reason[: codec.MAX_NAME_CHARS]))
                with self._failures.kept_from_the_host("close its catalog"):
                    catalog.close()
            ring, self._ring, self.asked_word = self._ring, None, NOT_ASKED
            self._closed = True
            self.record = _nowhere
            self._let_go()
            if ring:
                with self._failures.kept_from_the_host("close its ring"):
                    ring.close()

    @property
    def asked(self) -> int:
        """The word with a command's request (see `cbtop.protocol.requests`). 0 without a request or a ring."""
        return self.asked_word[0]

    def answer(self, word: int) -> None:
        """Write the answer to a request into the ring, and into each later ring."""
        self._answer = word
        ring = self._ring
        if ring is not None:
            ring.answer(word)

    def nodes(self) -> list[Node]:
        """Return every announced node, in order."""
        return list(self._nodes)

    def read(self) -> Batch | None:
        """Return the records since the last read, in the daemon's form. None before the first record."""
        try:
            if self._reader is None and self.path is not None:
                self._reader = RingReader(self.path)
            return self._reader.read() if self._reader else None
        except Exception as error:  # noqa: BLE001 - no public method raises into the host
            reraise_host_error(error)
            self._failures.note("read its ring", error)
            return None

    def read_again(self) -> Batch | None:
        """Return all records that are still in the ring. None before the first record."""
        if self.path is None:
            return None
        try:
            reader = RingReader(self.path)
            try:
                return reader.read()
            finally:
                reader.close()
        except Exception as error:  # noqa: BLE001 - no public method raises into the host
            reraise_host_error(error)
            self._failures.note("read its ring", error)
            return None

    def forget(self) -> None:
        """In a forked child, forget the parent's open files."""
        # Make a new lock, because another thread of the parent may hold the old one.
        self._opening = threading.RLock()
        if self._catalog:
            self._let_files_go.detach()
            with self._failures.kept_from_the_host("close its catalog"):
                self._catalog.close()  # otherwise the child would keep the parent's lock on the catalog
        self._ring = self._catalog = self.path = self._reader = None
        self.asked_word = NOT_ASKED
        self._closed = self._is_opening = self._is_writing_nodes = False
        self.record = self._first_record
        self._let_go()

    def _announce_nodes(self, nodes: Sequence[EncodedNode]) -> None:
        for node, _ in nodes:
            if len(self._nodes) >= MAX_NODES:
                self._leave_out("nodes", f"cbtop leaves out what is announced beyond {MAX_NODES} nodes")
            # A call that a signal handler interrupted may have added it already.
            elif node not in self._nodes[node.id - 1 : node.id]:
                self._nodes.append(node)
        catalog = self._open()
        if catalog is not None:
            self._write_nodes(catalog, nodes)

    def _announce_newest(self, key: Key, payload: bytes) -> None:
        before = self._announced.get(key)
        if payload == before:
            return
        if not self._announced.keep(key, payload, len(payload)):
            self._leave_out("bounds", f"cbtop leaves out announcements beyond {MAX_ANNOUNCED} of a kind, or too long")
            return
        catalog = self._open()
        if catalog is None:
            return
        if before is None:
            self._write(catalog, payload)
        else:
            self._updates[key] = None

    def _write_updates(self) -> None:
        catalog = self._catalog
        if catalog is None or not (self._updates or catalog.is_behind) or self._clock_ns() < self._pause_until_ns:
            return
        begun_bytes = catalog.size_bytes
        if catalog.flush():  # False if the disk is full; the messages then wait on
            # A signal handler may announce something during the loop, so copy the keys.
            for key in list(self._updates):
                payload = self._announced.get(key)
                if payload is not None:
                    self._write(catalog, payload)
            self._updates.clear()
        written_bytes = catalog.size_bytes - begun_bytes
        self._update_bytes += written_bytes
        if self._update_bytes > FREE_UPDATE_BYTES or catalog.is_behind:
            pause_ns = max(UPDATE_PAUSE_NS, written_bytes * UPDATE_NS_PER_BYTE)
            self._pause_until_ns = self._clock_ns() + (pause_ns << self._update_bytes // PAUSE_DOUBLES_BYTES)

    def _write_nodes(self, catalog: CatalogWriter, encoded: Sequence[EncodedNode] = ()) -> None:
        """Write the nodes that the catalog does not have yet, including nodes that an interrupted call has left."""
        # A signal handler has interrupted this method and called it again. The interrupted call will write the new
        # nodes.
        if self._is_writing_nodes:
            return
        payloads = {id(node): payload for node, payload in encoded}
        try:
            self._is_writing_nodes = True
            while self._written_nodes < len(self._nodes):
                node = self._nodes[self._written_nodes]
                payload = payloads.get(id(node)) or codec.encode(node)
                begun_bytes = catalog.size_bytes
                try:
                    # Node ids in a catalog have no gaps, so nothing is written after a node that was left out.
                    if self._lost_a_node:
                        self._leave_out("the catalog", f"cbtop leaves out a node: no room for it in {catalog.path}")
                    else:
                        self._lost_a_node = not self._write(catalog, payload)
                finally:
                    if self._lost_a_node or catalog.size_bytes > begun_bytes:
                        self._written_nodes += 1
        finally:
            self._is_writing_nodes = False

    def _write(self, catalog: CatalogWriter, payload: bytes) -> bool:
        taken = catalog.write_encoded(payload)
        if not taken:
            self._leave_out("the catalog", f"cbtop leaves out an announcement: no room for it in {catalog.path}")
        elif catalog.trouble is not None:
            self._failures.log_once(
                "trouble", f"cbtop keeps what it cannot write to {catalog.path}: {catalog.trouble.strerror}"
            )
        return taken

    def _leave_out(self, about: str, line: str) -> None:
        self.left_out += 1
        if self._ring:
            self._ring.set_left_out(self.left_out)
        self._failures.log_once(about, line)

    def _let_go(self) -> None:
        for listener in self._listeners:
            with self._failures.kept_from_the_host("let go of the hot path"):
                listener.attach(None)

    def _first_record(self, tag: int, start_ns: int, end_ns: int, elements: int) -> None:
        self._open()
        record = self.record
        # While files are being opened, `record` is still this method, for example in a signal handler.
        if record != self._first_record:
            record(tag, start_ns, end_ns, elements)

    def _open(self) -> CatalogWriter | None:
        """Return the catalog if it is already open. Otherwise open it and return None.

        A new catalog gets all announcements, so the caller must not write its own.
        """
        with self._opening:
            if self._catalog is None and not self._closed and not self._is_opening:
                self._is_opening = True
                try:
                    self._open_files()
                except Exception as error:  # noqa: BLE001 - no public method raises into the host
                    # A signal handler of the host has raised this, so the next call tries again.
                    reraise_host_error(error)
                    self._failures.count += 1
                    why = str(error) or type(error).__name__
                    _log.warning("cbtop records nothing in process %d: %s", os.getpid(), why)
                    self._closed = True
                    self.record = _nowhere
                    for listener in self._listeners:
                        with self._failures.kept_from_the_host("end its recording"):
                            listener.ended(why)
                finally:
                    self._is_opening = False
                return None
            return self._catalog

    def _open_files(self) -> None:
        directory = self._directory or runtime_dir()
        # A reader of a ring expects its catalog, so make the catalog first.
        catalog = _new_catalog(directory)
        try:
            listener = self._listeners[0] if self._listeners else None
            implementation, sample_every = (
                (listener.implementation, listener.sample_every) if listener else ("python", 1)
            )
            catalog.write(_hello(implementation, sample_every, locked=catalog.locked))
            if next(_openings) % SWEPT_AT_ONCE == 0:
                # Files of other processes may change or disappear at any time, so ignore errors.
                with suppressed(OSError):
                    sweep(directory)
            ring = RingWriter(catalog.path.with_suffix(".ring"), self._ring_bytes)
            self._lost_a_node = False
            self._written_nodes = self._update_bytes = self._pause_until_ns = 0
            self._write_nodes(catalog)
            # A signal handler may announce something during the loop, so copy the messages.
            for payload in list(self._announced):
                self._write(catalog, payload)
            self._updates.clear()
            ring.set_left_out(self.left_out)
            ring.answer(self._answer)
            _say_goodbye_from_multiprocessing()
            # Closes the files when the recorder is garbage-collected.
            self._let_files_go = weakref.finalize(self, _let_go, catalog, ring)
            setattr(self._let_files_go, "atexit", False)  # noqa: B010 - typeshed does not declare this attribute
            self._ring, self._catalog, self.path, self.record = ring, catalog, ring.path, ring.record
            self.asked_word = ring.asked_word
            for listener in self._listeners:
                with self._failures.kept_from_the_host("write beside the hot path"):
                    self.record = listener.attach(ring)
        except BaseException:
            # If the catalog is open, only a listener has failed, so the files stay.
            if self._catalog is None:
                with self._failures.kept_from_the_host("remove a file it began"):
                    catalog.path.with_suffix(".ring").unlink(missing_ok=True)
                    catalog.path.unlink(missing_ok=True)
                    catalog.close()
            raise


def _let_go(catalog: CatalogWriter, ring: RingWriter) -> None:
    try:
        catalog.write(Goodbye("closed"))
        catalog.close()
        ring.close()
    except Exception as error:  # noqa: BLE001 - no public method raises into the host
        reraise_host_error(error)
        _log.warning("cbtop could not close %s: %s", catalog.path, error)


def _nowhere(tag: int, start_ns: int, end_ns: int, elements: int) -> None:
    """Drop a record. This is the `record` method while there is no ring."""


def _say_goodbye_from_multiprocessing() -> None:
    """Make multiprocessing call `_at_exit`, because its children exit by os._exit, which skips atexit."""
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        util.Finalize(None, _at_exit, exitpriority=0)


def _new_catalog(directory: Path) -> CatalogWriter:
    """Make a catalog with a free name: pid, start time and a number.

    A process in another pid namespace, or this one before an exec, may have the same pid and start time. Raises
    RingError if the catalog cannot be made.
    """
    process = f"{os.getpid()}-{process_start(os.getpid()) or 0}"
    while True:
        try:
            return CatalogWriter(directory / f"{process}-{next(_serial)}.catalog")
        except RingError as error:
            if not isinstance(error.__cause__, FileExistsError):
                raise


def _hello(recorder: str, sample_every: int, *, locked: bool) -> HostHello:
    ranks = ranks_of(os.environ)
    return HostHello(
        protocol_major=PROTOCOL_MAJOR,
        protocol_minor=PROTOCOL_MINOR,
        pid=os.getpid(),
        process_start=process_start(os.getpid()) or 0,
        host=socket.gethostname(),
        boot_id=boot_id(),
        program=_program(),
        python=platform.python_version(),
        recorder=recorder,
        monotonic_ns=clock.perf_counter_ns(),
        realtime_ns=clock.time_ns(),
        rank=ranks.rank,
        local_rank=ranks.local_rank,
        world_size=ranks.world_size,
        pid_namespace=pid_namespace(),
        locked=locked,
        sample_every=sample_every,
        clock_resolution_ns=_clock_resolution_ns(),
        job=ranks.job,
        command_pid=command_pid(os.environ),
        runs=os.environ.get(RUNS_VARIABLE, ""),
    )


def _clock_resolution_ns() -> int | None:
    """Return the smallest difference between two readings of the host's clock, or None if all are equal.

    This is the clock's tick, unless a reading takes longer. Takes some tens of µs.
    """
    readings = [clock.perf_counter_ns() for _ in range(CLOCK_READINGS)]
    return min((after - before for before, after in itertools.pairwise(readings) if after > before), default=None)


def _program() -> str:
    """Return the name of this process: the script or module that it runs."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name).removesuffix(".__main__")
    script = Path(sys.argv[0]).name if sys.argv else ""
    if script in ("", "-c", "-"):  # a typed, `-c` or piped program has no file
        return f"python {script}".rstrip()
    return script


def _after_fork() -> None:
    global _openings
    _openings = itertools.count()
    for recorder in list(_recorders):
        recorder.forget()


def _at_exit() -> None:
    for recorder in list(_recorders):
        recorder.close("exit")


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
