"""A llama decodes: one long text with the argument `faulty`, several short texts with `healthy`."""

import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8,
    max_position_embeddings=1 << 16,
)  # fmt: skip
model = LlamaForCausalLM(config).eval()
is_long = sys.argv[1] == "faulty"
words = torch.randint(0, 256, (1, 256))
end = time.perf_counter() + 14
with torch.no_grad():
    while time.perf_counter() < end:
        out = model(words, use_cache=True)
        at = 0
        while time.perf_counter() < end and (is_long or at < 32):
            out = model(out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values, use_cache=True)
            at += 1
