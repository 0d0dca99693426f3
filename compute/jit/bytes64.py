"""Vectors of sixty-four bytes, for int8 kernels. Sums of four products are computed for sixteen rows at a time.

`Bytes64` is a Numba type without a Python value, like the types of `vectors`. Byte 4r + j belongs to row r of
sixteen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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
    cgutils,
    constant_intrinsic,
)

_BYTE = ir.IntType(8)
_BYTES = ir.VectorType(_BYTE, 4 * LANES)


Weights = Sequence[Callable[[], Any]]  # functions that each make one Bytes64 in the compiled code


class Bytes64(types.Type):
    """Sixty-four bytes."""

    def __init__(self) -> None:
        super().__init__(name="Bytes64")


@register_model(Bytes64)
class _Bytes64Model(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, _BYTES)  # type: ignore[no-untyped-call]


_bytes = Bytes64()
# whether products subtract 128 from the weights of formats that have weights above 127
LESS_128 = HAS_AVX2 and not HAS_VNNI
_tuple_of: Any = types.UniTuple


def _splat_bytes(builder: Any, scalar: Any) -> Any:
    """Return a vector with the lowest byte of an int32 in every byte."""
    return builder.bitcast(_splat(builder, builder.mul(scalar, _INT(0x01010101)), _INTS), _BYTES)


@_intrinsic
def load_64(typing: Any, array: Any, row: Any, column: Any) -> tuple[Any, Codegen]:
    """Return array[row, column : column + 64] of a uint8 matrix."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _load(builder, _address(context, builder, signature.args[0], *values), _BYTES)

    return _bytes(array, types.uint64, types.uint64), generate


@_intrinsic
def store_64(typing: Any, array: Any, row: Any, column: Any, vector: Any) -> tuple[Any, Codegen]:
    """Set array[row, column : column + 64] = vector, for a uint8 matrix."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = _address(context, builder, signature.args[0], *values[:3])
        builder.store(values[3], builder.bitcast(pointer, _BYTES.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(array, types.uint64, types.uint64, _bytes), generate


@_intrinsic
def shifted(typing: Any, vector: Any, amount: Any) -> tuple[Any, Codegen]:
    """Shift each byte right by `amount` bits.

    The caller must mask the high bits, because they come from the next byte.

    No processor can shift bytes, so words are shifted. If LLVM emulated a shift of bytes by an amount that is only
    known at run time, products of Q5_K would take 1.4 times as long.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        words = builder.lshr(builder.bitcast(values[0], _INTS), _splat(builder, values[1], _INTS))
        return builder.bitcast(words, _BYTES)

    return _bytes(_bytes, types.int32), generate


@_intrinsic
def masked(typing: Any, vector: Any, mask: Any) -> tuple[Any, Codegen]:
    """Return each byte & mask."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.and_(values[0], _splat_bytes(builder, values[1]))

    return _bytes(_bytes, types.int32), generate


@_intrinsic
def flipped(typing: Any, vector: Any, mask: Any) -> tuple[Any, Codegen]:
    """Return each byte ^ mask."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.xor(values[0], _splat_bytes(builder, values[1]))

    return _bytes(_bytes, types.int32), generate


@_intrinsic
def with_upper_bits(typing: Any, low: Any, high: Any, place: Any, mask: Any) -> tuple[Any, Codegen]:
    """Shift `high`, then return low | (high & mask).

    The shift turns bit `place` (0 to 7) of `high` into the fifth bit.

    Whole words are shifted, and the mask removes the bits of neighbouring bytes. AVX-512 rotates in one instruction,
    and computes `&` and `|` in one.
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
    """Return `low` with 16 added to some bytes.

    16 is added to byte 4r + j if bit shift + j of words[r] (Ints16) is 1.
    """

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


def _picked(builder: Any, table: Any, places: Any) -> Any:
    """Replace each byte of `places` (0 to 15) by a byte of `table`."""
    if HAS_VNNI:
        return _called(builder, "llvm.x86.avx512.pshuf.b.512", _BYTES, [table, places])
    if HAS_AVX2:
        kind = ir.VectorType(_BYTE, 32)
        parts = [[_part(builder, one, first, 32) for one in (table, places)] for first in (0, 32)]
        halves = [_called(builder, "llvm.x86.avx2.pshuf.b", kind, part) for part in parts]
        return builder.shuffle_vector(*halves, ir.Constant(ir.VectorType(_INT, 4 * LANES), list(range(4 * LANES))))
    found = ir.Constant(_BYTES, [0] * 4 * LANES)
    for place in range(16):
        mask = ir.Constant(ir.VectorType(_INT, 4 * LANES), [place] * 4 * LANES)
        is_there = builder.icmp_unsigned("==", places, ir.Constant(_BYTES, [place] * 4 * LANES))
        found = builder.select(is_there, builder.shuffle_vector(table, table, mask), found)
    return found


@_intrinsic
def picked(typing: Any, table: Any, places: Any) -> tuple[Any, Codegen]:
    """Replace each byte of `places` (0 to 15) by a byte of `table`.

    `places` and `table` have four parts of sixteen bytes each. A byte of `places` is looked up in the part of `table`
    at the same position.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _picked(builder, *values)

    return _bytes(_bytes, _bytes), generate


