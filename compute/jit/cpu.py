"""What the processor can do that kernels are compiled for: this one, unless NUMBA_CPU_NAME names another."""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import binding

_settings: Any = numba.config  # its attributes are made at run time, unknown to type checkers


def _has(feature: str) -> bool:
    if _settings.CPU_NAME:
        return f"+{feature}" in (_settings.CPU_FEATURES or "").split(",")
    return bool(binding.get_host_cpu_features().get(feature))


HAS_F16C = _has("f16c")  # converts binary16; without it LLVM calls a function that is not there
HAS_AVX2 = _has("avx2")  # multiplies pairs of int16 and adds them, sixteen at a time
HAS_VNNI = _has("avx512vnni")  # adds products of four bytes to an int32
TIER = "AVX-512 VNNI" if HAS_VNNI else "AVX2" if HAS_AVX2 else "generic"  # what products of integers are made of
