"""The architecture family Gemma 2. It differs from Llama by a GELU gate, norms after attention and after the
feed-forward network, soft caps, and a window in every other layer.

Source: Gemma 2 technical report (2024). The following is taken from llama.cpp's LLM_ARCH_GEMMA2: tensor names, norm
weights that are stored with 1 added, the RoPE layout, the defaults of missing keys, and the scale of the 27B's scores
(46 layers).
"""

from __future__ import annotations

from cbtop.compute.decoder.base import Family

GEMMA2 = Family(
    architecture="gemma2",
    rope_layout="neox",
    qkv_bias=False,
    activation="gelu",
    post_norms=True,
    scales_embedding=True,
    attention_cap=50.0,
    logit_cap=30.0,
    window_period=2,
    window=4096,
    layers_scaled_by_hidden=46,
)
