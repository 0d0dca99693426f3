"""Tests of measured peak rates of the processor: the best of several rounds counts, and their variation is stored."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from cbtop.compute import backends, ceilings
from cbtop.protocol.messages import Ceiling
from cbtop.protocol.vocabulary import Provenance
from tests.representatives import first_by_default


def test_a_ceiling_is_the_best_round_and_stores_the_median_and_the_lowest() -> None:
    before_s = int(time.time())
    found = ceilings.ceiling("read", "bandwidth", 6e9, [3.0, 2.0, 1.0])
    measured = Ceiling("read", "bandwidth", 6.0, "GB/s", Provenance.MEASURED, 3.0, 2.0, rounds=3)
    assert replace(found, measured_on="") == measured
    assert found.measured_s is not None
    assert before_s <= found.measured_s <= time.time()


def test_a_processor_ceiling_reports_the_load_of_other_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used_s = iter([10.0, 10.0])
    monkeypatch.setattr(backends, "_others_s", lambda: next(used_s))
    assert ceilings.measured("read", "bandwidth", 1.0, lambda: None).load_percent == 0
    # The used time can exceed the available time, because the system clock counts in steps of 10 ms.
    used_s = iter([10.0, 1e9])
    assert ceilings.measured("read", "bandwidth", 1.0, lambda: None).load_percent == 100


@pytest.mark.parametrize(("longest_s", "size"), [(1.0, 1024), (64.0, 4096), (63.0, 2048), (0.5, 1024)])
def test_matrices_are_as_large_as_there_is_time_for(longest_s: float, size: int) -> None:
    assert ceilings.largest_size((4096, 2048, 1024), 1.0, longest_s) == size


def test_a_torch_product_is_measured_with_the_requested_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: make torch")
    monkeypatch.setattr(ceilings, "PRODUCT_SIZES", (64, 32))
    before = torch.get_num_threads()
    try:
        measured = ceilings.measure_product(1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert (measured.name, measured.kind) == ("matmul_bfloat16", "compute")
    assert 0 < (measured.lowest or 0) <= (measured.median or 0) <= measured.value


@pytest.mark.parametrize(("available_mib", "buffer_mib"), [(64 << 10, 128), (400, 100), (40, 10), (0, 1), (None, 64)])
def test_reading_uses_a_quarter_of_the_free_memory_also_in_a_control_group(
    available_mib: int | None, buffer_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = None if available_mib is None else available_mib << 20
    monkeypatch.setattr(ceilings, "_last_level_cache_bytes", lambda: 32 << 20)
    # The real function also reads the memory limits of control groups, which differ between machines.
    monkeypatch.setattr(ceilings, "available_bytes", lambda: left)
    assert ceilings.dram_buffer_bytes() == buffer_mib << 20


AVX2 = "+sse4.2,+ssse3,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2"
AVX512 = "+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512vnni"
AMX = "+avx512vbmi,+avx512bf16,+amx-tile,+amx-bf16"
MACHINE_CODE = """
import sys
from numba import types
from cbtop.compute import ceilings
function = getattr(ceilings, sys.argv[1])
some, numbers = types.Array(types.float32, 1, "C"), types.Array(types.float32, 2, "C")
lines = types.Array(types.uint8, 2, "C")
function.compile((lines, some, lines, numbers, numbers, types.int64, types.int64))
print(next(iter(function.inspect_asm().values())))
"""


@first_by_default(
    ("tier", "function", "instruction", "at_once"),
    [
        # The loop has 12 instructions. Each instruction works on 32 bytes.
        (f"haswell {AVX2}", "_multiply_bytes", "vpmaddubsw", 12),
        # The loop has 12 instructions that do not depend on each other. Each instruction works on 8 numbers.
        (f"haswell {AVX2}", "_multiply_add", "vfmadd213ps", 12),
        pytest.param(f"cascadelake {AVX2},{AVX512}", "_multiply_bytes", "vpdpbusd", 12, marks=pytest.mark.slow),
        pytest.param(f"cascadelake {AVX2},{AVX512}", "_multiply_add", "vfmadd213ps", 12, marks=pytest.mark.slow),
        pytest.param(
            f"cooperlake {AVX2},{AVX512},+avx512bf16", "_multiply_pairs", "vdpbf16ps", 12, marks=pytest.mark.slow
        ),
        pytest.param(
            f"sapphirerapids {AVX2},{AVX512},{AMX}", "_multiply_four_tiles", "tdpbf16ps", 4, marks=pytest.mark.slow
        ),
    ],
)
def test_the_timed_loop_of_a_ceiling_is_mostly_the_kernels_instruction(
    tier: str, function: str, instruction: str, at_once: int
) -> None:
    processor, features = tier.split()
    environment = os.environ | {
        "NUMBA_CPU_NAME": processor,
        "NUMBA_CPU_FEATURES": features,
        "NUMBA_CACHE_DIR": os.devnull,  # Compile without a cache, because code from the cache has no assembly text.
    }
    command = [sys.executable, "-c", MACHINE_CODE, function]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.split(".Lfunc_end0:")[0].splitlines()]
    words = [line[0] for line in lines if line]
    loops = [  # Find the loops: each goes from a label to a jump back to this label.
        words[words.index(f"{line[1]}:") : at]
        for at, line in enumerate([line for line in lines if line])
        if len(line) == 2 and line[0].startswith("j") and f"{line[1]}:" in words[:at]
    ]
    timed = min((loop for loop in loops if instruction in loop), key=len)
    assert timed.count(instruction) >= at_once
    assert timed.count(instruction) % at_once == 0
    others = [one for one in timed if one not in (instruction, "vpaddw") and not one.startswith((".", "#"))]
    # All other instructions only control the loop. Registers are not spilled or shuffled.
    assert len(others) <= timed.count(instruction) // 4 + 2
