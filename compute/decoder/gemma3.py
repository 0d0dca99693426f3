"""Gemma 3's text models: as Gemma 2 with queries and keys normalised in place of soft caps, and a window in five of
six layers, which rotate by a base of their own.

Source: Gemma 3 technical report (2025); tensor names, the RoPE layout, what holds where a file says nothing, and the
scale of the 27B's scores (62 layers) as llama.cpp's LLM_ARCH_GEMMA3.
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
