"""The recorder: this process's ring and catalog files, opened on first use and again in a forked child."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import platform
import socket
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Protocol

from cbtop.protocol import codec
from cbtop.protocol.catalog import CatalogWriter
from cbtop.protocol.endpoint import runtime_dir
from cbtop.protocol.errors import ProtocolError, RingError
from cbtop.protocol.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    CatalogMessage,
    Goodbye,
    HostHello,
    Node,
    TraceSummary,
)
from cbtop.protocol.process import boot_id, pid_namespace, process_start, ranks_of
from cbtop.protocol.ring import DEFAULT_RING_BYTES, Batch, Record, RingReader, RingWriter

_log = logging.getLogger("cbtop")
_serial = itertools.count()
_recorders: weakref.WeakSet[RingRecorder] = weakref.WeakSet()


class Recorder(Protocol):
    """Where records and catalog messages go."""

    def record(self, tag: int, start_ns: int, end_ns: int, elements: int, /) -> None: ...

    def announce(self, message: CatalogMessage, /) -> None: ...

    def close(self, reason: str, /) -> None: ...


class RingListener(Protocol):
    """What writes records of its own into the ring."""

    @property
    def implementation(self) -> str: ...

    def attach(self, ring: RingWriter | None, /) -> Record: ...

    def finish(self) -> None: ...


class RingRecorder:
    """Writes records into this process's ring and messages into its catalog.

    Nothing is opened before something is recorded. When the files cannot be made (no room, no safe runtime
    directory) one warning is logged and nothing is recorded; the host goes on. A forked child never writes its
    parent's files: it opens its own pair on first use and says again what its parent had said.
    """

    record: Record

    def __init__(self, directory: Path | None = None, ring_bytes: int = DEFAULT_RING_BYTES) -> None:
        self._directory = directory
        self._ring_bytes = ring_bytes
        self._said: list[CatalogMessage] = []
        self._traced: dict[str, TraceSummary] = {}  # only the last of each trace: it replaces those before it
        self._opening = threading.RLock()
        self._ring: RingWriter | None = None
        self._catalog: CatalogWriter | None = None
        self._closed = False
        self._path: Path | None = None  # of the ring: it stays readable after `close`
        self._reader: RingReader | None = None
        self._listeners: list[RingListener] = []
        self.record = self._first_record
        _recorders.add(self)

    def add_listener(self, listener: RingListener) -> None:
        """Attach `listener` to each ring as it opens and to None when it is gone; it says how to write beside it."""
        with self._opening:
            self._listeners.append(listener)
            if self._ring:
                self.record = listener.attach(self._ring)

    def announce(self, message: CatalogMessage) -> None:
        """Write `message` into the catalog. One that cannot be said is logged, and the host goes on."""
        try:
            codec.encode(message)
        except (TypeError, ValueError, OverflowError) as error:
            _log.warning("cbtop cannot say a %s: %s", type(message).__name__, error)
            return
        with self._opening:
            if isinstance(message, TraceSummary):
                self._traced[message.trace] = message
            else:
                self._said.append(message)
            if self._catalog:
                self._catalog.write(message)
                return
        self._open()

    def close(self, reason: str) -> None:
        """Say goodbye; the files stay for the daemon to read to their end."""
        for listener in self._listeners:
            listener.finish()
        with self._opening:
            catalog, self._catalog = self._catalog, None
            if catalog:
                catalog.write(Goodbye(reason))
                catalog.close()
            self._ring = None
            self._closed = True
            self.record = _nowhere
            self._let_go()

    def nodes(self) -> list[Node]:
        """Every node announced so far, in order."""
        return [message for message in self._said if isinstance(message, Node)]

    def read(self) -> Batch | None:
        """The records since the last read, as the daemon would read them; None before the first record."""
        if self._reader is None and self._path is not None:
            self._reader = RingReader(self._path)
        return self._reader.read() if self._reader else None

    def read_again(self) -> Batch | None:
        """The records that the ring still holds, read before or not; None before the first record."""
        if self._path is None:
            return None
        reader = RingReader(self._path)
        try:
            return reader.read()
        finally:
            reader.close()

    def forget(self) -> None:
        """Back to not having opened anything, without touching the files: they are the parent's."""
        self._opening = threading.RLock()  # another thread of the parent may have held the old one
        if self._catalog:
            self._catalog.close()  # or the parent would seem alive for as long as this child
        self._ring = self._catalog = self._path = self._reader = None
        self._closed = False
        self.record = self._first_record
        self._let_go()

    def _let_go(self) -> None:
        for listener in self._listeners:
            listener.attach(None)

    def _first_record(self, tag: int, start_ns: int, end_ns: int, elements: int) -> None:
        self._open()
        self.record(tag, start_ns, end_ns, elements)

    def _open(self) -> None:
        with self._opening:
            if self._ring or self._closed:
                return
            catalog: CatalogWriter | None = None
            try:
                directory = self._directory or runtime_dir()
                # The catalog comes first: whoever sees the ring finds the catalog beside it.
                catalog = _new_catalog(directory)
                recorder = self._listeners[0].implementation if self._listeners else "python"
                catalog.write(_hello(recorder, locked=catalog.locked))
                for message in (*self._said, *self._traced.values()):
                    catalog.write(message)
                ring = RingWriter(catalog.path.with_suffix(".ring"), self._ring_bytes)
            except (ProtocolError, OSError) as error:
                _log.warning("cbtop records nothing in process %d: %s", os.getpid(), error)
                if catalog is not None:
                    catalog.close()
                    catalog.path.unlink(missing_ok=True)
                self._closed = True
                self.record = _nowhere
                return
            self._ring, self._catalog, self._path, self.record = ring, catalog, ring.path, ring.record
            for listener in self._listeners:
                self.record = listener.attach(ring)
            _say_goodbye_from_multiprocessing()


def _nowhere(tag: int, start_ns: int, end_ns: int, elements: int) -> None:
    """Where records go when there is no ring."""


def _say_goodbye_from_multiprocessing() -> None:
    """The children of multiprocessing leave by os._exit, past atexit: they have finalizers of their own."""
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        util.Finalize(None, _at_exit, exitpriority=0)


def _new_catalog(directory: Path) -> CatalogWriter:
    """A catalog of a name that was free: pid, start, and a number.

    Two processes in two pid namespaces may have pid and start in common, and begin at once; one that becomes another
    by exec has both. Raises RingError when it cannot be made.
    """
    process = f"{os.getpid()}-{process_start(os.getpid()) or 0}"
    while True:
        try:
            return CatalogWriter(directory / f"{process}-{next(_serial)}.catalog")
        except RingError as error:
            if not isinstance(error.__cause__, FileExistsError):
                raise


def _hello(recorder: str, *, locked: bool) -> HostHello:
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
        monotonic_ns=time.perf_counter_ns(),
        realtime_ns=time.time_ns(),
        rank=ranks.rank,
        local_rank=ranks.local_rank,
        world_size=ranks.world_size,
        pid_namespace=pid_namespace(),
        locked=locked,
    )


def _program() -> str:
    """What a user would call this process: the script or module it runs."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name).removesuffix(".__main__")
    return Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"


def _after_fork() -> None:
    for recorder in _recorders:
        recorder.forget()


def _at_exit() -> None:
    for recorder in list(_recorders):
        recorder.close("exit")


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
