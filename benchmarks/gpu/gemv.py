"""Multiply one token by a matrix of every format, and compare its bytes a second with reading as many bytes.

    python -m benchmarks.gpu.gemv [FORMAT ...]

Shapes are from the projections of a 7B. For weights in blocks, two variants are measured: int8 activations, without
the time to quantise them, and unrounded float32 activations. Launches are in a captured graph. They use several
copies of the matrix one after the other, which together exceed the second-level cache. The kernel that `cbtop
calibrate` measures reading with does the same. All variants take turns in rounds. Ratios are medians over the rounds.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.base import Ratio
from cbtop.compute.cuda.launches import CudaLaunch, CudaModule, LibraryCall, line
from cbtop.compute.gpu.device import Gpu
from cbtop.compute.gpu_ceilings import LOAD_BYTES, LOADS, SOURCE, THREADS
from cbtop.compute.kernels import linear, linear_int8
from cbtop.compute.kernels.linear_int8 import Int8Scratch
from cbtop.compute.quantization import FORMATS
from cbtop.compute.quantization.base import BlockFormat

# (rows, columns) of each matrix that is measured
SHAPES = ((3584, 18944), (18944, 3584), (3584, 3584), (152064, 3584))
COPIES_BYTES = 400_000_000
ROUND_BYTES = 1_500_000_000
ROUNDS = 11
READ = CudaModule("memory_read", SOURCE)
BLOCK_BYTES = THREADS * LOADS * LOAD_BYTES

Launch = CudaLaunch | LibraryCall


def captured(gpu: Gpu, launches: Sequence[Launch], count: int) -> Callable[[], float]:
    """Return a function that replays a graph. It returns the seconds per launch, by the GPU's clock.

    The graph has `count` launches, which are taken from `launches` in turn.
    """
    cuda = gpu.cupy.cuda
    stream = cuda.Stream(non_blocking=True)
    with stream:
        # Prepare the weights in the same way as in a decoder.
        prepared = [gpu.prepared(one, is_early=True) for one in launches]
        for launch in prepared:
            launch()
        stream.synchronize()
        stream.begin_capture()
        for at in range(count):
            prepared[at % len(prepared)]()
        graph = stream.end_capture()
    begin, end = cuda.Event(), cuda.Event()

    def seconds() -> float:
        begin.record(stream)
        graph.launch(stream)
        end.record(stream)
        end.synchronize()
        return float(cuda.get_elapsed_time(begin, end)) / 1e3 / count

    return seconds


def products(gpu: Gpu, block_format: BlockFormat, rows: int, columns: int) -> dict[str, list[Launch]]:
    """Return the launches of each way to multiply one token by a matrix. They use several copies of the matrix.

    The launches named `read` only read the same number of bytes.
    """
    layout = block_format.planes
    assert layout is not None
    size_bytes = layout.size_bytes(rows * columns // block_format.block_elements, block_format.block_elements)
    size_bytes += -size_bytes % BLOCK_BYTES
    random = gpu.cupy.random.randint
    copies = [random(0, 255, size_bytes, dtype=np.uint8) for _ in range(max(COPIES_BYTES // size_bytes, 2))]
    x, out, bias = gpu.zeros((1, columns), np.float32), gpu.zeros((1, rows), np.float32), gpu.zeros(0, np.float32)
    scratch = Int8Scratch(
        gpu.zeros((1, columns), np.uint8), gpu.zeros((1, columns // 8), np.float32), gpu.multiprocessors, None
    )
    grid, block = line(size_bytes // BLOCK_BYTES, THREADS)
    found: dict[str, list[Launch]] = {
        "read": [CudaLaunch(READ, "memory_read", grid, block, (one, out)) for one in copies],
        "float32": [linear.launches(block_format.code, one, bias, x, out, None)[-1] for one in copies],
    }
    if block_format.block_elements > 1:
        found["int8"] = [linear_int8.launches(block_format.code, one, bias, x, out, scratch)[-1] for one in copies]
    return found


def figures(gpu: Gpu, block_format: BlockFormat, rows: int, columns: int) -> Iterator[str]:
    """Yield a line of results for each way to multiply one token by a matrix."""
    ways = products(gpu, block_format, rows, columns)
    size_bytes = rows * columns // block_format.block_elements * block_format.block_bytes
    count = max(ROUND_BYTES // size_bytes, len(ways["read"]))
    timed = {name: captured(gpu, launches, count) for name, launches in ways.items()}
    taken: dict[str, list[float]] = {name: [] for name in timed}
    for turn in range(ROUNDS + 2):
        for name, seconds in timed.items():
            took = seconds()
            if turn > 1:  # Leave out the first two turns, until the clocks of the GPU are stable.
                taken[name].append(took)
    for name in list(timed)[1:]:
        ratio = Ratio.of(taken["read"], taken[name])
        gb_per_s, read_gb_per_s = (size_bytes / statistics.median(taken[one]) / 1e9 for one in (name, "read"))
        yield (
            f"{block_format.name:7}{rows:7,} x {columns:6,} {name:8}{gb_per_s:8,.0f} GB/s {ratio.median:6.3f} "
            f"({ratio.low:.3f} to {ratio.high:.3f}) x reading, {read_gb_per_s:,.0f} GB/s"
        )


def main() -> None:
    gpu = Gpu()
    version: Any = gpu.cupy.cuda.runtime.driverGetVersion()
    command = " ".join(["python -m benchmarks.gpu.gemv", *sys.argv[1:]])
    print(f"{time.strftime('%Y-%m-%d')} {gpu.name}, CUDA {version}, CuPy {gpu.cupy.__version__}: {command}")
    names = sys.argv[1:] or [one.name for one in FORMATS.values()]
    for block_format in FORMATS.values():
        if block_format.name in names:
            for rows, columns in SHAPES:
                for text in figures(gpu, block_format, rows, columns):
                    print(text, flush=True)


if __name__ == "__main__":
    main()
