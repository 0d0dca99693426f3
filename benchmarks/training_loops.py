"""Compare the parts of a training step with the clocks of the program itself, in several kinds of loops.

    python -m benchmarks loops [NAME ...] [--device cuda] [--steps N] [--overhead PERCENT]

On a CPU, both measure the same steps of one run under `cbtop run`. A run without cbtop shows what cbtop itself adds.
On a GPU, the parts are times of kernels. They are compared with the kernels that torch.profiler sees in a run without
cbtop. The program's clocks are not used there, because they synchronise the GPU and also time the launches.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.real.programs import FOLDER, ROOT, ProgramError, last_line
from benchmarks.real.turns import CBTOP

PROGRAM = FOLDER / "training_loops.py"
LOOPS = (
    "sgd",
    "momentum",
    "adamw",
    "adamw_for_loop",
    "gpt_adamw",
    "scaler",
    "accumulation",
    "checkpoints",
    "gan",
    "loader",
    "lbfgs",
)
STEP = "step"
OPTIMIZER = "optimizer"
OFF = 0.05  # a part may differ by this share of its time from the program's clock,
# or by this share of the step, because a clock around a short call also times how cbtop enters and leaves it
OFF_STEP = 0.01
OVERHEAD = "3%"  # the default of `cbtop run` without a recording
LIMIT_S = 600


@dataclass(frozen=True, slots=True)
class PartOfLoop:
    """The mean time (ms) of one part of a step in the latest steps: by the program's clocks, and by cbtop.

    Means are compared, because they add up: on a busy machine, the median of a sum is not the sum of medians.
    """

    phase: str
    name: str
    bare_ms: float  # by the program's clocks in a run without cbtop; on a GPU, by torch.profiler
    own_ms: float  # by the program's clocks in the run that cbtop has watched; on a GPU, the same as `bare_ms`
    cbtop_ms: float
    step_ms: float  # the whole step, by the program's clocks
    # cbtop's own work (ms) that the program's clock has also timed. Most of it runs in the hooks of the optimizer.
    hooks_ms: float = 0.0

    @property
    def is_off(self) -> bool:
        """Whether cbtop's time differs from the program's clock by more than is allowed."""
        allowed_ms = max(OFF * self.own_ms, OFF_STEP * self.step_ms) + self.hooks_ms
        return not abs(self.cbtop_ms - self.own_ms) <= allowed_ms  # a part that is missing (nan) is off, too


def main(arguments: Sequence[str]) -> int:
    """Print a table for each loop. Returns 1 if a part is off."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks loops", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(LOOPS)} (default: all)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--overhead", default=OVERHEAD, metavar="PERCENT", help=f"of `cbtop run` ({OVERHEAD})")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in LOOPS]:
        parser.error(f"no loop is called {unknown[0]!r}; there are {', '.join(LOOPS)}")
    off = []
    for name in options.names or LOOPS:
        print(f"{name}, load of the machine {os.getloadavg()[0]:.1f}", flush=True)
        try:
            for part in measured(name, options.device, options.steps, options.overhead):
                print(_line(part), flush=True)
                off += [f"{name}: {part.phase}: {part.name}"] if part.is_off else []
        except ProgramError as error:
            print(f"  failed: {error}", flush=True)
            off.append(name)
    print("", "Beyond the limits:", *[f"  {one}" for one in off or ["nothing"]], sep="\n")
    return int(bool(off))


def measured(name: str, device: str, steps: int, overhead: str) -> Iterator[PartOfLoop]:
    """Run a loop without cbtop and with it. Yields the parts that the program has clocks for, and the whole step.

    Raises ProgramError if one of the programs fails.
    """
    command = [sys.executable, str(PROGRAM), name, "--steps", str(steps), "--device", device]
    is_cuda = device == "cuda"
    bare = _clocks(_output([*command, "--kernels"] if is_cuda else command))
    with tempfile.TemporaryDirectory(prefix="cbtop-loops-") as folder:
        file = Path(folder) / "run.cbtop"
        watched = [*command, "--no-clocks"] if is_cuda else command
        run = [*CBTOP, "run", "--overhead", overhead, "--record", str(file), "--", *watched]
        output = _output(run)
        own = bare if is_cuda else _clocks(output)
        for phase, clocks in bare.items():
            parts_ms, hooks_ms = _parts_ms(file, phase)
            print(f"  {phase:<18} cbtop's own work, in no part: {hooks_ms:.3f} ms a step", flush=True)
            for part, bare_ms in clocks["mean_ms"].items():
                own_ms, cbtop_ms = own[phase]["mean_ms"][part], parts_ms.get(part, math.nan)
                step_ms = own[phase]["mean_ms"][STEP]
                may_include_ms = hooks_ms if part in (OPTIMIZER, STEP) else 0.0
                yield PartOfLoop(phase, part, bare_ms, own_ms, cbtop_ms, step_ms, may_include_ms)


def _clocks(output: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(output.splitlines()[-1])
    return found


def _parts_ms(file: Path, phase: str) -> tuple[dict[str, float], float]:
    """Return the mean time (ms) of each part of the latest steps in a recording, and of the whole step. Also return
    the mean time (ms) of cbtop's own work in a step.
    """
    replay = [*CBTOP, "replay", str(file), "--headless", "--window", "all", "--format", "json", "--phase", phase]
    trainings = [source["training"] for source in json.loads(_output(replay))["sources"] if source["training"]]
    if not trainings:
        raise ProgramError(f"the recording has no training step of the phase {phase}")
    found = {part["name"]: part["mean_us"] / 1e3 for part in trainings[0]["parts"]}
    return found | {STEP: sum(found.values())}, trainings[0]["own_us"] / 1e3


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=ROOT)
    if done.returncode:
        raise ProgramError(f"exit code {done.returncode}: {last_line(done.stderr)}")
    return done.stdout


def _line(part: PartOfLoop) -> str:
    ratios = f"{part.cbtop_ms / part.own_ms:6.3f} × own {part.cbtop_ms / part.bare_ms:6.3f} × bare"
    times = f"{part.bare_ms:9.3f} bare {part.own_ms:9.3f} own {part.cbtop_ms:9.3f} cbtop"
    return f"  {part.phase:<18} {part.name:<10} {times} ms {ratios}{'  off' if part.is_off else ''}"
