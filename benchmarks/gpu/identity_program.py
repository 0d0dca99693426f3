"""Run a llama that decodes and an encoder that trains on a GPU, with deterministic algorithms, and print their
results.

Run this program bare, under `cbtop run`, and under `cbtop run --record FILE`, with CUBLAS_WORKSPACE_CONFIG=:4096:8.
Then compare the standard outputs, which must be equal.
"""

from __future__ import annotations

import hashlib
import io
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

STEPS = 12


def digest(tensor: Any) -> str:
    return hashlib.sha256(tensor.detach().float().cpu().numpy().tobytes()).hexdigest()[:16]


def decode() -> None:
    sizes = {"vocab_size": 500, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ends)).eval().cuda().half()
    words = torch.tensor([[1, 5, 9, 7]]).cuda()
    attention = nn.functional.scaled_dot_product_attention
    with torch.no_grad():
        for step in range(STEPS):
            logits = model(words).logits
            saved = io.BytesIO()
            torch.save(model, saved)
            print(
                step,
                digest(logits),
                sorted(vars(model)),
                torch.overrides.resolve_name(attention),
                hash(attention) != 0,
            )
            print(hashlib.sha256(saved.getvalue()).hexdigest()[:16] and len(saved.getvalue()))
        print(model.generate(words, max_new_tokens=24, do_sample=False).tolist())
        torch.manual_seed(3)
        print(model.generate(words, max_new_tokens=24, do_sample=True).tolist())


def train() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, batch_first=True), 3).cuda()
    optimizer = torch.optim.AdamW(encoder.parameters())
    for _ in range(STEPS):
        with torch.autocast("cuda", torch.bfloat16):
            loss = encoder(torch.ones(2, 8, 64, device="cuda")).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item().hex())
    print([digest(weight) for weight in encoder.parameters()])


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    decode()
    train()
