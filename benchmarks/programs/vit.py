"""Classify images with a ViT."""

import torch
from steady import DEVICE, DTYPE, run
from transformers import ViTConfig, ViTForImageClassification

WIDTH, LAYERS, BATCH = (1024, 24, 16) if DEVICE == "cuda" else (384, 6, 2)
config = ViTConfig(
    image_size=64,
    patch_size=16 if DEVICE == "cpu" else 4,
    hidden_size=WIDTH,
    intermediate_size=4 * WIDTH,
    num_hidden_layers=LAYERS,
    num_attention_heads=WIDTH // 64,
)
model = ViTForImageClassification(config).eval().to(DEVICE, DTYPE)
images = torch.randn(BATCH, 3, 64, 64, device=DEVICE, dtype=DTYPE)


@torch.inference_mode()
def classify():
    return model(images).logits.argmax(-1).tolist()


run(classify)
