"""`cbtop overhead`: measure the cost of profiling on this machine."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path

from cbtop import units
from cbtop.commands.shared.compiled import why_in_python
from cbtop.commands.shared.crossovers import go_by_kept_crossovers
from cbtop.commands.shared.progress import ProgressLine
from cbtop.profiler.clocks import HostClock
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol.vocabulary import BrickId, SyncMode
from cbtop.reports.tables import Table, table
from cbtop.viewmodels.straggler import bound_of_median

DESCRIPTION = (
    "Measure what timing one brick costs in each sync mode, beside two bare reads of the clock, and what it costs "
    "a real decode step, also one that is not sampled and timed as a whole. Rounds take turns, so that a busy "
    "machine hits all alike; shown are medians, and the interval in which each lies (95 %). A ratio whose interval "
    "includes 1 is below noise: it was not told from nothing."
)
EPILOG = "The modes run on the host's own clock, which never waits: on a GPU, waiting comes on top.\n"

BRICKS_A_ROUND = 2_000
ROUNDS = 41
STEPS_A_TURN = 8
TURNS = 15
# Probability that the true value is above the printed interval. It is below with the same probability.
ALPHA = 0.025
FLOOR = "two clock reads"
NOTHING = "nothing"
OFF = "disabled"
PLAIN = "plain step"  # name of the profiling mode that records only the total time of each step


@dataclass(frozen=True, slots=True)
class Measured:
    """A median with its 95 % interval. The interval is None if there were too few rounds."""

    median: float
    low: float | None
    high: float | None

    @property
    def below_noise(self) -> bool | None:
        """Whether the ratio may be noise, because its interval contains 1. None without an interval."""
        return None if self.low is None or self.high is None else self.low <= 1 <= self.high


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one mode of profiling.

    `times_floor` is the time of a brick, divided by two clock reads. `step_ratio` is the time of a decode step,
    divided by the same step with a disabled profiler. Both are medians of one ratio per round, and None for the
    reference mode.
    """

    mode: str
    ns_per_brick: Measured
    times_floor: Measured | None
    step_us: Measured | None
    step_ratio: Measured | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--model", type=Path, metavar="FILE.gguf", help="whose decode step (default: the demo's)")


def run(options: argparse.Namespace) -> int:
    line = ProgressLine(sys.stderr)
    # Rings are written to a new directory. No daemon reads this directory, so nothing disturbs the measurement.
    with tempfile.TemporaryDirectory(prefix="cbtop-overhead-") as directory:
        profilers = _profilers(Path(directory))
        costs = _costs(_brick_ns(profilers, line), _step_us(profilers, options.model, line))
        for profiler in profilers.values():
            profiler.close()
    line.clear()
    recorder = profilers["host clock"].implementation
    if options.json:
        document = {"schema": "cbtop.overhead/2", "recorder": recorder, "costs": [_plain(cost) for cost in costs]}
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        sys.stdout.write(_text(costs, recorder))
        if found := why_in_python():
            sys.stdout.write(f"measured of the recorder in Python ({found[0]}) → {found[1]}\n")
    return 0


def _profilers(directory: Path) -> dict[str, BrickProfiler]:
    def profiler(**how: object) -> BrickProfiler:
        return BrickProfiler(recorder=RingRecorder(directory), **how)  # type: ignore[arg-type]

    modes = {mode.name.lower(): profiler(device_clock=HostClock(), sync_mode=mode) for mode in SyncMode}
    return {OFF: profiler(enabled=False), PLAIN: profiler(sample_every=1 << 40), "host clock": profiler()} | modes


def _brick_ns(profilers: dict[str, BrickProfiler], line: ProgressLine) -> dict[str, list[float]]:
    """Return times in ns: of two clock reads, and for each profiler of starting and stopping a brick once.

    The time of an empty loop is subtracted.
    """
    loops = {NOTHING: _nothing, FLOOR: _clock_reads} | {name: _pairs(one) for name, one in profilers.items()}
    found: dict[str, list[float]] = {name: [] for name in loops}
    step = profilers[PLAIN].step("bricks")
    with step:  # The profiler always records the first step of each name, so do not measure it.
        pass
    with step:
        for turn in range(ROUNDS):
            line.show("timing bricks", turn / ROUNDS)
            for name, loop in loops.items():
                begun_ns = time.perf_counter_ns()
                loop(BRICKS_A_ROUND)
                found[name].append((time.perf_counter_ns() - begun_ns) / BRICKS_A_ROUND)
    nothing = found.pop(NOTHING)
    return {name: [took - empty for took, empty in zip(times, nothing, strict=True)] for name, times in found.items()}


def _nothing(times: int) -> None:
    for _ in repeat(None, times):
        pass


def _clock_reads(times: int) -> None:
    clock = time.perf_counter_ns
    for _ in repeat(None, times):
        clock()
        clock()


def _pairs(profiler: BrickProfiler) -> Callable[[int], None]:
    def loop(times: int) -> None:
        brick = BrickId.RMS_NORM
        for _ in repeat(None, times):
            profiler.stop_brick(profiler.start_brick(brick), 1)
        profiler.finalize()  # Include work that the profiler has deferred in the measured cost.

    return loop


def _step_us(profilers: dict[str, BrickProfiler], model: Path | None, line: ProgressLine) -> dict[str, list[float]]:
    """Return for each profiler the times of a decode step in µs, one time per turn."""
    # Imported here, because Numba loads slowly.
    from cbtop.compute.backends import cpu_backend
    from cbtop.compute.decoder.decoder import Decoder
    from cbtop.compute.decoder.int8 import model_to_run
    from cbtop.compute.demo_model import demo_model

    path = model or demo_model(line.show)
    go_by_kept_crossovers(line)
    # Run the model with the fastest settings, like `cbtop demo`. In a slower step, the share of profiling would look
    # smaller.
    loaded = model_to_run(path)
    # Use one thread. With several, the step also waits for busy cores, which would count as profiling cost.
    backend = cpu_backend(1)
    line.show("compiling kernels")
    decoders = {
        name: Decoder(loaded, backend.label, backend.threads, profiler, context=64)
        for name, profiler in profilers.items()
    }
    tokens = {name: decoder.prefill([1, 2, 3, 4]) for name, decoder in decoders.items()}
    found: dict[str, list[float]] = {name: [] for name in decoders}
    for turn in range(TURNS):
        line.show("timing decode steps", turn / TURNS)
        for name, decoder in decoders.items():
            # Begin every turn with a context of 4 tokens, because attention takes longer with a longer context.
            decoder.position = 4
            begun_ns = time.perf_counter_ns()
            for _ in range(STEPS_A_TURN):
                tokens[name] = decoder.decode(tokens[name])
            found[name].append((time.perf_counter_ns() - begun_ns) / STEPS_A_TURN / 1e3)
    return found


def _costs(brick_ns: dict[str, list[float]], step_us: dict[str, list[float]]) -> list[Cost]:
    costs = []
    for name, ns in brick_ns.items():
        steps = step_us.get(name)
        costs.append(
            Cost(
                name,
                _measured(ns),
                None if name == FLOOR else _ratio(ns, brick_ns[FLOOR]),
                _measured(steps) if steps else None,
                None if steps is None or name == OFF else _ratio(steps, step_us[OFF]),
            )
        )
    return costs


def _ratio(times: list[float], others: list[float]) -> Measured:
    return _measured([one / other for one, other in zip(times, others, strict=True)])


def _measured(values: list[float]) -> Measured:
    """Return the median of the values with a confidence interval between two order statistics. The interval is valid
    for any distribution.
    """
    ordered, k = sorted(values), bound_of_median(len(values), ALPHA)
    return Measured(statistics.median(ordered), *((ordered[k - 1], ordered[-k]) if k else (None, None)))


def _plain(cost: Cost) -> dict[str, object]:
    """Return the JSON fields of the results. Each figure has its interval, and each ratio has a flag whether it is
    below noise.
    """
    ratios = {"times_floor": cost.times_floor, "step_ratio": cost.step_ratio}
    noise = {f"{name}_below_noise": one.below_noise if one else None for name, one in ratios.items()}
    return {**asdict(cost), **noise}


def _text(costs: list[Cost], recorder: str) -> str:
    rows: Table = [("mode", "ns/brick", "× floor", "µs/step", "× disabled")]
    rows += [
        (
            cost.mode,
            _between(cost.ns_per_brick, ".0f"),
            _between(cost.times_floor, ".2f", is_ratio=True),
            _between(cost.step_us, ".1f"),
            _between(cost.step_ratio, ".3f", is_ratio=True),
        )
        for cost in costs
    ]
    head = (
        f"recorder: {recorder}; {len(os.sched_getaffinity(0))} processors; every figure measured now, 95 % intervals"
    )
    return f"{head}\n{table(rows, left=1)}\n"


def _between(found: Measured | None, digits: str, *, is_ratio: bool = False) -> str:
    """Return a ratio with its interval as text, such as `1.012 (0.998–1.031) below noise`."""
    if found is None:
        return units.NONE_THERE
    interval = units.NOT_MEASURED
    if found.low is not None and found.high is not None:
        interval = f"{found.low:{digits}}–{found.high:{digits}}"
    noise = " below noise" if is_ratio and found.below_noise else ""
    return f"{found.median:{digits}} ({interval}){noise}"
