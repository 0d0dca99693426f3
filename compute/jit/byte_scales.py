"""Convert scales of one byte, as in MXFP4 and NVFP4, to float32. The conversions are exact."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from cbtop.compute.jit.vectors import (
    _FLOATS,
    _HALVES,
    _INTS,
    LANES,
    Codegen,
    _floats,
    _intrinsic,
    _ints,
    _widened,
)

_SHORTS = ir.VectorType(ir.IntType(16), LANES)


def _all_of(value: int) -> Any:
    return ir.Constant(_INTS, [value] * LANES)


@_intrinsic
def of_e8m0(typing: Any, exponents: Any) -> tuple[Any, Codegen]:
    """Return 2 to the power of (exponent - 128), as Floats16, for Ints16 of 0 to 255."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        # The powers of 0 and 1 are subnormal, so the result is the product of two powers of half the size.
        rounded_down = builder.lshr(values[0], _all_of(1))
        factors = []
        for half in (rounded_down, builder.sub(values[0], rounded_down)):
            bits = builder.shl(builder.add(half, _all_of(127 - 64)), _all_of(23))
            factors.append(builder.bitcast(bits, _FLOATS))
        return builder.fmul(*factors)

    return _floats(_ints), generate


@_intrinsic
def of_ue4m3(typing: Any, codes: Any) -> tuple[Any, Codegen]:
    """Return half of each E4M3 number, as Floats16, for Ints16 of 0 to 255.

    Like ggml, ignore the highest bit, and return 0 for 0x7F.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        # A binary16 has a larger exponent, with a bias of 15 instead of 7. Subnormal numbers fit, too.
        (codes,) = values
        bits = builder.shl(builder.and_(codes, _all_of(0x7F)), _all_of(7))
        number = _widened(builder, builder.bitcast(builder.trunc(bits, _SHORTS), _HALVES))
        scaled = builder.fmul(number, ir.Constant(_FLOATS, [2.0 ** (15 - 7) / 2] * LANES))
        is_nan = builder.icmp_unsigned("==", codes, _all_of(0x7F))
        return builder.select(is_nan, ir.Constant(_FLOATS, [0.0] * LANES), scaled)

    return _floats(_ints), generate
