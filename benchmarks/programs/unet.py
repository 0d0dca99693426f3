"""A UNet as diffusion models write it by hand: convolutions, group norms, and attention in the middle."""

import torch
from steady import DEVICE, DTYPE, run
from torch import nn

WIDTH, SIZE, BATCH = (256, 64, 8) if DEVICE == "cuda" else (32, 32, 1)


class Residual(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, before), nn.Conv2d(before, after, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(8, after), nn.Conv2d(after, after, 3, padding=1)
        self.act = nn.SiLU()
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x):
        inside = self.conv1(self.act(self.norm1(x)))
        return self.skip(x) + self.conv2(self.act(self.norm2(inside)))


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.proj = nn.GroupNorm(8, width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, width, height, columns = x.shape
        flat = self.norm(x).flatten(2).transpose(1, 2)
        split = self.qkv(flat).view(batch, -1, 3, width // 32, 32).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*split)
        mixed = self.proj(mixed.transpose(1, 2).reshape(batch, -1, width))
        return x + mixed.transpose(1, 2).view(batch, width, height, columns)


class UNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv_in = nn.Conv2d(4, width, 3, padding=1)
        self.down1, self.shrink1 = Residual(width, width), nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.down2, self.shrink2 = Residual(width, 2 * width), nn.Conv2d(2 * width, 2 * width, 3, stride=2, padding=1)
        self.middle1, self.attention = Residual(2 * width, 2 * width), Attention(2 * width)
        self.middle2 = Residual(2 * width, 2 * width)
        self.grow2, self.up2 = nn.ConvTranspose2d(2 * width, 2 * width, 2, stride=2), Residual(4 * width, width)
        self.grow1, self.up1 = nn.ConvTranspose2d(width, width, 2, stride=2), Residual(2 * width, width)
        self.norm_out, self.conv_out = nn.GroupNorm(8, width), nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, x):
        first = self.down1(self.conv_in(x))
        second = self.down2(self.shrink1(first))
        x = self.middle2(self.attention(self.middle1(self.shrink2(second))))
        x = self.up2(torch.cat([self.grow2(x), second], 1))
        x = self.up1(torch.cat([self.grow1(x), first], 1))
        return self.conv_out(nn.functional.silu(self.norm_out(x)))


model = UNet(WIDTH).eval().to(DEVICE, DTYPE)
noise = torch.randn(BATCH, 4, SIZE, SIZE, device=DEVICE, dtype=DTYPE)


@torch.inference_mode()
def denoise():
    return model(noise).mean().item()


run(denoise)
