"""Scripted modules with exported methods are parts of two models: one model is not scripted, and one is traced."""

import torch
from small import Simple, Stack, show, vectors
from torch import Tensor, nn


class Scripted(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.proj, self.factor = nn.Linear(width, width), 2

    @torch.jit.export
    def _split_heads(self, x: Tensor) -> Tensor:
        return x * self.factor

    def forward(self, x: Tensor) -> Tensor:
        return self._split_heads(torch.relu(self.proj(x)))


@torch.jit.script
def dropout_add(x: Tensor, residual: Tensor) -> Tensor:
    return x + residual


class Mixed(Simple):
    def __init__(self, width):
        super().__init__(width)
        self.part = torch.jit.script(Scripted(width))

    def forward(self, x):
        return dropout_add(self.part(super().forward(x)), x)


model, x = Stack(Mixed).eval(), vectors()
with torch.no_grad():
    for step in range(10):
        show(step, model(x), model.layers[0].part._split_heads(x))
        if step in (0, 1, 9):
            traced = torch.jit.trace(model, (x,))
            torch.jit.save(traced, f"traced-{step}.pt")
            show(traced(x), torch.jit.optimize_for_inference(traced)(x), dropout_add.code)
            torch.jit.save(torch.jit.script(Scripted(8)), f"scripted-{step}.pt")
