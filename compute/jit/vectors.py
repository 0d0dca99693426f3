"""LLVM vectors of sixteen numbers, used as values inside compiled kernels.

`Ints16` (int32) and `Floats16` (float32) are Numba types without a Python value. They can only be passed to the
functions below, inside a function under @jit. LLVM puts them into the processor's registers: one of 512 bits, two of
256, or four of 128.
"""

# In plain loops, a quantised dot product sums across lanes for each block, and converts each scale separately. With
# sums and scales in vectors, the product is about twice as fast.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils as numba_cgutils
from numba.core import types
from numba.core.errors import LoweringError
from numba.extending import intrinsic as numba_intrinsic
from numba.extending import models, register_model

from cbtop.compute.jit.compile import (
    HALF_TO_SINGLE_BIAS,
    INFINITE_HALF,
    SMALLEST_NORMAL_HALF,
    SMALLEST_NORMAL_HALF_VALUE,
)
from cbtop.compute.jit.cpu import HAS_F16C

# the base class in Numba has no type annotations
cgutils: Any = numba_cgutils
_initialise_model: Any = models.PrimitiveModel.__init__

LANES = 16
_INT = ir.IntType(32)
_INTS = ir.VectorType(_INT, LANES)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)
_BYTES = ir.VectorType(ir.IntType(8), LANES)
_FAST = ("fast",)  # flags that allow LLVM to reorder sums, and to fuse multiplications with additions

Codegen = Callable[[Any, Any, Any, Any], Any]
_pointer_to: Any = types.CPointer
_tuple_of: Any = types.UniTuple


class Ints16(types.Type):
    """Sixteen int32."""

    def __init__(self) -> None:
        super().__init__(name="Ints16")


class Floats16(types.Type):
    """Sixteen float32."""

    def __init__(self) -> None:
        super().__init__(name="Floats16")


