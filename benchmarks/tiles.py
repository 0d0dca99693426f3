"""Compare the times of int8 tiles and of bfloat16 tiles, and measure the cost of configuring tiles (Intel AMX).

Products of quantised weights have a scale for every 32 columns, and so have activations. Tiles of bfloat16 hold
scaled numbers, so that sums stay in tiles over all columns. Tiles of int8 multiply 32 columns in half of the time,
but then all their sums must be scaled and added up outside of tiles. Here, this is done as cheaply as possible: one
scale for a token and one for a row, and no minimum.

Both multiply 32 tokens by 32 rows, from a cache. Neither includes making tiles of weights. Processor time is
measured, in turns. Without AMX, nothing is printed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.base import Figure, Ratio, interleaved_cpu_ns
from cbtop.compute.jit import tiles
from cbtop.compute.jit.compile import jit
from cbtop.compute.jit.cpu import HAS_TILES
from cbtop.compute.jit.tiles import (
    configure_tiles,
    load_tile,
    multiply_tiles,
    release_tiles,
    store_tile,
    zero_tile,
)
from cbtop.compute.jit.vectors import (
    constant_intrinsic,
    load_floats,
    load_words,
    multiply,
    multiply_add,
    splat,
    store_floats,
    to_floats,
)
from cbtop.compute.kernels import linear_bf16
from cbtop.compute.quantization.q4_k import Q4_K
from cbtop.compute.settings import STATIC_CROSSOVERS

U = np.uint64
STEPS = 32  # number of steps of a product, each over 32 columns
TOKENS = ROWS = 32
REPEATS, ROUNDS, PAIRS = 200, 15, 10_000
HALF = 512  # size in bytes of a tile of 16 x 32 or 32 x 16 int8 numbers
# The shapes of the tiles, in the order of ldtilecfg: four tiles of 16 x 16 sums, two of 16 tokens x 32 columns, and
# two of 32 columns x 16 rows. In the last two, columns are grouped by four.
_ROW_BYTES, _ROWS = (64, 64, 64, 64, 32, 32, 64, 64), (16, 16, 16, 16, 16, 16, 8, 8)
_CONFIGURATION = bytes(
    [1, *[0] * 15, *[byte for one in _ROW_BYTES for byte in (one, 0)], *[0] * 16, *_ROWS, *[0] * 8]
)


def run() -> list[Figure]:
    return list(_figures()) if HAS_TILES else []


@constant_intrinsic
def multiply_bytes(typing: Any, total: Any, a: Any, b: Any) -> tuple[Any, Any]:
    """Set total[m, n] += sum over k < 32 of a[m, k] * b[k // 4, 4 n + k % 4]. Inputs are int8, sums are int32."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        tiles._called(builder, "llvm.x86.tdpbssd", tiles._VOID, [tiles._number(one) for one in (total, a, b)])
        return context.get_dummy_value()

    return tiles.types.void(total, a, b), generate


@constant_intrinsic
def load_half(typing: Any, tile: Any, array: Any, row: Any, column: Any) -> tuple[Any, Any]:
    """Load 512 bytes into `tile`, 32 bytes a row, beginning at array[row, column]."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = tiles._address(context, builder, array, *values[1:])
        tiles._called(builder, "llvm.x86.tileloadd64", tiles._VOID, [tiles._number(tile), pointer, tiles._LONG(32)])
        return context.get_dummy_value()

    return tiles.types.void(tile, array, tiles.types.uint64, tiles.types.uint64), generate


@tiles._intrinsic
def configure_half_tiles(typing: Any) -> tuple[Any, Any]:
    """Configure tiles as `configure_tiles` does, but with sizes for int8 products of 32 columns."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        data = tiles.cgutils.make_bytearray(bytearray(_CONFIGURATION))
        data = tiles.cgutils.global_constant(builder, "half_tiles", data)
        pointer = builder.bitcast(data, tiles._BYTE.as_pointer())
        tiles._called(builder, "llvm.x86.ldtilecfg", tiles._VOID, [pointer])
        return context.get_dummy_value()

    return tiles.types.void(), generate


@jit
def of_int8(x: Any, w: Any, of_tokens: Any, of_rows: Any, ints: Any, sums: Any, repeats: Any) -> None:
    """Multiply by tiles of int8. Scale the sums of each step, and add them to `sums`.

    `x` and `w`: uint8 (1, steps * 1024), two tiles a step. `of_tokens` and `of_rows`: float32 (steps, 32), scales.
    `ints`: uint8 (1, 4096), scratch. `sums`: float32 (32, 32).
    """
    configure_half_tiles()
    for _ in range(repeats):
        for step in range(U(of_tokens.shape[0])):
            at = step * U(2 * HALF)
            zero_tile(0)
            zero_tile(1)
            zero_tile(2)
            zero_tile(3)
            load_tile(6, w, U(0), at)
            load_half(4, x, U(0), at)
            multiply_bytes(0, 4, 6)
            load_tile(7, w, U(0), at + U(HALF))
            multiply_bytes(1, 4, 7)
            load_half(5, x, U(0), at + U(HALF))
            multiply_bytes(2, 5, 6)
            multiply_bytes(3, 5, 7)
            store_tile(0, ints, U(0), U(0))
            store_tile(1, ints, U(0), U(1024))
            store_tile(2, ints, U(0), U(2048))
            store_tile(3, ints, U(0), U(3072))
            first, last = load_floats(of_rows, step, U(0)), load_floats(of_rows, step, U(16))
            for t in range(U(TOKENS)):
                at = t // U(16) * U(2048) + t % U(16) * U(64)
                scale = splat(of_tokens[step, t])
                low, high = to_floats(load_words(ints, U(0), at)), to_floats(load_words(ints, U(0), at + U(1024)))
                low = multiply_add(low, multiply(first, scale), load_floats(sums, t, U(0)))
                high = multiply_add(high, multiply(last, scale), load_floats(sums, t, U(16)))
                store_floats(sums, t, U(0), low)
                store_floats(sums, t, U(16), high)
    release_tiles()


@jit
def of_bfloat16(x: Any, w: Any, sums: Any, repeats: Any) -> None:
    """Multiply by tiles of bfloat16.

    `x` and `w`: uint32 (1, steps * 512), two tiles a step. `sums`: float32 (4, 256), one tile per row.
    """
    configure_tiles()
    for _ in range(repeats):
        zero_tile(0)
        zero_tile(1)
        zero_tile(2)
        zero_tile(3)
        for step in range(U(x.shape[1] // 512)):
            at = step * U(512)
            load_tile(6, w, U(0), at)
            load_tile(4, x, U(0), at)
            multiply_tiles(0, 4, 6)
            load_tile(7, w, U(0), at + U(256))
            multiply_tiles(1, 4, 7)
            load_tile(5, x, U(0), at + U(256))
            multiply_tiles(2, 5, 6)
            multiply_tiles(3, 5, 7)
        store_tile(0, sums, U(0), U(0))
        store_tile(1, sums, U(1), U(0))
        store_tile(2, sums, U(2), U(0))
        store_tile(3, sums, U(3), U(0))
    release_tiles()


@jit
def configure(repeats: Any) -> None:
    for _ in range(repeats):
        configure_tiles()
        release_tiles()


def _figures() -> Iterator[Figure]:  # pragma: no cover - AMX
    rng = np.random.default_rng(1)
    # x and w have the shape (steps, tokens or rows, columns).
    x, w = (rng.integers(-100, 100, (STEPS, 32, 32), np.int8) for _ in range(2))
    of_tokens, of_rows = (rng.random((STEPS, 32), np.float32) for _ in range(2))
    # Group the columns of the weights by four: b[k // 4, 4 n + k % 4] = w[n, k].
    by_fours = w.reshape(STEPS, 2, 16, 8, 4).transpose(0, 1, 3, 2, 4)
    given = x.view(np.uint8).reshape(1, -1), np.ascontiguousarray(by_fours).view(np.uint8).reshape(1, -1)
    ints, sums = np.zeros((1, 4096), np.uint8), np.zeros((TOKENS, ROWS), np.float32)
    of_int8(*given, of_tokens, of_rows, ints, sums, 1)
    exact = np.einsum("stk,srk,st,sr->tr", *(one.astype(np.float64) for one in (x, w, of_tokens, of_rows)))
    np.testing.assert_allclose(sums, exact, rtol=0, atol=1e-5 * np.abs(exact).max())

    # Each 32-bit word contains two bfloat16 numbers with the value 1.
    ones = np.full((1, STEPS * 512), 0x3F803F80, np.uint32)
    totals = np.zeros((4, 256), np.float32)
    of_bfloat16(ones, ones, totals, 1)
    assert (totals == 32 * STEPS).all()

    kernel = linear_bf16.kernel_for(Q4_K, STATIC_CROSSOVERS.bf16_tokens)
    smallest = kernel.examples(rng, 200)
    found = interleaved_cpu_ns(
        {
            "int8": lambda: of_int8(*given, of_tokens, of_rows, ints, sums, REPEATS),
            "bfloat16": lambda: of_bfloat16(ones, ones, totals, REPEATS),
            "configure": lambda: configure(PAIRS),
            "product": lambda: [kernel.implementation(*smallest) for _ in range(REPEATS)],
        },
        1,
        ROUNDS,
    )
    each_ns = {name: [one / count for one in times] for name, times in found.items() for count in [_count(name)]}
    median_ns = {name: float(np.median(times)) for name, times in each_ns.items()}
    ratio = Ratio.of(each_ns["int8"], each_ns["bfloat16"])
    yield Figure(
        "tiles of int8, sums scaled: 32 columns of 32 x 32", median_ns["int8"] / STEPS, "ns", "bfloat16", ratio
    )
    rows, columns = smallest[1].shape[0], smallest[3].shape[1]
    product = f"a product of {STATIC_CROSSOVERS.bf16_tokens} tokens, {rows} x {columns}"
    ratio = Ratio.of(each_ns["configure"], each_ns["product"])
    yield Figure("tiles configured and released", median_ns["configure"], "ns", product, ratio)


def _count(name: str) -> int:
    return PAIRS if name == "configure" else REPEATS
