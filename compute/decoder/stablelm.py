"""The architecture family of StableLM and StableLM 2. They differ from Llama by LayerNorms instead of RMSNorms, and
by RoPE over a part of each head.

Source: Stable LM 2 1.6B technical report (2024). Keys, tensor names, biases and the RoPE layout are from llama.cpp's
LLM_ARCH_STABLELM. The 12B model is refused, because it has parallel halves and norms of heads.
"""

from __future__ import annotations

from cbtop.compute.decoder.base import Family

STABLELM = Family(architecture="stablelm", rope_layout="neox", qkv_bias=False, layer_norm=True)
