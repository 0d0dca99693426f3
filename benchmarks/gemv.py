"""Multiply one token by a matrix of every weight format.

The bytes of weights a second are compared with reading and with llama.cpp, and the number of weights a second with
Q4_0.

Three matrices are used: one that fits into L2, one that fits into L3, and one that is larger than any cache. One
thread is used. Processor time is measured, in rounds that take turns.

Reading is the faster of a plain loop and of one that prefetches. Both of them, and each kernel, have memory of their
own on huge pages. The kernels are the same as in a decoder on this processor.

llama.cpp is PyPI's `xllamacpp`, if installed. ggml's own functions are called, which repack the weights if possible.
Its heap is on huge pages with GLIBC_TUNABLES=glibc.malloc.hugetlb=1.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from benchmarks.base import Figure, Ratio
from benchmarks.llama_peer import Product, library
from cbtop.compute.backends import cpu_backend
from cbtop.compute.ceilings import _read
from cbtop.compute.decoder.machine import activations
from cbtop.compute.jit.compile import jit
from cbtop.compute.jit.cpu import TIER
from cbtop.compute.jit.vectors import add, load_floats, prefetch, splat, total_of
from cbtop.compute.kernels.linear import linear
from cbtop.compute.kernels.linear_int8 import Int8Scratch, linear_int8
from cbtop.compute.memory import on_huge_pages
from cbtop.compute.quantization import FORMATS
from cbtop.compute.quantization.base import BlockFormat, QuantizedMatrix
from cbtop.compute.quantization.interleaved import InterleavedMatrix, can_interleave
from cbtop.compute.quantization.q4_0 import Q4_0

COLUMNS, ROUNDS = 2048, 11
# sizes of the matrices in bytes, chosen for an L2 of 1 MiB and an L3 of 32 MiB or more
SIZES = {"L2": 512 << 10, "L3": 8 << 20, "memory": 300_000_000}
ROUND_BYTES = 100_000_000  # A round reads at least this many bytes, so that the clock's resolution does not matter.
LINE_FLOATS, AHEAD_FLOATS = 16, 512
NO_BIAS = np.zeros(0, np.float32)


@jit
def _read_ahead(rows: Any, sums: Any) -> None:
    """Read an array of float32, shape (1, numbers), by cache lines, with a prefetch 2 KiB ahead."""
    even, odd, row = splat(np.float32(0)), splat(np.float32(0)), np.uint64(0)
    for pair in range(np.uint64(rows.shape[1] // (2 * LINE_FLOATS))):
        first = pair * np.uint64(2 * LINE_FLOATS)
        prefetch(rows, row, first + np.uint64(AHEAD_FLOATS))
        prefetch(rows, row, first + np.uint64(AHEAD_FLOATS + LINE_FLOATS))
        even = add(even, load_floats(rows, row, first))
        odd = add(odd, load_floats(rows, row, first + np.uint64(LINE_FLOATS)))
    sums[0] = total_of(add(even, odd))


def plain_reading(of: Any) -> Callable[[], object]:
    """Return a function that reads all numbers of an array in order, as the measurement of roofs does."""
    nothing, once, out = np.zeros((1, 1), np.uint8), np.array([1, 0], np.float32), np.zeros((1, 1), np.float32)
    return partial(_read, nothing, once, nothing, of.reshape(1, -1).view(np.float32), out, 0, 1)


def run() -> list[Figure]:
    return list(_figures())


def _figures() -> Iterator[Figure]:
    cpu_backend(1)  # Use one thread. Waiting threads spin, which would count as processor time.
    try:
        library()
    except ImportError:
        print("  xllamacpp is not installed: pip install xllamacpp", file=sys.stderr)
        peer = None
    else:
        peer = Product
    for place, size_bytes in SIZES.items():
        for block_format in FORMATS.values():
            yield from _figures_of(place, block_format, size_bytes, peer)


def _figures_of(
    place: str, block_format: BlockFormat, size_bytes: int, peer: type[Product] | None
) -> Iterator[Figure]:
    matrix = _weights(block_format, size_bytes)
    # Each of the two ways to read has memory of its own.
    words, numbers = (np.frombuffer(on_huge_pages(matrix.size_bytes), np.float32).reshape(1, -1) for _ in range(2))
    words[:], numbers[:] = 1, 1
    theirs = peer and peer(block_format.code, matrix.data, COLUMNS, np.ones((1, COLUMNS), np.float32))
    name, product = _product(matrix)
    calls: dict[str, Callable[[], object]] = {
        "plain": plain_reading(words),
        "ahead": partial(_read_ahead, numbers, np.zeros(1, np.float32)),
        "product": product,
    }
    beside = None if block_format is Q4_0 else _weights(Q4_0, size_bytes)
    if beside is not None:
        calls["Q4_0"] = _product(beside)[1]
    if theirs is not None:
        calls["theirs"] = theirs
    taken: dict[str, list[float]] = {name: [] for name in calls}
    repeats = max(ROUND_BYTES // matrix.size_bytes, 1)
    for turn in range(ROUNDS + 1):  # Leave out the first turn, which compiles the code and touches every page.
        for each, call in calls.items():
            begun_ns = time.process_time_ns()
            for _ in range(repeats):
                call()
            if turn:
                taken[each].append(time.process_time_ns() - begun_ns)
    reading = [min(both) for both in zip(taken["plain"], taken["ahead"], strict=True)]
    what, gb_per_s = f"{name} from {place}", repeats * matrix.size_bytes / float(np.median(taken["product"]))
    yield Figure(what, gb_per_s, "GB/s", "reading", Ratio.of(reading, taken["product"]))
    if beside is not None:
        of_as_many = [taken_ns * matrix.rows / beside.rows for taken_ns in taken["Q4_0"]]
        yield Figure(what, gb_per_s, "GB/s", "the weights of Q4_0", Ratio.of(of_as_many, taken["product"]))
    if theirs is not None:
        how = "llama.cpp's speed" + ", repacked" * theirs.is_repacked
        yield Figure(what, gb_per_s, "GB/s", how, Ratio.of(taken["theirs"], taken["product"]))
        theirs.close()


def _product(matrix: QuantizedMatrix) -> tuple[str, Callable[[], object]]:
    block_format, x = matrix.format, activations((1, COLUMNS), np.float32)
    x[:] = 1
    out = np.zeros((1, matrix.rows), np.float32)
    if TIER == "generic" or not can_interleave(matrix):
        scratch = np.zeros((1, COLUMNS), np.float32)
        return block_format.name, partial(linear, block_format.code, matrix.data, NO_BIAS, x, out, scratch)
    data = InterleavedMatrix.of(matrix).data
    int8_scratch = Int8Scratch.of(1, COLUMNS, 1)
    call = partial(linear_int8, block_format.code, data, NO_BIAS, x, out, int8_scratch)
    return f"{block_format.name}, int8 by {TIER},", call


def _weights(block_format: BlockFormat, size_bytes: int) -> QuantizedMatrix:
    """Return a matrix of the given size that repeats a few rows.

    Quantising different rows would take minutes.
    """
    some = block_format.quantize(np.random.default_rng(1).standard_normal((16, COLUMNS), dtype=np.float32))
    times = size_bytes // some.nbytes
    data = np.frombuffer(on_huge_pages(times * some.nbytes), np.uint8).reshape(times, *some.shape)
    data[:] = some
    return QuantizedMatrix(block_format, data.reshape(-1, some.shape[1]), COLUMNS)
