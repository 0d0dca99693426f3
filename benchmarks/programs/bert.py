"""Run a BERT that embeds sentences of several lengths, padded to the longest."""

import torch
from steady import DEVICE, DTYPE, run
from transformers import BertConfig, BertModel

WIDTH, LAYERS, BATCH, LENGTH = (1024, 24, 32, 256) if DEVICE == "cuda" else (256, 4, 2, 24)
config = BertConfig(
    vocab_size=4000,
    hidden_size=WIDTH,
    intermediate_size=4 * WIDTH,
    num_hidden_layers=LAYERS,
    num_attention_heads=WIDTH // 64,
)
model = BertModel(config).eval().to(DEVICE, DTYPE)
words = torch.randint(0, 4000, (BATCH, LENGTH), device=DEVICE)
lengths = torch.linspace(LENGTH // 2, LENGTH, BATCH, device=DEVICE)
mask = (torch.arange(LENGTH, device=DEVICE) < lengths[:, None]).long()


@torch.inference_mode()
def embed():
    states = model(words, attention_mask=mask).last_hidden_state
    return (states * mask[..., None]).sum(1).float().cpu()


run(embed)
