"""The roofs of this machine, measured: how fast memory is read, and how fast floats are multiplied."""

# Both run on the threads that the decoder uses, in code from the same compiler: a ceiling is what a kernel of
# ours could reach, not what a data sheet says.

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cbtop.compute.backends import OtherProcesses, available_threads, torch_on, turn
from cbtop.compute.errors import ComputeError
from cbtop.compute.jit.bytes64 import load_64, multiplied_again, sums_of_products
from cbtop.compute.jit.compile import jit, jit_parallel, prange
from cbtop.compute.jit.cpu import HAS_TILES, HAS_VNNI, TIER
from cbtop.compute.jit.tiles import (
    configure_tiles,
    load_tile,
    multiply_tiles,
    release_tiles,
    store_tile,
    zero_tile,
)
from cbtop.compute.jit.vectors import add, load_floats, store_floats, to_floats
from cbtop.profiler.roofline import is_integer
from cbtop.protocol.messages import Ceiling
from cbtop.protocol.vocabulary import Provenance

U = np.uint64
MIB = 1 << 20
LARGEST_BUFFER_BYTES = 1024 * MIB
SMALLEST_BUFFER_BYTES = 64 * MIB
UNKNOWN_CACHE_BYTES = 32 * MIB
CACHES_PER_BUFFER = 4  # a buffer that is four caches long finds little of itself there on the next round
SHARE_OF_FREE_MEMORY = 4
ROUNDS = 5
COMPUTE_LANES = 2048  # float32: 8 KiB, stays in L1
COMPUTE_REPEATS = 4_000
FMAS_PER_VISIT = 16  # written out in _multiply_add: enough that loading and storing do not count
LINE = 64  # bytes: of a vector, and of a row of a tile
BYTE_CHAINS = 12 if HAS_VNNI else 6  # independent sums: enough to wait for none, and no more than registers hold
BYTE_REPEATS = 8_000_000 // BYTE_CHAINS  # a round takes about as long as one of floats
TILE_BYTES = 1024
PRODUCTS_OF_TILES = 4 * 16 * 16 * 32  # of four tiles: 16 tokens, 16 rows, 32 columns
TILE_REPEATS = 20_000
CACHE_SHARE = 2  # a working set of half a cache: the rest is for what else runs there
CACHE_READ_BYTES = 256 * MIB  # that a round reads from a cache, of each thread
PRODUCT_SIZES = (4096, 2048, 1024, 512)  # of square matrices; the largest that a round has time for
PRODUCT_S = 0.1


