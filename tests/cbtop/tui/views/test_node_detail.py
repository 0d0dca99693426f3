"""Tests of the details of a kernel in the graph: who made it, how that is known, and the waves of its launch."""

from __future__ import annotations

from dataclasses import replace

from cbtop.protocol.attributes import KernelAttributes
from cbtop.protocol.kernel_messages import KernelTimes
from cbtop.protocol.vocabulary import NodeKind
from cbtop.tui.views.node_detail import node_lines
from cbtop.viewmodels.graph import GraphRow
from cbtop.viewmodels.kernels import BrickKernels, KernelRow, Waves
from tests.cbtop import samples

LAUNCH = KernelAttributes(grid=(300, 1, 1), block=(256, 1, 1), registers=128)
KERNEL = next(row for row in samples.LIVE.graph if row.kind is NodeKind.KERNEL)
BURST = KernelTimes(1, 3, 3, 1000.0, 0.0, 1000, 1000, maker="Triton 3.9.0, 4 warps", source="/a/norms.py:41")


def text_of(node: GraphRow, *kernels: KernelRow) -> str:
    source = replace(samples.LIVE, kernels=(BrickKernels("RmsNorm", "", 1, kernels),))
    lines = node_lines(node, source, 100, 30)
    return "\n".join("".join(text for text, _ in line) for line in lines)


def test_a_kernel_of_a_burst_has_its_maker_its_source_and_its_waves() -> None:
    node = replace(KERNEL, kernel=LAUNCH, burst=BURST)
    row = KernelRow(node.name, 1.0, LAUNCH, 1.0, 0.0, 1.0, 1.0, waves=Waves(132, 2, 300, 300 / 264, 36 / 264))
    text = text_of(node, row)
    assert "Triton 3.9.0, 4 warps" in text
    assert "/a/norms.py:41" in text
    assert "1.14, the last 14 % full (132 × 2 blocks a wave)" in text
    assert "waves" not in text_of(node, replace(row, kernel=replace(LAUNCH, registers=64)))


def test_local_memory_is_shown_if_a_thread_has_some() -> None:
    text = text_of(replace(KERNEL, kernel=replace(LAUNCH, local_memory_bytes=1024)))
    (line,) = (line for line in text.split("\n") if "local bytes a thread" in line)
    assert "1,024 local bytes a thread" in line
    for none in (0, None):
        assert "local" not in text_of(replace(KERNEL, kernel=replace(LAUNCH, local_memory_bytes=none)))


def test_a_kernel_without_evidence_has_no_maker_and_a_brick_has_none() -> None:
    assert "maker" not in text_of(replace(KERNEL, name="my_kernel", kernel=LAUNCH))
    assert "cuBLAS (by name)" in text_of(replace(KERNEL, name="cublas_gemm_bf16"))
    assert "cuBLAS" not in text_of(replace(KERNEL, name="cublas_gemm_bf16", kind=NodeKind.BRICK))
