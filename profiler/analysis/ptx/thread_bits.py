"""Finds the bits of a thread's number that a register depends on.

This shows that a reduction over a block has the same result in all threads, although the result comes from memory and
from other threads. At its end, each warp reads and combines the same partial results, and each exchange between
threads removes bits. A loaded value depends on the same bits as its address.
"""

from __future__ import annotations

from cbtop.profiler.analysis.ptx.dataflow import Dataflow, Divergence
from cbtop.profiler.analysis.ptx.lane_values import WARP_THREADS, LaneValue
from cbtop.profiler.analysis.ptx.model import PtxInstruction
from cbtop.profiler.analysis.ptx.opcodes import opcode

ALL_BITS = -1
LANE_BITS = WARP_THREADS - 1
MAX_DEPTH = 200  # at most this many instructions from a thread's id to a value computed from it
_COMMUTATIVE = frozenset({"add", "mul", "min", "max", "and", "or", "xor"})
_OTHERS = frozenset({"atom", "call", "elect", "activemask", "mbarrier", "match", "tex", "mma", "wgmma", "ldmatrix"})
_IDS = ("%tid", "%laneid", "%warpid", "%lanemask", "%clock", "%globaltimer", "%pm")


def shared_results(data: Dataflow) -> frozenset[int]:
    """Return the instructions that combine values of several threads to a result that is the same in all threads of a
    block.
    """
    bits = ThreadBits(data)
    return frozenset(
        writers[0]
        for name, writers in data.writers.items()
        if len(writers) == 1 and name in data.divergence and not bits.of_register(name)
    )


class ThreadBits:
    """For each register, a mask of the bits of the thread's number that it depends on. All bits if unknown."""

    def __init__(self, data: Dataflow) -> None:
        self._data = data
        self._known: dict[str, int] = {}

    def of_register(self, name: str, depth: int = 0) -> int:
        if name not in self._known:
            # A register may depend on itself. While its mask is computed, it counts as depending on all bits.
            self._known[name] = ALL_BITS
            if depth < MAX_DEPTH:
                self._known[name] = self._computed(name, depth + 1)
        return self._known[name]

    def _computed(self, name: str, depth: int) -> int:
        data = self._data
        if data.divergence_of(name) is Divergence.UNIFORM:
            return 0
        value = self._value(name)
        if value is not None:
            return _bits_of(value.lanes)
        one = data.only_writer(name)
        if one is None or any(own in operand for operand in one.operands for own in _IDS):
            return ALL_BITS
        parsed = opcode(one.opcode)
        if parsed.base in _OTHERS or "volatile" in parsed.parts:
            return ALL_BITS
        bits = 0
        at = data.writers[name][0]
        for read in data.reads[at]:
            writers = data.writers.get(read, ())
            if not all(data.has_same_turn(write, at) for write in writers):
                # Threads may leave a loop after different numbers of passes, so the value may depend on all bits.
                return ALL_BITS
            bits |= self.of_register(read, depth)
        if parsed.base in ("redux", "vote", "shfl"):
            return self._exchanged(one, parsed.parts, bits)
        if parsed.base in _COMMUTATIVE and len(one.operands) == 3:
            bits &= ~self._partner(*one.operands[1:])
        return bits

    def _exchanged(self, one: PtxInstruction, parts: tuple[str, ...], bits: int) -> int:
        """Return the bits that a value depends on after an exchange between all threads of a warp. After other
        exchanges, all bits.
        """
        if self._number(one.operands[-1]) not in (-1, (1 << WARP_THREADS) - 1):
            return ALL_BITS
        if parts[0] == "shfl":
            if self._number(one.operands[-2]) != LANE_BITS or self._number(one.operands[2]) is None:
                return ALL_BITS
            if "bfly" in parts:
                return bits
            if "idx" not in parts:
                return ALL_BITS
        return bits & ~LANE_BITS

    def _partner(self, a: str, b: str) -> int:
        """Return the distance between the lanes of a butterfly exchange that makes one of `a` and `b` from the other,
        else 0.
        """
        for own, other in ((a, b), (b, a)):
            one = self._data.only_writer(self._source(other))
            if one is not None and one.opcode.startswith("shfl.sync.bfly"):
                distance = self._number(one.operands[2]) or 0
                if self._source(one.operands[1]) == self._source(own) and distance.bit_count() == 1:
                    return distance
        return 0

    def _source(self, name: str) -> str:
        """Return the register that a register was copied from."""
        for _ in range(MAX_DEPTH):
            one = self._data.only_writer(name)
            if one is None or not one.opcode.startswith("mov.") or len(one.operands) != 2:
                break
            name = one.operands[1]
        return name

    def _value(self, name: str) -> LaneValue | None:
        values = self._data.lane_values
        return values.of_register(name) if values is not None and values.threads.is_whole_block else None

    def _number(self, operand: str) -> int | None:
        try:
            return int(operand, 0)
        except ValueError:
            value = self._value(operand)
        return value.lanes[0] if value is not None and value.is_number and value.is_uniform else None


def _bits_of(lanes: tuple[int, ...]) -> int:
    """Return the bits of a thread's number that decide its value in `lanes`."""
    bits, bit = 0, 1
    while bit < len(lanes):
        if any(lane != lanes[at ^ bit] for at, lane in enumerate(lanes) if at ^ bit < len(lanes)):
            bits |= bit
        bit <<= 1
    return bits
