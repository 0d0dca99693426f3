"""Measure the cost of timing one brick, as a multiple of two clock reads. CBTOP_PURE_PYTHON selects the hot path.

Each measured line is written out in a loop of its own, `for _ in repeat(None, n): …`, so that none has a function
call that the others lack. Only the time of an empty loop is subtracted from each. The peer, two calls of
time.perf_counter_ns, is measured in the same way in the same round. The result is the median of the rounds' ratios,
with the bounds of their middle half. All records are written into a real ring.

One brick follows itself again and again. So the next brick is always the one that the compiled hot path expects, as
in a decoder. The caches are warm, unlike in a decoder: the decode benchmark gives the cost of a brick there.

The first use of a brick with one kernel, which creates the nodes of both, is measured in processor time, without a
peer.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from itertools import repeat

from benchmarks.base import Figure, Ratio, interleaved_loops_ns
from cbtop.profiler.definitions import BrickDefinition, KernelDefinition
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.attributes import Work
from cbtop.protocol.vocabulary import BrickId

# Number of bricks per turn. A round takes a fifth of a millisecond, so most rounds are not interrupted even on a busy
# machine.
TURNS, ROUNDS = 2_000, 401
TURNS_BESIDE_TORCH = 100  # record_function takes 60 times as long as the clock, so it has fewer turns.
NEW_BRICKS = 50  # number of bricks that are timed per round
CLOCK = "two clock reads"
TORCH = "torch.profiler.record_function"
NOTHING = "nothing"

Loop = Callable[[int], None]


def run() -> list[Figure]:
    profiler, disabled = BrickProfiler(), BrickProfiler(enabled=False)
    sampled_out = BrickProfiler(sample_every=1 << 40)
    # The first step is recorded. The second step is not recorded, and it is left open.
    with sampled_out.step("decode", tokens=1):
        pass
    sampled_out.step("decode", tokens=1).__enter__()
    recorded = _forms("recorded", profiler)
    loops = recorded | _forms("disabled", disabled) | _forms("sampled out", sampled_out)
    figures = _against(CLOCK, _clock_reads, loops, TURNS)
    if torch := _record_function():
        figures += _against(TORCH, torch, recorded, TURNS_BESIDE_TORCH)
    return [*figures, Figure(f"first use of a brick, recorded, {profiler.implementation}", _first_use_us(), "µs")]


def _first_use_us() -> float:
    profiler, found = BrickProfiler(), []
    for _ in range(ROUNDS):
        kernels = (KernelDefinition("gemv", "numba"),)
        work = Work(flops_per_element=2.0, bytes_per_call=1e6)
        bricks = [BrickDefinition.of(BrickId.RMS_NORM, work=work, kernels=kernels) for _ in range(NEW_BRICKS)]
        begun_ns = time.thread_time_ns()
        for brick in bricks:
            profiler.stop_brick(profiler.start_brick(brick), 1)
        found.append((time.thread_time_ns() - begun_ns) / NEW_BRICKS / 1e3)
    return statistics.median(found)


def _forms(how: str, profiler: BrickProfiler) -> dict[str, Loop]:
    form = f"{how}, {profiler.implementation}"
    return {f"start_brick/stop_brick, {form}": _pair(profiler), f"with brick(), {form}": _span(profiler)}


def _against(peer: str, peer_loop: Loop, loops: dict[str, Loop], turns: int) -> list[Figure]:
    times = interleaved_loops_ns({NOTHING: _nothing, peer: peer_loop, **loops}, turns, ROUNDS)
    nothing = times.pop(NOTHING)
    net = {name: [a - b for a, b in zip(found, nothing, strict=True)] for name, found in times.items()}
    return [Figure(peer, statistics.median(net[peer]), "ns")] + [
        Figure(name, statistics.median(net[name]), "ns", peer, Ratio.of(net[name], net[peer])) for name in loops
    ]


def _nothing(times: int) -> None:
    for _ in repeat(None, times):
        pass


def _clock_reads(times: int) -> None:
    clock = time.perf_counter_ns
    for _ in repeat(None, times):
        clock()
        clock()


def _pair(profiler: BrickProfiler) -> Loop:
    brick = BrickId.RMS_NORM

    def loop(times: int) -> None:
        for _ in repeat(None, times):
            profiler.stop_brick(profiler.start_brick(brick), 1)

    return loop


def _span(profiler: BrickProfiler) -> Loop:
    brick = BrickId.RMS_NORM

    def loop(times: int) -> None:
        for _ in repeat(None, times):
            with profiler.brick(brick, 1):
                pass

    return loop


def _record_function() -> Loop | None:
    """Return the same loop with PyTorch's record_function in place of a brick. No profiler of PyTorch is active
    meanwhile.
    """
    try:
        from torch.profiler import record_function
    except ImportError:
        print("  no comparison with torch, which is not installed: pip install -e '.[bench]'", file=sys.stderr)
        return None

    def loop(times: int) -> None:
        for _ in repeat(None, times):
            with record_function("RmsNorm"):
                pass

    return loop
