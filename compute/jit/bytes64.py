"""Sixty-four bytes at a time, and the sum of four products for each of sixteen rows: what int8 kernels are made of.

`Bytes64` is a Numba type without a Python value, as those of `vectors`: byte 4r + j belongs to row r of sixteen.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import models, register_model

from cbtop.compute.jit.cpu import HAS_AVX2, HAS_VNNI
from cbtop.compute.jit.vectors import (
    _FLOATS,
    _INT,
    _INTS,
    LANES,
    Codegen,
    _address,
    _called,
    _floats,
    _intrinsic,
    _ints,
    _load,
    _splat,
    constant_intrinsic,
)

_BYTE = ir.IntType(8)
_BYTES = ir.VectorType(_BYTE, 4 * LANES)


class Bytes64(types.Type):
    """Sixty-four bytes."""

    def __init__(self) -> None:
        super().__init__(name="Bytes64")


@register_model(Bytes64)
class _Bytes64Model(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, _BYTES)  # type: ignore[no-untyped-call]


_bytes = Bytes64()


def _splat_bytes(builder: Any, scalar: Any) -> Any:
    """The lowest byte of an int32 in all."""
    return builder.bitcast(_splat(builder, builder.mul(scalar, _INT(0x01010101)), _INTS), _BYTES)


@_intrinsic
def load_64(typing: Any, array: Any, row: Any, column: Any) -> tuple[Any, Codegen]:
    """array[row, column : column + 64] of a uint8 matrix."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _load(builder, _address(context, builder, signature.args[0], *values), _BYTES)

    return _bytes(array, types.uint64, types.uint64), generate


@_intrinsic
def shifted(typing: Any, vector: Any, amount: Any) -> tuple[Any, Codegen]:
    """Each byte shifted right by `amount` bits; above them those of the next byte come in, to be masked away.

    No processor shifts bytes: with an amount known only as it runs, that took products of Q5_K 1.4 times as long.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        words = builder.lshr(builder.bitcast(values[0], _INTS), _splat(builder, values[1], _INTS))
        return builder.bitcast(words, _BYTES)

    return _bytes(_bytes, types.int32), generate


@_intrinsic
def masked(typing: Any, vector: Any, mask: Any) -> tuple[Any, Codegen]:
    """Each byte & mask."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.and_(values[0], _splat_bytes(builder, values[1]))

    return _bytes(_bytes, types.int32), generate


@_intrinsic
def flipped(typing: Any, vector: Any, mask: Any) -> tuple[Any, Codegen]:
    """Each byte ^ mask."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.xor(values[0], _splat_bytes(builder, values[1]))

    return _bytes(_bytes, types.int32), generate


@_intrinsic
def with_upper_bits(typing: Any, low: Any, high: Any, place: Any, mask: Any) -> tuple[Any, Codegen]:
    """low | what of high's bits from `place` on (0 to 7) comes to lie in `mask` where that bit becomes the fifth.

    They are moved once, from where they lie to where they belong, in words: what of other bytes comes with them is
    masked away. AVX-512 rotates in one instruction, and takes `&` and `|` for one.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        low, high, place, mask = values
        words = builder.bitcast(high, _INTS)
        up = builder.sub(_INT(4), place)
        if HAS_VNNI:
            words = _called(builder, "llvm.fshl.v16i32", _INTS, [words, words, _splat(builder, up, _INTS)])
        else:
            is_up = builder.icmp_signed(">", up, _INT(0))
            left, right = (builder.select(is_up, *amounts) for amounts in ((up, _INT(0)), (_INT(0), builder.neg(up))))
            words = builder.lshr(builder.shl(words, _splat(builder, left, _INTS)), _splat(builder, right, _INTS))
        return builder.or_(low, builder.and_(builder.bitcast(words, _BYTES), _splat_bytes(builder, mask)))

    return _bytes(_bytes, _bytes, types.int32, types.int32), generate


@_intrinsic
def with_fifth_bits(typing: Any, low: Any, words: Any, shift: Any) -> tuple[Any, Codegen]:
    """low[4r + j] | 16 where bit shift + j of words[r] (Ints16) is one."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        low, words, shift = values
        shifted = builder.bitcast(builder.lshr(words, _splat(builder, shift, _INTS)), _BYTES)
        lowest = ir.Constant(ir.VectorType(_INT, 4 * LANES), [byte // 4 * 4 for byte in range(4 * LANES)])
        bits = builder.and_(
            builder.shuffle_vector(shifted, shifted, lowest), ir.Constant(_BYTES, [1, 2, 4, 8] * LANES)
        )
        zero, sixteen = ir.Constant(_BYTES, [0] * 4 * LANES), ir.Constant(_BYTES, [16] * 4 * LANES)
        return builder.or_(low, builder.select(builder.icmp_unsigned("!=", bits, zero), sixteen, zero))

    return _bytes(_bytes, _ints, types.int32), generate


@_intrinsic
def splat_int(typing: Any, scalar: Any) -> tuple[Any, Codegen]:
    """An int32 in all lanes."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _splat(builder, values[0], _INTS)

    return _ints(types.int32), generate


