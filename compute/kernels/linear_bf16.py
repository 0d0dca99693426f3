"""Linear in bfloat16: y = x @ W.T + bias for many tokens. W is interleaved. W and x are rounded to bfloat16.

reference    product in float64 of the same rounded weights and activations
numba        AMX: some columns of 32 rows are dequantised into tiles, and all tokens are multiplied by these tiles.
             One instruction multiplies 16 tokens x 32 columns by 32 columns x 16 rows. The dequantised weights
             include their scales, so sums are not scaled. With several threads, each thread computes some groups of
             rows. 2.9x the speed of linear_int8 with 32 tokens, 4.5x with 64, 5.9x with 128 (Q4_K, 4096 x 4096, one
             thread of an Emerald Rapids Xeon)
cuda         x is rounded, W is dequantised into the scratch, and cuBLAS multiplies both

With bfloat16, which keeps 8 bits, the rounding error of activations is 0.43-0.44 of that with int8 (normal random
numbers). Tiles of int8 multiply twice as many numbers per instruction, but are not used. Each block of columns has
its own scales, so all sums of a tile would have to be scaled after every instruction. Altogether, int8 takes 1.92
times as long for the same columns. Each call configures the tiles. This takes 86 ns, 0.001 of the smallest product
(`python -m benchmarks tiles`; a Xeon with AMX, 2026-11-28).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cbtop.compute.contracts import contract
from cbtop.compute.cuda.gemm import bf16_product
from cbtop.compute.cuda.launches import CudaKernel, CudaLaunch, CudaModule, Launch, line
from cbtop.compute.cuda.units import UNITS
from cbtop.compute.jit.bfloats import bfloats, store_ints
from cbtop.compute.jit.bytes64 import column_pairs, from_tile, row_pairs
from cbtop.compute.jit.compile import copy_of, jit, jit_inlined
from cbtop.compute.jit.cpu import HAS_TILES
from cbtop.compute.jit.tiles import (
    configure_tiles,
    load_tile,
    multiply_tiles,
    release_tiles,
    store_tile,
    zero_tile,
)
from cbtop.compute.jit.vectors import add, load_floats, multiply, multiply_add, splat, store_floats
from cbtop.compute.kernels.base import Arguments, Kernel, check_floats, floats
from cbtop.compute.kernels.linear import narrow_interleaved, work
from cbtop.compute.kernels.products import CompiledRows, multiply_one
from cbtop.compute.memory import on_huge_pages
from cbtop.compute.quantization import FORMATS, INTERLEAVABLE, ON_GPU
from cbtop.compute.quantization.base import BlockFormat, QuantizedMatrix
from cbtop.compute.quantization.floats import BF16
from cbtop.compute.quantization.interleaved import ROWS, InterleavedMatrix, rows_of
from cbtop.compute.quantization.interleaved_layout import Factors, InterleavedLayout
from cbtop.compute.settings import STATIC_CROSSOVERS

U = np.uint64
TOKENS = 16  # number of tokens in a tile (a matrix register of AMX)
STEP = 32  # number of columns in a tile
WORDS = 256  # number of 32-bit words in a tile
# Number of columns that are dequantised at once. The dequantised weights and the same columns of 128 tokens stay in
# L2.
STRETCH = 1024
PANEL = STRETCH // STEP * WORDS  # number of words that the weights of sixteen rows take


@dataclass(frozen=True, slots=True)
class TileScratch:
    """The buffers that a product writes to.

    `tiles`: uint32 (tokens / 16, columns * 8), the activations in blocks of 16 tokens x 32 columns. `panels`: float32
    (threads, words), the weights of 32 rows for each thread, then four tiles of sums.

    Rows of tiles are aligned to cache lines. Otherwise each row would be in two lines, and a product would take twice
    as long.
    """

    tiles: Any
    panels: Any

    @classmethod
    def of(cls, tokens: int, columns: int, threads: int) -> TileScratch:
        return cls(
            _on_pages(np.uint32, -(-tokens // TOKENS), columns // 2 * TOKENS),
            _on_pages(np.float32, threads, 2 * PANEL + 4 * WORDS),
        )


@dataclass(frozen=True, slots=True)
class CudaScratch:
    """The buffers that a product on a GPU writes to. bfloat16 is stored as uint16.

    - `x`: (tokens * columns or more,).
    - `weights`: (rows * columns or more,).
    - `sums`: float32 (tokens * rows or more,), used when matrices are multiplied together.

    All matrices of a decoder share one scratch. It is large enough for each matrix, and for all matrices that are
    multiplied together.
    """

    x: Any
    weights: Any
    sums: Any


def _on_pages(dtype: Any, rows: int, columns: int) -> Any:
    memory = on_huge_pages(rows * columns * np.dtype(dtype).itemsize)
    return np.frombuffer(memory, dtype).reshape(rows, columns)


def reference(code: int, weights: Any, bias: Any, x: Any, out: Any, scratch: TileScratch) -> None:
    """Set out[tokens, rows] = bf16(x)[tokens, columns] @ bf16(W).T + bias.

    `weights` are interleaved. `bias` may be empty.
    """
    block_format = FORMATS[code]
    matrix = block_format.dequantize(rows_of(block_format, weights, np.arange(len(weights))))
    out[:] = _rounded(x) @ _rounded(matrix).T + (bias if bias.size else 0.0)


def _rounded(values: Any) -> Any:
    return BF16.dequantize(BF16.quantize(np.ascontiguousarray(values))).astype(np.float64)


@jit
def round_tokens(x: Any, tiles: Any) -> None:
    """Write the activations x to tiles. After the last token, tiles are filled with zeros."""
    tokens, steps = U(x.shape[0]), U(x.shape[1] // STEP)
    for tile in range((tokens + U(TOKENS - 1)) // U(TOKENS)):
        first = tile * U(TOKENS)
        count = min(tokens - first, U(TOKENS))
        for step in range(steps):
            column, at = step * U(STEP), step * U(WORDS)
            for i in range(count):
                low, high = load_floats(x, first + i, column), load_floats(x, first + i, column + U(STEP // 2))
                store_ints(tiles, tile, at + i * U(STEP // 2), bfloats(low, high))
            for i in range(count * U(STEP // 2), U(WORDS)):
                tiles[tile, at + i] = np.uint32(0)


@jit_inlined
def _four_columns(q: Any, scales: Any, panels: Any, chunk: Any, at: Any) -> None:
    """Write two rows of a tile. Each row of the tile contains two columns of sixteen rows of weights."""
    scale, other_scale, offset, other_offset = scales
    low = multiply_add(column_pairs(q, 0, 0), scale, offset)
    high = multiply_add(column_pairs(q, 0, 1), other_scale, other_offset)
    store_ints(panels, chunk, at, bfloats(low, high))
    low = multiply_add(column_pairs(q, 1, 0), scale, offset)
    high = multiply_add(column_pairs(q, 1, 1), other_scale, other_offset)
    store_ints(panels, chunk, at + U(16), bfloats(low, high))


@jit_inlined
def _sixteen_columns(
    q: Any, r: Any, s: Any, t: Any, scale: Any, offset: Any, panels: Any, chunk: Any, at: Any
) -> None:
    scales = row_pairs(scale, 0), row_pairs(scale, 1), row_pairs(offset, 0), row_pairs(offset, 1)
    _four_columns(q, scales, panels, chunk, at)
    _four_columns(r, scales, panels, chunk, at + U(32))
    _four_columns(s, scales, panels, chunk, at + U(64))
    _four_columns(t, scales, panels, chunk, at + U(96))


@jit_inlined
def _write_with_minimum(found: Any, panels: Any, chunk: Any, at: Any) -> None:
    """Write a tile with the values of scale * weights - minimum. 32 columns share one scale and one minimum."""
    q, r, s, t, a, b, c, d, scale, minimum = found
    offset = multiply(minimum, splat(np.float32(-1)))
    _sixteen_columns(q, r, s, t, scale, offset, panels, chunk, at)
    _sixteen_columns(a, b, c, d, scale, offset, panels, chunk, at + U(WORDS // 2))


@jit_inlined
def _write_less_32(found: Any, panels: Any, chunk: Any, at: Any) -> None:
    """Write a tile with the values of scale * (weights - 32). 16 columns share a scale."""
    q, r, s, t, a, b, c, d, first, last = found
    less = splat(np.float32(-32))
    _sixteen_columns(q, r, s, t, first, multiply(first, less), panels, chunk, at)
    _sixteen_columns(a, b, c, d, last, multiply(last, less), panels, chunk, at + U(WORDS // 2))


@jit_inlined
def _write_with_minima(found: Any, panels: Any, chunk: Any, at: Any) -> None:
    """Write a tile with the values of scale * weights - minimum. 16 columns share a scale and a minimum."""
    q, r, s, t, a, b, c, d, first, last, minimum, other_minimum = found
    less = splat(np.float32(-1))
    _sixteen_columns(q, r, s, t, first, multiply(minimum, less), panels, chunk, at)
    _sixteen_columns(a, b, c, d, last, multiply(other_minimum, less), panels, chunk, at + U(WORDS // 2))


# Each format has a copy of the code below. In the copy, the format's own functions and sizes replace the following
# ones.
_unpack: Any = None
_write, _BLOCK_BYTES, _BLOCK_COLUMNS = _write_with_minimum, 144, 256


def _dequantize_32(w: Any, row: Any, first: Any, count: Any, panels: Any, chunk: Any, at: Any) -> None:  # compiled
    """Write `count` columns of sixteen rows, starting with column `first`, as tiles."""
    begin = first // U(STEP)
    for step in range(count // U(STEP)):
        _write(_unpack(w, row, begin + step, U(0)), panels, chunk, at + step * U(WORDS))


def _dequantize_64(w: Any, row: Any, first: Any, count: Any, panels: Any, chunk: Any, at: Any) -> None:  # compiled
    begin = first // U(2 * STEP)
    for step in range(count // U(2 * STEP)):
        place = at + step * U(2 * WORDS)
        _write(_unpack(w, row, begin + step, U(0)), panels, chunk, place)
        _write(_unpack(w, row, begin + step, U(1)), panels, chunk, place + U(WORDS))


def _dequantize_128(w: Any, row: Any, first: Any, count: Any, panels: Any, chunk: Any, at: Any) -> None:  # compiled
    begin = first // U(4 * STEP)
    for step in range(count // U(4 * STEP)):
        place = at + step * U(4 * WORDS)
        _write(_unpack(w, row, begin + step, U(0)), panels, chunk, place)
        _write(_unpack(w, row, begin + step, U(1)), panels, chunk, place + U(WORDS))
        _write(_unpack(w, row, begin + step, U(2)), panels, chunk, place + U(2 * WORDS))
        _write(_unpack(w, row, begin + step, U(3)), panels, chunk, place + U(3 * WORDS))


_dequantize = _dequantize_128


def _two_tiles(tiles: Any, tile: Any, begin: Any, steps: Any, panels: Any, chunk: Any) -> None:  # compiled
    """Multiply two tiles of tokens, starting at word `begin`, by both panels.

    The sums are stored in four tiles after the panels.
    """
    zero_tile(0)
    zero_tile(1)
    zero_tile(2)
    zero_tile(3)
    for step in range(steps):
        at = step * U(WORDS)
        load_tile(6, panels, chunk, at)
        load_tile(4, tiles, tile, begin + at)
        multiply_tiles(0, 4, 6)
        load_tile(7, panels, chunk, at + U(PANEL))
        multiply_tiles(1, 4, 7)
        load_tile(5, tiles, tile + U(1), begin + at)
        multiply_tiles(2, 5, 6)
        multiply_tiles(3, 5, 7)
    store_tile(0, panels, chunk, U(2 * PANEL))
    store_tile(1, panels, chunk, U(2 * PANEL + WORDS))
    store_tile(2, panels, chunk, U(2 * PANEL + 2 * WORDS))
    store_tile(3, panels, chunk, U(2 * PANEL + 3 * WORDS))


def _one_tile(tiles: Any, tile: Any, begin: Any, steps: Any, panels: Any, chunk: Any) -> None:  # compiled
    """Do the same as `_two_tiles` for one tile of tokens."""
    zero_tile(0)
    zero_tile(1)
    for step in range(steps):
        at = step * U(WORDS)
        load_tile(6, panels, chunk, at)
        load_tile(4, tiles, tile, begin + at)
        multiply_tiles(0, 4, 6)
        load_tile(7, panels, chunk, at + U(PANEL))
        multiply_tiles(1, 4, 7)
    store_tile(0, panels, chunk, U(2 * PANEL))
    store_tile(1, panels, chunk, U(2 * PANEL + WORDS))


@jit
def _number(word: Any, is_high: Any) -> Any:
    """Return the high or the low bfloat16 of a 32-bit word, as float32."""
    bits = np.uint32(word & np.uint32(0xFFFF0000)) if is_high else np.uint32(word << np.uint32(16))
    return np.uint32(bits).view(np.float32)


def _one_tile_plainly(tiles: Any, tile: Any, begin: Any, steps: Any, panels: Any, chunk: Any) -> None:  # compiled
    """Do the same as `_one_tile`, but without AMX. Used in tests on processors without AMX."""
    for panel in range(U(2)):
        for token in range(U(TOKENS)):
            to = U(2 * PANEL) + panel * U(WORDS) + token * U(ROWS)
            for row in range(U(ROWS)):
                panels[chunk, to + row] = np.float32(0)
            for pair in range(steps * U(STEP // 2)):
                at = pair // U(16) * U(WORDS)
                word = np.uint32(tiles[tile, begin + at + token * U(16) + pair % U(16)])
                for row in range(U(ROWS)):
                    weights = np.float32(panels[chunk, panel * U(PANEL) + pair * U(ROWS) + row]).view(np.uint32)
                    low, high = (
                        _number(word, False) * _number(weights, False),
                        _number(word, True) * _number(weights, True),
                    )
                    panels[chunk, to + row] += low + high


_two_tiles, _one_tile = jit_inlined(_two_tiles), jit_inlined(_one_tile if HAS_TILES else _one_tile_plainly)


@jit_inlined
def _add_sums(
    panels: Any, chunk: Any, is_first: Any, out: Any, token: Any, count: Any, row: Any, groups: Any
) -> None:
    """Store the sums of `count` tokens and `groups` groups of rows in `out`.

    The sums of the first range of columns replace the values in `out`. The sums of later ranges are added to the
    values.
    """
    for i in range(count):
        at = U(2 * PANEL) + i // U(TOKENS) * U(2 * WORDS) + i % U(TOKENS) * U(ROWS)
        for group in range(groups):
            sums = from_tile(load_floats(panels, chunk, at + group * U(WORDS)))
            place = row + group * U(ROWS)
            if not is_first:
                sums = add(sums, load_floats(out, token + i, place))
            store_floats(out, token + i, place, sums)


@jit_inlined
def _multiply(tiles: Any, first: Any, count: Any, panels: Any, chunk: Any, out: Any, row: Any, groups: Any) -> None:
    """Multiply all tokens by the columns in the panels."""
    tokens, begin, steps = U(out.shape[0]), first // U(STEP) * U(WORDS), count // U(STEP)
    token: Any = U(0)
    while token < tokens:
        together: Any = U(TOKENS)
        if HAS_TILES and tokens - token > U(TOKENS):
            together = U(2 * TOKENS)
            _two_tiles(tiles, token // U(TOKENS), begin, steps, panels, chunk)
        else:
            _one_tile(tiles, token // U(TOKENS), begin, steps, panels, chunk)
        _add_sums(panels, chunk, first == U(0), out, token, min(tokens - token, together), row, groups)
        token += together


def _groups(w: Any, bias: Any, tiles: Any, panels: Any, out: Any, chunk: Any, chunks: Any) -> None:  # compiled
    """Compute the groups of rows in chunk number `chunk` of `chunks`, for all tokens.

    Two groups are processed at a time.
    """
    groups, columns = w.shape[0] // ROWS, U(w.shape[1] // _BLOCK_BYTES * _BLOCK_COLUMNS)
    group: Any = U(chunk * groups // chunks)
    end, own = U((chunk + 1) * groups // chunks), U(chunk)
    if HAS_TILES:
        configure_tiles()
    while group < end:
        row, together = group * U(ROWS), min(end - group, U(2))
        for first in range(U(0), columns, U(STRETCH)):
            count = min(columns - first, U(STRETCH))
            for i in range(together):
                _dequantize(w, row + i * U(ROWS), first, count, panels, own, i * U(PANEL))
            _multiply(tiles, first, count, panels, own, out, row, together)
        if bias.shape[0]:
            for token in range(U(out.shape[0])):
                for i in range(together * U(ROWS)):
                    out[token, row + i] += bias[row + i]
        group += together
    if HAS_TILES:
        release_tiles()


_WRITE = {
    Factors.OF_32: _write_with_minimum,
    Factors.OF_16: _write_with_minima,
    Factors.LESS_32: _write_less_32,
}


def _compiled(block_format: BlockFormat, layout: InterleavedLayout) -> CompiledRows:
    """Return `_groups` of one format. The first call compiles it."""
    # Some processes may use tiles, and others may not. All of them share one cache of compiled code, so the name
    # contains the kind of code.
    name = f"{block_format.name}_{'tiles' if HAS_TILES else 'plain'}"
    columns = block_format.block_elements
    dequantize = copy_of(
        {32: _dequantize_32, 64: _dequantize_64}.get(columns, _dequantize_128),
        f"_dequantize_{name}",
        _unpack=layout.unpack,
        _write=_WRITE[layout.factors],
    )
    groups = copy_of(
        _groups,
        f"_groups_{name}",
        _dequantize=jit_inlined(dequantize),
        _BLOCK_BYTES=block_format.block_bytes,
        _BLOCK_COLUMNS=columns,
    )
    return CompiledRows(jit(groups), ROWS)


ROWS_OF: dict[int, CompiledRows] = {code: _compiled(FORMATS[code], layout) for code, layout in INTERLEAVABLE.items()}


def prepared(x: Any, scratch: TileScratch) -> tuple[Any, Any]:
    """Return the activations as tiles, and the panels. Raises ValueError if x is not float32."""
    check_floats(x)
    round_tokens(x, scratch.tiles)
    return scratch.tiles, scratch.panels


def linear_bf16(code: int, weights: Any, bias: Any, x: Any, out: Any, scratch: TileScratch) -> None:
    """Compute the same as the function `reference`, in code that Numba compiles."""
    tiles, panels = prepared(x, scratch)
    multiply_one(ROWS_OF[code], weights, bias, tiles, panels, out, len(panels))


ROUND_ROWS = "round_rows"
ROUND = CudaModule(
    "linear_bf16",
    r"""
