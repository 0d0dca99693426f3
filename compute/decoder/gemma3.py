"""The architecture family of Gemma 3's text models. They have normalised queries and keys, where Gemma 2 has soft
caps.

Five of six layers have a window and a different RoPE base.

Source: Gemma 3 technical report (2025). Taken from llama.cpp's LLM_ARCH_GEMMA3: tensor names, the RoPE layout, the
defaults of missing keys, and the scale of the 27B's scores (62 layers).
"""

from __future__ import annotations

from cbtop.compute.decoder.base import Family

GEMMA3 = Family(
    architecture="gemma3",
    rope_layout="neox",
    qkv_bias=False,
    qk_norm=True,
    activation="gelu",
    post_norms=True,
    scales_embedding=True,
    logit_cap=0.0,
    window_period=6,
    sliding_rope_base=10_000.0,
    layers_scaled_by_hidden=62,
)
