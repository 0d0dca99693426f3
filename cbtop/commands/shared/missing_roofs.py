"""Measure the roofs (speed limits of the hardware) that a run does not know, once, as soon as the machine is quiet.

Rules
- The command has priority. Nothing is measured inside its processes, on a GPU, or while a needed processor is in use.
- A measurement yields to all other processes. When one begins to work, it ends and stores nothing.
- CI machines are not measured. The next job begins at once, and no viewer shows the roofs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

from cbtop.commands.shared.machine_load import MachineLoad
from cbtop.commands.shared.short_measurement import ShortMeasurement, UnmeasuredError, in_words
from cbtop.protocol.catalog import CatalogReader
from cbtop.protocol.ended import rings_of_latest
from cbtop.protocol.errors import DecodeError, RoofsError
from cbtop.protocol.messages import Ceiling, Manifest
from cbtop.protocol.roofs import DeviceRoofs, cpu_name, known_roofs, roofs_of_cpu, way_out_on_cpu

QUIET_S = 0.9  # Judge the load of the machine over at least this many seconds.
AFTER_S = 8.0  # After the command has ended, wait at most this many seconds for a quiet second.
LOOK_S = 0.1  # Seconds between two checks of the machine's load, after the command has ended.
MAX_ATTEMPTS = 3
MAX_READ = 8  # Read the announcements of at most this many processes.
BETTER = "`cbtop calibrate` measures longer"


class MissingRoofs:
    """The speed limits (roofs) of the hardware that are unknown to the processes of a run.

    The ring files of these processes are in `directory`.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        # Processes that need not be read again, because their model is known or their file is damaged.
        self._asked: set[int] = set()
        # ring file -> the reader of its process's catalog, and the messages that were read
        self._catalogs: dict[Path, tuple[CatalogReader, list[Manifest | Ceiling]]] = {}
        self._threads: int | None = None  # number of threads for the measurement; None if no process lacks roofs
        self._load: MachineLoad | None = None
        self._running: ShortMeasurement | None = None
        self._measured: DeviceRoofs | None = None
        self._attempts = 0 if _is_wanted() else MAX_ATTEMPTS

    @property
    def _is_over(self) -> bool:
        return self._measured is not None or self._attempts >= MAX_ATTEMPTS

    def look(self, pids: Iterable[int]) -> None:
        """Start a measurement if roofs are missing and the machine was quiet since the last call. This method does
        not wait for the result.
        """
        if self._running is not None:
            self._look_at_running(self._running)
        elif not self._is_over:
            self._ask(pids)
            if self._threads is not None:
                self._look_at_load(self._threads)

    def line(self) -> str:
        """Return a line about the measured roofs for the summary, or "" if there is nothing to report."""
        if self._measured is not None:
            return f"roofs were measured in a quiet second: {in_words(self._measured.ceilings)}; {BETTER}"
        if self._threads is None or self._is_over:
            return ""
        threads = f"{self._threads} thread{'s' if self._threads > 1 else ''}"
        return f"roofs of {threads} are not known: measured next if the machine is quiet; {BETTER}"

    def measure_after(self) -> None:
        """Wait for a quiet second after the command has ended.

        Then start the measurement of roofs and wait for it.
        """
        self._load, end_s = None, time.monotonic() + AFTER_S
        while self._running is not None or (
            self._threads is not None and not self._is_over and time.monotonic() < end_s
        ):
            self.look(())
            time.sleep(LOOK_S)

    def _look_at_load(self, threads: int) -> None:
        if self._load is None:
            self._load = MachineLoad(time.process_time)
        elif self._load.elapsed_s >= QUIET_S:
            was_quiet = self._load.is_quiet()
            self._load = MachineLoad(time.process_time)
            if was_quiet:
                self._begin(threads)

    def _begin(self, threads: int) -> None:
        try:
            # Another run has stored these roofs in the meantime.
            if roofs_of_cpu(known_roofs(), threads) is not None:
                self._attempts = MAX_ATTEMPTS
            else:
                self._running = ShortMeasurement(threads)
        except (UnmeasuredError, RoofsError, OSError):
            self._attempts += 1

    def _look_at_running(self, running: ShortMeasurement) -> None:
        try:
            self._measured = running.poll()
            is_over = self._measured is not None
        except (UnmeasuredError, RoofsError):
            self._attempts += 1
            is_over = True
        if is_over:
            self._running = None
            running.close()

    def _ask(self, pids: Iterable[int]) -> None:
        """Read the new announcements of each process. A process is not read again after it has announced its
        model.
        """
        pids = [pid for pid in list(pids)[:MAX_READ] if pid not in self._asked]
        names = os.listdir(self._directory) if pids else ()
        for pid in pids:
            for ring in rings_of_latest(names, pid):
                self._read(pid, Path(self._directory, ring))

    def _read(self, pid: int, ring: Path) -> None:
        try:
            if ring not in self._catalogs:
                self._catalogs[ring] = CatalogReader(ring.with_suffix(".catalog")), []
            reader, said = self._catalogs[ring]
            said += [one for one in reader.read() if isinstance(one, Manifest | Ceiling)]
        except DecodeError:
            self._asked.add(pid)
            return
        if any(isinstance(one, Manifest) for one in said):
            self._asked.add(pid)
            threads = missing_threads(said)
            if threads is not None and threads <= len(os.sched_getaffinity(0)):
                self._threads = self._threads or threads


def missing_threads(said: Iterable[Manifest | Ceiling]) -> int | None:
    """Return how many threads a process has, if it announced that its roofs are unknown. Returns None for any other
    process.
    """
    manifest, roofs = None, {}
    for message in said:
        match message:
            case Manifest():
                manifest = message
            case Ceiling():
                roofs[message.name] = message
    is_missing = manifest is not None and manifest.roofs == way_out_on_cpu(manifest.threads)
    return manifest.threads if manifest and is_missing and all(one.withdrawn for one in roofs.values()) else None


def _is_wanted() -> bool:
    """Return whether roofs may be measured without the user's request: not in CI, and not on a processor without a
    model name.
    """
    in_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    return not in_ci and hasattr(os, "sched_getaffinity") and bool(cpu_name())