KERNEL round_rows(const float* x, uint16_t* out, int64_t eights STAMP)
{
    ENTER
    int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (at < eights) {
        float4 a = __ldg((const float4*)x + 2 * at), b = __ldg((const float4*)x + 2 * at + 1);
        ((uint4*)out)[at] =
            make_uint4(two_bf16(a.x, a.y), two_bf16(a.z, a.w), two_bf16(b.x, b.y), two_bf16(b.z, b.w));
    }
    LEAVE
}

KERNEL add_bias(const float* bias, float* out, int rows, int64_t size STAMP)
{
    ENTER
    int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (at < size) out[at] += bias[at % rows];
    LEAVE
}

// Of sums of three products, whose rows lie one behind the other, each to its own.
KERNEL take_sums(const float* sums, const float* bias_a, int has_a, float* a, int rows_a, const float* bias_b,
    int has_b, float* b, int rows_b, const float* bias_c, int has_c, float* c, int rows_c, int64_t size STAMP)
{
    ENTER
    int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (at < size) {
        const int all = rows_a + rows_b + rows_c;
        const int64_t token = at / all;
        int row = at % all;
        if (row < rows_a) a[token * rows_a + row] = sums[at] + (has_a ? bias_a[row] : 0.0f);
        else if ((row -= rows_a) < rows_b) b[token * rows_b + row] = sums[at] + (has_b ? bias_b[row] : 0.0f);
        else {
            row -= rows_b;
            c[token * rows_c + row] = sums[at] + (has_c ? bias_c[row] : 0.0f);
        }
    }
    LEAVE
}
""",
)
DEQUANTIZE = r"""
// A thread has eight weights, 16 bytes of what is written.
KERNEL dequantize(const uint8_t* planes, uint16_t* out, int64_t weights STAMP)
{
    ENTER
    int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (at < weights / 8) {
        float w[8];
        eight_weights(NAME(planes, weights), at / 4, at % 4, w);
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; i++) pairs[i] = two_bf16(w[2 * i], w[2 * i + 1]);
        ((uint4*)out)[at] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    LEAVE
}
"""
CUDA_THREADS = 256


def _module(block_format: BlockFormat) -> CudaModule:
    assert block_format.planes is not None
    entry = DEQUANTIZE.replace("NAME", block_format.name)
    source = UNITS + block_format.planes.source + entry
    return CudaModule(f"dequantize_{block_format.name.lower()}", source)


MODULES = {code: _module(one) for code, one in FORMATS.items() if code in ON_GPU and one.block_elements > 1}


def _launch(module: CudaModule, entry: str, threads: int, *arguments: Any) -> CudaLaunch:
    return CudaLaunch(module, entry, *line(-(-threads // CUDA_THREADS), CUDA_THREADS), arguments)


CudaMatrix = tuple[int, Any, Any, Any]  # the kernel's parameters: format code, planes, bias and out (tokens, rows)


def _in_bf16(x: Any, scratch: CudaScratch) -> CudaLaunch:
    return _launch(ROUND, ROUND_ROWS, x.size // 8, x, scratch.x, np.int64(x.size // 8))


def _dequantized(code: int, weights: Any, to: Any, size: int) -> CudaLaunch:
    return _launch(MODULES[code], "dequantize", size // 8, weights, to, np.int64(size))


def launches_of_several(matrices: Iterable[CudaMatrix], x: Any, scratch: CudaScratch) -> Sequence[Launch]:
    """Return the launches of the products of several matrices with the same activations.

    The products run one after the other, because they share the scratch.
    """
    columns = x.shape[1]
    found: list[Launch] = [_in_bf16(x, scratch)]
    for code, weights, bias, out in matrices:
        rows = out.shape[1]
        found.append(_dequantized(code, weights, scratch.weights, rows * columns))
        found.append(bf16_product(scratch.weights, scratch.x, out, columns))
        if bias.size:
            found.append(_launch(ROUND, "add_bias", out.size, bias, out, np.int32(rows), np.int64(out.size)))
    return found


def launches_of_three(matrices: Sequence[CudaMatrix], x: Any, scratch: CudaScratch) -> Sequence[Launch]:
    """Return the launches of one product of three matrices with the same activations.

    The sums are separated afterwards. Multiplied alone, a matrix of few rows would leave most of a GPU idle. On an
    H100, 512 tokens of a 7B took 22.1 ms with one product, and 22.6 ms with three (one run each).
    """
    (tokens, columns), all_rows = x.shape, sum(out.shape[1] for *_, out in matrices)
    sums = scratch.sums[: tokens * all_rows].reshape(tokens, all_rows)
    found: list[Launch] = [_in_bf16(x, scratch)]
    taken: list[Any] = []
    first = 0
    for code, weights, bias, out in matrices:
        rows = out.shape[1]
        found.append(_dequantized(code, weights, scratch.weights[first * columns :], rows * columns))
        taken += bias, np.int32(bias.size > 0), out, np.int32(rows)
        first += rows
    found.append(bf16_product(scratch.weights, scratch.x, sums, columns))
    found.append(_launch(ROUND, "take_sums", sums.size, sums, *taken, np.int64(sums.size)))
    return found


def launches(code: int, weights: Any, bias: Any, x: Any, out: Any, scratch: CudaScratch) -> Sequence[Launch]:
    """Return launches that round activations and weights to bfloat16, multiply them, and add the bias if there is
    one.
    """
    return launches_of_several([(code, weights, bias, out)], x, scratch)


def cuda_modules(code: int) -> tuple[CudaModule, ...]:
    """Return the CUDA modules that `launches` may use."""
    return ROUND, MODULES[code]


def _examples(block_format: BlockFormat, tokens: int, threads: int) -> Callable[..., Arguments]:
    def examples(rng: np.random.Generator, size: int) -> Arguments:
        # The largest example has more columns than STRETCH, so that sums are added to earlier ones.
        rows, columns = ROWS * (1 + size // 8), 256 * (1 + size // 32)
        if block_format.block_elements < 256:
            # The number of columns in examples must not be divisible by a large power of two.
            columns += 5 * block_format.block_elements
        matrix = InterleavedMatrix.of(QuantizedMatrix.of(block_format, floats(rng, rows, columns)))
        bias = floats(rng, rows if size % 2 else 0)
        x, out = floats(rng, tokens, columns), np.zeros((tokens, rows), np.float32)
        return block_format.code, matrix.data, bias, x, out, TileScratch.of(tokens, columns, threads)

    return examples


def kernel_for(block_format: BlockFormat, tokens: int = STATIC_CROSSOVERS.bf16_tokens, threads: int = 1) -> Kernel:
    """Return the kernel for interleaved weights of one format.

    Its examples have `tokens` tokens and use `threads` threads.
    """
    return Kernel(
        name=f"{block_format.name.lower()}_linear_bf16",
        reference=reference,
        implementation=linear_bf16,
        work=work,
        outputs=(4,),
        contract=contract("linear_bf16"),
        examples=_examples(block_format, tokens, threads),
        narrow=narrow_interleaved,
        parallel=True,
        by_token=(3, 4),
        cuda=CudaKernel(cuda_modules(block_format.code), launches),
    )


LINEAR_BF16: dict[int, Kernel] = {code: kernel_for(FORMATS[code]) for code in INTERLEAVABLE}
