"""A llama generates. With the argument `faulty`, it has no cache, so each token reads the whole text again."""

import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
    bos_token_id=1, eos_token_id=None, pad_token_id=0,
)  # fmt: skip
model = LlamaForCausalLM(config).eval()
words = torch.randint(2, 256, (1, 64))
generated, begun = 0, time.perf_counter()
while time.perf_counter() < begun + 5:
    model.generate(words, max_new_tokens=32, do_sample=False, use_cache=sys.argv[1] == "healthy")
    generated += 32
sys.stdout.write(f"{generated / (time.perf_counter() - begun)}\n")
