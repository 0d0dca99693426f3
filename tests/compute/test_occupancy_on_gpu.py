"""Tests with a real GPU: resources and occupancy that are read from machine code equal what the driver reports."""

from __future__ import annotations

import pytest

from cbtop.compute.gpu.device import Gpu
from cbtop.profiler.analysis.machine_code.cubin import kernels_of
from cbtop.profiler.analysis.machine_code.occupancy import LIMITS, BlockShape, capability_of, occupancy_of
from tests.compute.test_cuda_compiles import MODULES

pytestmark = pytest.mark.gpu
THREADS = (32, 64, 96, 128, 256, 384, 512, 1024)
# sizes of dynamic shared memory; with the static part they stay below 48 KiB, because more needs an opt-in
DYNAMIC_SHARED_BYTES = (0, 1, 5_000, 20_000)
MAX_SHARED_BYTES = 48 * 1024
SHARED_BYTES, LOCAL_BYTES, REGISTERS = 1, 3, 4  # CUfunction_attribute


@pytest.mark.parametrize("name", MODULES)
def test_registers_memory_and_blocks_are_those_of_the_driver(name: str, gpu: Gpu) -> None:
    if capability_of(gpu.architecture) not in LIMITS:
        pytest.skip(f"the limits of {gpu.architecture} are not known")
    module, driver = MODULES[name], gpu.cupy.cuda.driver
    kernels = kernels_of(gpu.module(module).cubin)
    assert kernels
    for kernel in kernels:
        function = gpu.function(module, kernel.name).ptr
        reported = [driver.funcGetAttribute(which, function) for which in (REGISTERS, SHARED_BYTES, LOCAL_BYTES)]
        assert [kernel.registers, kernel.shared_bytes, kernel.frame_bytes] == reported, kernel.name
        for threads in THREADS:
            for dynamic in DYNAMIC_SHARED_BYTES:
                if threads > (kernel.max_threads or 1024) or kernel.shared_bytes + dynamic > MAX_SHARED_BYTES:
                    continue
                block = BlockShape(
                    threads, kernel.registers or 0, kernel.shared_bytes + dynamic, kernel.barriers or 0
                )
                occupancy = occupancy_of(gpu.architecture, block)
                assert occupancy is not None
                blocks = driver.occupancyMaxActiveBlocksPerMultiprocessor(function, threads, dynamic)
                assert occupancy.blocks == blocks, (kernel.name, threads, dynamic)
