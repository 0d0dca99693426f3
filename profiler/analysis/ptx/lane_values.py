"""Computes the values of registers in each thread of a block, if they follow from thread ids and constants.

A value is a sum of a number, which is known for each thread, and multiples of terms. Terms never change and are the
same in all threads, such as a parameter or the address of a shared variable. Usually it is a·tid.x + b.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from cbtop.profiler.analysis.ptx.model import TYPE_BITS, PtxFunction, PtxInstruction, Variable
from cbtop.profiler.analysis.ptx.opcodes import opcode

WARP_THREADS = 32
# Number of threads if the block size is unknown. With two warps, one can wait for the other.
ASSUMED_THREADS = 64
MAX_THREADS = 1024  # at most this many threads of a block (CUDA Programming Guide, "Technical Specifications")
MAX_CHAIN = 200  # at most this many instructions from a thread id to a value that is computed from it
# At most this many values of single threads are computed for a function. Most functions need a few 10,000.
MAX_WORK = 4_000_000
_ADDRESS = re.compile(r"([\w$%#]+)\s*(?:\+\s*(-?\w+))?")

Lanes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LaneValue:
    """The value of a register in each thread: a sum of terms, plus a number.

    `terms` has the factor of each term. A term is the same in all threads: `shared:NAME` or `generic:NAME` for an
    address, `param:NAME+OFFSET`, or a special register. `lanes` has the number in each thread, or one number for all.
    """

    terms: Mapping[str, int]
    lanes: Lanes

    @property
    def is_uniform(self) -> bool:
        return len(set(self.lanes)) == 1

    @property
    def is_same_in_warps(self) -> bool:
        """Whether all threads of a warp have the same value, in each warp."""
        return all(
            len(set(self.lanes[start : start + WARP_THREADS])) == 1
            for start in range(0, len(self.lanes), WARP_THREADS)
        )

    @property
    def is_number(self) -> bool:
        return not self.terms


def number(value: int) -> LaneValue:
    return LaneValue({}, (value,))


@dataclass(frozen=True, slots=True)
class Threads:
    """The threads with computed values: a whole block, or its first warps if the block size is unknown."""

    shape: tuple[int, int, int]
    is_whole_block: bool

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def ids(self) -> list[tuple[int, int, int]]:
        x, y, z = self.shape
        return [(a, b, c) for c in range(z) for b in range(y) for a in range(x)]


def threads_of(function: PtxFunction, launch: Sequence[int] | None) -> Threads | None:
    """Return the threads to compute values for. None if the block size is unknown and its rows may have any
    length.
    """
    shape = tuple(launch or function.limits.get("reqntid", ()))
    if shape:
        x, y, z = (*shape, 1, 1)[:3]
        return Threads((x, y, z), is_whole_block=True) if 0 < x * y * z <= MAX_THREADS else None
    if any(name in operand for one in function.instructions for operand in one.operands for name in _OTHER_ROWS):
        return None
    most = math.prod(function.limits.get("maxntid", (ASSUMED_THREADS,)))
    return Threads((max(min(most, ASSUMED_THREADS), 1), 1, 1), is_whole_block=False)


def most_threads_of(function: PtxFunction) -> Threads:
    """Return the threads of the largest possible block, in one row."""
    most = math.prod(function.limits.get("maxntid", (MAX_THREADS,)))
    return Threads((max(min(most, MAX_THREADS), 1), 1, 1), is_whole_block=False)


_OTHER_ROWS = ("%tid.y", "%tid.z", "%ntid.y", "%ntid.z")


class LaneValues:
    """The values of the registers that only one instruction of the function writes."""

    def __init__(
        self, threads: Threads, writer_of: Mapping[str, PtxInstruction], steady: frozenset[str],
        variables: Mapping[str, Variable], known: Mapping[str, LaneValue] | None = None,
    ) -> None:  # fmt: skip
        """`writer_of` has the only instruction that writes a register. `steady` has the registers with a value that
        never changes and is the same in all threads. `known` has values that are used instead of computed ones.
        """
        self.threads = threads
        self._writer_of = writer_of
        self._steady = steady
        self._variables = variables
        self._known: dict[str, LaneValue | None] = dict(known or {})
        self._work = 0

    def of_register(self, name: str) -> LaneValue | None:
        """Return the value of a register. None if it does not follow from thread ids and constants."""
        return self._register(name, 0)

    def of_address(self, text: str) -> LaneValue | None:
        """Return the value of an address operand such as `%r1+16`, without its brackets."""
        match = _ADDRESS.fullmatch(text)
        if match is None:
            return None
        base, offset = self._operand(match[1], 0), _integer(match[2] or "0")
        return None if base is None or offset is None else added(base, number(offset))

    def _register(self, name: str, depth: int) -> LaneValue | None:
        if name in self._known:
            return self._known[name]
        writer = self._writer_of.get(name)
        found = None
        if writer is not None and depth < MAX_CHAIN and self._work < MAX_WORK:
            found = self._computed(writer, depth + 1)
            if found is not None:
                self._work += len(found.lanes)
        if found is None and name in self._steady:
            found = LaneValue({name: 1}, (0,))
        # Deeper values may be unknown only because of MAX_CHAIN, so do not store them.
        if depth < MAX_CHAIN // 2:
            self._known[name] = found
        return found

    def _operand(self, text: str, depth: int) -> LaneValue | None:
        if (value := _integer(text)) is not None:
            return number(value)
        if text in self._special:
            return self._special[text]
        if text in self._writer_of or text in self._known or text in self._steady:
            return self._register(text, depth)
        name, _, offset = text.partition("+")
        variable = self._variables.get(name.strip())
        if variable is not None and variable.space == "shared":
            return LaneValue({f"shared:{variable.name}": 1}, (_integer(offset.strip() or "0") or 0,))
        return None

    @cached_property
    def _special(self) -> dict[str, LaneValue]:
        ids = self.threads.ids
        x, y, _ = self.threads.shape
        found = {
            f"%{name}.{axis}": LaneValue({f"%{name}.{axis}": 1}, (0,))
            for name in ("ctaid", "nctaid")
            for axis in "xyz"
        }
        found |= {f"%tid.{axis}": LaneValue({}, tuple(one[at] for one in ids)) for at, axis in enumerate("xyz")}
        linear = [a + x * (b + y * c) for a, b, c in ids]
        found["%laneid"] = LaneValue({}, tuple(one % WARP_THREADS for one in linear))
        if self.threads.is_whole_block:
            found |= {f"%ntid.{axis}": number(size) for axis, size in zip("xyz", self.threads.shape, strict=True)}
        else:
            found["%ntid.x"] = LaneValue({"%ntid.x": 1}, (0,))
        return found

    def _computed(self, one: PtxInstruction, depth: int) -> LaneValue | None:
        parsed = opcode(one.opcode)
        if one.guard or "sat" in parsed.parts or "cc" in parsed.parts:
            return None
        if parsed.base == "ld" and parsed.space == "param":
            is_number = parsed.lanes == 1 and len(one.operands) == 2
            return LaneValue({f"param:{one.operands[1][1:-1]}": 1}, (0,)) if is_number else None
        rule, count = _RULES.get(parsed.base, (None, 0))
        if (
            rule is None
            or len(one.operands) != count + 1
            or not parsed.type
            or one.operands[0][0] == "{"
            or "|" in one.operands[0]
        ):
            return None
        if parsed.type.startswith(("f", "bf")) or parsed.type in ("tf32", "e4m3", "e5m2"):
            return None
        values = [self._operand(operand, depth) for operand in one.operands[1:]]
        given = [value for value in values if value is not None]
        if len(given) < len(values):
            return None
        return rule(one, given)


# --- arithmetic -----------------------------------------------------------------------------------------------------


def added(a: LaneValue, b: LaneValue, factor: int = 1) -> LaneValue:
    """Return the sum of `a` and `factor` times `b`."""
    terms = dict(a.terms)
    for name, count in b.terms.items():
        terms[name] = terms.get(name, 0) + factor * count
    lanes = _each(lambda x, y: x + factor * y, a.lanes, b.lanes)
    return LaneValue({name: count for name, count in terms.items() if count}, lanes)


def product(a: LaneValue, b: LaneValue) -> LaneValue | None:
    """Return the product of two values, or None if it is not a sum of terms and a number."""
    if a.terms or len(a.lanes) > 1:
        a, b = b, a
    if a.terms:
        return LaneValue({_product_name(a, b): 1}, (0,)) if len(a.lanes) == len(b.lanes) == 1 else None
    if len(a.lanes) == 1:
        factor = a.lanes[0]
        terms = {name: count * factor for name, count in b.terms.items() if factor}
        return LaneValue(terms, tuple([one * factor for one in b.lanes]))
    return None if b.terms else LaneValue({}, _each(operator.mul, a.lanes, b.lanes))


def _product_name(a: LaneValue, b: LaneValue) -> str:
    """Return the name of a new term: the product of two values that are the same in all threads."""
    sums = [
        "+".join(f"{count}*{name}" for name, count in sorted(one.terms.items())) + f"+{one.lanes[0]}"
        for one in (a, b)
    ]
    return "({})*({})".format(*sorted(sums))


def numbers(function: Callable[[int, int], int], a: LaneValue, b: LaneValue) -> LaneValue | None:
    """Apply a function to two values in each thread. None if one of them has terms."""
    return None if a.terms or b.terms else LaneValue({}, _each(function, a.lanes, b.lanes))


def _each(function: Callable[[int, int], int], a: Lanes, b: Lanes) -> Lanes:
    if len(a) == 1 and len(b) > 1:
        a *= len(b)
    if len(b) == 1 and len(a) > 1:
        b *= len(a)
    return tuple(map(function, a, b))


# Computes the value of an instruction, from the instruction and the values of its inputs.
Rule = Callable[[PtxInstruction, Sequence[LaneValue]], LaneValue | None]


def _integer(text: str) -> int | None:
    digits = text.removesuffix("U")
    try:
        if len(digits) > 1 and digits[0] == "0" and digits.isdecimal():
            return int(digits, 8)
        return int(digits, 0) if digits[:2] not in ("0f", "0F", "0d", "0D") and "_" not in digits else None
    except ValueError:
        return None


def bits_of(one: PtxInstruction) -> int:
    return TYPE_BITS.get(opcode(one.opcode).type, 0) or 1


def _unsigned(value: int, bits: int) -> int:
    return value & ((1 << bits) - 1)


def _signed(value: int, bits: int) -> int:
    value = _unsigned(value, bits)
    return value - (1 << bits) if value >> (bits - 1) else value


def _typed(one: PtxInstruction) -> Callable[[int], int]:
    """Return a function that converts a number to the integer type of an instruction."""
    bits = bits_of(one)
    read = _signed if opcode(one.opcode).type[0] == "s" else _unsigned
    return lambda value: read(value, bits)


def _wrapped(one: PtxInstruction, value: LaneValue | None) -> LaneValue | None:
    """Return a value converted to the type of an instruction. If it has terms, it is assumed not to overflow."""
    if value is None or value.terms:
        return value
    return LaneValue({}, tuple([_signed(lane, bits_of(one)) for lane in value.lanes]))


def _move(one: PtxInstruction, given: Sequence[LaneValue]) -> LaneValue | None:
    return given[0]


def _convert(one: PtxInstruction, given: Sequence[LaneValue]) -> LaneValue | None:
    """Compute `cvt` between integers. `cvt.u64.u32` reads the bits of its second type."""
    parts = opcode(one.opcode).parts
    types = [part for part in parts if part in TYPE_BITS]
    if len(types) != 2 or any(part[0] not in "sub" or part[:2] == "bf" for part in types):
        return None
    if given[0].terms:
        return given[0]
    lanes = given[0].lanes
    for type_name in reversed(types):
        read = _signed if type_name[0] == "s" else _unsigned
        lanes = tuple([read(lane, TYPE_BITS[type_name]) for lane in lanes])
    return LaneValue({}, lanes)


def _convert_address(one: PtxInstruction, given: Sequence[LaneValue]) -> LaneValue | None:
    """Compute `cvta`. `cvta.shared` makes a generic address from a shared one, and `cvta.to.shared` does the
    reverse.
    """
    parts = opcode(one.opcode).parts
    if not any(part.startswith("shared") for part in parts):
        return None
    old, new = ("generic:", "shared:") if "to" in parts else ("shared:", "generic:")
    terms = {new + name.removeprefix(old) if name.startswith(old) else name: n for name, n in given[0].terms.items()}
    return LaneValue(terms, given[0].lanes)


def _add(one: PtxInstruction, given: Sequence[LaneValue]) -> LaneValue | None:
    return _wrapped(one, added(given[0], given[1]))


def _subtract(one: PtxInstruction, given: Sequence[LaneValue]) -> LaneValue | None:
    return _wrapped(one, added(given[0], given[1], -1))


def _multiply(one: PtxInstruction, given: Sequence[LaneValue]) -> LaneValue | None:
    parts = opcode(one.opcode).parts
    if "wide" in parts:
        read = _typed(one)
        given = [one if one.terms else LaneValue({}, tuple([read(lane) for lane in one.lanes])) for one in given]
        return product(given[0], given[1])
    return _wrapped(one, product(given[0], given[1])) if "lo" in parts else None


def _multiply_add(one: PtxInstruction, given: Sequence[LaneValue]) -> LaneValue | None:
    result = _multiply(one, given[:2])
    return None if result is None else added(result, given[2])


def _shift_left(one: PtxInstruction, given: Sequence[LaneValue]) -> LaneValue | None:
    count = given[1]
    if count.terms or len(count.lanes) > 1:
        return None
    if not 0 <= count.lanes[0] < bits_of(one):
        return None
    return _wrapped(one, product(given[0], number(1 << count.lanes[0])))


def _shift_right(one: PtxInstruction, given: Sequence[LaneValue]) -> LaneValue | None:
    read, bits = _typed(one), bits_of(one)
    return numbers(lambda a, b: read(a) >> min(_unsigned(b, 32), bits), given[0], given[1])


def _bitwise(function: Callable[[int, int], int]) -> Rule:
    def rule(one: PtxInstruction, given: Sequence[LaneValue]) -> LaneValue | None:
        return numbers(function, given[0], given[1])

    return rule


def _or(one: PtxInstruction, given: Sequence[LaneValue]) -> LaneValue | None:
    """Compute `or`. If all bits of one value are above all bits of the other, it is their sum."""
    if result := numbers(operator.or_, given[0], given[1]):
        return result
    high, low = given if given[0].terms else (given[1], given[0])
    if low.terms or min(low.lanes) < 0:
        return None
    unit = 1 << max(low.lanes).bit_length()
    parts = (*high.terms.values(), *high.lanes)
    return added(high, low) if all(part % unit == 0 for part in parts) else None


def _not(one: PtxInstruction, given: Sequence[LaneValue]) -> LaneValue | None:
    is_predicate = opcode(one.opcode).type == "pred"
    return numbers(lambda a, b: 1 - a if is_predicate else ~a, given[0], number(0))


def _negate(one: PtxInstruction, given: Sequence[LaneValue]) -> LaneValue | None:
    return _wrapped(one, added(number(0), given[0], -1))


def _extreme(function: Callable[[int, int], int]) -> Rule:
    def rule(one: PtxInstruction, given: Sequence[LaneValue]) -> LaneValue | None:
        read = _typed(one)
        return numbers(lambda a, b: function(read(a), read(b)), given[0], given[1])

    return rule


def _divide(one: PtxInstruction, given: Sequence[LaneValue]) -> LaneValue | None:
    read = _typed(one)
    is_rest = opcode(one.opcode).base == "rem"
    if given[1].terms or any(read(lane) <= 0 for lane in given[1].lanes):
        return None
    if given[0].terms or any(read(lane) < 0 for lane in given[0].lanes):
        return None
    function = operator.mod if is_rest else operator.floordiv
    return numbers(lambda a, b: function(read(a), read(b)), given[0], given[1])


def _compare(one: PtxInstruction, given: Sequence[LaneValue]) -> LaneValue | None:
    """Compare two values in each thread. Terms in both are ignored, because the sums are assumed not to overflow."""
    parts = opcode(one.opcode).parts
    function = _COMPARISONS.get(parts[1])
    if function is None or len(parts) != 3:
        return None
    if dict(given[0].terms) != dict(given[1].terms):
        return _compare_with_size(function, *given)
    read = _typed(one) if not given[0].terms else lambda value: value
    a, b = (LaneValue({}, value.lanes) for value in given)
    return numbers(lambda x, y: int(function(read(x), read(y))), a, b)


def _compare_with_size(function: Callable[[int, int], bool], a: LaneValue, b: LaneValue) -> LaneValue | None:
    """Compare a number in each thread with the size of a block of one row. The size is above every thread id."""
    if b.is_number:
        return _compare_with_size(lambda x, y: function(y, x), b, a) if a.terms else None
    if a.terms or dict(b.terms) != {"%ntid.x": 1} or min(*a.lanes, *b.lanes, 0) < 0:
        return None
    distances = added(a, LaneValue({}, b.lanes), -1).lanes
    is_below = all(one <= thread for thread, one in enumerate(distances))
    return number(int(function(0, 1))) if is_below else None


def _select(one: PtxInstruction, given: Sequence[LaneValue]) -> LaneValue | None:
    if given[2].terms or dict(given[0].terms) != dict(given[1].terms):
        return None
    count = max(len(value.lanes) for value in given)
    a, b, chosen = (value.lanes * count if len(value.lanes) == 1 else value.lanes for value in given)
    return LaneValue(given[0].terms, tuple(x if p else y for x, y, p in zip(a, b, chosen, strict=True)))


def _extract(one: PtxInstruction, given: Sequence[LaneValue]) -> LaneValue | None:
    """Compute `bfe`, which extracts a bit field."""
    if given[1].terms or given[2].terms or len(given[1].lanes) + len(given[2].lanes) > 2:
        return None
    start, length = given[1].lanes[0], given[2].lanes[0]
    if opcode(one.opcode).type[0] != "u" or start + length > bits_of(one):
        return None
    return numbers(lambda a, b: (_unsigned(a, bits_of(one)) >> start) & ((1 << length) - 1), given[0], number(0))


_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge,
}  # fmt: skip
# Name of an instruction -> its rule, and its number of inputs.
_RULES: dict[str, tuple[Rule, int]] = {
    "mov": (_move, 1), "cvt": (_convert, 1), "cvta": (_convert_address, 1), "not": (_not, 1), "neg": (_negate, 1),
    "add": (_add, 2), "sub": (_subtract, 2), "mul": (_multiply, 2), "mad": (_multiply_add, 3),
    "div": (_divide, 2), "rem": (_divide, 2), "min": (_extreme(min), 2), "max": (_extreme(max), 2),
    "shl": (_shift_left, 2), "shr": (_shift_right, 2), "and": (_bitwise(operator.and_), 2),
    "or": (_or, 2), "xor": (_bitwise(operator.xor), 2),
    "setp": (_compare, 2), "selp": (_select, 3), "bfe": (_extract, 3),
}  # fmt: skip
