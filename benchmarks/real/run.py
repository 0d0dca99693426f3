"""Run the real programs bare, under `cbtop run` and under the oracle, and print what each shows."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.beside_bare import Variant, median_of
from benchmarks.real.comparison import HEADER, Comparison, Overhead, Row, beyond, comparison, details, line
from benchmarks.real.programs import PROGRAMS, VLLM_ENVIRONMENT, Program

ROOT = Path(__file__).parents[2]
CBTOP = [sys.executable, "-m", "cbtop"]
STEPS = re.compile(r"^steps (\d+) seconds ([\d.]+)$", re.MULTILINE)
PROCESSOR = re.compile(r"^processor seconds ([\d.]+)$", re.MULTILINE)
ORACLE_RUNS = 2  # the difference between these runs is the noise
TRACED_SECONDS = 1.0  # maximum on a GPU, because a second of eager steps gives half a million events in a trace
MORE_SECONDS = 420  # additional time that a program may take to start, compile and warm up


class ProgramError(Exception):
    """A program failed. The text is the last line that it wrote, or the reason."""


@dataclass(frozen=True, slots=True)
class Options:
    names: Sequence[str]
    seconds: float
    rounds: int
    has_cuda: bool = False


def options_of(arguments: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(prog="python -m benchmarks real", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PROGRAMS)} (default: all)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run (default: 10)")
    parser.add_argument(
        "--rounds", type=int, default=5, help="runs with cbtop, each between two bare (default: 5); 0: no overhead"
    )
    found = parser.parse_args(arguments)
    if unknown := [name for name in found.names if name not in PROGRAMS]:
        parser.error(f"no program is called {unknown[0]!r}; there are {', '.join(PROGRAMS)}")
    if found.seconds <= 0 or found.rounds < 0:
        parser.error("--seconds must be above 0, --rounds at least 0")
    return Options(found.names or list(PROGRAMS), found.seconds, found.rounds, _has_cuda())


def main(arguments: Sequence[str]) -> int:
    """Print each program's figures as soon as they are measured, then the table. Returns 1 if a program failed."""
    options = options_of(arguments)
    rows: list[Row] = []
    print(f"{options.rounds} rounds of {options.seconds:g} s; load of the machine {os.getloadavg()[0]:.1f}")
    for name in options.names:
        program = PROGRAMS[name]
        if reason := skipped(program, options.has_cuda):
            print(f"{name}: skipped, {reason}", flush=True)
            continue
        print(f"{name} …", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="cbtop-real-") as folder:
            rows.append(measured(program, options, Path(folder)))
        print(name, *details(rows[-1]), HEADER, line(rows[-1]), "", sep="\n", flush=True)
    print(HEADER, *(line(row) for row in rows), sep="\n")
    print("", "Beyond the limits:", *([f"  {one}" for row in rows for one in beyond(row)] or ["  nothing"]), sep="\n")
    return int(any(isinstance(row.verdicts, str) or isinstance(row.overhead, str) for row in rows))


