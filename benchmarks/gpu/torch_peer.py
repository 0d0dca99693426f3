"""Measure the rate at which torch reads the weights of a 7B on a GPU: `python -m benchmarks.gpu.torch_peer`.

The model is in bfloat16 and runs as in a serving engine: one captured graph, replayed and waited for. The result is
the size of the weights divided by the time of a step. Compare it with `python -m benchmarks.gpu.decode` on the same
machine.
"""

from __future__ import annotations

import statistics
import time

import torch

from benchmarks.gpu.lean import Engine, lean

ROUNDS, STEPS = 9, 30


def main() -> None:
    model = lean(1)
    engine = Engine(model, 1).capture()
    size_bytes = sum(
        parameter.numel() * parameter.element_size()
        for name, parameter in model.named_parameters()
        if "embed_tokens" not in name
    )
    found = []
    for _ in range(ROUNDS):
        engine.restart()
        torch.cuda.synchronize()
        begun_ns = time.perf_counter_ns()
        for _ in range(STEPS):
            engine.step()
            torch.cuda.synchronize()
        found.append((time.perf_counter_ns() - begun_ns) / STEPS)
    took_us = statistics.median(found) / 1e3
    print(
        f"torch {torch.__version__}, bfloat16, captured graph: {size_bytes / 1e9:.2f} GB of weights "
        f"in {took_us:.0f} us, {size_bytes / took_us / 1e3:.0f} GB/s"
    )


if __name__ == "__main__":
    main()
