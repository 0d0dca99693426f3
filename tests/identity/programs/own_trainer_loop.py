"""A trainer in the style of Lightning calls `training_step`, callbacks and checkpoints."""

import torch
import torch.nn.functional as F
from small import IDS, Net, show


class Module(Net):
    def __init__(self):
        super().__init__()
        self.trainer, self.logged = None, {}

    def log(self, name, value):
        self.logged[name] = float(value)

    def training_step(self, batch, index):
        loss = F.cross_entropy(self(batch).flatten(0, 1), batch.flatten())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("validation", self(batch).mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)


class Trainer:
    def fit(self, module, batches):
        optimizer, scheduler = module.configure_optimizers()
        for epoch in range(3):
            module.train()
            for index, batch in enumerate(batches):
                loss = module.training_step(batch, index)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
                optimizer.step()
            scheduler.step()
            module.eval()
            with torch.inference_mode():
                module.validation_step(batches[0], 0)
            show(epoch, module.logged, scheduler.get_last_lr())
            checkpoint = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(checkpoint, f"epoch-{epoch}.ckpt")


module = Module()
Trainer().fit(module, [IDS + shift for shift in range(4)])
again = Module()
again.load_state_dict(torch.load("epoch-2.ckpt")["model"])
show(again(IDS), module(IDS))