@_intrinsic
def looked_up(typing: Any, table: Any, places: Any) -> tuple[Any, Codegen]:
    """Do the same as `picked` for a table of int8, and add 128 to each."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        table, places = values
        more = ir.Constant(_BYTES, [128] * 4 * LANES)
        if HAS_VNNI:  # LLVM moves this `xor` out of the loop, because the table is constant
            return _picked(builder, builder.xor(table, more), places)
        # With AVX2, LLVM removes this `xor`, because the product applies the same `xor` to its weights.
        return builder.xor(_picked(builder, table, places), more)

    return _bytes(_bytes, _bytes), generate


# The order of the rows in a tile: from every group of four, first the first two rows, then the last two rows. In any
# other order, two columns would need permutations across a register (two instructions for 32 weights).
_TILE_ROWS = [4 * quarter + 2 * half + lane for half in range(2) for quarter in range(4) for lane in range(2)]


@constant_intrinsic
def column_pairs(typing: Any, vector: Any, pair: Any, half: Any) -> tuple[Any, Codegen]:
    """Return bytes 2 * pair and 2 * pair + 1 of eight rows, next to each other, as Floats16.

    `half` is 0 for the first eight rows of a tile and 1 for the last. `pair` is 0 or 1. Both are constants.
    """

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
    """Return eight rows of a Floats16. Each row is repeated once, and the order is the order of `column_pairs`."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        rows = _TILE_ROWS[8 * half.literal_value :][:8]
        return builder.shuffle_vector(values[0], values[0], _INTS([row for row in rows for _ in range(2)]))

    return _floats(_floats, half), generate


