"""The features of the processor that kernels are compiled for.

This is the present processor, unless NUMBA_CPU_NAME names a different one. Features that NUMBA_CPU_FEATURES (`-avx2`)
or NUMBA_ENABLE_AVX=0 removes count as missing, because LLVM cannot compile code for them.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numba
from llvmlite import binding

_settings: Any = numba.config  # Numba makes its settings at run time, so type checkers do not know them
# From Linux's asm/prctl.h. A process must request permission once to use tiles, because the system saves them for
# each thread.
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18
# The features that each feature requires. If a required feature is removed, LLVM also removes the features that
# require it.
_AVX = {"sse3", "ssse3", "sse4.1", "sse4.2", "avx"}
_AVX512 = _AVX | {"f16c", "fma", "avx2", "avx512f"}
FEATURES: dict[str, set[str]] = {
    "sse4.2": set(), "avx": _AVX - {"avx"}, "avx512f": _AVX512 - {"avx512f"}, "neon": set(), "sve": {"neon"},
    "f16c": _AVX, "avx2": _AVX, "avx512vnni": _AVX512, "avx512bf16": _AVX512 | {"avx512bw"}, "amx-tile": set(),
    "amx-bf16": {"amx-tile"},
}  # fmt: skip


def has_feature(feature: str) -> bool:
    """Return whether kernels may use a feature of the processor. `feature` is a key of FEATURES, the name in LLVM."""
    told = _settings.CPU_FEATURES
    if told is None:
        told = "" if _settings.ENABLE_AVX else "-avx"
    has = not _settings.CPU_NAME and bool(binding.get_host_cpu_features().get(feature))
    for sign, name in ((one[:1], one[1:]) for one in told.split(",")):
        # If NUMBA_CPU_FEATURES contains a feature twice, the later setting is used.
        if name == feature:
            has = sign == "+"
        elif sign == "-" and name in FEATURES[feature]:
            has = False
    return has


def _may_use_tiles() -> bool:
    """Return whether the system allows this process, its threads and its forks to use tiles."""
    if sys.platform != "linux":
        return False
    call: Any = ctypes.CDLL(None).syscall
    return bool(call(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)


CPU_NAME: str = _settings.CPU_NAME or binding.get_host_cpu_name()  # LLVM's name for the processor
# Zen 4 and 5 read a stream from memory at full speed only if the code does not prefetch it. Prefetched cache lines
# occupy the few slots of L1 for lines that are on their way, and then the processor's own prefetching into L2 does
# not start.
LOOKS_AHEAD = CPU_NAME in ("znver4", "znver5")
# Whether the processor can convert binary16. If it cannot, LLVM calls a function that does not exist.
HAS_F16C = has_feature("f16c")
# whether the processor can multiply pairs of int16 and add both products, for sixteen pairs at a time
HAS_AVX2 = has_feature("avx2")
HAS_VNNI = has_feature("avx512vnni")  # whether the processor can add products of four bytes to an int32
# Other processors with AVX-512 need two prefetches: one into L2 long before a line is used, and one into L1 shortly
# before the use. A line that comes from memory directly into L1 occupies one of the few slots for pending lines for a
# long time. With one prefetch, a Xeon reads Q4_K, F16 and BF16 at 0.8 of its bandwidth, and with two at 0.9 to 1.0.
ASKS_TWICE = HAS_VNNI and not LOOKS_AHEAD
L1_AHEAD, L2_AHEAD = 2048, 16384  # how far ahead to prefetch into each cache, in bytes
# The instructions that compute products of integers, if the processor has any.
TIER = "AVX-512 VNNI" if HAS_VNNI else "AVX2" if HAS_AVX2 else "generic"
# the same in the name of a backend
TIER_LABEL = TIER.replace("-", "").replace(" ", "").lower()
HAS_BF16 = has_feature("avx512bf16")  # whether the processor can add products of two bfloat16 to a float32
# Whether products of bfloat16 are faster than float32. Per cycle, a Zen 4 can start either one vector of sixteen
# float32 products, or one of 32 bfloat16 products. A Xeon begins two vectors of float32. On a Xeon, attention takes
# 1.9 times as long with pairs of bfloat16 (one token at position 2,000).
BF16_PAYS = HAS_BF16 and CPU_NAME == "znver4"
# Whether AMX can multiply tiles of bfloat16. If NUMBA_CPU_NAME names a processor, only that processor counts, because
# the code need not run on this one.
HAS_TILES = (
    HAS_BF16 and all(map(has_feature, ("amx-tile", "amx-bf16"))) and (bool(_settings.CPU_NAME) or _may_use_tiles())
)
