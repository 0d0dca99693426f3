"""A machine whose load is set by the test. cbtop's processes read the load from a file instead of /proc/stat."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Python imports this file when it starts. The file makes the measurements short and independent of the load. It also
# removes idle priority, because idle processes would wait for other tests.
SITECUSTOMIZE = """
import os
from cbtop.commands.shared import machine_load, short_measurement, short_roofs
os.nice = lambda increment: 0
del os.SCHED_IDLE
machine_load.PROC_STAT = {stat!r}
short_measurement.MAX_S = 200
short_roofs.KIND_S = short_roofs.MAX_FILL_S = 100
short_roofs.MAX_ROUNDS, short_roofs.ROUND_S, short_roofs.PRODUCT_SIZE = short_roofs.MIN_ROUNDS, 0.001, 64
short_roofs.MAX_SPREAD_PERCENT = short_roofs.MAX_WAIT_PERCENT = float("inf")
short_roofs.CACHES_PER_BUFFER, short_roofs.SMALLEST_BUFFER_BYTES = 0, 1 << 22
{more}
"""
BUSY_TICKS = 10  # 0.1 s of processor time
BUSY_EVERY_S = 0.05


class QuietMachine:
    """A simulated machine. Its processors are idle, except while the context `busy` is open."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.stat, self._ticks = folder, folder / "stat", 0
        folder.mkdir()
        self._write()

    def environment(self, more: str = "") -> dict[str, str]:
        """Return the environment of a process on this machine.

        `more` has additional lines of Python that run when the process starts.
        """
        (self._folder / "sitecustomize.py").write_text(SITECUSTOMIZE.format(stat=str(self.stat), more=more))
        path = os.pathsep.join(filter(None, [str(self._folder), os.environ.get("PYTHONPATH")]))
        return os.environ | {"PYTHONPATH": path, "CI": ""}

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Simulate other programs that use two processors."""
        is_over = threading.Event()

        def use() -> None:
            while not is_over.wait(BUSY_EVERY_S):
                self._ticks += BUSY_TICKS
                self._write()

        thread = threading.Thread(target=use)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def _write(self) -> None:
        new = self._folder / "new"
        new.write_text(f"cpu  {self._ticks} 0 0 0 0 0 0 0 0 0\n")
        new.replace(self.stat)
