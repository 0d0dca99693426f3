"""Measure the cost of cbtop for two tensor-parallel ranks on two GPUs. A step lasts until the slower rank has ended
it.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.gpu.two_ranks

A decode step of a 7B-shaped model in bf16 is measured, eager and as a captured graph. The program waits for each
step, as an engine does that reads its tokens. These variants take turns in rounds, on both ranks at the same time:
without cbtop (twice, and the ratio of both is the noise), under `--overhead 1%`, and with every step recorded. Ratios
are medians over the rounds on rank 0. In eager rounds without cbtop, cbtop is detached and leaves nothing in torch.
Graphs are captured with cbtop attached, except the bare one.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.tensor_parallel import LIKE_7B, Rank, Sizes
from cbtop.profiler.instrument import attach
from cbtop.profiler.instrument.governor import GovernedProfiler
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder

ROUNDS, STEPS = 15, 20  # number of rounds, and number of steps that each variant runs in a round
WARM_UP = 400  # Each variant runs this many warm-up steps. After them, the governor knows the cost of recording.
PERCENT = 1.0
BARE, AGAIN, DEFAULT, EVERY = "bare", "bare again", "default", "every step"


def timed_us(step: Callable[[], object], steps: int) -> float:
    dist.barrier()
    torch.cuda.synchronize()
    begun_ns = time.perf_counter_ns()
    for _ in range(steps):
        step()
        torch.cuda.synchronize()
    return (time.perf_counter_ns() - begun_ns) / steps / 1e3


def measure(what: str, rank: int, ways: dict[str, Callable[[int], float]]) -> None:
    """Print a line of results for each variant.

    A variant is a function of the number of steps, and returns the µs per step.
    """
    for run in ways.values():
        run(WARM_UP)
    found: dict[str, list[float]] = {way: [] for way in ways}
    names = list(ways)
    for at in range(ROUNDS):
        for way in names[at % len(names) :] + names[: at % len(names)]:
            found[way].append(ways[way](STEPS))
    if rank == 0:
        print(f"{what}: {statistics.median(found[BARE]):.0f} µs a step without cbtop")
        for way in names[1:]:
            ratios = sorted(one / other for one, other in zip(found[way], found[BARE], strict=True))
            low, high = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
            print(f"  {way:12}{statistics.median(ratios):8.4f} ×   half of the rounds {low:.4f} to {high:.4f}")
        sys.stdout.flush()


def eager(sizes: Sizes) -> None:
    rank = Rank(sizes)

    def attached(profiler: BrickProfiler) -> Callable[[int], float]:
        def run(steps: int) -> float:
            attachment = attach(rank.model, profiler)
            timed_us(rank.step, 3)
            took_us = timed_us(rank.step, steps)
            attachment.detach()
            return took_us

        return run

    governed = GovernedProfiler(PERCENT, recorder=RingRecorder())
    bare = partial(timed_us, rank.step)
    ways = {BARE: bare, AGAIN: bare, DEFAULT: attached(governed), EVERY: attached(BrickProfiler())}
    measure(f"eager, batch {sizes.batch}", rank.rank, ways)


def captured(sizes: Sizes) -> None:
    plain: Any = torch._C._CUDAGraph.replay
    rank, another = Rank(sizes), Rank(sizes)
    bare, _ = rank.captured()
    attachments = [
        attach(rank.model, GovernedProfiler(PERCENT, recorder=RingRecorder())),
        attach(another.model, BrickProfiler()),
    ]
    (default, _), (every, _) = rank.captured(), another.captured()
    ways = {BARE: lambda: plain(bare), AGAIN: lambda: plain(bare), DEFAULT: default.replay, EVERY: every.replay}
    measure(
        f"captured graph, batch {sizes.batch}",
        rank.rank,
        {way: partial(timed_us, step) for way, step in ways.items()},
    )
    for attachment in attachments:
        attachment.detach()


def main() -> None:
    dist.init_process_group("nccl")
    if dist.get_rank() == 0:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, NCCL {nccl}", flush=True)
    with torch.no_grad():
        for batch in map(int, sys.argv[1:] or ["1"]):
            sizes = replace(LIKE_7B, batch=batch)
            eager(sizes)
            captured(sizes)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
