"""Tiles are registers of sixteen rows of 64 bytes. One instruction multiplies two of them (Intel AMX).

A thread configures its tiles before it uses them and releases them afterwards. While tiles are in use, the system
saves 8 KB more for the thread. A tile is identified by its number, which is a constant in the code.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from cbtop.compute.jit.vectors import (
    Codegen,
    _address,
    _called,
    _intrinsic,
    cgutils,
    constant_intrinsic,
)

ROWS, ROW_BYTES = 16, 64
_BYTE, _LONG = ir.IntType(8), ir.IntType(64)
# The operand of ldtilecfg for eight tiles. Byte 0 is the palette, 1. From byte 16 on, 16 bits per tile contain the
# number of bytes in a row. From byte 48 on, one byte per tile contains the number of rows.
_CONFIGURATION = bytes([1, *[0] * 15, *[ROW_BYTES, 0] * 8, *[0] * 16, *[ROWS] * 8, *[0] * 8])


def _number(tile: Any) -> Any:
    """Return a tile's number as an immediate operand of the instruction."""
    return _BYTE(tile.literal_value)


_VOID = ir.VoidType()


@_intrinsic
def configure_tiles(typing: Any) -> tuple[Any, Codegen]:
    """Configure eight tiles for this thread, filled with zeros."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        data = cgutils.global_constant(builder, "tiles", cgutils.make_bytearray(bytearray(_CONFIGURATION)))
        _called(builder, "llvm.x86.ldtilecfg", _VOID, [builder.bitcast(data, _BYTE.as_pointer())])
        return context.get_dummy_value()

    return types.void(), generate


@_intrinsic
def release_tiles(typing: Any) -> tuple[Any, Codegen]:
    """Release this thread's tiles."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        _called(builder, "llvm.x86.tilerelease", _VOID, [])
        return context.get_dummy_value()

    return types.void(), generate


@constant_intrinsic
def zero_tile(typing: Any, tile: Any) -> tuple[Any, Codegen]:
    """Set a tile to zero."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        _called(builder, "llvm.x86.tilezero", _VOID, [_number(tile)])
        return context.get_dummy_value()

    return types.void(tile), generate


def _moved(name: str, array: Any, tile: Any) -> tuple[Any, Codegen]:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = _address(context, builder, array, *values[1:])
        _called(builder, name, _VOID, [_number(tile), pointer, _LONG(ROW_BYTES)])
        return context.get_dummy_value()

    return types.void(tile, array, types.uint64, types.uint64), generate


@constant_intrinsic
def load_tile(typing: Any, tile: Any, array: Any, row: Any, column: Any) -> tuple[Any, Codegen]:
    """Load a tile with the 1024 bytes from array[row, column] on."""
    return _moved("llvm.x86.tileloadd64", array, tile)


@constant_intrinsic
def store_tile(typing: Any, tile: Any, array: Any, row: Any, column: Any) -> tuple[Any, Codegen]:
    """Store a tile in the 1024 bytes from array[row, column] on."""
    return _moved("llvm.x86.tilestored64", array, tile)


@constant_intrinsic
def multiply_tiles(typing: Any, total: Any, a: Any, b: Any) -> tuple[Any, Codegen]:
    """Set total[m, n] += sum over k < 32 of a[m, k] * b[k // 2, 2 n + k % 2].

    a and b contain bfloat16, and totals are float32.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        _called(builder, "llvm.x86.tdpbf16ps", _VOID, [_number(total), _number(a), _number(b)])
        return context.get_dummy_value()

    return types.void(total, a, b), generate
