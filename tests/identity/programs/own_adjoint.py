"""A neural ODE calls its model in the backward of an autograd function, which computes its own gradients."""

import torch
from small import Stack, show
from torch.autograd import Function, grad


class Field(Stack):
    calls = 0

    def forward(self, time, y):
        self.calls += 1
        if self.calls == 290:
            raise FloatingPointError(f"{self.calls} calls")
        return super().forward(y) - y * time


def integrate(function, y, begin, end, count):
    width = (end - begin) / count
    for step in range(count):
        time = begin + step * width
        middle = y + width / 2 * function(time, y)
        y = y + width * function(time + width / 2, middle)
    return y


class Adjoint(Function):
    @staticmethod
    def forward(ctx, function, y, *weights):
        ctx.function = function
        y = integrate(function, y, 0.0, 1.0, 4)
        ctx.save_for_backward(y, *weights)
        return y

    @staticmethod
    def backward(ctx, gradient):
        end, *weights = ctx.saved_tensors
        size = end.numel()

        def back(time, state):
            with torch.enable_grad():
                y = state[:size].view_as(end).detach().requires_grad_()
                slope = ctx.function(time, y)
                parts = grad(slope, (y, *weights), -state[size : 2 * size].view_as(end))
            return torch.cat([slope.detach().flatten(), *(part.flatten() for part in parts)])

        state = torch.cat([end.flatten(), gradient.flatten(), *(torch.zeros_like(w).flatten() for w in weights)])
        _, y, *rest = integrate(back, state, 1.0, 0.0, 4).split([size, size, *(w.numel() for w in weights)])
        return None, y.view_as(end), *(part.view_as(w) for part, w in zip(rest, weights, strict=True))


field, x = Field(), torch.randn(4, 8)
weights = tuple(field.parameters())
optimizer = torch.optim.SGD(weights, 1e-2)
for step in range(16):
    loss = Adjoint.apply(field, x, *weights).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    show(step, loss, field.calls, weights[0].grad)
try:
    for _ in range(9):
        Adjoint.apply(field, x.requires_grad_(), *weights).sum().backward()
except FloatingPointError as error:
    print(error, field.calls)
show(x.grad, integrate(field, x, 0.0, 1.0, 4))
torch.save(field.state_dict(), "field.pt")
