"""Compute the arithmetic intensity of a kernel from its machine code, if it does not depend on how often loops run.

The intensity is FLOP per byte. Floating-point additions, multiplications and tensor-core products count as FLOP. The
bytes are those that a warp requests from global memory. A conditional instruction counts as if it ran. Caches are not
modelled, so the memory may move fewer bytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from cbtop.profiler.analysis.machine_code.sass import BULK_COPIES, SPACES, TENSOR, Instruction
from cbtop.profiler.analysis.roofline import COMPUTE, MEMORY

WARP = 32  # threads per warp
FLOP = {  # floating-point operations per instruction and thread
    "FADD": 1, "FMUL": 1, "FFMA": 2, "FADD2": 2, "FMUL2": 2, "FFMA2": 4,
    "HADD2": 2, "HMUL2": 2, "HFMA2": 4, "DADD": 1, "DMUL": 1, "DFMA": 2,
}  # fmt: skip
INTEGER_TENSOR = ("IMMA", "IGMMA", "BMMA", "BGMMA")
WARPS_OF_A_GROUP = 4  # warps that run one wgmma instruction together
GLOBAL = ("global load", "global store", "generic load", "generic store")
GLOBAL_ATOMICS = ("ATOM", "ATOMG", "RED", "REDG")
SAME = 1.05  # loops are equally intensive if they differ by at most this factor
# Two bounds in FLOP/byte. Below the first, memory limits every GPU from V100 to B200. Above the second, arithmetic
# limits every one. In between, it depends on the GPU. In NVIDIA's data sheets, the ratio of peak FLOP/s to bandwidth
# is 12 (A100) to 82 (RTX 4090) for float32, and 125 (V100) to 290 (B200) for dense float16 of tensor cores.
SURELY_MEMORY, SURELY_COMPUTE = 10, 100
SURELY_MEMORY_TENSOR, SURELY_COMPUTE_TENSOR = 100, 600
# If a warp requests fewer bytes per instruction, issuing instructions can take longer than memory. An SM issues 4
# instructions per clock, and memory delivers at most 28 bytes per clock to an SM (B200).
MEMORY_BYTES_PER_INSTRUCTION = 8


@dataclass(frozen=True, slots=True)
class Intensity:
    """The FLOP of a warp and the bytes that it requests, in one pass of a loop (or in a kernel without loops)."""

    flop: float
    requested_bytes: int
    has_tensor: bool
    instructions: int

    @property
    def flop_per_byte(self) -> float:
        return self.flop / self.requested_bytes

    @property
    def bound(self) -> str | None:
        """What limits the kernel on every GPU from V100 to B200, if no cache helps: MEMORY or COMPUTE. None if it
        depends on the GPU.
        """
        low, high = (
            (SURELY_MEMORY_TENSOR, SURELY_COMPUTE_TENSOR) if self.has_tensor else (SURELY_MEMORY, SURELY_COMPUTE)
        )
        if self.flop_per_byte < low and self.requested_bytes >= MEMORY_BYTES_PER_INSTRUCTION * self.instructions:
            return MEMORY
        return COMPUTE if self.flop_per_byte > high else None


def intensity_of(instructions: Sequence[Instruction]) -> Intensity | str:
    """Return the intensity of a kernel, or the reason why it is unknown.

    It is known for a kernel without loops. With loops, all innermost loops that access global memory must have the
    same intensity, and loops around them must not access it.
    """
    if any(one.name in BULK_COPIES or one.name.startswith("UTC") for one in instructions):
        return "the sizes of bulk copies, or of tensor-core products, are not in the code"
    loops = _loops(instructions)
    inside = [one for one in loops if not any(other != one and _contains(one, other) for other in loops)]
    outside_bytes = any(
        _contains(around, one) and _bytes(_between(instructions, around)) > _bytes(_between(instructions, one))
        for around in loops
        for one in inside
        if around != one
    )
    if outside_bytes:
        return "it depends on the trip counts of nested loops"
    parts = [_between(instructions, one) for one in inside] if loops else [instructions]
    found = [one for one in map(_intensity, parts) if one is not None]
    if not found:
        return "no loop accesses global memory" if loops else "no access to global memory"
    ratios = [one.flop_per_byte for one in found]
    if max(ratios) > SAME * min(ratios):
        return f"{len(ratios)} loops have different intensities"
    return max(found, key=lambda one: one.requested_bytes)


def _loops(instructions: Sequence[Instruction]) -> list[tuple[int, int]]:
    """Return the first and last address of each loop. A loop ends with a branch to its first address."""
    return sorted(
        {
            (target, one.address)
            for one in instructions
            if (target := one.branch_target) is not None and target < one.address
        }
    )


def _contains(outer: tuple[int, int], inner: tuple[int, int]) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _between(instructions: Sequence[Instruction], loop: tuple[int, int]) -> list[Instruction]:
    return [one for one in instructions if loop[0] <= one.address <= loop[1]]


def _intensity(instructions: Sequence[Instruction]) -> Intensity | None:
    moved = _bytes(instructions)
    if not moved:
        return None
    tensor = [one for one in instructions if TENSOR.fullmatch(one.name) and one.name not in INTEGER_TENSOR]
    flop = sum(_flop(one) * WARP for one in instructions) + sum(map(_tensor_flop, tensor))
    return Intensity(flop, moved, bool(tensor), len(instructions))


def _flop(one: Instruction) -> int:
    """Return the FLOP of an instruction in one thread. Adding zero or multiplying by zero counts as 0, because it
    only moves a number.
    """
    count = FLOP.get(one.name, 0)
    operands = [part.strip(" -|") for part in one.operands.split(",")[1:3]]
    zeros = operands.count("RZ")
    is_move = zeros == 2 or (zeros == 1 and one.name in ("FADD", "HADD2"))
    return 0 if is_move else count


def _bytes(instructions: Sequence[Instruction]) -> int:
    """Return the bytes of global memory that a warp requests by an instruction."""
    return sum(
        one.width // 8 * WARP for one in instructions if SPACES.get(one.name) in GLOBAL or one.name in GLOBAL_ATOMICS
    )


def _tensor_flop(one: Instruction) -> float:
    """Return the FLOP of a warp in a tensor-core instruction. Its name contains m, n and k, such as 16816 or
    64x128x16.
    """
    for part in one.opcode.split(".")[1:]:
        if match := re.fullmatch(r"(\d+)x(\d+)x(\d+)", part):
            m, n, k = map(int, match.groups())
            return 2 * m * n * k / WARPS_OF_A_GROUP
        if match := re.fullmatch(r"(16|8)(8)(4|8|16|32|64)", part):
            m, n, k = map(int, match.groups())
            return 2 * m * n * k
    return 0
