"""The architecture family of Qwen2 and Qwen2.5. It has biases on queries, keys and values, and RoPE over split
halves.

Source: Qwen2 technical report (2024). Tensor names and the RoPE layout are from llama.cpp's LLM_ARCH_QWEN2.
"""

from __future__ import annotations

from cbtop.compute.decoder.base import Family

QWEN2 = Family(architecture="qwen2", rope_layout="neox", qkv_bias=True)
