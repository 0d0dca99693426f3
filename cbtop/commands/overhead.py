"""`cbtop overhead`: what profiling costs on this machine, measured now."""

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

from cbtop import formatting as fmt
from cbtop.commands.shared.compiled import why_in_python
from cbtop.commands.shared.progress import ProgressLine
from cbtop.profiler.clocks import HostClock
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol.vocabulary import BrickId, SyncMode

DESCRIPTION = (
    "Measure what timing one brick costs in each sync mode, beside two bare reads of the clock, and what it costs "
    "a real decode step, also one that is not sampled and timed as a whole. Rounds take turns, so that a busy "
    "machine hits all alike; the medians are shown."
)
EPILOG = "The modes run on the host's own clock, which never waits: on a GPU, waiting comes on top.\n"

BRICKS_A_ROUND = 2_000
ROUNDS = 41
STEPS_A_TURN = 8
TURNS = 15
FLOOR = "two clock reads"
NOTHING = "nothing"
OFF = "disabled"
PLAIN = "plain step"  # one that is not sampled: timed as a whole


@dataclass(frozen=True, slots=True)
class Cost:
    """What one way of profiling costs. `step_ratio` is a decode step's time over that of a disabled profiler's."""

    mode: str
    ns_per_brick: float
    times_floor: float
    step_us: float | None
    step_ratio: float | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--model", type=Path, metavar="FILE.gguf", help="whose decode step (default: the demo's)")


def run(options: argparse.Namespace) -> int:
    line = ProgressLine(sys.stderr)
    # Rings of its own, which no daemon sees: nobody is to watch this.
    with tempfile.TemporaryDirectory(prefix="cbtop-overhead-") as directory:
        profilers = _profilers(Path(directory))
        costs = _costs(_brick_ns(profilers, line), _step_us(profilers, options.model, line))
        for profiler in profilers.values():
            profiler.close()
    line.clear()
    recorder = profilers["host clock"].implementation
    if options.json:
        document = {"schema": "cbtop.overhead/1", "recorder": recorder, "costs": [asdict(cost) for cost in costs]}
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


def _brick_ns(profilers: dict[str, BrickProfiler], line: ProgressLine) -> dict[str, float]:
    """The time (ns) of one start and stop with each profiler, and of the floor, less that of a loop of nothing."""
    loops = {NOTHING: _nothing, FLOOR: _clock_reads} | {name: _pairs(one) for name, one in profilers.items()}
    found: dict[str, list[float]] = {name: [] for name in loops}
    step = profilers[PLAIN].step("bricks")
    with step:  # the first of its name is sampled
        pass
    with step:
        for turn in range(ROUNDS):
            line.show("timing bricks", turn / ROUNDS)
            for name, loop in loops.items():
                begun_ns = time.perf_counter_ns()
                loop(BRICKS_A_ROUND)
                found[name].append((time.perf_counter_ns() - begun_ns) / BRICKS_A_ROUND)
    nothing = found.pop(NOTHING)
    return {
        name: statistics.median(took - empty for took, empty in zip(times, nothing, strict=True))
        for name, times in found.items()
    }


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
        profiler.finalize()  # what was deferred is part of the price

    return loop


def _step_us(profilers: dict[str, BrickProfiler], model: Path | None, line: ProgressLine) -> dict[str, list[float]]:
    """The times of a decode step (µs) with each profiler, turn by turn."""
    # Numba and gguf take their time to load.
    from cbtop.compute.backends import cpu_backend
    from cbtop.compute.decoder import FAMILIES
    from cbtop.compute.decoder.base import read_model
    from cbtop.compute.decoder.decoder import Decoder
    from cbtop.compute.demo_model import demo_model

    loaded = read_model(model or demo_model(line.show), FAMILIES)
    backend = cpu_backend(1)  # one thread: another that is not always ours would be measured with it
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
            decoder.position = 4  # the same context each turn: attention grows with it
            begun_ns = time.perf_counter_ns()
            for _ in range(STEPS_A_TURN):
                tokens[name] = decoder.decode(tokens[name])
            found[name].append((time.perf_counter_ns() - begun_ns) / STEPS_A_TURN / 1e3)
    return found


def _costs(brick_ns: dict[str, float], step_us: dict[str, list[float]]) -> list[Cost]:
    floor = brick_ns[FLOOR]
    costs = []
    for name, ns in brick_ns.items():
        steps = step_us.get(name)
        ratios = [on / off for on, off in zip(steps, step_us[OFF], strict=True)] if steps else None
        costs.append(
            Cost(
                name,
                ns,
                ns / floor,
                statistics.median(steps) if steps else None,
                statistics.median(ratios) if ratios else None,
            )
        )
    return costs


def _text(costs: list[Cost], recorder: str) -> str:
    lines = [
        f"recorder: {recorder}; {len(os.sched_getaffinity(0))} processors; every figure measured now\n",
        f"{'mode':<16}{'ns/brick':>10}{'× floor':>9}{'µs/step':>11}{'× disabled':>12}",
    ]
    for cost in costs:
        ratio = fmt.NOT_MEASURED if cost.step_ratio is None else f"{cost.step_ratio:.3f}"
        lines.append(
            f"{cost.mode:<16}{cost.ns_per_brick:>10.0f}{cost.times_floor:>9.2f}{fmt.number(cost.step_us):>11}{ratio:>12}"
        )
    return "\n".join(lines) + "\n"
