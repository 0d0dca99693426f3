"""Measure the roofs of this machine: how fast it reads memory, and how fast it multiplies numbers."""

# All measurements use the decoder's threads and the decoder's compiler. So a ceiling is a rate that our kernels could
# reach, and not a figure from a data sheet.

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cbtop.compute.backends import OtherProcesses, available_threads, torch_on, turn
from cbtop.compute.errors import ComputeError
from cbtop.compute.jit.addresses import address_of, on_threads
from cbtop.compute.jit.bfloats import add_pairs_again, bfloats
from cbtop.compute.jit.bytes64 import load_64, multiplied_again, sums_of_products
from cbtop.compute.jit.compile import jit
from cbtop.compute.jit.cpu import BF16_PAYS, HAS_TILES, HAS_VNNI, TIER
from cbtop.compute.jit.tiles import (
    configure_tiles,
    load_tile,
    multiply_tiles,
    release_tiles,
    store_tile,
    zero_tile,
)
from cbtop.compute.jit.vectors import (
    LANES,
    add,
    chains,
    load_floats,
    multiply_add_again,
    splat,
    store_floats,
    to_floats,
)
from cbtop.compute.memory import available_bytes
from cbtop.profiler.analysis.roofline import is_integer
from cbtop.protocol.messages import Ceiling
from cbtop.protocol.vocabulary import Provenance

U = np.uint64
MIB = 1 << 20
LARGEST_BUFFER_BYTES = 1024 * MIB
SMALLEST_BUFFER_BYTES = 64 * MIB
UNKNOWN_CACHE_BYTES = 32 * MIB
# Size of the buffer that is read to measure memory, as a multiple of the last-level cache. At four times the cache,
# little of the buffer is still cached in the next round.
CACHES_PER_BUFFER = 4
SHARE_OF_FREE_MEMORY = 4
ROUNDS = 5
LINE = 64  # size in bytes of a vector register, and of one row of an AMX tile
# Number of independent sums in a measurement of multiplications. With this number, no addition waits for the previous
# one, and all sums stay in registers.
FLOAT_CHAINS = 2 if TIER == "generic" else 12 if HAS_VNNI else 6
BYTE_CHAINS = 12 if HAS_VNNI else 6
FLOAT_REPEATS, BYTE_REPEATS = 8_000_000 // FLOAT_CHAINS, 8_000_000 // BYTE_CHAINS
TILE_BYTES = 1024
WORD = 8
# Number of products in the four multiplications of `_multiply_four_tiles`. Each of them multiplies 16 tokens by 16
# rows, over 32 columns.
PRODUCTS_OF_TILES = 4 * 16 * 16 * 32
TILE_REPEATS = 20_000
CACHE_SHARE = 2  # the measurement of a cache reads 1 / CACHE_SHARE of it; other data may fill the rest
CACHE_READ_BYTES = 256 * MIB  # bytes that each thread reads from a cache in a round
# Sizes of the square matrices that torch multiplies. A round multiplies the largest matrices that fit into the time
# of a round.
PRODUCT_SIZES = (4096, 2048, 1024, 512)
PRODUCT_S = 0.1


# The following functions run on threads. Each function has all the parameters that `on_threads` passes, although the
# function uses only some of the parameters.