@_intrinsic
def from_tile(typing: Any, vector: Any) -> tuple[Any, Codegen]:
    """Reorder sixteen values from the order of rows in a tile to ascending order."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        places = [_TILE_ROWS.index(row) for row in range(LANES)]
        return builder.shuffle_vector(values[0], values[0], _INTS(places))

    return _floats(_floats), generate


_PAIRS, _EIGHT = ir.VectorType(ir.IntType(16), LANES), ir.VectorType(_INT, 8)
_ONES = ir.Constant(_PAIRS, [1] * LANES)


def _sums_with_avx2(builder: Any, weights: Weights, codes: Sequence[Sequence[Any]], largest: int) -> list[Any]:
    """Compute `sums_of_products` in two halves of 32 bytes, the size of an AVX2 register.

    With four tokens, the sums and factors fill all sixteen registers.
    """
    quads = [partial(_halves, builder, one) for one in weights]
    # Both halves of the weights use the first half of the codes, because the halves of the codes are equal.
    of_tokens = [[_part(builder, x, 0, 32) for x in own] for own in codes]
    sums = (_sums_of_signed if largest > 127 else _sums_of_small)(builder, quads, of_tokens, largest)
    whole = ir.Constant(_INTS, list(range(LANES)))
    return [builder.shuffle_vector(*both, whole) for both in sums]


def _halves(builder: Any, weights: Callable[[], Any]) -> list[Any]:
    made = weights()
    return [_part(builder, made, first, 32) for first in (0, 32)]


def _sums_of_small(
    builder: Any, quads: Sequence[Callable[[], Sequence[Any]]], codes: Sequence[Sequence[Any]], largest: int
) -> list[list[Any]]:
    """Return the sums of each token, in two halves.

    Products are added as int16, but at most as many as cannot overflow.
    """
    at_once = (1 << 15) // (2 * largest * 128)
    totals: list[list[Any]] = [[] for _ in codes]
    for begin in range(0, len(quads), at_once):
        together: list[list[Any]] = [[] for _ in codes]
        for i in range(begin, min(begin + at_once, len(quads))):
            halves = quads[i]()
            for token, own in enumerate(codes):
                products = [_called(builder, "llvm.x86.avx2.pmadd.ub.sw", _PAIRS, [q, own[i]]) for q in halves]
                together[token] = _added(builder, together[token], products)
        for token, sums in enumerate(together):
            found = [_called(builder, "llvm.x86.avx2.pmadd.wd", _EIGHT, [one, _ONES]) for one in sums]
            totals[token] = _added(builder, totals[token], found)
    return totals


def _sums_of_signed(
    builder: Any, quads: Sequence[Callable[[], Sequence[Any]]], codes: Sequence[Sequence[Any]], largest: int
) -> list[list[Any]]:
    """Do the same as `_sums_of_small` for formats that have weights above 127 (see LESS_128).

    Weights become int8. The instruction needs unsigned weights, so the sign of each weight is moved to its code. The
    sum of two products fits into an int16.
    """
    kind = ir.VectorType(_BYTE, 32)
    totals: list[list[Any]] = [[] for _ in codes]
    for i, quad in enumerate(quads):
        signed = [builder.xor(q, ir.Constant(kind, [128] * 32)) for q in quad()]
        sizes = [_called(builder, "llvm.abs.v32i8", kind, [one, ir.IntType(1)(0)]) for one in signed]
        for token, own in enumerate(codes):
            found = []
            for size, sign in zip(sizes, signed, strict=True):
                code = _called(builder, "llvm.x86.avx2.psign.b", kind, [own[i], sign])
                products = _called(builder, "llvm.x86.avx2.pmadd.ub.sw", _PAIRS, [size, code])
                found.append(_called(builder, "llvm.x86.avx2.pmadd.wd", _EIGHT, [products, _ONES]))
            totals[token] = _added(builder, totals[token], found)
    return totals


def _added(builder: Any, totals: list[Any], more: list[Any]) -> list[Any]:
    return [builder.add(one, other) for one, other in zip(totals, more, strict=True)] if totals else more


def _part(builder: Any, vector: Any, first: int, count: int) -> Any:
    """Return `count` elements of a vector, starting at element `first`."""
    mask = ir.Constant(ir.VectorType(_INT, count), list(range(first, first + count)))
    return builder.shuffle_vector(vector, vector, mask)


@constant_intrinsic
def sums_of_products(
    typing: Any, weights: Any, codes: Any, row: Any, column: Any, tokens: Any, largest: Any
) -> tuple[Any, Codegen]:
    """Return a tuple of Ints16, one for each of `tokens` tokens t.

    Element r is the sum over i and j < 4 of weights[i][4r + j] * codes[row + t, column + 4i + j]. `weights` is a
    tuple of unsigned Bytes64 that are at most `largest`. If `largest` is above 127, LESS_128 applies. `codes` is a
    uint8 matrix of int8 other than -128. `tokens` and `largest` are constants.
    """
    count, result = weights.count, _tuple_of(_ints, tokens.literal_value)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        quads, place = cgutils.unpack_tuple(builder, values[0], count), (signature.args[1], *values[1:4])
        given = [partial(lambda made: made, one) for one in quads]
        return _sums(context, builder, given, place, result, largest.literal_value)

    return result(weights, codes, types.uint64, types.uint64, tokens, largest), generate


@constant_intrinsic
def sums_of_loaded(
    typing: Any, count: Any, weights: Any, at: Any, codes: Any, row: Any, column: Any, tokens: Any, largest: Any
) -> tuple[Any, Codegen]:
    """Compute `sums_of_products` with weights from a uint8 matrix: `count` vectors of 64 bytes, from weights[0, at]
    on.

    Each vector is loaded when it is multiplied.
    """
    result = _tuple_of(_ints, tokens.literal_value)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        first = _address(context, builder, signature.args[1], values[1], values[2].type(0), values[2])
        lines = [builder.gep(first, [_INT(64 * i)]) for i in range(count.literal_value)]
        given = [partial(_load, builder, line, _BYTES) for line in lines]
        return _sums(context, builder, given, (signature.args[3], *values[3:6]), result, largest.literal_value)

    unsigned = types.uint64
    return result(count, weights, unsigned, codes, unsigned, unsigned, tokens, largest), generate


def _sums(context: Any, builder: Any, weights: Weights, place: Any, result: Any, largest: int) -> Any:
    array_type, array, row, column = place
    codes = []
    for token in range(len(result)):
        first = _address(context, builder, array_type, array, builder.add(row, row.type(token)), column)
        codes.append([_splat_of_four(builder, builder.gep(first, [_INT(4 * i)])) for i in range(len(weights))])
    return context.make_tuple(builder, result, _sums_of(weights, codes, builder, largest))


def _sums_of(weights: Weights, codes: Sequence[Sequence[Any]], builder: Any, largest: int) -> list[Any]:
    if HAS_AVX2 and not HAS_VNNI:
        return _sums_with_avx2(builder, weights, codes, largest)
    return _sums_one_by_one(builder, weights, codes)


@constant_intrinsic
def add_products_apart(
    typing: Any, totals: Any, weights: Any, codes: Any, row: Any, column: Any, apart: Any, largest: Any
) -> tuple[Any, Codegen]:
    """Add products to each Ints16 of the tuple `totals`.

    In row r of totals[i], this adds the sum over j < 4 of weights[i][4r + j] * codes[row, column + apart * i + j].
    `weights`, `codes` and `largest` are as in `sums_of_products`. `apart` is a constant.
    """
    count = totals.count

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        given = zip(*(cgutils.unpack_tuple(builder, one, count) for one in values[:2]), strict=True)
        first, found = _address(context, builder, signature.args[2], *values[2:5]), []
        for i, (total, quad) in enumerate(given):
            x = _splat_of_four(builder, builder.gep(first, [_INT(apart.literal_value * i)]))
            if HAS_VNNI:
                found.append(_added_by_vnni(builder, total, quad, x))
            else:
                (more,) = _sums_of([partial(lambda made: made, quad)], [[x]], builder, largest.literal_value)
                found.append(builder.add(total, more))
        return context.make_tuple(builder, totals, found)

    return totals(totals, weights, codes, types.uint64, types.uint64, apart, largest), generate


@_intrinsic
def multiplied_again(typing: Any, weights: Any, totals: Any) -> tuple[Any, Codegen]:
    """Multiply the 64 bytes of each Ints16 in `totals` by `weights`, and add the products to that Ints16.

    This measures the roof of the processor's instruction for int8 products, so the sums are meaningless. AVX2 adds
    all products as int16.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        added = _added_by_vnni if HAS_VNNI else _added_by_avx2
        found = [
            added(builder, total, builder.bitcast(total, _BYTES), values[0])
            for total in cgutils.unpack_tuple(builder, values[1], totals.count)
        ]
        return context.make_tuple(builder, totals, found)

    return totals(_bytes, totals), generate


