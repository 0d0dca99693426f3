"""A small Hugging Face model with random weights that generates without end: what `cbtop run` is pictured with."""

from __future__ import annotations

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

PROMPT_TOKENS, NEW_TOKENS = 48, 100

torch.manual_seed(7)
torch.set_num_threads(1)
model = Qwen3ForCausalLM(
    Qwen3Config(
        vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=1024,
    )
).eval()  # fmt: skip
while True:
    prompt = torch.randint(0, model.config.vocab_size, (1, PROMPT_TOKENS))
    model.generate(prompt, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
