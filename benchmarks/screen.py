"""Measure the cost of the screen on a real terminal of 120×40 cells: CPU time and bytes a frame, and the time to the
first true one.

The watched process has 365 places and writes 10,000 records a second. The floor is Textual alone: an app of the same
size that changes one number as often.

CPU time is the time of the viewer's threads, counted by the kernel. On a busy machine, frames come later and cost
about the same. A loop of plain Python is timed in the same round, so that multiples of its time can be compared
between machines.
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import statistics
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from pathlib import Path

from textual.app import App, ComposeResult
from textual.widgets import Static

from benchmarks.base import Figure, Ratio
from benchmarks.load import BRICKS, LAYERS, daemon, decode_once
from cbtop import BrickProfiler
from cbtop.tui.views import VIEWS

RECORDS_PER_S = 10_000
RECORDS_A_STEP = 1 + LAYERS * (1 + len(BRICKS))
COLUMNS, ROWS, INTERVAL_S = 120, 40, 0.5  # size of the terminal and refresh interval, as cbtop has them by default
SETTLE_S, WATCHED_S, ROUNDS = 1.0, 3.0, 3
ENDED, STARTS = 50, 3
# Ended processes leave this many steps. 100 steps take 1.2 MB, and 720 steps are more than a ring of 8 MiB can hold.
LEFT_STEPS = {"small": 100, "full": 720}
PATIENCE_S = 120.0
TRUE = b"RmsNorm"  # Name of a brick. If the screen shows it, the screen shows measured data.
LOOP = "a loop of 100,000"
FLOOR = "the floor"
CBTOP = ["-m", "cbtop", "--interval", str(INTERVAL_S)]
NUMBER = ["-c", "from benchmarks import screen; screen.show_number()"]


def run() -> list[Figure]:
    figures = []
    for where, outside in (("daemon outside", True), ("daemon inside", False)):
        _empty()
        with daemon() if outside else nullcontext(), _writer():
            figures += frames(where)
    _empty()
    with _writer():
        figures += first_frame("beside no other")
        for size, steps in LEFT_STEPS.items():
            _run(f"leave({steps})").wait()
            figures += first_frame(f"beside {ENDED} that ended, {size} rings")
            _empty(ended_only=True)
    return figures


def frames(where: str) -> list[Figure]:
    """Measure the CPU time of a frame in each view, compared with the floor, and the number of bytes sent to the
    terminal.

    The views take turns in rounds.
    """
    used: dict[str, list[float]] = {view.title: [] for view in VIEWS}
    sent: dict[str, list[float]] = {view.title: [] for view in VIEWS}
    loops, floors = [], []
    with _Screen(NUMBER) as number, _Screen(CBTOP) as screen:
        screen.wait_for(TRUE)
        for _ in range(ROUNDS):
            loops.append(_loop_ms())
            number.watch(SETTLE_S)
            floors.append(number.watch(WATCHED_S)[0] * INTERVAL_S / WATCHED_S)
            for key, view in enumerate(VIEWS, 1):
                os.write(screen.terminal, b"%d" % key)
                screen.watch(SETTLE_S)
                ms, size_bytes = screen.watch(WATCHED_S)
                used[view.title].append(ms * INTERVAL_S / WATCHED_S)
                sent[view.title].append(size_bytes / WATCHED_S / 1024)
    ratio = Ratio.of(floors, loops)
    found = [Figure(f"a frame of Textual alone: {FLOOR}", statistics.median(floors), "ms CPU", LOOP, ratio)]
    for title, times in used.items():
        ratio = Ratio.of(times, floors)
        found.append(Figure(f"a frame of {title}, {where}", statistics.median(times), "ms CPU", FLOOR, ratio))
        found.append(Figure("  sent to the terminal", statistics.median(sent[title]), "KiB/s"))
    return found


def first_frame(beside: str) -> list[Figure]:
    """Measure the CPU and wall time until the screen shows measured data, and the viewer's memory then and later."""
    wall_s, cpu_s, first_mb, later_mb = [], [], [], []
    for _ in range(STARTS):
        with _Screen(CBTOP) as screen:
            wall_s.append(screen.wait_for(TRUE))
            cpu_s.append(screen.cpu_ms / 1e3)
            first_mb.append(screen.most_resident_mb)
            screen.watch(WATCHED_S)
            later_mb.append(screen.most_resident_mb)
    return [
        Figure(f"first true frame {beside}", statistics.median(wall_s), "s"),
        Figure("  in CPU time", statistics.median(cpu_s), "s CPU"),
        Figure("  most resident until then", statistics.median(first_mb), "MB"),
        Figure(f"  and {WATCHED_S:g} s later", statistics.median(later_mb), "MB"),
    ]


