"""A whole model is saved after each step, with and without its gradients. The hash of the pickle is printed."""

import hashlib
import pickle

import torch
from small import IDS, Net, show

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    loss = model(IDS).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    show(step, loss, hashlib.sha256(pickle.dumps(model)).hexdigest(), pickle.dumps(optimizer.state_dict()))
    if step in (0, 3, 9):
        torch.save(model, f"model-{step}.pt")
        torch.save(model.state_dict(), f"weights-{step}.pt")
