"""A model trains with Lightning: two micro-batches per step, clipped gradients, and some validations."""

import sys
import warnings

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

warnings.filterwarnings("ignore")
torch.set_num_threads(1)
torch.manual_seed(0)
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 120


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(128), nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Language(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(100, 128), nn.Linear(128, 100)
        self.layers = nn.ModuleList(Block() for _ in range(6))

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def training_step(self, ids, number):
        loss = nn.functional.cross_entropy(self(ids).flatten(0, 1), ids.flatten())
        self.log("loss", loss)
        return loss

    def validation_step(self, ids, number):
        self.log("validation", nn.functional.cross_entropy(self(ids).flatten(0, 1), ids.flatten()))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


ids = torch.randint(0, 100, (4 * 2 * STEPS, 64))
trainer = lightning.Trainer(
    max_steps=STEPS,
    accelerator="cpu",
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    val_check_interval=100,
    limit_val_batches=4,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Language(), DataLoader(ids, batch_size=4), DataLoader(ids[:64], batch_size=4))