@jit_parallel
def _fill(buffer: Any, threads: int) -> None:
    """Touch every page, from the thread that will read it."""
    size = buffer.shape[0]
    for thread in prange(threads):
        for i in range(np.uint64(thread * size // threads), np.uint64((thread + 1) * size // threads)):
            buffer[i] = np.int64(1)


@jit_parallel
def _read(buffer: Any, sums: Any, repeats: int, nothing: int) -> None:
    """Each thread reads its part `repeats` times, a sequential stream; `nothing` is 0, which keeps the compiler from
    reading it once."""
    size, threads = buffer.shape[0], sums.shape[0]
    for thread in prange(threads):
        begin, end = np.uint64(thread * size // threads), np.uint64((thread + 1) * size // threads)
        total = np.int64(0)
        for repeat in range(repeats):
            for i in range(begin + np.uint64(repeat * nothing), end):
                total += buffer[i]
        sums[thread] = total


@jit_parallel
def _multiply_add(values: Any, factor: Any, term: Any, repeats: int) -> None:
    """values[thread] go through FMAS_PER_VISIT dependent multiply-adds, `repeats` times over."""
    for thread in prange(values.shape[0]):
        for _ in range(repeats):
            for i in range(np.uint64(COMPUTE_LANES)):
                value = values[thread, i]
                for _ in range(FMAS_PER_VISIT):
                    value = value * factor + term
                values[thread, i] = value


@jit
def _multiply_bytes(lines: Any, out: Any, repeats: int) -> None:
    """Sums of BYTE_CHAINS rows of `lines` go through as many multiply-adds with its first, `repeats` times over."""
    weights = load_64(lines, U(0), U(0))
    totals = sums_of_products((weights,), lines, U(0), U(0), BYTE_CHAINS, 255)
    for _ in range(repeats):
        totals = multiplied_again(weights, totals)
    for total in totals:
        store_floats(out, U(0), U(0), add(load_floats(out, U(0), U(0)), to_floats(total)))


@jit_parallel
def _multiply_add_bytes(lines: Any, out: Any, repeats: int) -> None:
    for thread in prange(out.shape[0]):
        _multiply_bytes(lines, out[thread : thread + 1], repeats)


@jit
def _multiply_four_tiles(lines: Any, out: Any, repeats: int) -> None:
    """Four sums of two tiles times two."""
    configure_tiles()
    zero_tile(0)
    zero_tile(1)
    zero_tile(2)
    zero_tile(3)
    load_tile(4, lines, U(0), U(0))
    load_tile(5, lines, U(0), U(0))
    load_tile(6, lines, U(0), U(0))
    load_tile(7, lines, U(0), U(0))
    for _ in range(repeats):
        multiply_tiles(0, 4, 6)
        multiply_tiles(1, 4, 7)
        multiply_tiles(2, 5, 6)
        multiply_tiles(3, 5, 7)
    store_tile(0, out, U(0), U(0))
    release_tiles()


@jit_parallel
def _multiply_add_tiles(lines: Any, out: Any, repeats: int) -> None:
    for thread in prange(out.shape[0]):
        _multiply_four_tiles(lines, out[thread : thread + 1], repeats)


@turn()
def measure_ceilings(threads: int | None = None, weights_bytes: int | None = None) -> list[Ceiling]:
    """DRAM and cache bandwidth and the rates of multiply-adds of `threads` threads, to `announce`; None: of all that
    this process may use. Those are of float32, of int8 where its products are made of it, and with AMX of bfloat16.

    With `weights_bytes`, also the bandwidth over a working set as large as that: the weights of a small model may
    stay in the last-level cache. Takes seconds, and a quarter of the free memory (at most 1 GiB) while it runs.
    """
    threads = threads or available_threads()
    buffer = np.empty(dram_buffer_bytes() // 8, np.int64)
    _fill(buffer, threads)
    sums = np.zeros(threads, np.int64)
    values = np.ones((threads, COMPUTE_LANES), np.float32)
    # A contraction towards 1: nothing overflows and nothing becomes denormal.
    factor, term = np.float32(0.5), np.float32(0.5)
    _multiply_add(values, factor, term, 1)  # the first call compiles, or loads what was compiled
    _read(buffer, sums, 1, 0)

    flops = 2.0 * threads * COMPUTE_LANES * COMPUTE_REPEATS * FMAS_PER_VISIT
    found = [_measured("dram_read", "bandwidth", buffer.nbytes, lambda: _read(buffer, sums, 1, 0))]
    if weights_bytes is not None:
        weights = buffer[: max(min(weights_bytes, buffer.nbytes) // 8, threads)]
        found.append(_measured("weights_read", "bandwidth", weights.nbytes, lambda: _read(weights, sums, 1, 0)))
    found += _cache_ceilings(buffer, threads, found[0])
    multiply_add = partial(_multiply_add, values, factor, term, COMPUTE_REPEATS)
    found.append(_measured("fma_float32", "compute", flops, multiply_add, "float32"))
    return [*found, *_ceilings_of_products(threads)]


def _ceilings_of_products(threads: int) -> Iterator[Ceiling]:
    """Of the instructions that products of quantised weights are made of."""
    lines = np.ones((TILE_BYTES // LINE, LINE), np.uint8)
    if TIER != "generic":
        sums = np.zeros((threads, LINE // 4), np.float32)
        _multiply_add_bytes(lines, sums, 1)
        amount = 2.0 * threads * BYTE_REPEATS * BYTE_CHAINS * LINE
        run = partial(_multiply_add_bytes, lines, sums, BYTE_REPEATS)
        yield _measured("dot_int8", "compute", amount, run, "int8")
    if HAS_TILES:  # pragma: no cover - AMX
        sums = np.zeros((threads, TILE_BYTES // 4), np.float32)
        _multiply_add_tiles(lines, sums, 1)
        amount = 2.0 * threads * TILE_REPEATS * PRODUCTS_OF_TILES
        run = partial(_multiply_add_tiles, lines, sums, TILE_REPEATS)
        yield _measured("tiles_bfloat16", "compute", amount, run, "bfloat16")


def _cache_ceilings(buffer: Any, threads: int, dram: Ceiling) -> list[Ceiling]:
    """How fast a working set is read that fits each level of cache, the nearest first; kind `cache`.

    A level that is read no faster than memory here, as a last one that others fill, is none.
    """
    sums = np.zeros(threads, np.int64)
    found = []
    for level, size_bytes in cache_bytes(threads).items():
        each = max(size_bytes // CACHE_SHARE // 8, 1)
        part = buffer[: each * threads]
        repeats = max(1, CACHE_READ_BYTES // (8 * each))
        _read(part, sums, 1, 0)  # into the cache
        run = partial(_read, part, sums, repeats, 0)
        one = _measured(f"l{level}_read", "cache", part.nbytes * repeats, run)
        if part.nbytes < buffer.nbytes and one.value > dram.value:
            found.append(one)
    return found


def cache_bytes(threads: int, folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> dict[int, int]:
    """Of each level of data cache the bytes that one of `threads` threads has, by level (Linux sysfs).

    A cache that several processors share is shared by as many of the threads as there are of these.
    """
    found: dict[int, int] = {}
    for index in sorted(folder.glob("index*")):
        said = {name: (index / name).read_text().strip() for name in ("level", "type", "size", "shared_cpu_list")}
        size = said["size"]
        if said["type"] in ("Data", "Unified") and size.endswith("K") and size[:-1].isdigit():
            sharing = min(threads, _processors(said["shared_cpu_list"]))
            found[int(said["level"])] = (int(size[:-1]) << 10) // max(1, sharing)
    return dict(sorted(found.items()))


def _processors(text: str) -> int:
    """How many a list like `0-3,8` holds."""
    ends = [part.partition("-") for part in text.split(",") if part]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ends)


def measure_product(threads: int) -> Ceiling:
    """The rate of a bfloat16 matrix product of torch on `threads` threads. ComputeError where there is no torch."""
    torch = torch_on(threads)
    smallest = PRODUCT_SIZES[-1]

    def product(size: int) -> Callable[[], object]:
        left, right, out = (torch.randn(size, size).to(torch.bfloat16) for _ in range(3))
        return lambda: torch.mm(left, right.t(), out=out)  # as a linear layer multiplies

    try:
        with torch.no_grad():
            size = largest_size(PRODUCT_SIZES, min(_seconds(product(smallest))), PRODUCT_S)
            run = product(size)
            run()
            return _measured("matmul_bfloat16", "compute", 2.0 * size**3, run, "bfloat16")
    except RuntimeError as error:
        raise ComputeError(f"torch: {error}") from error


def largest_size(sizes: Sequence[int], smallest_s: float, longest_s: float) -> int:
    """The largest of `sizes` of square matrices whose product takes at most `longest_s`, by that of the smallest."""
    return next((size for size in sizes if smallest_s * (size / sizes[-1]) ** 3 <= longest_s), sizes[-1])


def ceiling(name: str, kind: str, amount: float, seconds: Sequence[float], dtype: str = "") -> Ceiling:
    """A roof from rounds that each moved `amount` bytes or did `amount` operations on numbers of `dtype`.

    It is the best of them: a ceiling is what is possible, and other processes only take away.
    """
    rates = sorted(amount / each / 1e9 for each in seconds)
    unit = "GB/s" if kind != "compute" else "GOP/s" if is_integer(dtype) else "GFLOP/s"
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    others = statistics.median(rates), rates[0]
    return Ceiling(name, kind, rates[-1], unit, Provenance.MEASURED, *others, now, dtype=dtype, rounds=len(rates))


def _measured(name: str, kind: str, amount: float, run: Callable[[], object], dtype: str = "") -> Ceiling:
    """A roof of the processors, and how much of them others used meanwhile."""
    others = OtherProcesses()
    found = ceiling(name, kind, amount, _seconds(run), dtype)
    return replace(found, load_percent=others.percent())


def dram_buffer_bytes() -> int:
    """A buffer that does not fit the last-level cache, as far as free memory allows."""
    wanted = max(CACHES_PER_BUFFER * _last_level_cache_bytes(), SMALLEST_BUFFER_BYTES)
    return max(min(wanted, LARGEST_BUFFER_BYTES, _free_memory_bytes() // SHARE_OF_FREE_MEMORY), MIB)


def _seconds(run: Callable[[], object]) -> list[float]:
    """The time of each of ROUNDS."""
    found = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return found


def _last_level_cache_bytes() -> int:
    """The largest cache of the first processor (Linux sysfs: `size` reads like 32768K)."""
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        if text.endswith("K") and text[:-1].isdigit():
            sizes.append(int(text[:-1]) << 10)
    return max(sizes, default=UNKNOWN_CACHE_BYTES)


def _free_memory_bytes() -> int:
    """MemAvailable of /proc/meminfo; where there is none, enough for the smallest buffer."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return SMALLEST_BUFFER_BYTES * SHARE_OF_FREE_MEMORY