@jit
def _fill(weights: Any, bias: Any, x: Any, numbers: Any, out: Any, chunk: int, chunks: int) -> None:
    """Write to every page from the thread that will read it later."""
    size = numbers.shape[1]
    for i in range(np.uint64(chunk * size // chunks), np.uint64((chunk + 1) * size // chunks)):
        numbers[np.uint64(0), i] = np.float32(1)


@jit
def _read(weights: Any, repeats: Any, x: Any, numbers: Any, out: Any, chunk: int, chunks: int) -> None:
    """Read this thread's part of the memory sequentially, repeats[0] times.

    repeats[1] is 0. The compiler does not know this, so it cannot merge the repeated reads into one.
    """
    # add integers, because an integer addition has a shorter latency than a float addition
    words, nothing = numbers[0].view(np.int64), np.int64(repeats[1])
    size = words.shape[0]
    begin, end = np.uint64(chunk * size // chunks), np.uint64((chunk + 1) * size // chunks)
    total = np.int64(0)
    for repeat in range(np.int64(repeats[0])):
        for i in range(begin + np.uint64(repeat * nothing), end):
            total += words[i]
    out[chunk, 0] = np.float32(total)


@jit
def _multiply_add(weights: Any, by: Any, x: Any, numbers: Any, out: Any, chunk: int, chunks: int) -> None:
    """Replace FLOAT_CHAINS vectors x by x * by[1] + by[2], by[0] times."""
    row, factor, term = np.uint64(chunk), splat(by[1]), splat(by[2])
    totals = chains(load_floats(numbers, U(0), U(0)), FLOAT_CHAINS)
    for _ in range(np.int64(by[0])):
        totals = multiply_add_again(totals, factor, term)
    for total in totals:
        store_floats(out, row, U(0), add(load_floats(out, row, U(0)), total))


@jit
def _multiply_bytes(weights: Any, repeats: Any, lines: Any, beside: Any, out: Any, chunk: int, chunks: int) -> None:
    """Add int8 products with the first row of `lines` to BYTE_CHAINS sums, repeats[0] times."""
    row = np.uint64(chunk)
    weights = load_64(lines, U(0), U(0))
    totals = sums_of_products((weights,), lines, U(0), U(0), BYTE_CHAINS, 255)
    for _ in range(np.int64(repeats[0])):
        totals = multiplied_again(weights, totals)
    for total in totals:
        store_floats(out, row, U(0), add(load_floats(out, row, U(0)), to_floats(total)))


@jit
def _multiply_pairs(weights: Any, repeats: Any, x: Any, numbers: Any, out: Any, chunk: int, chunks: int) -> None:
    """Add products of pairs of bfloat16 to FLOAT_CHAINS sums, repeats[0] times."""
    row, ones = np.uint64(chunk), load_floats(numbers, U(0), U(0))
    totals, words = chains(ones, FLOAT_CHAINS), bfloats(ones, ones)
    for _ in range(np.int64(repeats[0])):
        totals = add_pairs_again(totals, words)
    for total in totals:
        store_floats(out, row, U(0), add(load_floats(out, row, U(0)), total))


@jit
def _multiply_four_tiles(
    weights: Any, repeats: Any, lines: Any, beside: Any, out: Any, chunk: int, chunks: int
) -> None:
    """Multiply two tiles by two other tiles and add the products to four sums, repeats[0] times."""
    configure_tiles()
    zero_tile(0)
    zero_tile(1)
    zero_tile(2)
    zero_tile(3)
    load_tile(4, lines, U(0), U(0))
    load_tile(5, lines, U(0), U(0))
    load_tile(6, lines, U(0), U(0))
    load_tile(7, lines, U(0), U(0))
    for _ in range(np.int64(repeats[0])):
        multiply_tiles(0, 4, 6)
        multiply_tiles(1, 4, 7)
        multiply_tiles(2, 5, 6)
        multiply_tiles(3, 5, 7)
    store_tile(0, out, np.uint64(chunk), U(0))
    release_tiles()


class _Threads:
    """A number of threads, and the data that each thread reads in measurements."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.buffer = np.empty((1, dram_buffer_bytes() // WORD * WORD // 4), np.float32)
        self._lines = np.ones((TILE_BYTES // LINE, LINE), np.uint8)
        self._sums = np.zeros((number, TILE_BYTES // 4), np.float32)
        self.runner(_fill, self.buffer)()

    def runner(self, function: Any, numbers: Any, *by: float) -> Callable[[], object]:
        """Return a function that runs `function` on every thread and waits for all threads."""
        arguments = self._lines, np.array([*by, 0], np.float32), self._lines, numbers, self._sums
        return partial(on_threads, address_of(function, *arguments, 0, 1), *arguments, self.number)


@turn()
def measure_ceilings(threads: int | None = None, weights_bytes: int | None = None) -> list[Ceiling]:
    """Measure the ceilings (peak rates) of `threads` threads. None means all threads that this process may use.

    The ceilings are DRAM bandwidth, cache bandwidth and multiply-add rates. The rates are measured for float32, and
    also for int8 and bfloat16 (with or without AMX) if products use these types.

    If `weights_bytes` is given, the function also measures the bandwidth over this number of bytes, because the
    weights of a small model may stay in the last-level cache.

    The function takes seconds, and a quarter of the free memory (at most 1 GiB).
    """
    on = _Threads(threads or available_threads())
    buffer, values = on.buffer, np.ones((1, LANES), np.float32)
    found = [measured("dram_read", "bandwidth", buffer.nbytes, on.runner(_read, buffer, 1))]
    if weights_bytes is not None:
        part = _part(buffer, max(min(weights_bytes, buffer.nbytes), WORD * on.number))
        found.append(measured("weights_read", "bandwidth", part.nbytes, on.runner(_read, part, 1)))
    found += _cache_ceilings(on, found[0])
    # x/2 + 1/2 approaches 1, so no number overflows or becomes denormal.
    run = on.runner(_multiply_add, values, FLOAT_REPEATS, 0.5, 0.5)
    operations = 2.0 * on.number * FLOAT_REPEATS * FLOAT_CHAINS * LANES
    found.append(measured("fma_float32", "compute", operations, run, "float32"))
    # The following loops use the same instructions as the products of quantised weights.
    if TIER != "generic":
        run = on.runner(_multiply_bytes, values, BYTE_REPEATS)
        operations = 2.0 * on.number * BYTE_REPEATS * BYTE_CHAINS * LINE
        found.append(measured("dot_int8", "compute", operations, run, "int8"))
    if BF16_PAYS:
        run = on.runner(_multiply_pairs, values, FLOAT_REPEATS)
        operations = 2.0 * on.number * FLOAT_REPEATS * FLOAT_CHAINS * 2 * LANES
        found.append(measured("dot_bfloat16", "compute", operations, run, "bfloat16"))
    if HAS_TILES:  # pragma: no cover - AMX
        run = on.runner(_multiply_four_tiles, values, TILE_REPEATS)
        operations = 2.0 * on.number * TILE_REPEATS * PRODUCTS_OF_TILES
        found.append(measured("tiles_bfloat16", "compute", operations, run, "bfloat16"))
    return found


def _part(buffer: Any, size_bytes: int) -> Any:
    """Return the beginning of `buffer`: its first `size_bytes` bytes, rounded down to whole words."""
    return buffer[:, : size_bytes // WORD * WORD // 4]


def _cache_ceilings(on: _Threads, dram: Ceiling) -> list[Ceiling]:
    """Measure the read bandwidth of each cache level, beginning with the level nearest to the core.

    Returns ceilings of the kind `cache`. Levels that are not faster than memory are left out. A shared level may be
    slow because other processes fill it.
    """
    found = []
    for level, size_bytes in cache_bytes(on.number).items():
        each_bytes = max(size_bytes // CACHE_SHARE, WORD)
        part = _part(on.buffer, each_bytes * on.number)
        repeats = max(1, CACHE_READ_BYTES // each_bytes)
        on.runner(_read, part, 1)()
        run = on.runner(_read, part, repeats)
        one = measured(f"l{level}_read", "cache", part.nbytes * repeats, run)
        if part.nbytes < on.buffer.nbytes and one.value > dram.value:
            found.append(one)
    return found


def cache_bytes(threads: int, folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> dict[int, int]:
    """Return the bytes of data cache per thread, by cache level (Linux sysfs).

    A cache that several processors share is divided among the threads that run on these processors.
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
    """Return the number of processors in a list like `0-3,8`."""
    ends = [part.partition("-") for part in text.split(",") if part]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ends)


def measure_product(threads: int) -> Ceiling:
    """Measure the rate of torch's bfloat16 matrix product on `threads` threads.

    Raises ComputeError if torch is missing.
    """
    torch = torch_on(threads)
    smallest = PRODUCT_SIZES[-1]

    def product(size: int) -> Callable[[], object]:
        left, right, out = (torch.randn(size, size).to(torch.bfloat16) for _ in range(3))
        # Multiply by the transposed matrix, as torch.nn.Linear does.
        return lambda: torch.mm(left, right.t(), out=out)

    try:
        with torch.no_grad():
            size = largest_size(PRODUCT_SIZES, min(_seconds(product(smallest))), PRODUCT_S)
            run = product(size)
            run()
            return measured("matmul_bfloat16", "compute", 2.0 * size**3, run, "bfloat16")
    except RuntimeError as error:
        raise ComputeError(f"torch: {error}") from error


def largest_size(sizes: Sequence[int], smallest_s: float, longest_s: float) -> int:
    """Return the largest of `sizes` that lets a product of square matrices take at most `longest_s` seconds.

    The times are estimated from the smallest size, which takes `smallest_s` seconds.
    """
    return next((size for size in sizes if smallest_s * (size / sizes[-1]) ** 3 <= longest_s), sizes[-1])


def ceiling(name: str, kind: str, amount: float, seconds: Sequence[float], dtype: str = "") -> Ceiling:
    """Return a roof (peak rate) from the times of several rounds.

    Each round moved `amount` bytes, or did `amount` operations on numbers of `dtype`. The roof is the rate of the
    fastest round, because other processes can only slow a round down.
    """
    rates = sorted(amount / each / 1e9 for each in seconds)
    unit = "GB/s" if kind != "compute" else "GOP/s" if is_integer(dtype) else "GFLOP/s"
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    others = statistics.median(rates), rates[0]
    return Ceiling(name, kind, rates[-1], unit, Provenance.MEASURED, *others, now, dtype=dtype, rounds=len(rates))


def measured(name: str, kind: str, amount: float, run: Callable[[], object], dtype: str = "") -> Ceiling:
    """Return a roof of the processors, with the share of the processors that other processes used during the
    measurement."""
    others = OtherProcesses()
    found = ceiling(name, kind, amount, _seconds(run), dtype)
    return replace(found, load_percent=others.percent())


def dram_buffer_bytes() -> int:
    """Return the size in bytes of a buffer that is too large for the last-level cache.

    If little memory is free, the returned size is smaller.
    """
    wanted = max(CACHES_PER_BUFFER * _last_level_cache_bytes(), SMALLEST_BUFFER_BYTES)
    available = available_bytes()
    if available is None:
        return min(wanted, SMALLEST_BUFFER_BYTES)
    return max(min(wanted, LARGEST_BUFFER_BYTES, available // SHARE_OF_FREE_MEMORY), MIB)


def _seconds(run: Callable[[], object]) -> list[float]:
    """Run the function ROUNDS times. Returns the duration of each run in seconds."""
    found = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return found


def _last_level_cache_bytes() -> int:
    """Return the bytes of the first processor's largest cache (Linux sysfs: `size` reads like 32768K)."""
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        if text.endswith("K") and text[:-1].isdigit():
            sizes.append(int(text[:-1]) << 10)
    return max(sizes, default=UNKNOWN_CACHE_BYTES)
