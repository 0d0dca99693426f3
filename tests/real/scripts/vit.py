"""A ViT reads batches of images, so it has no tokens.

With the argument `faulty`, one of eight layers has a wider MLP.
"""

import sys

import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

torch.set_num_threads(1)
config = ViTConfig(
    image_size=64, patch_size=8, hidden_size=128, intermediate_size=512, num_hidden_layers=8, num_attention_heads=4
)  # fmt: skip
model = ViTForImageClassification(config).eval()
if sys.argv[1] == "faulty":
    for name, module in model.named_modules():
        if ".4." in name and isinstance(module, nn.Linear) and 512 in (module.in_features, module.out_features):
            wide = {512: 2048, 128: 128}
            new = nn.Linear(wide[module.in_features], wide[module.out_features])
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, new)
images = torch.randn(2, 3, 64, 64)
with torch.no_grad():
    for _ in range(450):
        model(images)
