"""Generate text with a llama and a small assistant model, which proposes tokens."""

import torch
from llama import VOCABULARY, llama
from steady import DEVICE, run

TOKENS = 32
model, draft = llama(), llama(width=256, layers=2)
words = torch.randint(0, VOCABULARY, (1, 32), device=DEVICE)

run(
    lambda: model.generate(words, max_new_tokens=TOKENS, do_sample=False, assistant_model=draft).tolist(),
    TOKENS,
)
