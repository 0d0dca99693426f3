"""A tiny UNet with several kinds of convolutions, and attention over the pixels of its smallest image."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

HEADS = 2


class Attention(nn.Module):
    def __init__(self, channels: int, context: int | None = None) -> None:
        super().__init__()
        self.to_q = nn.Linear(channels, channels, bias=False)
        self.to_k = nn.Linear(context or channels, channels, bias=False)
        self.to_v = nn.Linear(context or channels, channels, bias=False)
        self.to_out = nn.Linear(channels, channels)

    def forward(self, pixels: Any, context: Any = None) -> Any:
        context = pixels if context is None else context
        heads = [
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in (self.to_q(pixels), self.to_k(context), self.to_v(context))
        ]
        return self.to_out(nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, columns: int, rows: int, *, attends: bool = False) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, columns)
        self.conv1 = nn.Conv2d(columns, rows, 3, padding=1)
        self.conv2 = nn.Conv2d(rows, rows, 3, padding="same", dilation=2, groups=2, bias=False)
        self.shortcut = nn.Conv2d(columns, rows, 1)
        self.attention = Attention(rows, context=6) if attends else None

    def forward(self, image: Any, context: Any) -> Any:
        image = self.shortcut(image) + self.conv2(self.conv1(self.norm(image)))
        if self.attention is None:
            return image
        pixels = image.flatten(2).transpose(1, 2)
        return image + self.attention(pixels, context).transpose(1, 2).unflatten(2, image.shape[2:])


class Down(nn.Module):
    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.block = Block(columns, rows)
        self.downsample = nn.Conv2d(rows, rows, 3, stride=2, padding=1)

    def forward(self, image: Any, context: Any) -> Any:
        return self.downsample(self.block(image, context))


class Up(nn.Module):
    def __init__(self, columns: int, rows: int, kernel: int) -> None:
        super().__init__()
        self.upsample = nn.ConvTranspose2d(columns, rows, kernel, stride=2, padding=1, groups=2)
        self.block = Block(rows, rows)

    def forward(self, image: Any, context: Any) -> Any:
        return self.block(self.upsample(image), context)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(3, 4, 3, padding=1)
        self.down_blocks = nn.ModuleList([Down(4, 8), Down(8, 16)])
        self.mid_block = Block(16, 16, attends=True)
        self.up_blocks = nn.ModuleList([Up(16, 8, 4), Up(8, 4, 3)])
        self.conv_out = nn.Conv2d(4, 3, 3, padding="valid")

    def forward(self, image: Any, context: Any) -> Any:
        image = self.conv_in(image)
        for block in self.down_blocks:
            image = block(image, context)
        image = self.mid_block(image, context)
        for block in self.up_blocks:
            image = block(image, context)
        return self.conv_out(image)


def unet() -> Any:
    torch.manual_seed(7)
    return UNet().eval()


def pictures(count: int, height: int, width: int) -> tuple[Any, Any]:
    """Return some images, and five words that describe each of them."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, 3, height, width, generator=generator), torch.randn(count, 5, 6, generator=generator)
