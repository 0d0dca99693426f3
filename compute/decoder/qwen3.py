"""Qwen3.

It differs from Qwen2 in two ways: it has no biases, and it normalises each head of queries and keys before RoPE.

Source: Qwen3 technical report (2025). Tensor names and the RoPE layout are from llama.cpp's LLM_ARCH_QWEN3.
"""

from __future__ import annotations

from cbtop.compute.decoder.base import Family

QWEN3 = Family(architecture="qwen3", rope_layout="neox", qkv_bias=False, qk_norm=True)
