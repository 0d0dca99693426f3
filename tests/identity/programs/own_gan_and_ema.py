"""A generator and a discriminator train in turn, with an averaged copy and weights shared between them."""

import copy

import torch
import torch.nn.functional as F
from small import Stack, show
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

generator = nn.Sequential(Stack(), nn.Linear(8, 8))
discriminator = nn.Sequential(Stack(), nn.Linear(8, 1))
discriminator[0].layers[0].up.weight = generator[0].layers[0].up.weight
average = AveragedModel(generator, multi_avg_fn=get_ema_multi_avg_fn(0.9))
teacher = copy.deepcopy(generator).eval()
first, second = (torch.optim.RMSprop(part.parameters(), lr=1e-3) for part in (generator, discriminator))
for step in range(8):
    noise = torch.randn(4, 8)
    real, fake = discriminator(torch.randn(4, 8)), discriminator(generator(noise).detach())
    loss = F.softplus(-real).mean() + F.softplus(fake).mean()
    second.zero_grad()
    loss.backward()
    second.step()
    gain = F.softplus(-discriminator(generator(noise))).mean() + F.mse_loss(generator(noise), teacher(noise))
    first.zero_grad()
    gain.backward()
    first.step()
    average.update_parameters(generator)
    show(step, loss, gain, average(noise))
torch.save({"generator": generator, "average": average.state_dict()}, "gan.pt")
