"""The block formats that weights are stored in, by ggml's number of the type."""

from __future__ import annotations

from cbtop.compute.quantization.base import BlockFormat
from cbtop.compute.quantization.floats import BF16, F16, F32
from cbtop.compute.quantization.iq4_nl import IQ4_NL
from cbtop.compute.quantization.iq4_xs import IQ4_XS
from cbtop.compute.quantization.q2_k import Q2_K
from cbtop.compute.quantization.q3_k import Q3_K
from cbtop.compute.quantization.q4_0 import Q4_0
from cbtop.compute.quantization.q4_1 import Q4_1
from cbtop.compute.quantization.q4_k import Q4_K
from cbtop.compute.quantization.q5_0 import Q5_0
from cbtop.compute.quantization.q5_1 import Q5_1
from cbtop.compute.quantization.q5_k import Q5_K
from cbtop.compute.quantization.q6_k import Q6_K
from cbtop.compute.quantization.q8_0 import Q8_0

FORMATS: dict[int, BlockFormat] = {
    block_format.code: block_format
    for block_format in (F32, F16, BF16, Q8_0, Q5_0, Q5_1, Q4_0, Q4_1, Q6_K, Q5_K, Q4_K, Q3_K, Q2_K, IQ4_NL, IQ4_XS)
}


def known(code: int) -> int:
    """Return `code` if a format has it. Otherwise raises ValueError with the known codes."""
    if code not in FORMATS:
        names = ", ".join(f"{code} {block_format.name}" for code, block_format in FORMATS.items())
        raise ValueError(f"weights of block format {code}; known are {names}")
    return code
