"""A class like RWKV's is a ScriptModule with script methods and a plain `forward`, which is also called by name."""

import types

import torch
from small import Stack, show, vectors
from torch.jit import ScriptModule, script_method

WIDTH, LAYERS = 16, 3


class RWKV(ScriptModule):
    def __init__(self, words):
        super().__init__()
        self.w = types.SimpleNamespace(emb=torch.randn(words, WIDTH), blocks={})
        for layer in range(LAYERS):
            names = ("key", "value", "receptance")
            weights = {name: torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for name in names}
            self.w.blocks[layer] = types.SimpleNamespace(**weights, first=torch.randn(WIDTH))
        self.attention, self.layers = "time_mixing", range(LAYERS)

    @script_method
    def time_mixing(self, x, state, i: int, first, kw, vw, rw):
        k, v, r = kw @ x, vw @ x, torch.sigmoid(rw @ x)
        a, b = state[2 * i], state[2 * i + 1]
        e = torch.exp(first + k)
        out = (a + e * v) / (b + e)
        state[2 * i] = 0.9 * a + torch.exp(k) * v
        state[2 * i + 1] = 0.9 * b + torch.exp(k)
        return r * out

    def forward(self, token, state):
        x = self.w.emb[token]
        for layer in self.layers:
            w = self.w.blocks[layer]
            x = x + self.time_mixing(x, state, layer, w.first, w.key, w.value, w.receptance)
        return self.w.emb @ x, state


model, stack = RWKV(30), Stack()
state, token, tokens = torch.zeros(2 * LAYERS, WIDTH), 3, []
with torch.no_grad():
    for step in range(40):
        call = model if step % 2 else model.forward
        scores, state = call(token, state)
        token = int(scores.argmax()) if step % 3 else int(torch.multinomial(scores.softmax(-1), 1))
        tokens.append(token)
        stack(vectors())
show(tokens, scores, state)
print(model.time_mixing.code, model.time_mixing.graph, type(model).__mro__[0].__name__, stack)
torch.save({"state": state, "w": vars(model.w)["emb"]}, "state.pt")
