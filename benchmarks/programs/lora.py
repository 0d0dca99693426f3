"""Train LoRA adapters of a llama with peft."""

import torch
from llama import VOCABULARY, llama
from peft import LoraConfig, get_peft_model
from steady import DEVICE, run

LAYERS, BATCH, LENGTH = (8, 4, 256) if DEVICE == "cuda" else (3, 1, 16)
base = llama(width=None if DEVICE == "cuda" else 256, layers=LAYERS)
model = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")).train()
optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad])
words = torch.randint(0, VOCABULARY, (BATCH, LENGTH), device=DEVICE)


def train():
    loss = model(input_ids=words, labels=words).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


run(train)
