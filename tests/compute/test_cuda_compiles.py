"""Every CUDA source compiles without a GPU, for old and new ones, with stamps and without."""

from __future__ import annotations

import re

import pytest

from cbtop.compute.cuda.compiler import architectures, compiled
from cbtop.compute.cuda.launches import CudaModule
from cbtop.compute.kernels import all_kernels

MODULES: dict[str, CudaModule] = {
    module.name: module for kernel in all_kernels() if kernel.cuda is not None for module in kernel.cuda.modules
}


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
@pytest.mark.parametrize("stamped", [False, True], ids=["plain", "stamped"])
def test_a_module_compiles_without_spilling_registers(module: CudaModule, stamped: bool) -> None:
    for architecture in ("sm_80", "sm_90", architectures()[-1]):
        made = compiled(module.source, architecture, stamped=stamped)
        assert made.ptx
        assert made.cubin
        spills = re.findall(r"(\d+) bytes spill stores", made.log)
        assert set(spills) == {"0"}, made.log


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_every_entry_takes_a_stamp_and_writes_it_first_and_last(module: CudaModule) -> None:
    entries = re.findall(r"KERNEL (\w+)\((.*?)\)\s*\{(.*?)\n\}", module.source, re.DOTALL)
    assert len(entries) == module.source.count("KERNEL ")
    for name, parameters, body in entries:
        assert parameters.endswith(" STAMP"), name
        assert body.split()[0] == "ENTER", name
        assert body.split()[-1] == "LEAVE", name
        assert "return" not in body, f"{name}: a thread that returns never reaches LEAVE"
