"""Compute how many blocks of a kernel fit on an SM, which resource limits this number, and how to change it.

The rules are those of NVIDIA's `cuda_occupancy.h` (CUDA 13.5). The limits are in the CUDA programming guide, table
"Technical specifications per compute capability". The shared memory of an SM is its largest carve-out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

WARP = 32  # threads per warp
KIB = 1024
REGISTERS_PER_SM = 65536  # registers of an SM; a single block may use all of them
REGISTER_UNIT = 256  # a warp's registers are rounded up to a multiple of this
PARTITIONS = 4  # an SM has four partitions, each with a quarter of its registers
MAX_THREADS_PER_BLOCK = 1024
MAX_REGISTERS = 255  # at most this many registers per thread

WARPS, BLOCKS, REGISTERS, SHARED, BARRIERS = "warps", "blocks", "registers", "shared memory", "barriers"


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one SM for a compute capability."""

    warps: int
    blocks: int
    shared_bytes: int
    barriers: int | None = None  # barriers of an SM; None if they do not limit the number of blocks
    shared_unit_bytes: int = 128
    reserved_shared_bytes: int = KIB  # shared memory that the driver reserves in each block


LIMITS = {  # compute capability: limits
    (7, 0): Limits(64, 32, 96 * KIB, shared_unit_bytes=256, reserved_shared_bytes=0),
    (7, 5): Limits(32, 16, 64 * KIB, shared_unit_bytes=256, reserved_shared_bytes=0),
    (8, 0): Limits(64, 32, 164 * KIB),
    (8, 6): Limits(48, 16, 100 * KIB),
    (8, 7): Limits(48, 16, 164 * KIB),
    (8, 9): Limits(48, 24, 100 * KIB),
    (9, 0): Limits(64, 32, 228 * KIB, 64),
    (10, 0): Limits(64, 32, 228 * KIB, 64),
    (10, 3): Limits(64, 32, 228 * KIB, 32),
    (11, 0): Limits(48, 24, 228 * KIB, 24),
    (12, 0): Limits(48, 24, 100 * KIB, 24),
    (12, 1): Limits(48, 24, 100 * KIB, 24),
}


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The resources that one block of a kernel needs."""

    threads: int
    registers: int  # registers per thread
    shared_bytes: int  # static and dynamic shared memory, without the driver's part
    barriers: int = 1

    @property
    def warps(self) -> int:
        return _divided_up(self.threads, WARP)


@dataclass(frozen=True, slots=True)
class OccupancyChange:
    """The smallest change of one resource that changes the number of blocks on an SM."""

    resource: str  # REGISTERS per thread, or SHARED memory in bytes per block
    amount: int  # how much more of the resource is used; negative if less
    blocks: int  # number of blocks on an SM after the change


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How many blocks and warps of a kernel fit on one SM. With 0 blocks, it cannot be launched."""

    threads: int  # threads per block
    blocks: int
    warps: int
    max_warps: int
    limiters: tuple[str, ...]  # the resources that allow no further block
    gain: OccupancyChange | None  # the smallest saving of one resource that lets more blocks fit
    loss: OccupancyChange | None  # the smallest increase of registers that lets fewer blocks fit

    @property
    def percent(self) -> float:
        return 100 * self.warps / self.max_warps


def capability_of(architecture: str) -> tuple[int, int] | None:
    """Return the compute capability of an architecture such as "sm_90a". None for any other text."""
    digits = architecture.removeprefix("sm_").rstrip("af")
    if (
        not architecture.startswith("sm_")
        or not digits.isascii()
        or not digits.isdecimal()
        or not 2 <= len(digits) <= 3
    ):
        return None
    return int(digits[:-1]), int(digits[-1])


