"""Run the real programs bare, under `cbtop run` and under the oracle, and print the results."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.base import Ratio
from benchmarks.real.comparison import HEADER, Comparison, Overhead, Row, beyond, comparison, details, line
from benchmarks.real.programs import PROGRAMS, ROOT, VLLM_ENVIRONMENT, Program, ProgramError, last_line
from benchmarks.real.turns import CBTOP, MORE_SECONDS, pair

ORACLE_RUNS = 2  # The program runs this often by itself. The difference between these runs is the noise.
# Maximum seconds under the oracle on a GPU. In a second, eager steps make half a million events in a trace.
TRACED_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Options:
    names: Sequence[str]
    seconds: float
    pairs: int = 3
    turns: int = 8
    overhead: str = ""
    has_cuda: bool = False


def options_of(arguments: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(prog="python -m benchmarks real", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PROGRAMS)} (default: all)")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="of the recording and of the oracle (default: 10); 0: neither"
    )
    parser.add_argument(
        "--pairs", type=int, default=3, help="pairs of a bare process and one with cbtop (default: 3); 0: no overhead"
    )
    parser.add_argument(
        "--turns", type=int, default=8, help="turns with cbtop in a pair, each between two bare ones (default: 8)"
    )
    parser.add_argument("--overhead", default="", metavar="PERCENT", help="of `cbtop run` (default: its own)")
    found = parser.parse_args(arguments)
    if unknown := [name for name in found.names if name not in PROGRAMS]:
        parser.error(f"no program is called {unknown[0]!r}; there are {', '.join(PROGRAMS)}")
    if found.seconds < 0 or found.pairs < 0 or found.turns < 1:
        parser.error("--seconds and --pairs must be at least 0, --turns at least 1")
    return Options(
        found.names or list(PROGRAMS), found.seconds, found.pairs, found.turns, found.overhead, _has_cuda()
    )


def main(arguments: Sequence[str]) -> int:
    """Print each program's figures as soon as they are measured, then the table. Returns 1 if a program failed."""
    options = options_of(arguments)
    rows: list[Row] = []
    print(f"{options.pairs} pairs, {options.turns} turns each; load of the machine {os.getloadavg()[0]:.1f}")
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
    """Return why a program cannot run on this machine, or ""."""
    if missing := [name for name in ("torch", *program.needs) if importlib.util.find_spec(name) is None]:
        return f"{missing[0]} is not installed"
    return "it needs a CUDA device" if program.needs_cuda and not has_cuda else ""


def measured(program: Program, options: Options, folder: Path) -> Row:
    """Measure a program in all ways. If one of them fails, its result is the reason."""
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
    """Use several pairs of processes, because the times of a single process are off by about 2 %."""
    if not options.pairs:
        raise ProgramError("--pairs 0")
    bare, *ratios = zip(*[pair(program, options.turns, options.overhead) for _ in range(options.pairs)], strict=True)
    return Overhead(statistics.median(bare), *[Ratio(statistics.median(of), min(of), max(of)) for of in ratios])


def recorded(program: Program, options: Options, folder: Path) -> dict[str, Any]:
    """Run the program with every step recorded. Return cbtop's JSON of the phase that took most time."""
    if not options.seconds:
        raise ProgramError("--seconds 0")
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
    """Run the program under the oracle. Return the figures of the kind of call that took most time."""
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
        raise ProgramError(f"exit code {done.returncode}: {last_line(done.stderr)}")
    return done.stdout
