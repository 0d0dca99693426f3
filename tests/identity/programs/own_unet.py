"""A UNet with time steps, skip connections and attention runs in a diffusion loop, as in diffusers."""

import torch
import torch.nn.functional as F
from small import show
from torch import nn


class ResnetBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(2, width), nn.Conv2d(width, width, 3, padding=1)
        self.time_emb_proj = nn.Linear(8, width)

    def forward(self, x, time):
        return x + self.conv1(F.silu(self.norm1(x))) + self.time_emb_proj(time)[:, :, None, None]


class AttnProcessor:
    def __call__(self, attn, x):
        q, k, v = (proj(x).unflatten(-1, (2, -1)).transpose(1, 2) for proj in (attn.to_q, attn.to_k, attn.to_v))
        return attn.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(width, width) for _ in range(4))
        self.processor = AttnProcessor()

    def forward(self, x):
        y = x.flatten(2).transpose(1, 2)
        return x + self.processor(self, y).transpose(1, 2).unflatten(2, x.shape[2:])


class UNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.conv_in, self.conv_out = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down_blocks = nn.ModuleList(ResnetBlock(width) for _ in range(2))
        self.mid_block = Attention(width)
        self.up_blocks = nn.ModuleList(ResnetBlock(width) for _ in range(2))

    def forward(self, sample, timestep):
        time, skips = (timestep * torch.arange(8.0)).cos()[None], []
        x = self.conv_in(sample)
        for block in self.down_blocks:
            x = block(x, time)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.mid_block(x)
        for block in self.up_blocks:
            x = block(F.interpolate(x, scale_factor=2.0) + skips.pop(), time)
        return self.conv_out(x)


unet, sample = UNet().eval(), torch.randn(1, 3, 16, 16)
with torch.no_grad():
    for timestep in reversed(range(12)):
        sample = sample - 0.1 * unet(sample, timestep / 12)
        show(timestep, sample)
torch.save(unet, "unet.pt")
