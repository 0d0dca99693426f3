"""A GPT-2 generates text. With the argument `faulty`, the program sorts and joins its whole text after each token."""

import sys
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.set_num_threads(1)
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=128, n_layer=4, n_head=4, n_positions=256)).eval()
end = time.perf_counter() + 5
with torch.no_grad():
    while time.perf_counter() < end:
        ids, cache, text = torch.randint(0, 256, (1, 16)), None, []
        for _ in range(64):
            out = model(ids, past_key_values=cache, use_cache=True)
            ids, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
            text.append(chr(32 + int(ids) % 90))
            if sys.argv[1] == "faulty":
                for _ in range(120):
                    words = "".join(text * 40).upper().split()
                    " ".join(sorted(words))
