"""Find which library made a kernel: by hooks in the process, by the hash of its PTX, or by its name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from cbtop.protocol.attributes import KernelAttributes
from cbtop.protocol.kernel_messages import KernelTimes


class MakerEvidence(StrEnum):
    """The kind of evidence for the maker of a kernel."""

    HOOK = "hook"  # a hook or code of the maker has reported the kernel in the process
    PTX = "ptx"  # the process gave the hash of the kernel's PTX
    NAME = "name"  # the name of the kernel has the form of a library's names
    NOTHING = "n/a"


@dataclass(frozen=True, slots=True)
class KernelMaker:
    """The maker of a kernel. Unknown texts are ""."""

    maker: str = ""
    source: str = ""
    # the library that loaded the kernel, if it reported this by a hook
    loader: str = ""
    tile: str = ""  # block of a matrix product (rows x columns), from the kernel's name
    evidence: MakerEvidence = MakerEvidence.NOTHING

    def __str__(self) -> str:
        """Return the maker as text, such as `cuBLAS, tile 128x64 (by name)`, or "" if unknown."""
        if not self.maker:
            return ""
        text = ", ".join(filter(None, (self.maker, self.tile and f"tile {self.tile}")))
        return f"{text} (by name)" if self.evidence is MakerEvidence.NAME else text


NO_MAKER = KernelMaker()

# Patterns of kernel names -> the maker. The first match decides. CUPTI's names have no namespaces and result types.
_NAMES = tuple(
    (re.compile(pattern), maker)
    for pattern, maker in (
        (r"triton_(?:poi|per|red|tem|mix|for|spl)_", "inductor"),
        (r"ncclDevKernel|ncclKernel", "NCCL"),
        (r"cupy_", "CuPy"),
        (r"nvjet_", "cuBLAS"),
        (r"(?:volta|turing|ampere|hopper|maxwell|sm\d+_xmma)_\w*gemm|cublas", "cuBLAS"),
        (r"gemv\w*_kernel|gemvNSP|splitKreduce_kernel|gemmk1_kernel|dot_kernel|reduce_1Block_kernel", "cuBLAS"),
        (r"cudnn_|sm\d+_xmma_(?:fprop|dgrad|wgrad)|implicit_convolve", "cuDNN"),
        (r"flash_fwd|flash_bwd|FlashAttn", "FlashAttention"),
        (r"fmha_cutlass", "CUTLASS, in torch"),
        (r"cutlass_\d+_|Kernel2?<(?:\w+::)*cutlass", "CUTLASS"),
        (r"Device(?:Reduce|Scan|RadixSort|Select|Segmented)\w*Kernel", "CUB"),
        (
            r"(?:vectorized_|unrolled_|legacy_)?elementwise_kernel|reduce_kernel<|CatArrayBatchedCopy|index_elementwise"
            r"|softmax_warp_(?:forward|backward)|cunn_SoftMax|vectorized_layer_norm_kernel|indexSelect",
            "torch (ATen)",
        ),
    )
)
_TILES = (
    re.compile(r"tilesize(\d+x\d+)x\d+"),  # sm90_xmma_gemm_..._tilesize64x128x64_...
    re.compile(r"nvjet_[a-z]+_(\d+x\d+)(?:_|$)"),  # nvjet_tst_64x8_64x16_4x1_...
    re.compile(r"(?:gemm|cutlass)\w*?_(\d+x\d+)(?:_|$)"),  # ampere_sgemm_128x64_tn, cutlass_80_..._64x64_32x6_...
)


def maker_of(name: str, kernel: KernelAttributes, times: KernelTimes | None) -> KernelMaker:
    """Return the maker of the kernel `name`, by the best evidence. `times` are the kernel's times in a burst."""
    if times is not None and times.maker:
        loader = "Triton" if times.maker.startswith("Triton") else ""
        return KernelMaker(times.maker, times.source, loader, evidence=MakerEvidence.HOOK)
    if kernel.ptx_hash is not None:
        return KernelMaker(f"PTX {kernel.ptx_hash:016x}", evidence=MakerEvidence.PTX)
    maker = next((maker for pattern, maker in _NAMES if pattern.match(name)), "")
    tile = next((found[1] for pattern in _TILES if (found := pattern.search(name))), "")
    return KernelMaker(maker, tile=tile, evidence=MakerEvidence.NAME) if maker else NO_MAKER
