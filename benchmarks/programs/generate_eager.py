"""Generate text with an eager llama and the dynamic cache."""

import torch
from llama import VOCABULARY, llama
from steady import DEVICE, run

TOKENS = 32
model = llama()
words = torch.randint(0, VOCABULARY, (1, 32), device=DEVICE)

run(lambda: model.generate(words, max_new_tokens=TOKENS, do_sample=False).tolist(), TOKENS)
