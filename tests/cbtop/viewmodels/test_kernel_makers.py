"""Tests of who made a kernel: the best evidence decides. If the kernel's name tells nothing, its maker is unknown."""

from __future__ import annotations

import pytest

from cbtop.protocol.attributes import NO_KERNEL, KernelAttributes
from cbtop.protocol.kernel_messages import KernelTimes
from cbtop.viewmodels.kernel_makers import KernelMaker, MakerEvidence, maker_of


def times(maker: str = "", source: str = "") -> KernelTimes:
    return KernelTimes(1, 1, 1, 1.0, 0.0, 1, 1, maker=maker, source=source)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "cuBLAS, tile 64x8 (by name)"),
        ("ampere_sgemm_128x64_tn", "cuBLAS, tile 128x64 (by name)"),
        ("cutlass_80_tensorop_s16816gemm_bf16_64x64_32x6_tn_align8", "CUTLASS, tile 64x64 (by name)"),
        ("sm90_xmma_gemm_bf16bf16_tn_n_tilesize64x128x64_warpgroupsize1x1x1", "cuBLAS, tile 64x128 (by name)"),
        ("gemv2T_kernel_val<int, int, __nv_bfloat16>", "cuBLAS (by name)"),
        ("Kernel2<cutlass_80_wmma_bf16_s161616gemm_bf16_16x16_64x2_tn_align8>", "CUTLASS, tile 16x16 (by name)"),
        ("triton_poi_fused_add_0", "inductor (by name)"),
        ("cupy_multiply__float_float_float", "CuPy (by name)"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "NCCL (by name)"),
        ("vectorized_elementwise_kernel<4, MulFunctor<float>, array<char*, 3>>", "torch (ATen) (by name)"),
        ("flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64>>", "FlashAttention (by name)"),
        ("rms_norm_kernel", ""),
        ("my_triton_poi_copy", ""),
        ("matmul_64x64_kernel", ""),
    ],
)  # fmt: skip
def test_libraries_are_known_by_the_form_of_their_names_and_others_are_not(name: str, expected: str) -> None:
    assert str(maker_of(name, NO_KERNEL, times())) == expected


def test_a_hook_is_better_evidence_than_a_hash_and_a_hash_than_a_name() -> None:
    compiled = KernelAttributes(ptx_hash=0xDC4A)
    by_hook = maker_of("nvjet_tst_64x8_", compiled, times("Triton 3.9.0, 4 warps", "a.py:9"))
    assert by_hook == KernelMaker("Triton 3.9.0, 4 warps", "a.py:9", "Triton", evidence=MakerEvidence.HOOK)
    by_hash = maker_of("nvjet_tst_64x8_", compiled, None)
    assert (str(by_hash), by_hash.evidence) == ("PTX 000000000000dc4a", MakerEvidence.PTX)
    assert maker_of("nvjet_tst_64x8_", NO_KERNEL, None).evidence is MakerEvidence.NAME
    assert maker_of("f", NO_KERNEL, times("inductor of torch 2.13", "c.py:5")).loader == ""
