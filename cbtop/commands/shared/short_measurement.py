"""Measure the processor's roofs (bandwidth and FLOP/s) within a few seconds, in a separate process."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Self

from cbtop.commands.shared.short_roofs import ONE_THREAD
from cbtop.errors import UntrustedError
from cbtop.protocol.cache import cache_dir
from cbtop.protocol.messages import Ceiling
from cbtop.protocol.roofs import DeviceRoofs, cpu_name, keep_roofs
from cbtop.protocol.vocabulary import Provenance

PROGRAM = "from cbtop.commands.shared.short_roofs import main; main()"
MAX_S = 3.0  # A measurement may take at most this many seconds. A usual measurement takes one to two seconds.
END_WITHIN_S = 5.0
POLL_S = 0.02
# for each measured roof: its kind, unit and dtype
ROOFS = {
    "dram_read": ("bandwidth", "GB/s", ""),
    "matmul_float32": ("compute", "GFLOP/s", "float32"),
    "matmul_float64": ("compute", "GFLOP/s", "float64"),
}


class UnmeasuredError(UntrustedError):
    """A short measurement was disturbed or failed. Nothing was stored."""


class ShortMeasurement:
    """A running measurement of the processor's roofs with `threads` threads. Call `poll` until it has ended, or
    `close` to end it early.

    Only one runs on a machine at a time. Raises UnmeasuredError while another one runs, and OSError if the process
    cannot be started.
    """

    def __init__(self, threads: int) -> None:
        self._threads, self._begun_s = threads, time.monotonic()
        os.makedirs(cache_dir(), exist_ok=True)
        # Use the cache directory itself as the lock, because a lock file would remain after the measurement.
        self._lock = os.open(cache_dir(), os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._process = subprocess.Popen(
                # The option -P keeps Python from importing a module of the current directory.
                [sys.executable, "-P", "-c", PROGRAM, str(threads)],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                env=os.environ | ONE_THREAD,
            )  # fmt: skip
        except BlockingIOError as error:
            os.close(self._lock)
            raise UnmeasuredError("another process measures the roofs") from error
        except BaseException:
            os.close(self._lock)
            raise

    def poll(self) -> DeviceRoofs | None:
        """Return the roofs, or None while the measurement runs.

        Raises UnmeasuredError if the measurement was disturbed or failed.
        """
        if self._process.poll() is None:
            if time.monotonic() - self._begun_s > MAX_S:
                raise UnmeasuredError(f"it took longer than {MAX_S:g} s")
            return None
        assert self._process.stdout is not None
        text = self._process.stdout.read()
        try:
            found = json.loads(text)
        except ValueError as error:
            raise UnmeasuredError(f"it ended with {self._process.returncode}") from error
        if "disturbed" in found:
            raise UnmeasuredError(f"the roofs were not measured: {found['disturbed']}; try again on an idle machine")
        roofs = DeviceRoofs(cpu_name(), tuple(map(_ceiling, found["roofs"])), self._threads)
        return keep_roofs([roofs])[0]

    def close(self) -> None:
        """End the measurement if it still runs. Nothing is stored in this case."""
        self._process.kill()
        self._process.communicate(timeout=END_WITHIN_S)
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def measure_short(threads: int) -> DeviceRoofs:
    """Measure the roofs for `threads` threads, store and return them. Raises UnmeasuredError if the measurement was
    disturbed, and OSError or RoofsError if it could not start or be stored.
    """
    with ShortMeasurement(threads) as running:
        while (found := running.poll()) is None:
            time.sleep(POLL_S)
    return found


def in_words(roofs: Sequence[Ceiling]) -> str:
    """Return the roofs as text, such as `memory 32.1 GB/s, float32 products 103.8 GFLOP/s`."""
    names = {"dram_read": "memory", "matmul_float32": "float32 products"}
    return ", ".join(f"{names[one.name]} {one.value:.1f} {one.unit}" for one in roofs if one.name in names)


def _ceiling(measured: dict[str, Any]) -> Ceiling:
    kind, unit, dtype = ROOFS[measured["name"]]
    rates = sorted(measured["rates"])
    middle = len(rates) // 2
    median = rates[middle] if len(rates) % 2 else (rates[middle - 1] + rates[middle]) / 2
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    return Ceiling(
        measured["name"], kind, rates[-1], unit, Provenance.MEASURED, median, rates[0], now,
        load_percent=measured["load_percent"], dtype=dtype, rounds=len(rates), is_short=True,
    )  # fmt: skip
