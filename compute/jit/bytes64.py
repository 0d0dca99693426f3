"""Sixty-four bytes at a time, and the sum of four products for each of sixteen rows: what int8 kernels are made of.

`Bytes64` is a Numba type without a Python value, as those of `vectors`: byte 4r + j belongs to row r of sixteen.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import models, register_model

from cbtop.compute.jit.cpu import HAS_VNNI
from cbtop.compute.jit.vectors import _INT, _INTS, LANES, Codegen, _address, _intrinsic, _ints, _load, _splat, cgutils

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
    """Each byte shifted right by `amount` bits."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.lshr(values[0], _splat_bytes(builder, values[1]))

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
def with_upper_bits(typing: Any, low: Any, high: Any) -> tuple[Any, Codegen]:
    """low | high << 4, of each byte."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.or_(values[0], builder.shl(values[1], ir.Constant(_BYTES, [4] * 4 * LANES)))

    return _bytes(_bytes, _bytes), generate


@_intrinsic
def splat_int(typing: Any, scalar: Any) -> tuple[Any, Codegen]:
    """An int32 in all lanes."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _splat(builder, values[0], _INTS)

    return _ints(types.int32), generate


@_intrinsic
def add_products(typing: Any, total: Any, q: Any, codes: Any, row: Any, column: Any) -> tuple[Any, Codegen]:
    """total[r] + sum over j < 4 of q[4r + j] (unsigned) * codes[row, column + j] (int8 in a uint8 matrix)."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        total, q, *place = values
        pointer = _address(context, builder, signature.args[2], *place)
        four = builder.load(builder.bitcast(pointer, _INT.as_pointer()), align=1, typ=_INT)
        x = builder.bitcast(_splat(builder, four, _INTS), _BYTES)
        if HAS_VNNI:
            kind = ir.FunctionType(_INTS, [_INTS, _BYTES, _BYTES])
            function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpdpbusd.512")
            return builder.call(function, [total, q, x])
        for j in range(4):
            mask = ir.Constant(ir.VectorType(_INT, LANES), [4 * lane + j for lane in range(LANES)])
            a = builder.zext(builder.shuffle_vector(q, q, mask), _INTS)
            b = builder.sext(builder.shuffle_vector(x, x, mask), _INTS)
            total = builder.add(total, builder.mul(a, b))
        return total

    return _ints(_ints, _bytes, codes, types.uint64, types.uint64), generate
