"""Tests that all CUDA sources compile for old and new GPUs, with and without time stamps. No GPU is needed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from cbtop.compute.cuda.compiler import architectures, compiled
from cbtop.compute.cuda.launches import CudaModule
from cbtop.compute.kernels import all_kernels, qkv
from cbtop.compute.quantization import FORMATS
from cbtop.compute.quantization.q5_k import Q5_K
from cbtop.compute.quantization.q6_k import Q6_K
from cbtop.compute.verification import variants
from cbtop.profiler.analysis.machine_code.resources import Spills, spills_of
from cbtop.profiler.analysis.ptx.lints import findings
from cbtop.profiler.analysis.ptx.lints.base import LintSeverity
from cbtop.profiler.analysis.ptx.parser import parse
from tests.representatives import first_by_default

# This kernel is compiled only for models that mix these formats. Kernels for Q4_K_M files are in the list of
# variants.
OF_MODELS = (qkv.kernel_for((Q5_K.code, Q5_K.code, Q6_K.code), is_int8=True),)
MODULES: dict[str, CudaModule] = {
    module.name: module
    for kernel in (*all_kernels(), *(one.kernel for one in variants()), *OF_MODELS)
    if kernel.cuda is not None
    for module in kernel.cuda.modules
}
# By default, only kernels of this format are compiled. Each of these kernels is compiled for one GPU.
EVERY_WAY = "q4_k"
OTHERS = tuple(one.name.lower() for one in FORMATS.values() if one.name.lower() != EVERY_WAY)
# This module spilled the most registers when its numbers of units had 64 bits.
TIGHTEST = "expert_linear_in_turn_4x1_iq4_xs"
# Spills of registers that remain with NVRTC 13.5, at most two registers each. A thread computes four units of two
# rows, which fills its 128 registers. With 168 registers, a multiprocessor would run 12 warps instead of 16.
SPILLS = {  # Keys: module, architecture, and whether launches write time stamps. Each module has one entry.
    ("linear_in_turn_4x1_iq4_xs", "sm_80", True): Spills(8, 8),
    ("qkv_in_turn_4x1_iq4_xs_iq4_xs_iq4_xs", "sm_121", False): Spills(8, 48),
}


def builds() -> Iterator[Any]:
    """Yield each module for three GPUs, with and without time stamps. Most combinations are slow tests."""
    turn = 0
    for name, module in MODULES.items():
        is_slow = name.endswith(OTHERS) and name != TIGHTEST
        for place, (stamped, which) in enumerate(product((False, True), ("sm_80", "sm_90", "newest"))):
            marks = () if place == turn % 6 and not is_slow else (pytest.mark.slow,)
            how = "stamped" if stamped else "plain"
            yield pytest.param(module, which, stamped, id=f"{name} {which} {how}", marks=marks)
        turn += not is_slow


@first_by_default(("module", "which", "stamped"), [*builds()], 10)
def test_a_module_compiles_without_errors_in_its_ptx_and_with_the_listed_spills(
    module: CudaModule, which: str, stamped: bool
) -> None:
    architecture = architectures()[-1] if which == "newest" else which
    made = compiled(module.source, architecture, stamped=stamped)
    assert made.ptx
    assert made.cubin
    spills = spills_of(made.log)
    assert len(spills) >= module.source.count("KERNEL ")
    listed = SPILLS.get((module.name, architecture, stamped))
    assert [one for one in spills.values() if one] == ([] if listed is None else [listed]), made.log
    errors = findings(parse(made.ptx.decode()), [LintSeverity.CORRECTNESS, LintSeverity.LIKELY])
    assert [(one.lint.id, one.function, one.line, one.message) for one in errors] == []


def test_every_listed_spill_is_of_a_module_that_is_compiled() -> None:
    assert {name for name, _, _ in SPILLS} <= MODULES.keys()


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_every_entry_takes_a_stamp_and_writes_it_first_and_last(module: CudaModule) -> None:
    entries = re.findall(
        r"KERNEL (?:__launch_bounds__\(\d+, \d+\) )?(\w+)\((.*?)\)\s*\{(.*?)\n\}", module.source, re.DOTALL
    )
    assert len(entries) == module.source.count("KERNEL ")
    for name, parameters, body in entries:
        assert parameters.endswith(" STAMP"), name
        # Before the macro ENTER, a kernel may do nothing except begin to read its weights (`ahead`).
        before, _, _ = body.partition("ENTER")
        assert {line.partition("<")[0] for line in before.split("\n") if line.strip()} <= {"    ahead"}, name
        assert body.split()[-1] == "LEAVE", name
        assert "return" not in body, f"{name}: a thread that returns never reaches LEAVE"
