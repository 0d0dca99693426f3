"""The program of the recording `h100.cbtop`: a small server without cbtop code on one NVIDIA H100.

    cbtop calibrate
    cbtop run --record h100.cbtop -- python tests/cbtop/h100.py

The model is a llama of transformers in bf16 with 8 layers of width 2048. Prompts of 4 x 512 tokens run eagerly. Then
a captured graph decodes 48 tokens each.
"""

from __future__ import annotations

import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

SEQUENCES, PROMPT, NEW, SECONDS = 4, 512, 48, 6.0

torch.set_grad_enabled(False)
torch.manual_seed(0)
config = LlamaConfig(
    num_hidden_layers=8,
    hidden_size=2048,
    intermediate_size=5504,
    num_attention_heads=16,
    max_position_embeddings=1024,
)
with torch.device("cuda"):
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    prompt = torch.randint(0, config.vocab_size, (SEQUENCES, PROMPT))
    positions = torch.arange(PROMPT)
    word, at = torch.zeros((SEQUENCES, 1), dtype=torch.long), torch.zeros(1, dtype=torch.long)
cache = StaticCache(config=config, max_cache_len=PROMPT + NEW)


def prefill() -> torch.Tensor:
    cache.reset()
    return model(prompt, past_key_values=cache, cache_position=positions, use_cache=True).logits


def decode() -> torch.Tensor:
    return model(word, past_key_values=cache, cache_position=at, use_cache=True).logits


prefill()
stream = torch.cuda.Stream()
stream.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(stream):
    decode()
torch.cuda.current_stream().wait_stream(stream)
graph = torch.cuda.CUDAGraph()
cache.reset()
with torch.cuda.graph(graph):
    scores = decode()

until_s = time.monotonic() + SECONDS
tokens = 0
while time.monotonic() < until_s:
    word.copy_(prefill()[:, -1:].argmax(-1))
    at.fill_(PROMPT)
    for _ in range(NEW - 1):
        graph.replay()
        word.copy_(scores.argmax(-1))
        at.add_(1)
        tokens += SEQUENCES
    torch.cuda.synchronize()
sys.stdout.write(f"{tokens} tokens\n")
