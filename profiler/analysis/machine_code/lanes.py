"""Compute how many memory transactions a warp needs, from the address in each thread.

Addresses come from the PTX. They are known if they follow from thread ids and constants. Only the first warp of a
block is examined. All its threads count, unless the PTX shows which of them run the instruction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cbtop.profiler.analysis.ptx.analysis import FunctionAnalysis
from cbtop.profiler.analysis.ptx.lane_values import WARP_THREADS
from cbtop.profiler.analysis.ptx.opcodes import is_plain_access, opcode

SECTOR_BYTES = 32  # bytes of the smallest transaction of global memory
BANKS, BANK_BYTES = 32, 4  # number of banks of shared memory, and bytes per bank
PASS_BYTES = BANKS * BANK_BYTES  # shared memory delivers at most this many bytes in one pass


@dataclass(frozen=True, slots=True)
class Access:
    """A load or store by a warp, and its transactions: sectors of global memory, or passes over the banks of shared
    memory.

    `needed` is the smallest number of transactions for the same bytes.
    """

    space: str  # global or shared
    is_store: bool
    line: int  # line in the PTX
    transactions: int
    needed: int


@dataclass(frozen=True, slots=True)
class LaneAddresses:
    """A kernel's accesses with known addresses, and the number of all accesses."""

    accesses: tuple[Access, ...]
    global_count: int
    shared_count: int

    def of_space(self, space: str) -> list[Access]:
        return [one for one in self.accesses if one.space == space]

    def unknown(self, space: str) -> int:
        """Return the number of accesses with an address that does not follow from thread ids and constants."""
        return (self.global_count if space == "global" else self.shared_count) - len(self.of_space(space))


def lanes_of(analysis: FunctionAnalysis) -> LaneAddresses:
    """Return a kernel's accesses with known addresses. A byte counts as wasted only if no other access to the same
    array uses it.
    """
    found: list[Access] = []
    counts = {"global": 0, "shared": 0}
    groups: dict[object, list[tuple[int, bool, list[int], int]]] = {}
    for at, one in analysis.reachable():
        space = opcode(one.opcode).space
        if space not in counts or not is_plain_access(one, space):
            continue
        counts[space] += 1
        addresses = _addresses(analysis, at)
        if not addresses:
            continue
        is_store, size = opcode(one.opcode).base == "st", opcode(one.opcode).bytes
        if space == "shared":
            found.append(Access(space, is_store, one.line, passes(addresses, size), needed_passes(addresses, size)))
        else:
            root = analysis.address(at)
            key = (is_store, tuple(sorted(root.terms.items())) if root is not None else ())
            groups.setdefault(key, []).append((one.line, is_store, addresses, size))
    for group in groups.values():
        found += _coalesced(group)
    return LaneAddresses(tuple(sorted(found, key=lambda one: one.line)), counts["global"], counts["shared"])


def sectors(addresses: Sequence[int], size: int) -> set[int]:
    """Return the sectors of global memory that contain the `size` bytes at each address."""
    return {place for one in addresses for place in range(one // SECTOR_BYTES, (one + size - 1) // SECTOR_BYTES + 1)}


def passes(addresses: Sequence[int], size: int) -> int:
    """Return how many passes over the banks of shared memory an access takes.

    Threads that use the same word share it. If an access has 8 bytes, half a warp does it at a time. If it has 16
    bytes, a quarter of a warp does.
    """
    threads = max(WARP_THREADS * BANK_BYTES // max(size, BANK_BYTES), 1)
    return sum(_passes(addresses[start : start + threads], size) for start in range(0, len(addresses), threads))


def needed_passes(addresses: Sequence[int], size: int) -> int:
    """Return how many passes over the banks an access would take without bank conflicts."""
    return -(-len(_words(addresses, size)) * BANK_BYTES // PASS_BYTES)


def _passes(addresses: Sequence[int], size: int) -> int:
    banks: dict[int, int] = {}
    for word in _words(addresses, size):
        banks[word % BANKS] = banks.get(word % BANKS, 0) + 1
    return max(banks.values())


def _words(addresses: Sequence[int], size: int) -> set[int]:
    return {place for one in addresses for place in range(one // BANK_BYTES, (one + size - 1) // BANK_BYTES + 1)}


def _coalesced(group: Sequence[tuple[int, bool, list[int], int]]) -> Iterator[Access]:
    """Return the accesses to one array."""
    used = {place for _, _, addresses, size in group for one in addresses for place in range(one, one + size)}
    filled: dict[int, int] = {}
    for place in used:
        filled[place // SECTOR_BYTES] = filled.get(place // SECTOR_BYTES, 0) + 1
    for line, is_store, addresses, size in group:
        touched = sectors(addresses, size)
        needed = -(-sum(filled[one] for one in touched) // SECTOR_BYTES)
        yield Access("global", is_store, line, len(touched), needed)


def _addresses(analysis: FunctionAnalysis, at: int) -> list[int]:
    """Return the address in each thread of the first warp, relative to a base that is the same for all. [] if
    unknown.
    """
    value, size = analysis.address(at), opcode(analysis.instructions[at].opcode).bytes
    values = analysis.data.lane_values
    if value is None or values is None or not size:
        return []
    count = min(values.threads.count, WARP_THREADS)
    lanes = value.lanes * count if len(value.lanes) == 1 else value.lanes[:count]
    active = analysis.threads_at(at)
    return [lane for thread, lane in enumerate(lanes) if active is None or thread in active]
