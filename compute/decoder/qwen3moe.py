"""The architecture family of Qwen3 as a mixture of experts: a router chooses some of many small feed-forward networks
for each token.

Source: Qwen3 technical report (2025). Tensor names, renormalised weights and the RoPE layout are from llama.cpp's
LLM_ARCH_QWEN3MOE.
"""

from __future__ import annotations

from cbtop.compute.decoder.base import Family

QWEN3MOE = Family(architecture="qwen3moe", rope_layout="neox", qkv_bias=False, qk_norm=True, experts=True)