# How a tile's rows of weights stand beside each other: two of every four, then the other two. In this order the bytes
# of two columns need no permutation across a register, which takes two instructions for 32 weights.
_TILE_ROWS = [4 * quarter + 2 * half + lane for half in range(2) for quarter in range(4) for lane in range(2)]


@constant_intrinsic
def column_pairs(typing: Any, vector: Any, pair: Any, half: Any) -> tuple[Any, Codegen]:
    """Bytes 2 * pair and 2 * pair + 1 of eight rows beside each other, as Floats16: the first eight of a tile, or the
    last. `pair` and `half` are constants, 0 or 1."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        first, zero = 2 * pair.literal_value, 4 * LANES
        rows = _TILE_ROWS[8 * half.literal_value :][:8]
        places = [place for row in rows for j in range(2) for place in (4 * row + first + j, zero, zero, zero)]
        mask = ir.Constant(ir.VectorType(_INT, 4 * LANES), places)
        spread = builder.shuffle_vector(values[0], ir.Constant(_BYTES, [0] * 4 * LANES), mask)
        return builder.sitofp(builder.bitcast(spread, _INTS), _FLOATS)

    return _floats(_bytes, pair, half), generate


@constant_intrinsic
def row_pairs(typing: Any, vector: Any, half: Any) -> tuple[Any, Codegen]:
    """Of eight rows of a Floats16 each twice, as `column_pairs` has them."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        rows = _TILE_ROWS[8 * half.literal_value :][:8]
        return builder.shuffle_vector(values[0], values[0], _INTS([row for row in rows for _ in range(2)]))

    return _floats(_floats, half), generate


@_intrinsic
def from_tile(typing: Any, vector: Any) -> tuple[Any, Codegen]:
    """Sixteen rows that stand as in a tile, in their order."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        places = [_TILE_ROWS.index(row) for row in range(LANES)]
        return builder.shuffle_vector(values[0], values[0], _INTS(places))

    return _floats(_floats), generate


def _with_avx2(builder: Any, total: Any, q: Any, x: Any) -> Any:
    """As `add_products`, in halves: registers of AVX2 have 32 bytes."""
    # Bytes as int16, even ones and odd ones: sums of two products of bytes (vpmaddubsw) may not fit an int16.
    pairs = ir.VectorType(ir.IntType(16), LANES)
    eight, low_byte = ir.Constant(pairs, [8] * LANES), ir.Constant(pairs, [255] * LANES)
    halves = []
    for first in (0, 8):
        total_half = _part(builder, total, first, 8)
        q_half = builder.bitcast(_part(builder, q, 4 * first, 32), pairs)
        x_half = builder.bitcast(_part(builder, x, 4 * first, 32), pairs)
        even = [builder.and_(q_half, low_byte), builder.ashr(builder.shl(x_half, eight), eight)]
        odd = [builder.lshr(q_half, eight), builder.ashr(x_half, eight)]
        for factors in (even, odd):
            products = _called(builder, "llvm.x86.avx2.pmadd.wd", total_half.type, factors)
            total_half = builder.add(total_half, products)
        halves.append(total_half)
    return builder.shuffle_vector(*halves, ir.Constant(_INTS, list(range(LANES))))


def _part(builder: Any, vector: Any, first: int, count: int) -> Any:
    """`count` elements of a vector, from `first` on."""
    mask = ir.Constant(ir.VectorType(_INT, count), list(range(first, first + count)))
    return builder.shuffle_vector(vector, vector, mask)


@_intrinsic
def add_products(typing: Any, total: Any, q: Any, codes: Any, row: Any, column: Any) -> tuple[Any, Codegen]:
    """total[r] + sum over j < 4 of q[4r + j] (unsigned) * codes[row, column + j] (int8 in a uint8 matrix)."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        total, q, *place = values
        pointer = _address(context, builder, signature.args[2], *place)
        four = builder.load(builder.bitcast(pointer, _INT.as_pointer()), align=1, typ=_INT)
        x = builder.bitcast(_splat(builder, four, _INTS), _BYTES)
        if HAS_VNNI:
            return _called(builder, "llvm.x86.avx512.vpdpbusd.512", _INTS, [total, q, x])
        if HAS_AVX2:
            return _with_avx2(builder, total, q, x)
        for j in range(4):
            mask = ir.Constant(ir.VectorType(_INT, LANES), [4 * lane + j for lane in range(LANES)])
            a = builder.zext(builder.shuffle_vector(q, q, mask), _INTS)
            b = builder.sext(builder.shuffle_vector(x, x, mask), _INTS)
            total = builder.add(total, builder.mul(a, b))
        return total

    return _ints(_ints, _bytes, codes, types.uint64, types.uint64), generate
