"""A draft model and a target model decode together with their own cache, early exits and skipped layers."""

import torch
from small import IDS, Net, show


class Exits(Net):
    def forward(self, ids, depth=None):
        x = self.embed(ids)
        for number, layer in enumerate(self.layers):
            if depth is not None and number >= depth:
                break
            x = layer(x)
        return self.lm_head(x)


target, ids, accepted = Exits(layers=5).eval(), IDS, 0
with torch.no_grad():
    while ids.shape[1] < 24:
        draft = ids
        for _ in range(3):
            draft = torch.cat((draft, target(draft, depth=2)[:, -1:].argmax(-1)), 1)
        logits = target(draft)
        choice = logits[:, ids.shape[1] - 1 :].argmax(-1)
        same = int((choice[0, :-1] == draft[0, ids.shape[1] :]).long().cumprod(0).sum())
        accepted += same
        ids = torch.cat((ids, choice[:, : same + 1]), 1)
        show(ids, same, logits)
print(accepted)
