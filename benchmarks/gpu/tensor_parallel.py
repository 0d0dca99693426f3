"""A decoder whose matrices are divided among the ranks of a process group, as in tensor-parallel engines.

Each rank has a part of every matrix and some of the heads. Two all-reduces per layer add up the partial results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the whole model, over all ranks."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    context: int
    words: int = 32_000
    batch: int = 1


LIKE_7B = Sizes(layers=32, hidden=4096, heads=32, intermediate=11_008, context=512)
TOY = Sizes(layers=2, hidden=256, heads=4, intermediate=512, context=32, words=1024)


class RowParallel(nn.Linear):
    """A product with the rank's part of a matrix, added up over all ranks.

    The part has some of the matrix's columns. `extra` is a number of additional products that slow this rank down on
    purpose.
    """

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__(columns, rows, bias=False)
        self.extra = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.extra):
            super().forward(x)
        x = super().forward(x)
        dist.all_reduce(x)
        return x


class Attention(nn.Module):
    """Attention over a full cache with this rank's part of the heads."""

    def __init__(self, sizes: Sizes, ranks: int) -> None:
        super().__init__()
        self.columns = sizes.hidden // sizes.heads
        self.heads = sizes.heads // ranks
        own = self.heads * self.columns
        self.q_proj = nn.Linear(sizes.hidden, own, bias=False)
        self.k_proj = nn.Linear(sizes.hidden, own, bias=False)
        self.v_proj = nn.Linear(sizes.hidden, own, bias=False)
        self.o_proj = RowParallel(own, sizes.hidden)
        cache = (2, sizes.batch, self.heads, sizes.context, self.columns)
        self.register_buffer("cache", torch.zeros(cache), persistent=False)

    def forward(self, x: torch.Tensor, input_pos: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        of_heads = (batch, length, self.heads, self.columns)
        query, key, value = (p(x).view(of_heads).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        keys, values = self.cache
        keys.index_copy_(2, input_pos, key)
        values.index_copy_(2, input_pos, value)
        seen = scaled_dot_product_attention(query, keys, values)
        return self.o_proj(seen.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    def __init__(self, sizes: Sizes, ranks: int) -> None:
        super().__init__()
        own = sizes.intermediate // ranks
        self.gate_proj = nn.Linear(sizes.hidden, own, bias=False)
        self.up_proj = nn.Linear(sizes.hidden, own, bias=False)
        self.down_proj = RowParallel(own, sizes.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, sizes: Sizes, ranks: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(sizes.hidden)
        self.self_attn = Attention(sizes, ranks)
        self.post_attention_layernorm = nn.RMSNorm(sizes.hidden)
        self.mlp = Mlp(sizes, ranks)

    def forward(self, x: torch.Tensor, input_pos: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), input_pos)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, sizes: Sizes, ranks: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(sizes.words, sizes.hidden)
        self.layers = nn.ModuleList(Layer(sizes, ranks) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden)
        self.lm_head = nn.Linear(sizes.hidden, sizes.words, bias=False)

    def forward(self, ids: torch.Tensor, input_pos: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, input_pos)
        return self.lm_head(self.norm(x))


class Rank:
    """The decoder of one rank in bf16 and its decode step. The GPU has the number of the rank."""

    def __init__(self, sizes: Sizes) -> None:
        self.rank, ranks = dist.get_rank(), dist.get_world_size()
        torch.cuda.set_device(self.rank)
        torch.manual_seed(7 + self.rank)
        with torch.device("cuda"):
            torch.set_default_dtype(torch.bfloat16)
            self.model = Decoder(sizes, ranks).eval()
            torch.set_default_dtype(torch.float32)
            self.ids = torch.full((sizes.batch, 1), 3)
            self.position = torch.full((1,), sizes.context - 1)
        for whole in (*self.model.embed_tokens.parameters(), *self.model.lm_head.parameters()):
            dist.broadcast(whole.detach(), 0)

    def step(self) -> torch.Tensor:
        logits: torch.Tensor = self.model(self.ids, self.position)
        return logits

    def slow_down(self, extra: int) -> None:
        for layer in self.model.layers:
            layer.mlp.down_proj.extra = extra

    def captured(self) -> tuple[Any, torch.Tensor]:
        """Return the step as a CUDA graph, and the graph's output. The graph includes the collectives."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, capture_error_mode="thread_local"
        ):  # In this mode, a thread of NCCL may query events meanwhile.
            logits = self.step()
        return graph, logits