class _Screen(AbstractContextManager["_Screen"]):
    """Runs a Python program in a terminal of its own."""

    def __init__(self, arguments: list[str]) -> None:
        self.terminal, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        environment = os.environ | {"TERM": "xterm-256color"}
        # Remove these variables. Programs would use them in place of the terminal's size.
        for name in ("COLUMNS", "LINES"):
            environment.pop(name, None)
        self._begun_s = time.perf_counter()
        command = [sys.executable, *arguments]
        self._process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
        os.close(slave)

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        while self._process.poll() is None:
            self._read()  # Read the remaining output. The program cannot end while its output waits to be read.
        os.close(self.terminal)

    def wait_for(self, word: bytes) -> float:
        """Wait until the program has written `word`. Returns the seconds since its start."""
        seen = b""
        while word not in seen:
            if time.perf_counter() - self._begun_s > PATIENCE_S or self._process.poll() is not None:
                raise RuntimeError(f"no {word!r} on the screen: it sent {seen!r}")
            seen = seen[-4096:] + self._read()
        return time.perf_counter() - self._begun_s

    def watch(self, seconds: float) -> tuple[float, int]:
        """Read the program's output for `seconds`. Returns the CPU time (ms) that it used meanwhile, and the number
        of bytes that it wrote.
        """
        used_ms, sent, until_s = self.cpu_ms, 0, time.perf_counter() + seconds
        while time.perf_counter() < until_s:
            sent += len(self._read())
        return self.cpu_ms - used_ms, sent

    @property
    def cpu_ms(self) -> float:
        """CPU time (ms) of all threads of the program until now.

        psutil is not used, because the resolution of its figure is only 10 ms.
        """
        threads = Path(f"/proc/{self._process.pid}/task").glob("*/schedstat")
        return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e6

    @property
    def most_resident_mb(self) -> float:
        """The largest resident memory of the program until now, in MB."""
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="utf-8")
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6

    def _read(self) -> bytes:
        """Wait for a moment, and return the bytes that the program has written meanwhile."""
        ready, _, _ = select.select([self.terminal], [], [], 0.05)
        try:
            return os.read(self.terminal, 65536) if ready else b""
        except OSError:  # The program has closed its end of the terminal.
            return b""


class _Number(Static):
    """A Textual widget that shows a growing number."""

    def on_mount(self) -> None:
        numbers = count()
        self.set_interval(INTERVAL_S, lambda: self.update(str(next(numbers)), layout=False))


class _ShowsNumber(App[None]):
    CSS = "_Number { height: 1; }"

    def compose(self) -> ComposeResult:
        yield _Number()


def show_number() -> None:
    """Show a growing number on the screen until this process is killed."""
    _ShowsNumber().run()


def write() -> None:
    """Write RECORDS_PER_S records a second into a ring until this process is killed."""
    profiler, due_s = BrickProfiler(), time.monotonic()
    while True:
        decode_once(profiler)
        due_s += RECORDS_A_STEP / RECORDS_PER_S
        time.sleep(max(0.0, due_s - time.monotonic()))


def leave(steps: int) -> None:
    """Leave ENDED rings in the runtime directory, each with the records of `steps` steps."""
    for _ in range(ENDED):
        profiler = BrickProfiler()
        for _ in range(steps):
            decode_once(profiler)
        profiler.close()


@contextmanager
def _writer() -> Iterator[None]:
    with _run("write()") as process:
        yield
        process.kill()


def _run(call: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", f"from benchmarks import screen; screen.{call}"])


def _empty(*, ended_only: bool = False) -> None:
    """Remove all files from the runtime directory."""
    for path in Path(os.environ["CBTOP_RUNTIME_DIR"]).iterdir():
        if not ended_only or _has_ended(path):
            path.unlink(missing_ok=True)


def _has_ended(path: Path) -> bool:
    pid = path.name.partition("-")[0]
    return pid.isdecimal() and not Path(f"/proc/{pid}").exists()


def _loop_ms() -> float:
    """Return the CPU time (ms) of one turn of the Python loop that other times are compared with."""
    begun_s = time.thread_time()
    total = 0
    for number in range(100_000):
        total += number
    return 1e3 * (time.thread_time() - begun_s)