def occupancy_of(architecture: str, block: BlockShape) -> Occupancy | None:
    """Return the occupancy of a kernel, or None if the architecture's limits are unknown.

    Raises ValueError if a block has no thread or no register.
    """
    limits = LIMITS.get(capability_of(architecture) or (0, 0))
    if limits is None:
        return None
    if block.threads < 1 or block.registers < 1:
        raise ValueError(f"a block of {block.threads} threads with {block.registers} registers; expected 1 or more")
    allowed = _allowed(limits, block)
    blocks = min(allowed.values())
    return Occupancy(
        threads=block.threads,
        blocks=blocks,
        warps=blocks * block.warps,
        max_warps=limits.warps,
        limiters=tuple(name for name, number in allowed.items() if number == blocks),
        gain=_gain(limits, block, blocks),
        loss=_loss(limits, block, blocks),
    )


def _allowed(limits: Limits, block: BlockShape) -> dict[str, int]:
    """Return for each resource how many blocks would fit on an SM if only this resource were limited."""
    allowed = {
        WARPS: limits.warps // block.warps if block.threads <= MAX_THREADS_PER_BLOCK else 0,
        BLOCKS: limits.blocks,
        REGISTERS: _by_registers(block),
        SHARED: _by_shared(limits, block),
    }
    if block.barriers and limits.barriers is not None:
        allowed[BARRIERS] = limits.barriers // block.barriers
    return allowed


def _by_registers(block: BlockShape) -> int:
    of_warp = _rounded_up(block.registers * WARP, REGISTER_UNIT)
    # At a launch, the driver assumes equally many warps for each partition of the SM.
    of_block = of_warp * _rounded_up(block.warps, PARTITIONS)
    if of_block > REGISTERS_PER_SM or block.registers > MAX_REGISTERS:
        return 0
    return REGISTERS_PER_SM // PARTITIONS // of_warp * PARTITIONS // block.warps


def _by_shared(limits: Limits, block: BlockShape) -> int:
    of_block = _rounded_up(block.shared_bytes + limits.reserved_shared_bytes, limits.shared_unit_bytes)
    if of_block > limits.shared_bytes:
        return 0
    return limits.shared_bytes // of_block if of_block else limits.blocks


def _gain(limits: Limits, block: BlockShape, blocks: int) -> OccupancyChange | None:
    def with_fewer_registers(amount: int) -> BlockShape:
        return replace(block, registers=block.registers - amount)

    def with_less_shared(amount: int) -> BlockShape:
        return replace(block, shared_bytes=block.shared_bytes - amount)

    registers = _smallest(limits, with_fewer_registers, block.registers - 1, blocks)
    if registers is not None:
        return OccupancyChange(REGISTERS, -registers[0], registers[1])
    shared = _smallest(limits, with_less_shared, block.shared_bytes, blocks)
    return None if shared is None else OccupancyChange(SHARED, -shared[0], shared[1])


def _smallest(limits: Limits, less: Callable[[int], BlockShape], most: int, blocks: int) -> tuple[int, int] | None:
    """Return how much less of a resource a block must use so that more than `blocks` blocks fit, and how many then
    fit. None if no saving is enough.
    """

    def blocks_with(amount: int) -> int:
        return min(_allowed(limits, less(amount)).values())

    if most < 1 or blocks_with(most) <= blocks:
        return None
    too_few, enough = 0, most  # more saving never means fewer blocks, so use bisection
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if blocks_with(middle) > blocks else (middle, enough)
    return enough, blocks_with(enough)


def _loss(limits: Limits, block: BlockShape, blocks: int) -> OccupancyChange | None:
    for registers in range(block.registers + 1, MAX_REGISTERS + 1):
        fewer = min(_allowed(limits, replace(block, registers=registers)).values())
        if fewer < blocks:
            return OccupancyChange(REGISTERS, registers - block.registers, fewer)
    return None


def _divided_up(number: int, unit: int) -> int:
    return -(-number // unit)


def _rounded_up(number: int, unit: int) -> int:
    return _divided_up(number, unit) * unit
