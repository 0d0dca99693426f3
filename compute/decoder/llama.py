"""Llama 1 to 3 and the many models that share its architecture: no biases; RoPE over neighbouring pairs.

The GGUF converter permutes the rows of queries and keys, so that neighbours rotate together (llama.cpp's
LLM_ARCH_LLAMA, LLAMA_ROPE_TYPE_NORM). Llama 3.1 adds `rope_freqs.weight`, factors of the frequencies. Mixtral is
of this architecture with experts (Jiang et al. 2024).
"""

from __future__ import annotations

from cbtop.compute.decoder.base import Family

LLAMA = Family(architecture="llama", rope_layout="normal", qkv_bias=False, experts=True)