@register_model(Ints16)
class _Ints16Model(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        _initialise_model(self, manager, numba_type, _INTS)


@register_model(Floats16)
class _Floats16Model(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        _initialise_model(self, manager, numba_type, _FLOATS)


_ints, _floats = Ints16(), Floats16()


def _intrinsic(define: Any) -> Any:
    """Declare a Numba intrinsic. Only compiled code may call it."""
    return numba_intrinsic(define)


def constant_intrinsic(define: Any) -> Any:
    """Declare a Numba intrinsic.

    If an argument is a constant in the code, the intrinsic gets the value of this constant.
    """
    return numba_intrinsic(prefer_literal=True)(define)


def _called(builder: Any, name: str, result: Any, values: list[Any]) -> Any:
    """Call the LLVM intrinsic `name` on `values`."""
    kind = ir.FunctionType(result, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


def _splat(builder: Any, scalar: Any, vector: ir.VectorType) -> Any:
    """Return a vector with `scalar` in all lanes."""
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, _INT(0))
    return builder.shuffle_vector(
        first, ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(_INT, LANES), [0] * LANES)
    )


def _address(context: Any, builder: Any, array_type: Any, array: Any, row: Any, column: Any) -> Any:
    """Return a pointer to array[row, column]. The rows of the matrix must be contiguous."""
    if array_type.layout != "C":
        raise LoweringError(f"{array_type} where rows that lie one after the other are wanted (np.ascontiguousarray)")
    view = context.make_array(array_type)(context, builder, array)
    row_stride = cgutils.unpack_tuple(builder, view.strides, 2)[0]
    # The element's size is a constant here. Reading a stride of the array would take an addition for every load.
    size_bytes = ir.IntType(64)(array_type.dtype.bitwidth // 8)
    offset = builder.add(builder.mul(row, row_stride), builder.mul(column, size_bytes))
    return builder.gep(builder.bitcast(view.data, ir.IntType(8).as_pointer()), [offset])


def _load(builder: Any, pointer: Any, vector: ir.VectorType) -> Any:
    return builder.load(builder.bitcast(pointer, vector.as_pointer()), align=1, typ=vector)


def _widened(builder: Any, halves: Any) -> Any:
    """Return sixteen binary16 as float32."""
    if HAS_F16C:
        return builder.fpext(halves, _FLOATS)

    def all_of(value: int) -> Any:
        return ir.Constant(_INTS, [value] * LANES)

    # Use integers, as compile.half_to_float does: add the leading one that subnormal numbers lack, and subtract it
    # later.
    wide = builder.zext(builder.bitcast(halves, ir.VectorType(ir.IntType(16), LANES)), _INTS)
    sign = builder.shl(builder.and_(wide, all_of(0x8000)), all_of(16))
    magnitude = builder.and_(wide, all_of(0x7FFF))
    exponent = all_of(int(HALF_TO_SINGLE_BIAS))
    shifted = builder.add(builder.shl(magnitude, all_of(13)), exponent)
    is_finite = builder.icmp_unsigned("<", magnitude, all_of(int(INFINITE_HALF)))
    normal = builder.select(is_finite, shifted, builder.add(shifted, exponent))
    leading = builder.bitcast(builder.add(shifted, all_of(1 << 23)), _FLOATS)
    smallest = ir.Constant(_FLOATS, [float(SMALLEST_NORMAL_HALF_VALUE)] * LANES)
    subnormal = builder.bitcast(builder.fsub(leading, smallest), _INTS)
    is_normal = builder.icmp_unsigned(">=", magnitude, all_of(int(SMALLEST_NORMAL_HALF)))
    return builder.bitcast(builder.or_(builder.select(is_normal, normal, subnormal), sign), _FLOATS)


@_intrinsic
def load_floats(typing: Any, array: Any, row: Any, column: Any) -> tuple[Any, Codegen]:
    """Return array[row, column : column + 16] of a float32 matrix.

    For a uint8 matrix, return the sixteen floats that begin at byte `column` of the row.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _load(builder, _address(context, builder, array, *values), _FLOATS)

    return _floats(array, types.uint64, types.uint64), generate


@_intrinsic
def load_bfloats(typing: Any, array: Any, row: Any, column: Any) -> tuple[Any, Codegen]:
    """Return the sixteen bfloat16 in array[row, column : column + 32] of a uint8 matrix, as Floats16."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        bits = _load(builder, _address(context, builder, array, *values), ir.VectorType(ir.IntType(16), LANES))
        return builder.bitcast(builder.shl(builder.zext(bits, _INTS), _INTS([16] * LANES)), _FLOATS)

    return _floats(array, types.uint64, types.uint64), generate


@_intrinsic
def load_halves(typing: Any, array: Any, row: Any, column: Any) -> tuple[Any, Codegen]:
    """Return the sixteen binary16 in array[row, column : column + 32] of a uint8 matrix, as Floats16."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _widened(builder, _load(builder, _address(context, builder, array, *values), _HALVES))

    return _floats(array, types.uint64, types.uint64), generate


@_intrinsic
def store_floats(typing: Any, array: Any, row: Any, column: Any, vector: Any) -> tuple[Any, Codegen]:
    """Set array[row, column : column + 16] = vector, in a float32 matrix."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = _address(context, builder, signature.args[0], *values[:3])
        builder.store(values[3], builder.bitcast(pointer, _FLOATS.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(array, types.uint64, types.uint64, _floats), generate


@_intrinsic
def load_bytes(typing: Any, array: Any, row: Any, column: Any) -> tuple[Any, Codegen]:
    """Return array[row, column : column + 16] of a uint8 matrix as Ints16."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.zext(_load(builder, _address(context, builder, array, *values), _BYTES), _INTS)

    return _ints(array, types.uint64, types.uint64), generate


@_intrinsic
def load_signed_bytes(typing: Any, array: Any, row: Any, column: Any) -> tuple[Any, Codegen]:
    """Return array[row, column : column + 16] of a uint8 matrix, read as int8, as Ints16."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.sext(_load(builder, _address(context, builder, array, *values), _BYTES), _INTS)

    return _ints(array, types.uint64, types.uint64), generate


@_intrinsic
def load_words(typing: Any, array: Any, row: Any, column: Any) -> tuple[Any, Codegen]:
    """Return the sixteen little-endian int32 in array[row, column : column + 64] of a uint8 matrix."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _load(builder, _address(context, builder, array, *values), _INTS)

    return _ints(array, types.uint64, types.uint64), generate


@_intrinsic
def store_words(typing: Any, array: Any, row: Any, column: Any, vector: Any) -> tuple[Any, Codegen]:
    """Set array[row, column : column + 64] = Ints16, in a uint8 matrix."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = _address(context, builder, signature.args[0], *values[:3])
        builder.store(values[3], builder.bitcast(pointer, _INTS.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(array, types.uint64, types.uint64, _ints), generate


@_intrinsic
def bytes_of(typing: Any, low: Any, high: Any) -> tuple[Any, Codegen]:
    """Return the eight bytes of each of two uint64, lowest first, as Ints16."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pair = ir.VectorType(ir.IntType(64), 2)
        words = builder.insert_element(ir.Constant(pair, ir.Undefined), values[0], _INT(0))
        words = builder.insert_element(words, values[1], _INT(1))
        return builder.zext(builder.bitcast(words, _BYTES), _INTS)

    return _ints(types.uint64, types.uint64), generate


@_intrinsic
def bits_of(typing: Any, word: Any) -> tuple[Any, Codegen]:
    """Return the low sixteen bits of a uint32, lowest first, each as 0 or 1."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        shifted = builder.lshr(_splat(builder, values[0], _INTS), _INTS(list(range(LANES))))
        return builder.and_(shifted, _INTS([1] * LANES))

    return _ints(types.uint32), generate


def _prefetched(array: Any, locality: int) -> tuple[Any, Codegen]:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = _address(context, builder, array, *values)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, _INT, _INT, _INT])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        # arguments of LLVM's prefetch instruction for reading data
        builder.call(function, [pointer, _INT(0), _INT(locality), _INT(1)])
        return context.get_dummy_value()

    return types.void(array, types.uint64, types.uint64), generate


@_intrinsic
def prefetch(typing: Any, array: Any, row: Any, column: Any) -> tuple[Any, Codegen]:
    """Prefetch the cache line of array[row, column] into L1. The address may be beyond the end of the array."""
    return _prefetched(array, 3)


@_intrinsic
def prefetch_to_l2(typing: Any, array: Any, row: Any, column: Any) -> tuple[Any, Codegen]:
    """Prefetch the cache line of array[row, column] into L2. The address may be beyond the end of the array."""
    return _prefetched(array, 2)


@constant_intrinsic
def on_stack(typing: Any, lines: Any) -> tuple[Any, Codegen]:
    """Return a pointer to `lines` times 64 bytes on the stack, aligned to a cache line. Pass it to `carray`."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        # Memory on the stack is allocated once per call, and not in every pass of a loop.
        with builder.goto_entry_block():
            room = builder.alloca(ir.ArrayType(ir.IntType(8), 64 * lines.literal_value))
        room.align = 64
        return builder.bitcast(room, ir.IntType(8).as_pointer())

    return _pointer_to(types.uint8)(lines), generate


@_intrinsic
def turns(typing: Any, number: Any) -> tuple[Any, Codegen]:
    """Return `number`, but hide its value from LLVM. LLVM then does not unroll a loop that runs this number of
    times.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        word = ir.IntType(64)
        return builder.call(ir.InlineAsm(ir.FunctionType(word, [word]), "", "=r,0"), [values[0]])

    return types.uint64(types.uint64), generate


def _int_operation(name: str) -> Any:
    def define(typing: Any, vector: Any, scalar: Any) -> tuple[Any, Codegen]:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return getattr(builder, name)(values[0], _splat(builder, values[1], _INTS))

        return _ints(_ints, types.int32), generate

    return _intrinsic(define)


bits_and = _int_operation("and_")  # the types of a function (ints, int32) -> ints
shift_right = _int_operation("lshr")
shift_left = _int_operation("shl")


@_intrinsic
def bits_or(typing: Any, a: Any, b: Any) -> tuple[Any, Codegen]:
    """Return a | b for two Ints16."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.or_(*values)

    return _ints(_ints, _ints), generate


@_intrinsic
def add_ints(typing: Any, a: Any, b: Any) -> tuple[Any, Codegen]:
    """Return a + b for two Ints16."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.add(*values)

    return _ints(_ints, _ints), generate


@_intrinsic
def to_floats(typing: Any, vector: Any) -> tuple[Any, Codegen]:
    """Convert Ints16 to Floats16."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.sitofp(values[0], _FLOATS)

    return _floats(_ints), generate


@_intrinsic
def splat(typing: Any, scalar: Any) -> tuple[Any, Codegen]:
    """Return a Floats16 with a float32 in all lanes."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _splat(builder, values[0], _FLOATS)

    return _floats(types.float32), generate


@_intrinsic
def no_ints(typing: Any) -> tuple[Any, Codegen]:
    """Return an Ints16 of zeros."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _INTS([0] * LANES)

    return _ints(), generate


@_intrinsic
def lane(typing: Any, vector: Any, index: Any) -> tuple[Any, Codegen]:
    """Return a Floats16 with lane `index` in all lanes. If the index is a constant, this is one shuffle."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _splat(builder, builder.extract_element(values[0], values[1]), _FLOATS)

    return _floats(_floats, types.uint64), generate


@_intrinsic
def halves(typing: Any, low: Any, high: Any) -> tuple[Any, Codegen]:
    """Return a Floats16 with one float32 in lanes 0-7 and another in lanes 8-15."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        mask = ir.Constant(ir.VectorType(_INT, LANES), [0] * 8 + [LANES] * 8)
        return builder.shuffle_vector(_splat(builder, values[0], _FLOATS), _splat(builder, values[1], _FLOATS), mask)

    return _floats(types.float32, types.float32), generate


@_intrinsic
def look_up(typing: Any, table: Any, places: Any) -> tuple[Any, Codegen]:
    """Return sixteen elements of a Floats16, by their indices of 0 to 15. With AVX-512 this is one permutation."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        table, places = values
        found = ir.Constant(_FLOATS, ir.Undefined)
        for number in range(LANES):
            place = builder.extract_element(places, _INT(number))
            found = builder.insert_element(found, builder.extract_element(table, place), _INT(number))
        return found

    return _floats(_floats, _ints), generate


@_intrinsic
def add(typing: Any, a: Any, b: Any) -> tuple[Any, Codegen]:
    """Return a + b for two Floats16."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.fadd(*values, flags=_FAST)

    return _floats(_floats, _floats), generate


@_intrinsic
def subtract(typing: Any, a: Any, b: Any) -> tuple[Any, Codegen]:
    """Return a - b for two Floats16."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.fsub(*values, flags=_FAST)

    return _floats(_floats, _floats), generate


@_intrinsic
def multiply(typing: Any, a: Any, b: Any) -> tuple[Any, Codegen]:
    """Return a * b + c for Floats16, as one fused operation."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.fmul(*values, flags=_FAST)

    return _floats(_floats, _floats), generate


@_intrinsic
def multiply_add(typing: Any, a: Any, b: Any, c: Any) -> tuple[Any, Codegen]:
    """Return a * b + c for Floats16, as one fused operation."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.fadd(builder.fmul(values[0], values[1], flags=_FAST), values[2], flags=_FAST)

    return _floats(_floats, _floats, _floats), generate


@constant_intrinsic
def chains(typing: Any, value: Any, count: Any) -> tuple[Any, Codegen]:
    """Return a tuple of `count` Floats16, each a different multiple of `value`. `count` is a constant."""
    made = _tuple_of(_floats, count.literal_value)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        of_each = (_FLOATS([1 + number / made.count] * LANES) for number in range(made.count))
        return context.make_tuple(builder, made, [builder.fmul(values[0], one) for one in of_each])

    return made(_floats, count), generate


@_intrinsic
def multiply_add_again(typing: Any, totals: Any, factor: Any, term: Any) -> tuple[Any, Codegen]:
    """Return each Floats16 of the tuple `totals` times `factor`, plus `term`.

    The results do not depend on each other.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        found = [
            builder.fadd(builder.fmul(total, values[1], flags=_FAST), values[2], flags=_FAST)
            for total in cgutils.unpack_tuple(builder, values[0], totals.count)
        ]
        return context.make_tuple(builder, totals, found)

    return totals(totals, _floats, _floats), generate


@_intrinsic
def total_of(typing: Any, vector: Any) -> tuple[Any, Codegen]:
    """Return the sum of a Floats16's lanes."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType(), _FLOATS])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.vector.reduce.fadd.v16f32")
        return builder.call(function, [ir.FloatType()(0.0), values[0]], fastmath=_FAST)

    return types.float32(_floats), generate


@_intrinsic
def larger(typing: Any, a: Any, b: Any) -> tuple[Any, Codegen]:
    """Return the larger of two Floats16 in each lane, or the first if one is NaN."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.select(builder.fcmp_unordered(">=", *values), *values)

    return _floats(_floats, _floats), generate


@_intrinsic
def largest_of(typing: Any, vector: Any) -> tuple[Any, Codegen]:
    """Return the largest of a Floats16's lanes. No lane may be NaN."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.FloatType(), [_FLOATS])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.vector.reduce.fmax.v16f32")
        return builder.call(function, values, fastmath=_FAST)

    return types.float32(_floats), generate


@_intrinsic
def any_above(typing: Any, vector: Any, scalar: Any) -> tuple[Any, Codegen]:
    """Return whether any lane of a Floats16 is greater than a float32."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        above = builder.fcmp_ordered(">", values[0], _splat(builder, values[1], _FLOATS))
        bits = builder.bitcast(above, ir.IntType(LANES))
        return builder.icmp_unsigned("!=", bits, bits.type(0))

    return types.boolean(_floats, types.float32), generate


@_intrinsic
def rounded(typing: Any, vector: Any) -> tuple[Any, Codegen]:
    """Round each lane of a Floats16 to the nearest whole number, halves to even."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _called(builder, "llvm.rint.v16f32", _FLOATS, values)

    return _floats(_floats), generate


@_intrinsic
def power_of_two(typing: Any, vector: Any) -> tuple[Any, Codegen]:
    """Return 2 to the power of each lane of a Floats16.

    Lanes are whole numbers of -126 to 127; for -127 the result is 0.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        exponent = builder.add(builder.fptosi(values[0], _INTS), _INTS([127] * LANES))
        return builder.bitcast(builder.shl(exponent, _INTS([23] * LANES)), _FLOATS)

    return _floats(_floats), generate


@_intrinsic
def largest_magnitude(typing: Any, a: Any, b: Any) -> tuple[Any, Codegen]:
    """Return the bits of the largest magnitude in the lanes of two Floats16.

    NaN counts as larger than all numbers.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        mask = _INTS([0x7FFFFFFF] * LANES)
        a, b = (builder.and_(builder.bitcast(one, _INTS), mask) for one in values)
        return _called(builder, "llvm.vector.reduce.smax.v16i32", _INT, [_larger_of(builder, a, b)])

    return types.int32(_floats, _floats), generate


def _larger_of(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.icmp_signed(">", a, b), a, b)


@_intrinsic
def store_rounded(typing: Any, array: Any, row: Any, column: Any, vector: Any, factor: Any) -> tuple[Any, Codegen]:
    """Multiply each lane by `factor`, and store the nearest int8 in array[row, column : column + 16], a uint8 matrix.

    Ties are rounded to even. Returns the sum of the int8. The result is exact to the last bit, because nothing is
    reordered.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = _address(context, builder, signature.args[0], *values[:3])
        product = builder.fmul(values[3], _splat(builder, values[4], _FLOATS))
        codes = builder.fptosi(_called(builder, "llvm.rint.v16f32", _FLOATS, [product]), _INTS)
        builder.store(builder.trunc(codes, _BYTES), builder.bitcast(pointer, _BYTES.as_pointer()), align=1)
        return _called(builder, "llvm.vector.reduce.add.v16i32", _INT, [codes])

    return types.int32(array, types.uint64, types.uint64, _floats, types.float32), generate