def _added_by_vnni(builder: Any, total: Any, weights: Any, codes: Any) -> Any:
    return _called(builder, "llvm.x86.avx512.vpdpbusd.512", _INTS, [total, weights, codes])


def _added_by_avx2(builder: Any, total: Any, weights: Any, codes: Any) -> Any:
    halves = []
    for first in (0, 32):
        pairs = _part(builder, weights, first, 32), _part(builder, codes, first, 32)
        products = _called(builder, "llvm.x86.avx2.pmadd.ub.sw", _PAIRS, [*pairs])
        halves.append(builder.add(builder.bitcast(pairs[0], _PAIRS), products))
    both = ir.Constant(ir.VectorType(_INT, 2 * LANES), list(range(2 * LANES)))
    return builder.bitcast(builder.shuffle_vector(*halves, both), _INTS)


def _splat_of_four(builder: Any, pointer: Any) -> Any:
    """Return a vector that repeats the four bytes at `pointer` sixteen times."""
    four = builder.load(builder.bitcast(pointer, _INT.as_pointer()), align=1, typ=_INT)
    return builder.bitcast(_splat(builder, four, _INTS), _BYTES)


def _sums_one_by_one(builder: Any, weights: Weights, codes: Sequence[Sequence[Any]]) -> list[Any]:
    """Compute `sums_of_products` with VNNI. Without VNNI, use instructions that every processor has."""
    totals: list[Any] = [ir.Constant(_INTS, [0] * LANES)] * len(codes)
    for i, made in enumerate(weights):
        q = made()
        for token, own in enumerate(codes):
            x = own[i]
            if HAS_VNNI:
                totals[token] = _added_by_vnni(builder, totals[token], q, x)
                continue
            for j in range(4):
                mask = ir.Constant(ir.VectorType(_INT, LANES), [4 * lane + j for lane in range(LANES)])
                a = builder.zext(builder.shuffle_vector(q, q, mask), _INTS)
                b = builder.sext(builder.shuffle_vector(x, x, mask), _INTS)
                totals[token] = builder.add(totals[token], builder.mul(a, b))
    return totals
