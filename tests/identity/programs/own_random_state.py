"""Random numbers of Python, numpy and torch are drawn between and inside steps. Their states are hashed."""

import hashlib
import pickle
import random
import time
import uuid

import numpy as np
import torch
from small import Net, Simple, Stack, show, vectors

random.seed(1)
np.random.seed(2)


class Noisy(Simple):
    def forward(self, x):
        x = super().forward(x) + torch.randn_like(x) * random.random() + np.random.rand()
        return torch.nn.functional.dropout(x, 0.1, training=True)


model = Stack(Noisy)
with torch.no_grad():
    for step in range(12):
        show(step, model(vectors()), torch.get_rng_state().sum(), random.random(), np.random.rand())
        show(hashlib.sha256(pickle.dumps((random.getstate(), np.random.get_state()))).hexdigest())
        ids = torch.multinomial(Net(layers=1)(torch.tensor([[step]])).softmax(-1)[0], 3)
        show(ids, torch.initial_seed(), len(str(uuid.uuid4())), time.time() > 0)
