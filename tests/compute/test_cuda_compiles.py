"""Every CUDA source compiles for old and new GPUs, with and without stamps. No GPU is needed."""

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
from cbtop.profiler.analysis.ptx.lints import findings
from cbtop.profiler.analysis.ptx.lints.base import Severity
from cbtop.profiler.analysis.ptx.parser import parse

OF_MODELS = (  # compiled only for models that have these formats; those of Q4_K_M files are among the variants
    qkv.kernel_for((Q5_K.code, Q5_K.code, Q6_K.code), is_int8=True),
)
MODULES: dict[str, CudaModule] = {
    module.name: module
    for kernel in (*all_kernels(), *(one.kernel for one in variants()), *OF_MODELS)
    if kernel.cuda is not None
    for module in kernel.cuda.modules
}
EVERY_WAY = "q4_k"  # a default run compiles only this format, and each module for one GPU
OTHERS = tuple(one.name.lower() for one in FORMATS.values() if one.name.lower() != EVERY_WAY)


def builds() -> Iterator[Any]:
    """Yield each module, with and without stamps, for three GPUs. Most combinations are slow tests."""
    turn = 0
    for name, module in MODULES.items():
        is_slow = name.endswith(OTHERS)
        for place, (stamped, which) in enumerate(product((False, True), ("sm_80", "sm_90", "newest"))):
            marks = () if place == turn % 6 and not is_slow else (pytest.mark.slow,)
            how = "stamped" if stamped else "plain"
            yield pytest.param(module, which, stamped, id=f"{name} {which} {how}", marks=marks)
        turn += not is_slow


@pytest.mark.parametrize(("module", "which", "stamped"), [*builds()])
def test_a_module_compiles_without_spills_or_errors_in_its_ptx(module: CudaModule, which: str, stamped: bool) -> None:
    made = compiled(module.source, architectures()[-1] if which == "newest" else which, stamped=stamped)
    assert made.ptx
    assert made.cubin
    spills = re.findall(r"(\d+) bytes spill stores", made.log)
    assert set(spills) == {"0"}, made.log
    errors = findings(parse(made.ptx.decode()), [Severity.CORRECTNESS, Severity.LIKELY])
    assert [(one.lint.id, one.function, one.line, one.message) for one in errors] == []


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_every_entry_takes_a_stamp_and_writes_it_first_and_last(module: CudaModule) -> None:
    entries = re.findall(
        r"KERNEL (?:__launch_bounds__\(\d+, \d+\) )?(\w+)\((.*?)\)\s*\{(.*?)\n\}", module.source, re.DOTALL
    )
    assert len(entries) == module.source.count("KERNEL ")
    for name, parameters, body in entries:
        assert parameters.endswith(" STAMP"), name
        before, _, _ = body.partition("ENTER")  # before ENTER, kernels may only read weights
        assert {line.partition("<")[0] for line in before.split("\n") if line.strip()} <= {"    ahead"}, name
        assert body.split()[-1] == "LEAVE", name
        assert "return" not in body, f"{name}: a thread that returns never reaches LEAVE"
