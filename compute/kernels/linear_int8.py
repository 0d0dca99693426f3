"""Linear, int8: y = x @ W.T + bias with interleaved W and x in int8, as quantize_rows leaves it.

reference    float64 product of the dequantised weights and the same int8 activations
numba        sixteen rows at a time: four weights of each and four codes are multiplied and added by one instruction
             (AVX-512 VNNI; AVX2 takes twelve), exactly; then one scale a row. Four tokens share every reading of
             weights. One thread, or some groups of rows for each.

x is rounded, so that y is as far from the product of x itself as int8 is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cbtop.compute.contracts import contract
from cbtop.compute.jit.bytes64 import (
    add_products,
    flipped,
    load_64,
    masked,
    shifted,
    splat_int,
    with_fifth_bits,
    with_upper_bits,
)
from cbtop.compute.jit.compile import copy_of, jit, jit_inlined
from cbtop.compute.jit.vectors import (
    bits_and,
    bits_or,
    load_bytes,
    load_halves,
    load_signed_bytes,
    load_words,
    multiply,
    multiply_add,
    prefetch,
    shift_left,
    shift_right,
    splat,
    store_floats,
    to_floats,
)
from cbtop.compute.kernels import linear
from cbtop.compute.kernels.base import Arguments, Kernel, floats
from cbtop.compute.kernels.linear import CHECKED_ROWS, work
from cbtop.compute.kernels.products import CompiledRows, multiply_one
from cbtop.compute.kernels.quantize_rows import BLOCK, FACTORS, empty_codes, quantize_rows
from cbtop.compute.kernels.quantize_rows import reference as quantize
from cbtop.compute.quantization import FORMATS
from cbtop.compute.quantization.base import BlockFormat, QuantizedMatrix
from cbtop.compute.quantization.interleaved import ROWS, UNITS, InterleavedMatrix, Matrix, rows_of
from cbtop.compute.quantization.q4_0 import Q4_0
from cbtop.compute.quantization.q4_1 import Q4_1
from cbtop.compute.quantization.q4_k import Q4_K
from cbtop.compute.quantization.q5_0 import Q5_0
from cbtop.compute.quantization.q5_1 import Q5_1
from cbtop.compute.quantization.q5_k import Q5_K
from cbtop.compute.quantization.q6_k import Q6_K
from cbtop.compute.quantization.q8_0 import Q8_0

U = np.uint64
AHEAD = np.uint64(4096)  # bytes that are asked for before they are needed


@dataclass(frozen=True, slots=True)
class Int8Scratch:
    """Where a product puts its activations: codes and factors of `quantize_rows`; and its threads."""

    codes: Any
    factors: Any
    threads: int

    @classmethod
    def of(cls, tokens: int, columns: int, threads: int) -> Int8Scratch:
        return cls(*empty_codes(tokens, columns), threads)


def reference(code: int, weights: Any, bias: Any, x: Any, out: Any, scratch: Int8Scratch) -> None:
    """out[tokens, rows] = x'[tokens, columns] @ W.T + bias, where x' is x as `quantize_rows` rounds it.

    `weights` are interleaved; `bias` has no elements where there is none.
    """
    codes, factors = empty_codes(*x.shape)
    quantize(x, codes, factors)
    scales = np.repeat(factors[:, ::FACTORS].astype(np.float64), BLOCK, axis=1)
    block_format = FORMATS[code]
    matrix = block_format.dequantize(rows_of(block_format, weights, np.arange(len(weights))))
    out[:] = codes.view(np.int8) * scales @ matrix.astype(np.float64).T + (bias if bias.size else 0.0)


# Of each format: eight vectors of 64 weights, unsigned, that are 32 columns of 16 rows; then what is needed of them.


@jit_inlined
def _ask_ahead(w: Any, row: Any, at: Any, lines: Any) -> None:
    for line in range(U(lines)):
        prefetch(w, row, at + AHEAD + U(64) * line)


@jit_inlined
def _unpack_q8_0(w: Any, row: Any, step: Any, part: Any) -> Any:
    base, sign = step * U(34 * ROWS), np.int32(128)
    at = base + U(2 * ROWS)
    _ask_ahead(w, row, base, 8)
    scale = load_halves(w, row, base)
    return (
        flipped(load_64(w, row, at), sign),
        flipped(load_64(w, row, at + U(64)), sign),
        flipped(load_64(w, row, at + U(128)), sign),
        flipped(load_64(w, row, at + U(192)), sign),
        flipped(load_64(w, row, at + U(256)), sign),
        flipped(load_64(w, row, at + U(320)), sign),
        flipped(load_64(w, row, at + U(384)), sign),
        flipped(load_64(w, row, at + U(448)), sign),
        scale,
        multiply(scale, splat(np.float32(128))),
    )


@jit_inlined
def _nibbles(w: Any, row: Any, at: Any, shift: Any) -> Any:
    return masked(shifted(load_64(w, row, at), shift), np.int32(15))


@jit_inlined
def _four_bits(w: Any, row: Any, at: Any) -> Any:
    """Thirty-two columns: those of the low nibbles, then those of the high ones."""
    low, high = np.int32(0), np.int32(4)
    return (
        _nibbles(w, row, at, low),
        _nibbles(w, row, at + U(64), low),
        _nibbles(w, row, at + U(128), low),
        _nibbles(w, row, at + U(192), low),
        _nibbles(w, row, at, high),
        _nibbles(w, row, at + U(64), high),
        _nibbles(w, row, at + U(128), high),
        _nibbles(w, row, at + U(192), high),
    )


@jit_inlined
def _five_bits(w: Any, row: Any, at: Any) -> Any:
    """As `_four_bits`, of what follows sixteen words of highest bits."""
    words = load_words(w, row, at)
    q, r, s, t, a, b, c, d = _four_bits(w, row, at + U(64))
    return (
        with_fifth_bits(q, words, np.int32(0)),
        with_fifth_bits(r, words, np.int32(4)),
        with_fifth_bits(s, words, np.int32(8)),
        with_fifth_bits(t, words, np.int32(12)),
        with_fifth_bits(a, words, np.int32(16)),
        with_fifth_bits(b, words, np.int32(20)),
        with_fifth_bits(c, words, np.int32(24)),
        with_fifth_bits(d, words, np.int32(28)),
    )


@jit_inlined
def _unpack_q4_0(w: Any, row: Any, step: Any, part: Any) -> Any:
    base = step * U(18 * ROWS)
    _ask_ahead(w, row, base, 5)
    scale = load_halves(w, row, base)
    return (*_four_bits(w, row, base + U(2 * ROWS)), scale, multiply(scale, splat(np.float32(8))))


@jit_inlined
def _unpack_q4_1(w: Any, row: Any, step: Any, part: Any) -> Any:
    base = step * U(20 * ROWS)
    _ask_ahead(w, row, base, 5)
    minimum = multiply(load_halves(w, row, base + U(2 * ROWS)), splat(np.float32(-1)))
    return (*_four_bits(w, row, base + U(4 * ROWS)), load_halves(w, row, base), minimum)


@jit_inlined
def _unpack_q5_0(w: Any, row: Any, step: Any, part: Any) -> Any:
    base = step * U(22 * ROWS)
    _ask_ahead(w, row, base, 6)
    scale = load_halves(w, row, base)
    return (*_five_bits(w, row, base + U(2 * ROWS)), scale, multiply(scale, splat(np.float32(16))))


@jit_inlined
def _unpack_q5_1(w: Any, row: Any, step: Any, part: Any) -> Any:
    base = step * U(24 * ROWS)
    _ask_ahead(w, row, base, 6)
    minimum = multiply(load_halves(w, row, base + U(2 * ROWS)), splat(np.float32(-1)))
    return (*_five_bits(w, row, base + U(4 * ROWS)), load_halves(w, row, base), minimum)


@jit_inlined
def _six_bit_factors(w: Any, row: Any, base: Any, half: Any, part: Any) -> Any:
    """Scale and minimum of a sub-block as Q4_K and Q5_K store them (see quantization/six_bits.py)."""
    fifteen = np.int32(15)
    a = load_bytes(w, row, base + U(4 * ROWS) + part * U(ROWS))
    m = load_bytes(w, row, base + U(8 * ROWS) + part * U(ROWS))
    c = load_bytes(w, row, base + U(12 * ROWS) + part * U(ROWS))
    if half == U(0):
        scales, minima = bits_and(a, np.int32(63)), bits_and(m, np.int32(63))
    else:
        scales = bits_or(bits_and(c, fifteen), shift_left(shift_right(a, np.int32(6)), np.int32(4)))
        minima = bits_or(shift_right(c, np.int32(4)), shift_left(shift_right(m, np.int32(6)), np.int32(4)))
    return (
        multiply(load_halves(w, row, base), to_floats(scales)),
        multiply(load_halves(w, row, base + U(2 * ROWS)), to_floats(minima)),
    )


@jit_inlined
def _unpack_q4_k(w: Any, row: Any, step: Any, part: Any) -> Any:
    base, half = (step >> U(1)) * U(144 * ROWS), step & U(1)
    at = base + U(16 * ROWS) + half * U(1024) + (part >> U(1)) * U(512)
    shift = np.int32(4) * np.int32(part & U(1))
    _ask_ahead(w, row, base + (half * U(4) + part) * U(18 * ROWS), 5)
    return (
        _nibbles(w, row, at, shift),
        _nibbles(w, row, at + U(64), shift),
        _nibbles(w, row, at + U(128), shift),
        _nibbles(w, row, at + U(192), shift),
        _nibbles(w, row, at + U(256), shift),
        _nibbles(w, row, at + U(320), shift),
        _nibbles(w, row, at + U(384), shift),
        _nibbles(w, row, at + U(448), shift),
        *_six_bit_factors(w, row, base, half, part),
    )


@jit_inlined
def _with_upper(w: Any, row: Any, low: Any, high: Any, low_shift: Any, high_shift: Any, mask: Any) -> Any:
    upper = masked(shifted(load_64(w, row, high), high_shift), mask)
    return with_upper_bits(_nibbles(w, row, low, low_shift), upper)


@jit_inlined
def _with_uppers(w: Any, row: Any, low: Any, high: Any, low_shift: Any, high_shift: Any, mask: Any) -> Any:
    """Thirty-two columns: nibbles, and above them the bits of `mask` of other bytes."""
    return (
        _with_upper(w, row, low, high, low_shift, high_shift, mask),
        _with_upper(w, row, low + U(64), high + U(64), low_shift, high_shift, mask),
        _with_upper(w, row, low + U(128), high + U(128), low_shift, high_shift, mask),
        _with_upper(w, row, low + U(192), high + U(192), low_shift, high_shift, mask),
        _with_upper(w, row, low + U(256), high + U(256), low_shift, high_shift, mask),
        _with_upper(w, row, low + U(320), high + U(320), low_shift, high_shift, mask),
        _with_upper(w, row, low + U(384), high + U(384), low_shift, high_shift, mask),
        _with_upper(w, row, low + U(448), high + U(448), low_shift, high_shift, mask),
    )


@jit_inlined
def _unpack_q5_k(w: Any, row: Any, step: Any, part: Any) -> Any:
    base, half = (step >> U(1)) * U(176 * ROWS), step & U(1)
    low = base + U(48 * ROWS) + half * U(1024) + (part >> U(1)) * U(512)
    low_shift, high_shift = np.int32(4) * np.int32(part & U(1)), np.int32(half * U(4) + part)
    _ask_ahead(w, row, base + (half * U(4) + part) * U(22 * ROWS), 6)
    return (
        *_with_uppers(w, row, low, base + U(16 * ROWS), low_shift, high_shift, np.int32(1)),
        *_six_bit_factors(w, row, base, half, part),
    )


@jit_inlined
def _unpack_q6_k(w: Any, row: Any, step: Any, part: Any) -> Any:
    base, half = (step >> U(1)) * U(210 * ROWS), step & U(1)
    low = base + half * U(64 * ROWS) + (part & U(1)) * U(512)
    high = base + U(128 * ROWS) + half * U(32 * ROWS)
    low_shift, high_shift = np.int32(4) * np.int32(part >> U(1)), np.int32(2) * np.int32(part)
    _ask_ahead(w, row, base + (half * U(4) + part) * U(420), 7)
    d = load_halves(w, row, base + U(208 * ROWS))
    scales = base + U(192 * ROWS) + (half * U(4) + part) * U(2 * ROWS)
    return (
        *_with_uppers(w, row, low, high, low_shift, high_shift, np.int32(3)),
        multiply(d, to_floats(load_signed_bytes(w, row, scales))),
        multiply(d, to_floats(load_signed_bytes(w, row, scales + U(ROWS)))),
    )


@jit_inlined
def _four(q: Any, r: Any, s: Any, t: Any, start: Any, codes: Any, token: Any, column: Any) -> Any:
    total = add_products(start, q, codes, token, column)
    total = add_products(total, r, codes, token, column + U(4))
    total = add_products(total, s, codes, token, column + U(8))
    return add_products(total, t, codes, token, column + U(12))


@jit_inlined
def _add_with_minimum(found: Any, codes: Any, factors: Any, token: Any, block: Any, total: Any) -> Any:
    """total + scale * (weights . x) - minimum * (sum of x): one scale and one minimum for 32 columns."""
    q, r, s, t, a, b, c, d, scale, minimum = found
    column, place = block * U(BLOCK), block * U(FACTORS)
    products = _four(q, r, s, t, splat_int(np.int32(0)), codes, token, column)
    products = _four(a, b, c, d, products, codes, token, column + U(16))
    total = multiply_add(multiply(to_floats(products), splat(factors[token, place])), scale, total)
    return multiply_add(splat(factors[token, place + U(1)]), minimum, total)


@jit_inlined
def _add_less_32(found: Any, codes: Any, factors: Any, token: Any, block: Any, total: Any) -> Any:
    """total + scale * ((weights - 32) . x): a scale for 16 columns each."""
    q, r, s, t, a, b, c, d, first, last = found
    column, place = block * U(BLOCK), block * U(FACTORS)
    zero, offset = splat_int(np.int32(0)), splat(np.float32(32))
    scale = splat(factors[token, place])
    low = to_floats(_four(q, r, s, t, zero, codes, token, column))
    high = to_floats(_four(a, b, c, d, zero, codes, token, column + U(16)))
    low = multiply_add(low, scale, multiply(offset, splat(factors[token, place + U(2)])))
    high = multiply_add(high, scale, multiply(offset, splat(factors[token, place + U(3)])))
    return multiply_add(high, last, multiply_add(low, first, total))


# What the code below calls of a format; each has a copy of it with its own in place of these.
_unpack, _add = _unpack_q4_k, _add_with_minimum


def _add_part(
    w: Any, row: Any, step: Any, part: Any, parts: Any, codes: Any, factors: Any, t: Any, totals: Any
) -> Any:
    """The totals of four tokens, and 32 columns more."""
    a, b, c, d = totals
    found, block = _unpack(w, row, step, part), step * parts + part
    return (
        _add(found, codes, factors, t, block, a),
        _add(found, codes, factors, t + U(1), block, b),
        _add(found, codes, factors, t + U(2), block, c),
        _add(found, codes, factors, t + U(3), block, d),
    )


def _four_tokens_32(w: Any, row: Any, step: Any, codes: Any, factors: Any, t: Any, totals: Any) -> Any:
    return _add_part(w, row, step, U(0), U(1), codes, factors, t, totals)


def _four_tokens_128(w: Any, row: Any, step: Any, codes: Any, factors: Any, t: Any, totals: Any) -> Any:
    # Written out: every part has shifts and places of its own, which are constants here.
    totals = _add_part(w, row, step, U(0), U(4), codes, factors, t, totals)
    totals = _add_part(w, row, step, U(1), U(4), codes, factors, t, totals)
    totals = _add_part(w, row, step, U(2), U(4), codes, factors, t, totals)
    return _add_part(w, row, step, U(3), U(4), codes, factors, t, totals)


def _one_token_32(w: Any, row: Any, step: Any, codes: Any, factors: Any, t: Any, total: Any) -> Any:
    return _add(_unpack(w, row, step, U(0)), codes, factors, t, step, total)


def _one_token_128(w: Any, row: Any, step: Any, codes: Any, factors: Any, t: Any, total: Any) -> Any:
    block = step * U(4)
    total = _add(_unpack(w, row, step, U(0)), codes, factors, t, block, total)
    total = _add(_unpack(w, row, step, U(1)), codes, factors, t, block + U(1), total)
    total = _add(_unpack(w, row, step, U(2)), codes, factors, t, block + U(2), total)
    return _add(_unpack(w, row, step, U(3)), codes, factors, t, block + U(3), total)


_four_tokens, _one_token = _four_tokens_128, _one_token_128
_STEP_BYTES = Q4_K.block_bytes // 2  # of a row, in a step


def _groups(w: Any, bias: Any, codes: Any, factors: Any, out: Any, chunk: Any, chunks: Any) -> None:
    """The whole groups of rows of one chunk of `chunks`, for all tokens: four at a time, then one by one."""
    tokens, groups, steps = U(out.shape[0]), w.shape[0] // ROWS, w.shape[1] // _STEP_BYTES
    for group in range(U(chunk * groups // chunks), U((chunk + 1) * groups // chunks)):
        row: Any = group * U(ROWS)
        t: Any = U(0)
        while t + U(3) < tokens:
            zero = splat(np.float32(0))
            totals = (zero, zero, zero, zero)
            for step in range(U(steps)):
                totals = _four_tokens(w, row, step, codes, factors, t, totals)
            a, b, c, d = totals
            store_floats(out, t, row, a)
            store_floats(out, t + U(1), row, b)
            store_floats(out, t + U(2), row, c)
            store_floats(out, t + U(3), row, d)
            t += U(4)
        while t < tokens:
            total = splat(np.float32(0))
            for step in range(U(steps)):
                total = _one_token(w, row, step, codes, factors, t, total)
            store_floats(out, t, row, total)
            t += U(1)
        if bias.shape[0]:
            for t in range(tokens):
                for i in range(U(ROWS)):
                    out[t, row + i] += bias[row + i]


def _compiled(block_format: BlockFormat, unpack: Any, add: Any) -> CompiledRows:
    """`_groups` of one format; compiled when they are first called."""
    name = block_format.name
    own: dict[str, Any] = {"_unpack": unpack, "_add": add}
    part = jit_inlined(copy_of(_add_part, f"_add_part_{name}", **own))
    is_small = block_format.block_elements == BLOCK
    four = copy_of(_four_tokens_32 if is_small else _four_tokens_128, f"_four_tokens_{name}", _add_part=part)
    one = copy_of(_one_token_32 if is_small else _one_token_128, f"_one_token_{name}", **own)
    tokens = {"_four_tokens": jit_inlined(four), "_one_token": jit_inlined(one)}
    step_bytes = block_format.block_bytes if is_small else block_format.block_bytes // 2
    return CompiledRows(jit(copy_of(_groups, f"_groups_{name}", _STEP_BYTES=step_bytes, **tokens)), ROWS)


ROWS_OF: dict[int, CompiledRows] = {
    Q8_0.code: _compiled(Q8_0, _unpack_q8_0, _add_with_minimum),
    Q5_0.code: _compiled(Q5_0, _unpack_q5_0, _add_with_minimum),
    Q5_1.code: _compiled(Q5_1, _unpack_q5_1, _add_with_minimum),
    Q4_0.code: _compiled(Q4_0, _unpack_q4_0, _add_with_minimum),
    Q4_1.code: _compiled(Q4_1, _unpack_q4_1, _add_with_minimum),
    Q4_K.code: _compiled(Q4_K, _unpack_q4_k, _add_with_minimum),
    Q5_K.code: _compiled(Q5_K, _unpack_q5_k, _add_with_minimum),
    Q6_K.code: _compiled(Q6_K, _unpack_q6_k, _add_less_32),
}


def prepared(code: int, x: Any, scratch: Any) -> tuple[Mapping[int, CompiledRows], Any, Any, int]:
    """What is made once of activations for all rows that meet them: the rows by format, what these take for x, what
    they take beside it, and the threads. Of an Int8Scratch int8 products; else `scratch` is as `linear` has it."""
    if isinstance(scratch, Int8Scratch):
        quantize_rows(x, scratch.codes, scratch.factors)
        return ROWS_OF, scratch.codes, scratch.factors, scratch.threads
    linear.prepare(code, x, scratch)
    return linear.ROWS_OF, x, scratch, scratch.shape[0]


def can_share(matrices: Sequence[Matrix]) -> bool:
    """Whether products by all of these take the same of activations."""
    if all(isinstance(matrix, InterleavedMatrix) for matrix in matrices):
        return True
    is_plain = all(isinstance(matrix, QuantizedMatrix) for matrix in matrices)
    return is_plain and len({matrix.format.prepare for matrix in matrices}) == 1


def linear_int8(code: int, weights: Any, bias: Any, x: Any, out: Any, scratch: Int8Scratch) -> None:
    """As `reference`."""
    rows, codes, factors, threads = prepared(code, x, scratch)
    multiply_one(rows[code], weights, bias, codes, factors, out, threads)


def narrow(arguments: Arguments) -> Arguments:
    """The same product for CHECKED_ROWS rows, in groups spread over the matrix."""
    code, weights, bias, x, out, scratch = arguments
    last = len(weights) // ROWS - 1
    groups = np.unique(np.linspace(0, last, CHECKED_ROWS // ROWS).astype(np.int64))
    rows = (groups[:, None] * ROWS + np.arange(ROWS)).reshape(-1)
    return code, weights[rows], bias[rows] if bias.size else bias, x, out[:, rows], scratch


def _examples(block_format: BlockFormat, tokens: int, threads: int) -> Any:
    def examples(rng: np.random.Generator, size: int) -> Arguments:
        rows, columns = ROWS * (1 + size // 8), 256 * (1 + size // 64)
        if block_format.block_elements < 256:
            columns += 5 * block_format.block_elements  # a number that no power of two divides
        matrix = InterleavedMatrix.of(QuantizedMatrix.of(block_format, floats(rng, rows, columns)))
        bias = floats(rng, rows if size % 2 or tokens == 1 else 0)
        x, out = floats(rng, tokens, columns), np.zeros((tokens, rows), np.float32)
        x[0, :BLOCK] = 0  # has no scale
        return block_format.code, matrix.data, bias, x, out, Int8Scratch.of(tokens, columns, threads)

    return examples


def kernel_for(block_format: BlockFormat, tokens: int = 1, threads: int = 1) -> Kernel:
    """The kernel for interleaved weights of one format; its examples are of `tokens` and `threads`."""
    return Kernel(
        name=f"{block_format.name.lower()}_linear_int8",
        reference=reference,
        implementation=linear_int8,
        work=work,
        outputs=(4,),
        contract=contract("linear_int8"),
        examples=_examples(block_format, tokens, threads),
        narrow=narrow,
        parallel=True,
    )


LINEAR_INT8: dict[int, Kernel] = {code: kernel_for(FORMATS[code]) for code in UNITS}
