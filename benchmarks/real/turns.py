"""Run a program bare and with cbtop in turns.

Both processes exist all the time, and one runs while the other waits. Both run on the same processor, because on a
shared host a processor may be slow for minutes: two processes on an H200's host differed by up to 20 % in either
direction. Only cbtop's own process runs on the others.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from benchmarks.real.programs import ROOT, VLLM_ENVIRONMENT, Program, ProgramError, last_line

CBTOP = [sys.executable, "-m", "cbtop"]
STEPS = re.compile(r"^steps (\d+) seconds ([\d.]+) processor ([\d.]+)$", re.MULTILINE)
SETTLE_SECONDS = 4.0  # The first turn of a process takes this many seconds. It is not counted.
# Each turn begins with this many seconds, which are not counted. On a GPU, cbtop records steps at intervals of
# wall-clock time. While the process waits, an interval may end, so a step may be recorded as soon as a turn begins.
LATE_SECONDS = 0.5
# Turns with cbtop last this many seconds. On a GPU, this is longer than the interval between two recordings, which is
# up to 2.5 s by default.
WATCHED_SECONDS, BARE_SECONDS = 3.0, 1.0
MORE_SECONDS = 420  # A program may take this many additional seconds to start, compile and warm up.
ENDING_SECONDS = 60  # A process may take this many seconds to end.


@dataclass(frozen=True, slots=True)
class StepMs:
    """The time of a step in milliseconds, by the wall clock and by the processor time of the process."""

    wall: float
    processor: float


class Turns:
    """A process of a program, started with the command `before` in front. It runs only during a call of `step_ms`."""

    def __init__(self, program: Program, before: Sequence[str]) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with this object
        self._process = subprocess.Popen(
            [*before, *on_one_processor(), sys.executable, str(program.path), "turns", *program.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=ROOT,
            env=os.environ | VLLM_ENVIRONMENT,
        )

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, *_: object) -> None:
        with self._errors, self._process as process, suppress(BrokenPipeError):
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=ENDING_SECONDS)
            process.terminate()

    def step_ms(self, seconds: float) -> StepMs:
        """Let the program run for some seconds. Returns the time of a step, from the line that the program prints."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        limit = threading.Timer(MORE_SECONDS, self._process.kill)
        limit.start()
        try:
            with suppress(BrokenPipeError):
                print(seconds, file=self._process.stdin, flush=True)
            for printed in self._process.stdout:
                if steps := STEPS.search(printed):
                    return StepMs(*(1000 * float(took) / int(steps[1]) for took in (steps[2], steps[3])))
        finally:
            limit.cancel()
        self._errors.seek(0)
        raise ProgramError(f"it ended early: {last_line(self._errors.read())}")


def on_one_processor() -> list[str]:
    """Return the beginning of a command that runs on the last processor that this process may use.

    Returns nothing if taskset is not installed.
    """
    taskset = shutil.which("taskset")
    return [] if taskset is None else [taskset, "--cpu-list", str(max(os.sched_getaffinity(0)))]


def pair(program: Program, turns: int, percent: str) -> tuple[float, ...]:
    """Run a bare process and one with cbtop in turns.

    Returns medians: a bare step in ms, then the ratios of `Overhead`.

    Each of the `turns` turns with cbtop is between two bare ones, so that a change of the machine's speed affects
    both. `percent` is the `--overhead` of `cbtop run`, or "" for the default.
    """
    overhead = [f"--overhead={percent}"] if percent else []
    with Turns(program, []) as bare, Turns(program, [*CBTOP, "run", *overhead, "--"]) as watched:
        for process in (bare, watched):
            process.step_ms(SETTLE_SECONDS)
        rows = []
        after = bare.step_ms(BARE_SECONDS)
        for _ in range(turns):
            before = after
            watched.step_ms(LATE_SECONDS)
            during = watched.step_ms(WATCHED_SECONDS)
            bare.step_ms(LATE_SECONDS)
            after = bare.step_ms(BARE_SECONDS)
            wall = 2 * during.wall / (before.wall + after.wall)
            processor = 2 * during.processor / (before.processor + after.processor)
            rows.append((after.wall, wall, after.wall / before.wall, processor))
    return tuple(map(statistics.median, zip(*rows, strict=True)))
