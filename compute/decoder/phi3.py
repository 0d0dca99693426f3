"""The architecture family of Phi-3, Phi-3.5 and Phi-4-mini.

They differ from Llama in two tensors: one tensor holds queries, keys and values, and one holds gate and up.

Source: Phi-3 technical report (2024). Tensor names and the RoPE layout are from llama.cpp's LLM_ARCH_PHI3.
"""

from __future__ import annotations

from cbtop.compute.decoder.base import Family

PHI3 = Family(architecture="phi3", rope_layout="neox", qkv_bias=False, fused=True, window_period=0)
