"""Llama 1 to 3, Mistral, and the many models that share their architecture: no biases, and RoPE over neighbouring
pairs.

The GGUF converter permutes the rows of queries and keys so that neighbours rotate together (llama.cpp's
LLM_ARCH_LLAMA, LLAMA_ROPE_TYPE_NORM). Llama 3.1 adds `rope_freqs.weight`, which holds factors of the frequencies.
Mistral 7B adds a sliding window over all layers (Mistral technical report, 2023), which llama.cpp does not read.
Mixtral adds experts (Jiang et al. 2024).
"""

from __future__ import annotations

from cbtop.compute.decoder.base import Family

LLAMA = Family(architecture="llama", rope_layout="normal", qkv_bias=False, experts=True, window_period=0)
