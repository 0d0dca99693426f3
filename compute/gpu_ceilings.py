"""Measure the roofs of NVIDIA GPUs: how fast memory is read and copied, and how fast matrices are multiplied.

Rules
- Two kernels of ours measure memory. Their buffers are far larger than the second-level cache, and each thread has
  several 16-byte loads in flight. Matrices are multiplied by cuBLAS, through torch or CuPy.
- Before the first round, the same work runs until the clocks are stable.
- A profiled process never measures roofs. A separate process, `cbtop calibrate`, does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from cbtop.compute.ceilings import ceiling, largest_size
from cbtop.compute.errors import ComputeError
from cbtop.compute.gpu_libraries import GpuProperties, Library, Run, gpu_library
from cbtop.compute.nvml import ManagedGpu
from cbtop.protocol.messages import Ceiling
from cbtop.protocol.roofs import DeviceRoofs, driver_version

Progress = Callable[[str, float | None], None]

GIB = 1 << 30
LARGEST_BUFFER_BYTES = 4 * GIB
SHARE_OF_FREE_MEMORY = 4
# Least size of the buffer, as a multiple of the second-level cache. Part of a smaller buffer would be read from the
# cache.
CACHES_PER_BUFFER = 4
ROUNDS = 9
ROUND_S = 0.03
WARM_S = 0.3
# The values below are the fastest on an H100. 1 to 8 loads, 256 to 1024 threads, and a grid with a stride were tried.
# All results were within 3 %.
THREADS = 512
LOADS = 2  # number of loads of 16 bytes that each thread has in flight; SOURCE repeats this number
LOAD_BYTES = 16
PRECISIONS = ("bfloat16", "float16", "tf32", "float32")
PRODUCT_SIZES = (8192, 4096, 2048)
PRODUCT_S = 0.3

SOURCE = """
extern "C" __global__ void memory_read(const uint4* from, uint4* to)
{
    const uint4* mine = from + (size_t)blockIdx.x * blockDim.x * 2 + threadIdx.x;
    uint4 a = mine[0], b = mine[blockDim.x];
    unsigned all = a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w;
    if (all == 0x9e3779b9u)  // as good as never; but the compiler may leave out no load
        to[0] = a;
}

extern "C" __global__ void memory_copy(const uint4* from, uint4* to)
{
    size_t at = (size_t)blockIdx.x * blockDim.x * 2 + threadIdx.x;
    uint4 a = from[at], b = from[at + blockDim.x];
    to[at] = a;
    to[at + blockDim.x] = b;
}
"""


def measure_gpus(progress: Progress, only: int | None = None) -> Iterator[tuple[DeviceRoofs, list[str]]]:
    """Yield the roofs (peak rates) and the failed measurements of each GPU that this process may use.

    `only` is the number of the only GPU to measure. Takes seconds for each GPU. Raises ComputeError if neither torch
    nor CuPy can use a GPU.
    """
    library = gpu_library()
    for index in range(library.count()) if only is None else (only,):
        yield _measure(library, library.use(index), progress)


def _measure(library: Library, gpu: GpuProperties, progress: Progress) -> tuple[DeviceRoofs, list[str]]:
    managed = ManagedGpu(gpu.uuid)
    found: list[Ceiling] = []
    missing = [f"power limit and other processes n/a: {managed.missing}"] if managed.missing else []
    progress(f"{gpu.name}: looking who uses it", None)
    before_percent, since_s = managed.used_percent(), time.time()
    work: dict[str, Callable[[], Ceiling]] = {
        "memory_read": partial(_bandwidth, library, gpu, "memory_read", 1),
        "memory_copy": partial(_bandwidth, library, gpu, "memory_copy", 2),
    }
    work |= {f"matmul_{precision}": partial(_product, library, precision) for precision in PRECISIONS}
    for number, (name, measure) in enumerate(work.items()):
        progress(f"{gpu.name}: {name}", number / len(work))
        try:
            found.append(measure())
        except (ComputeError, RuntimeError, MemoryError) as error:  # torch and CuPy raise these errors if CUDA fails
            missing.append(f"{name} n/a: {str(error).partition(chr(10))[0] or type(error).__name__}")
    loads = [one for one in (before_percent, managed.others_percent(since_s)) if one is not None]
    load_percent = min(max(loads), 100) if loads else None
    ceilings = tuple(replace(one, load_percent=load_percent, gpu=gpu.uuid) for one in found)
    limit_w = managed.power_limit_w()
    return DeviceRoofs(gpu.name, ceilings, None, gpu.uuid, gpu.multiprocessors, driver_version(), limit_w), missing


def _bandwidth(library: Library, gpu: GpuProperties, name: str, ways: int) -> Ceiling:
    """Measure the bandwidth with the kernel `name`. `ways` is 1 if the kernel only reads, and 2 if it also writes."""
    block_bytes = THREADS * LOADS * LOAD_BYTES
    wanted = min(LARGEST_BUFFER_BYTES, gpu.free_bytes // SHARE_OF_FREE_MEMORY)
    if wanted < CACHES_PER_BUFFER * gpu.l2_bytes:
        raise ComputeError("too little of its memory is free to measure more than its cache")
    blocks = wanted // ways // block_bytes
    size_bytes = blocks * block_bytes
    source, target = library.buffer(size_bytes), library.buffer(size_bytes if ways > 1 else LOAD_BYTES)
    launch = library.kernel(SOURCE, name)
    arguments: list[Any] = [source, target]
    return _ceiling(library, name, "bandwidth", ways * size_bytes, lambda: launch(blocks, THREADS, arguments))


def _product(library: Library, precision: str) -> Ceiling:
    smallest = library.product(precision, PRODUCT_SIZES[-1])
    smallest_s = min(library.seconds(smallest, 1) for _ in range(ROUNDS))
    size = largest_size(PRODUCT_SIZES, smallest_s, PRODUCT_S)
    run = library.product(precision, size)
    return _ceiling(library, f"matmul_{precision}", "compute", 2.0 * size**3, run, precision)


def _ceiling(library: Library, name: str, kind: str, amount: float, run: Run, dtype: str = "") -> Ceiling:
    until_s = time.monotonic() + WARM_S
    run_s = library.seconds(run, 1)
    while time.monotonic() < until_s:
        run_s = library.seconds(run, 1)
    repeats = max(round(ROUND_S / run_s), 1)
    return ceiling(name, kind, amount, [library.seconds(run, repeats) / repeats for _ in range(ROUNDS)], dtype)