def _has_cuda() -> bool:
    asked = [sys.executable, "-c", "import torch; print(torch.cuda.is_available())"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip() == "True"


def skipped(program: Program, has_cuda: bool) -> str:
    """Return the reason why a program cannot run here, or ""."""
    if missing := [name for name in ("torch", *program.needs) if importlib.util.find_spec(name) is None]:
        return f"{missing[0]} is not installed"
    return "it needs a CUDA device" if program.needs_cuda and not has_cuda else ""


def measured(program: Program, options: Options, folder: Path) -> Row:
    """Measure a program. If a part fails, its result is the reason."""
    overhead: Overhead | str
    verdicts: Sequence[str] | str
    compared: Comparison | str
    try:
        overhead = overhead_of(program, options)
    except ProgramError as error:
        overhead = f"overhead not measured: {error}"
    try:
        source = recorded(program, options, folder)
    except ProgramError as error:
        verdicts = compared = f"not recorded: {error}"
    else:
        verdicts = sorted(one["id"] for one in source["verdicts"] if one["severity"] != "note")
        try:
            kinds = [timed(program, options, folder) for _ in range(ORACLE_RUNS)]
            compared = comparison(source, kinds)
        except ProgramError as error:
            compared = str(error)
    expected = program.on_cuda if options.has_cuda else program.on_cpu
    return Row(program.name, overhead, compared, verdicts, expected)


def overhead_of(program: Program, options: Options) -> Overhead:
    """Run the program bare and with cbtop in turns. Each run with cbtop is between two bare runs."""
    if not options.rounds:
        raise ProgramError("--rounds 0")
    bare = [step_ms(program, options, [])]
    wall, control, processor = (Variant(lambda: lambda: None) for _ in range(3))
    for _ in range(options.rounds):
        watched = step_ms(program, options, [*CBTOP, "run", "--"])
        bare.append(step_ms(program, options, []))
        before, after = bare[-2:]
        wall.ratios.append(2 * watched.wall / (before.wall + after.wall))
        control.ratios.append(after.wall / before.wall)
        processor.ratios.append(2 * watched.processor / (before.processor + after.processor))
    return Overhead(statistics.median(one.wall for one in bare), *map(median_of, (wall, control, processor)))


@dataclass(frozen=True, slots=True)
class StepMs:
    """Milliseconds per step, by the wall clock and by the processor time of the process."""

    wall: float
    processor: float


def step_ms(program: Program, options: Options, before: Sequence[str]) -> StepMs:
    """Run the program, prefixed by the command `before`. Returns the time of a step from the lines that it prints."""
    printed = output([*before, *_command(program, options)], options)
    steps, processor = STEPS.search(printed), PROCESSOR.search(printed)
    if steps is None or processor is None:
        raise ProgramError("it printed no line `steps N seconds S`")
    return StepMs(*(1000 * float(seconds) / int(steps[1]) for seconds in (steps[2], processor[1])))


def recorded(program: Program, options: Options, folder: Path) -> dict[str, Any]:
    """Record every step of the program. Returns cbtop's JSON for the phase that took most time."""
    file = folder / "run.cbtop"
    output([*CBTOP, "run", "--record", str(file), "--", *_command(program, options)], options)
    replay = [*CBTOP, "replay", str(file), "--headless", "--window", "all", "--format", "json"]
    source = _largest(json.loads(output(replay, options)))
    phase = max(source["phases"], key=lambda one: one["union_us"])["phase"]
    if phase != source["phase"]:
        source = _largest(json.loads(output([*replay, "--phase", phase], options)))
    return source


def _largest(report: dict[str, Any]) -> dict[str, Any]:
    sources: list[dict[str, Any]] = [one for one in report["sources"] if one["phases"]]
    if not sources:
        raise ProgramError("the recording has no step")
    return max(sources, key=lambda one: sum(phase["union_us"] for phase in one["phases"]))


def timed(program: Program, options: Options, folder: Path) -> dict[str, Any]:
    """Run the oracle. Returns its figures for the kind of call that took most time."""
    if not program.has_modules:
        raise ProgramError("no shares: compiled code calls no module that an oracle could time")
    file = folder / "oracle.json"
    if options.has_cuda:
        options = replace(options, seconds=min(options.seconds, TRACED_SECONDS))
    command = [sys.executable, "-m", "benchmarks.real.oracle", str(file), *_command(program, options)[1:]]
    try:
        output(command, options, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    except ProgramError as error:
        raise ProgramError(f"the oracle failed: {error}") from error
    kinds = [one | {"kind": kind} for kind, one in json.loads(file.read_text()).items() if one["bricks"]]
    if not kinds:
        raise ProgramError("the oracle saw no module")
    return max(kinds, key=lambda one: sum(brick["us"] for brick in one["bricks"]))


def _command(program: Program, options: Options) -> list[str]:
    return [sys.executable, str(program.path), f"{options.seconds:g}", *program.arguments]


def output(command: Sequence[str], options: Options, more: dict[str, str] | None = None) -> str:
    """Run a command in the root of the repository. Returns its standard output."""
    environment = os.environ | VLLM_ENVIRONMENT | (more or {})
    limit_s = MORE_SECONDS + 2 * options.seconds
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, check=False, cwd=ROOT, env=environment
        )
    except subprocess.TimeoutExpired as error:
        raise ProgramError(f"it ran longer than {limit_s:.0f} s") from error
    if done.returncode:
        last = (done.stderr.strip() or "it wrote nothing on stderr").splitlines()[-1]
        raise ProgramError(f"exit code {done.returncode}: {last}")
    return done.stdout
