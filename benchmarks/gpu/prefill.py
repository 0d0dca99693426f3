"""Time a prompt of 512 tokens with a 7B in Q4_K_M on a GPU: `python -m benchmarks.gpu.prefill`.

The result is the rate of the whole pass as a share of cuBLAS's rate in bfloat16 on large square matrices, in the same
run. The time of the pass includes attention, dequantising weights, and everything else. Its FLOP only include matrix
products.
"""

from __future__ import annotations

import statistics
import time

from benchmarks.gpu.shapes import model_7b
from cbtop.compute.decoder.on_gpu import GpuDecoder
from cbtop.compute.gpu.device import Gpu
from cbtop.compute.gpu_libraries import gpu_library
from cbtop.profiler.profiler import BrickProfiler

TOKENS, ROUNDS, SIZE, REPEATS = 512, 9, 8192, 10


def main() -> None:
    gpu = Gpu()
    model = model_7b(gpu)
    decoder = GpuDecoder(gpu, model, BrickProfiler(enabled=False), 2 * TOKENS)
    library = gpu_library()
    library.use(0)
    product = library.product("bfloat16", SIZE)
    library.seconds(product, 2)
    weights = sum(
        one.weight.rows * one.weight.columns
        for layer in model.layers
        for one in (layer.q, layer.k, layer.v, layer.output, layer.gate, layer.up, layer.down)
    )
    flop = 2.0 * TOKENS * weights  # Leave out the head of the model, because it only multiplies the last token.
    took_s, peaks = [], []
    for turn in range(ROUNDS + 2):
        decoder.restart()
        begun_ns = time.perf_counter_ns()
        decoder.prefill([*range(TOKENS)])
        if turn >= 2:
            took_s.append((time.perf_counter_ns() - begun_ns) / 1e9)
            peaks.append(2.0 * SIZE**3 * REPEATS / library.seconds(product, REPEATS))
    shares = sorted(flop / s / peak for s, peak in zip(took_s, peaks, strict=True))
    middle_s = statistics.median(took_s)
    print(
        f"{gpu.name}: {TOKENS} tokens in {1e3 * middle_s:.1f} ms, {TOKENS / middle_s:,.0f} tokens/s, "
        f"{flop / middle_s / 1e12:.0f} TFLOP/s, {statistics.median(shares):.2f} "
        f"({shares[0]:.2f} to {shares[-1]:.2f}) of {statistics.median(peaks) / 1e12:.0f} TFLOP/s"
    )


if __name__ == "__main__":
    main()
