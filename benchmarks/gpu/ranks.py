"""Time a token of a 7B in Q4_K_M on two GPUs of a host, compared with one: `python -m benchmarks.gpu.ranks`.

Two processes with one GPU each exchange their results through NCCL. In one variant, each process has half of the
layers, and they work one after the other. In the other variant, each has half of every layer (`cbtop demo --split`).
A decoder on the first GPU alone runs twice, and the ratio of both runs is the noise. All variants take turns in
rounds and begin together. Weights are random and differ between the variants, because the results do not matter here
(see tests/compute/test_ranks_on_gpus.py).
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.base import Ratio
from benchmarks.gpu.shapes import model_7b, read_bytes
from cbtop.compute.decoder.on_gpu import GpuDecoder
from cbtop.compute.decoder.ranks import ALONE, Rank, part_of
from cbtop.compute.gpu.device import Gpu
from cbtop.compute.gpu.nccl import NcclLink, new_id
from cbtop.profiler.profiler import BrickProfiler

RANKS, ROUNDS, WARM_UP, STEPS, CONTEXT, PROMPT = 2, 15, 2, 30, 4096, 32
ALONE_AGAIN = "one GPU again"


def rounds(decoder: GpuDecoder) -> float:
    """Decode STEPS tokens. Returns the nanoseconds that one token takes."""
    decoder.restart()
    token = decoder.decode(decoder.prefill([*range(PROMPT)]))
    begun_ns = time.perf_counter_ns()
    for _ in range(STEPS):
        token = decoder.decode(token)
    return (time.perf_counter_ns() - begun_ns) / STEPS


def of_rank(number: int, ids: Connection, together: Any) -> None:
    """Run all variants in the process of rank `number`. The process of the first rank prints the results."""
    gpu = Gpu(number)
    if number == 0:
        ids.send(new_id(gpu))
    link = NcclLink(gpu, number, RANKS, ids.recv())
    recorded = BrickProfiler()
    profilers = BrickProfiler(enabled=False), recorded

    def decoders(rank: Rank) -> list[GpuDecoder]:
        by_heads = rank.split == "heads"
        model = model_7b(gpu, ranks=RANKS) if by_heads else part_of(model_7b(gpu), rank)
        return [GpuDecoder(gpu, model, one, CONTEXT, rank=rank) for one in profilers]

    whole = decoders(ALONE)[0] if number == 0 else None
    layers, heads = (decoders(Rank(number, RANKS, link, split)) for split in ("layers", "heads"))
    runs: dict[str, Callable[[], float]] = {
        "one GPU": lambda: rounds(whole) if whole else 0.0,
        ALONE_AGAIN: lambda: rounds(whole) if whole else 0.0,
        "layers": lambda: rounds(layers[0]),
        "heads": lambda: rounds(heads[0]),
    }
    found: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for turn in range(ROUNDS + WARM_UP):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            together.wait()
            took = runs[name]()
            if turn >= WARM_UP:
                found[name].append(took)
    together.wait()
    rounds(heads[1])
    heads[1].restart()
    if number == 0 and whole is not None:
        alone_us = statistics.median(found["one GPU"]) / 1e3
        weights_gb = read_bytes(whole.model) / 1e9
        print(f"{RANKS} x {gpu.name}, weights {weights_gb:.2f} GB; one GPU: {alone_us:.0f} us a token")
        for name in names[1:]:
            ratio, us = Ratio.of(found[name], found["one GPU"]), statistics.median(found[name]) / 1e3
            spread = f"half of the rounds between {ratio.low:.3f} and {ratio.high:.3f}"
            print(f"  {name:14} {us:6.0f} us a token, {ratio.median:.3f} x ({spread})")
        print("heads, every step recorded, the first rank:")
        print(recorded.report())
    together.wait()


def main() -> None:
    spawn = multiprocessing.get_context("spawn")
    together = spawn.Barrier(RANKS)
    pipes = [spawn.Pipe() for _ in range(RANKS)]
    processes = [spawn.Process(target=of_rank, args=(at, pipes[at][1], together)) for at in range(RANKS)]
    for process in processes:
        process.start()
    unique_id = pipes[0][0].recv()
    for ours, _ in pipes:
        ours.send(unique_id)
    for process in processes:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in processes))


if __name__ == "__main__":
    main()
