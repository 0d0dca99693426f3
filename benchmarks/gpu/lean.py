"""A 7B-shaped model in the style of a serving engine.

It has static buffers, fused products, and one graph per batch size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, rows: Tensor) -> Tensor:
        return nn.functional.rms_norm(rows, (rows.shape[-1],), self.weight, 1e-6)


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, batch: int, context: int) -> None:
        super().__init__()
        self.heads, self.columns = heads, hidden // heads
        self.qkv_proj = nn.Linear(hidden, 3 * hidden, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)
        shape = (batch, heads, context, self.columns)
        self.register_buffer("keys", torch.zeros(shape))
        self.register_buffer("values", torch.zeros(shape))

    def forward(self, rows: Tensor, at: Tensor) -> Tensor:
        batch = rows.shape[0]
        query, key, value = self.qkv_proj(rows).view(batch, 1, 3, self.heads, self.columns).permute(2, 0, 3, 1, 4)
        self.keys.index_copy_(2, at, key)
        self.values.index_copy_(2, at, value)
        found = nn.functional.scaled_dot_product_attention(query, self.keys, self.values)
        return self.o_proj(found.transpose(1, 2).reshape(batch, 1, -1))


class FeedForward(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden, 2 * inner, bias=False)
        self.act_fn = nn.SiLU()
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(rows).chunk(2, dim=-1)
        return self.down_proj(self.act_fn(gate) * up)


class Layer(nn.Module):
    def __init__(self, hidden: int, inner: int, heads: int, batch: int, context: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden)
        self.self_attn = Attention(hidden, heads, batch, context)
        self.post_attention_layernorm = RMSNorm(hidden)
        self.mlp = FeedForward(hidden, inner)

    def forward(self, rows: Tensor, at: Tensor) -> Tensor:
        rows = rows + self.self_attn(self.input_layernorm(rows), at)
        return rows + self.mlp(self.post_attention_layernorm(rows))


class Lean(nn.Module):
    """A decoder that computes one new token for each sequence: `model(words, at)`.

    `words`: (batch, 1). `at`: (1,), the position, which is the same in all sequences.
    """

    def __init__(
        self,
        *,
        hidden: int = 4096,
        inner: int = 11008,
        heads: int = 32,
        layers: int = 32,
        batch: int = 1,
        context: int = 512,
        vocabulary: int = 32000,
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Layer(hidden, inner, heads, batch, context) for _ in range(layers))
        self.norm = RMSNorm(hidden)
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, words: Tensor, at: Tensor) -> Tensor:
        rows = self.embed_tokens(words)
        for layer in self.layers:
            rows = layer(rows, at)
        scores: Tensor = self.lm_head(self.norm(rows))
        return scores


class Engine:
    """An engine: a model, its static buffers, and a captured graph of its step."""

    def __init__(self, model: Any, batch: int) -> None:
        self.model = model
        device = next(model.parameters()).device
        self.words = torch.ones((batch, 1), dtype=torch.long, device=device)
        self.at = torch.zeros(1, dtype=torch.long, device=device)
        self.graph = torch.cuda.CUDAGraph()
        self.events: list[torch.cuda.Event] = []  # CUDA events that the captured graph records when it runs

    @torch.no_grad()
    def capture(self) -> Engine:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.model(self.words, self.at)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(self.graph):
            self.scores = self.model(self.words, self.at)
        return self

    def restart(self) -> None:
        """Empty the cache, if the model has a cache that counts its contents."""
        cache = getattr(self.model, "cache", None)
        if cache is not None:
            cache.reset()

    def step(self) -> None:
        """Replay the graph of one step. Does not wait for its end."""
        self.graph.replay()


def lean(batch: int = 1, *, seed: int = 0, **sizes: int) -> Any:
    """Return a model in bf16 with random weights, on the current CUDA device."""
    torch.manual_seed(seed)
    with torch.device("cuda"):
        model = Lean(batch=batch, **sizes).to(torch.bfloat16)
    return model.eval()


class _Called(torch.nn.Module):
    """A model of transformers with a static cache. It is called in the way that `Engine` calls its model."""

    def __init__(self, model: Any, cache: Any) -> None:
        super().__init__()
        self.model = model
        self.cache = cache

    def forward(self, words: Tensor, at: Tensor) -> Tensor:
        scores: Tensor = self.model(words, past_key_values=self.cache, cache_position=at, use_cache=True).logits
        return scores


def transformers_llama(batch: int = 1) -> Any:
    """Return transformers' Llama 7B, in bf16 with random weights and a static cache, on the CUDA device."""
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    config = LlamaConfig(
        num_hidden_layers=32, hidden_size=4096, intermediate_size=11008, max_position_embeddings=2048
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    return _Called(model, StaticCache(config=config, max_cache_len=512))
