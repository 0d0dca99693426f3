"""Time a token of a 7B in Q4_K_M on a GPU: `python -m benchmarks.gpu.decode [eager]`.

The first result is the ratio of a step to the least time for reading its weights. That time is measured in the same
run, with a kernel that only reads. The second result is the cost of stamping (recording the times of) every kernel:
in every step, and as often as `--overhead 1%` allows. All variants take turns in rounds and use the same decoder. A
second decoder would have arrays at different addresses, which alone changed times by 1 %. The variant without a
profiler runs twice, and the ratio of both is the noise.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

from benchmarks.base import Ratio
from benchmarks.gpu.shapes import model_7b, read_bytes
from cbtop.compute.decoder.on_gpu import GpuDecoder
from cbtop.compute.gpu.device import Gpu
from cbtop.compute.gpu_ceilings import SOURCE
from cbtop.profiler.instrument.governor import GovernedProfiler
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder

ROUNDS, STEPS, CONTEXT, PROMPT = 15, 30, 4096, 32
READ_BYTES = 300 * 8192 * 128  # number of bytes to read; 315 MB do not fit into any cache


def read_gb_per_s(gpu: Gpu) -> float:
    """Return the rate (GB/s) of a kernel that only reads memory."""
    cupy = gpu.cupy
    kernel, out = cupy.RawKernel(SOURCE, "memory_read"), cupy.zeros(64, "u1")
    buffers = [cupy.zeros(READ_BYTES, "u1") for _ in range(2)]
    best = 0.0
    for _ in range(20):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        for buffer in buffers:
            kernel((READ_BYTES // 8192,), (256,), (buffer, out))
        end.record()
        end.synchronize()
        best = max(best, 2 * READ_BYTES / cupy.cuda.get_elapsed_time(begin, end) / 1e6)
    return best


def main() -> None:
    is_eager = "eager" in sys.argv[1:]
    gpu = Gpu()
    model = model_7b(gpu)
    size_bytes, read = read_bytes(model), read_gb_per_s(gpu)
    bound_us = size_bytes / read / 1e3
    print(
        f"{gpu.name}: weights {size_bytes / 1e9:.2f} GB, read at {read:.0f} GB/s: {bound_us:.0f} us a token at least"
    )
    profilers = {
        "bare": BrickProfiler(enabled=False),
        "bare again": BrickProfiler(enabled=False),
        "every step": BrickProfiler(),
        "governed": GovernedProfiler(1.0, recorder=RingRecorder()),
    }
    decoder = GpuDecoder(gpu, model, profilers["bare"], CONTEXT, is_eager=is_eager)

    def steps(profiler: BrickProfiler) -> Callable[[], float]:
        def run() -> float:
            decoder.restart()
            decoder._profiler = profiler
            token = decoder.prefill([*range(PROMPT)])
            token = decoder.decode(token)
            begun_ns = time.perf_counter_ns()
            for _ in range(STEPS):
                token = decoder.decode(token)
            return (time.perf_counter_ns() - begun_ns) / STEPS

        return run

    runs = {name: steps(one) for name, one in profilers.items()}
    found: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(ROUNDS + 2):
        names = list(runs)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            took = runs[name]()
            if turn >= 2:
                found[name].append(took)
    bare_us = statistics.median(found["bare"]) / 1e3
    how = "eager" if is_eager else "captured graph"
    print(f"{how}: {bare_us:.0f} us a token ({1e6 / bare_us:.0f}/s), {100 * bound_us / bare_us:.0f} % of the bound")
    for name in list(runs)[1:]:
        ratio = Ratio.of(found[name], found["bare"])
        print(f"  {name:12} {ratio.median:.4f} x (half of the rounds between {ratio.low:.4f} and {ratio.high:.4f})")
    governed = profilers["governed"]
    assert isinstance(governed, GovernedProfiler)
    print(f"  governed: one step in {governed.governor.every}")
    decoder.restart()
    print(profilers["every step"].report())


if __name__ == "__main__":
    main()
