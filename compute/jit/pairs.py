"""Products of bytes with AVX2.

A loop adds either pairs of products as int16, or sums of four products of signed bytes.

The processor must have AVX2 (`cpu.HAS_AVX2`). The functions of `bytes64` work on every processor.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from cbtop.compute.jit.bytes64 import _BYTE, _EIGHT, _ONES, _PAIRS, _bytes, _part, _splat_of_four
from cbtop.compute.jit.vectors import _INT, _INTS, LANES, Codegen, _address, _called, _intrinsic, _ints

_ALL_PAIRS, _HALF = ir.VectorType(ir.IntType(16), 2 * LANES), ir.VectorType(_BYTE, 32)


def _codes(context: Any, builder: Any, array_type: Any, place: Any) -> Any:
    """Return a vector that fills an AVX2 register by repeating four codes."""
    return _part(builder, _splat_of_four(builder, _address(context, builder, array_type, *place)), 0, 32)


def _joined(builder: Any, halves: list[Any], count: int) -> Any:
    return builder.shuffle_vector(*halves, ir.Constant(ir.VectorType(_INT, count), list(range(count))))


@_intrinsic
def add_pairs(typing: Any, total: Any, weights: Any, codes: Any, row: Any, column: Any) -> tuple[Any, Codegen]:
    """Add the products of weights and codes to `total`, which holds two int16 for each row.

    In row r, the first int16 gets weights[4r + j] * codes[row, column + j] for j = 0 and 1. The second int16 gets the
    products for j = 2 and 3. The sums must not overflow. A product is at most 127 times the largest weight. `weights`
    is an unsigned Bytes64. `codes` are int8 in a uint8 matrix.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pairs, x = builder.bitcast(values[0], _ALL_PAIRS), _codes(context, builder, signature.args[2], values[2:])
        halves = []
        for first in (0, 32):
            of_weights = _part(builder, values[1], first, 32)
            products = _called(builder, "llvm.x86.avx2.pmadd.ub.sw", _PAIRS, [of_weights, x])
            halves.append(builder.add(_part(builder, pairs, first // 2, LANES), products))
        return builder.bitcast(_joined(builder, halves, 2 * LANES), _INTS)

    return _ints(_ints, _bytes, codes, types.uint64, types.uint64), generate


@_intrinsic
def sums_of_pairs(typing: Any, pairs: Any) -> tuple[Any, Codegen]:
    """Return the sum of both int16 of each row as Ints16. `pairs` is the result of `add_pairs`."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pairs = builder.bitcast(values[0], _ALL_PAIRS)
        parts = [_part(builder, pairs, first, LANES) for first in (0, LANES)]
        halves = [_called(builder, "llvm.x86.avx2.pmadd.wd", _EIGHT, [part, _ONES]) for part in parts]
        return _joined(builder, halves, LANES)

    return _ints(_ints), generate


@_intrinsic
def add_signed(typing: Any, total: Any, weights: Any, codes: Any, row: Any, column: Any) -> tuple[Any, Codegen]:
    """Return total + the sum over j < 4 of weights[4r + j] * codes[row, column + j] for each row r, as Ints16.

    `weights` is a Bytes64 of int8. `codes` is a uint8 matrix of int8 other than -128.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        x, halves = _codes(context, builder, signature.args[2], values[2:]), []
        for first in (0, 32):
            signed = _part(builder, values[1], first, 32)
            # The instruction needs one unsigned factor. So make the weight positive, and move its sign to the code.
            size = _called(builder, "llvm.abs.v32i8", _HALF, [signed, ir.IntType(1)(0)])
            code = _called(builder, "llvm.x86.avx2.psign.b", _HALF, [x, signed])
            products = _called(builder, "llvm.x86.avx2.pmadd.ub.sw", _PAIRS, [size, code])
            sums = _called(builder, "llvm.x86.avx2.pmadd.wd", _EIGHT, [products, _ONES])
            halves.append(builder.add(_part(builder, values[0], first // 4, 8), sums))
        return _joined(builder, halves, LANES)

    return _ints(_ints, _bytes, codes, types.uint64, types.uint64), generate
