"""A model with a kernel of Triton in each layer: `cbtop run -- python -m benchmarks.gpu.triton_norm SECONDS [LIMIT]`.

With LIMIT, Triton builds the same kernel with at most that many registers a thread. It prints the registers and
spills of the build as JSON.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

ROWS, WIDTH, LAYERS, WARPS = 4096, 8192, 4, 4


@triton.jit
def norm_rows(rows, weight, out, WIDTH: tl.constexpr):  # noqa: N803
    """Normalise a row, as RMSNorm does. A thread keeps WIDTH / (32 * WARPS) elements in registers."""
    place = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    x = tl.load(rows + place).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x) / WIDTH + 1e-6)
    tl.store(out + place, (x * scale * tl.load(weight + tl.arange(0, WIDTH))).to(tl.bfloat16))


class RMSNorm(nn.Module):
    def __init__(self, options: dict[str, int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.options = options
        self.build = None  # the compiled kernel

    def forward(self, rows: Tensor) -> Tensor:
        out = torch.empty_like(rows)
        self.build = norm_rows[(len(rows),)](rows, self.weight, out, WIDTH, num_warps=WARPS, **self.options)
        return out


class Layer(nn.Module):
    def __init__(self, options: dict[str, int]) -> None:
        super().__init__()
        self.norm = RMSNorm(options)
        self.down_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        return rows + self.down_proj(self.norm(rows)[:16]).sum() * 1e-6


class Model(nn.Module):
    def __init__(self, options: dict[str, int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(options) for _ in range(LAYERS))

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self.layers:
            rows = layer(rows)
        return rows


@torch.no_grad()
def main(seconds: float, options: dict[str, int]) -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Model(options).to(torch.bfloat16)
        rows = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        model(rows)
        torch.cuda.synchronize()
    build = model.layers[0].norm.build
    print(json.dumps({"registers": build.n_regs, "spills": build.n_spills}))


if __name__ == "__main__":
    main(float(sys.argv[1]), {"maxnreg": int(sys.argv[2])} if len(sys.argv) > 2 else {})
