"""What cbtop costs two tensor-parallel ranks on two GPUs, whose step is as long as that of the slower one.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.gpu.two_ranks

A decode step of a 7B-shaped model in bf16, waited for as an engine does that reads its tokens: eager, and as a
captured graph. Rounds interleaved, the ranks in step: without cbtop (twice: their ratio is the noise), under
`--overhead 1%`, and with every step recorded. Ratios are medians over the rounds, of rank 0. Without cbtop nothing of
it is in torch: it is detached for these rounds. A graph is captured while its way is attached.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.tensor_parallel import LIKE_7B, Rank, Sizes
from cbtop.profiler.instrument import attach
from cbtop.profiler.instrument.governor import GovernedProfiler
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder

ROUNDS, STEPS = 15, 20  # rounds, and steps of each way in one
WARM_UP = 400  # steps of each way: by then the governor knows what recording costs
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


def measure(
    what: str, rank: Rank, profilers: dict[str, BrickProfiler], steps: dict[str, Callable[[], object]]
) -> None:
    """Print a line for each way; `steps` are what one step of it is."""

    def run(way: str, count: int) -> float:
        attachment = attach(rank.model, profilers[way]) if way in profilers else None
        timed_us(steps[way], 3)
        took_us = timed_us(steps[way], count)
        if attachment is not None:
            attachment.detach()
        return took_us

    for way in steps:
        run(way, WARM_UP)
    found: dict[str, list[float]] = {way: [] for way in steps}
    ways = list(steps)
    for at in range(ROUNDS):
        for way in ways[at % len(ways) :] + ways[: at % len(ways)]:
            found[way].append(run(way, STEPS))
    if rank.rank == 0:
        print(f"{what}: {statistics.median(found[BARE]):.0f} µs a step without cbtop", flush=True)
        for way in ways[1:]:
            ratios = sorted(one / other for one, other in zip(found[way], found[BARE], strict=True))
            low, high = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
            print(f"  {way:12}{statistics.median(ratios):8.4f} ×   half of the rounds {low:.4f} to {high:.4f}")
        sys.stdout.flush()


def compare(sizes: Sizes) -> None:
    rank = Rank(sizes)
    profilers = {
        DEFAULT: GovernedProfiler(PERCENT, recorder=RingRecorder()),
        EVERY: BrickProfiler(),
    }
    measure(f"eager, batch {sizes.batch}", rank, profilers, dict.fromkeys((BARE, AGAIN, DEFAULT, EVERY), rank.step))
    replay: Any = torch._C._CUDAGraph.replay
    bare, _ = rank.captured()
    graphs: dict[str, Callable[[], object]] = {BARE: lambda: replay(bare), AGAIN: lambda: replay(bare)}
    for way, profiler in profilers.items():
        attachment = attach(rank.model, profiler)
        graph, _ = rank.captured()
        attachment.detach()
        graphs[way] = graph.replay
    measure(f"captured graph, batch {sizes.batch}", rank, profilers, graphs)
    if rank.rank == 0:
        print(f"  default records one step in {profilers[DEFAULT].sample_every}", flush=True)


def main() -> None:
    dist.init_process_group("nccl")
    if dist.get_rank() == 0:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, NCCL {nccl}", flush=True)
    with torch.no_grad():
        for batch in map(int, sys.argv[1:] or ["1"]):
            compare(replace(LIKE_7B, batch=batch))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
