"""Makes tiny models with random weights from the configurations of their architectures. This needs transformers."""

from __future__ import annotations

import logging
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make torch")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make torch")

WORDS = 101
_SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_OWN: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24},
    "mixtral": {"num_local_experts": 4},
}


def model_of(kind: str, **more: Any) -> Any:
    """Return a causal language model of the architecture in evaluation mode. Its weights are the same each time."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(kind, **(_SIZES | _OWN.get(kind, {}) | more))
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def words(*shape: int) -> Any:
    """Return token ids, the same each time."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(2, WORDS, shape, generator=generator)


class Layer(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = torch.nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(*[self.up_proj(x)] * 3)


class Stack(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x
