"""Small models and exact printing for the programs in `programs/`.

Importing this module sets the seed and limits torch to one thread.
"""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

torch.manual_seed(0)
torch.set_num_threads(1)


def _reduce_storage(storage: Any) -> tuple[Any, ...]:
    """Pickle a storage of torch without its address. torch's own pickle of a storage contains the address."""
    file = io.BytesIO()
    torch.save(storage, file)
    return torch.storage._load_from_bytes, (file.getvalue(),)


torch.storage.TypedStorage.__reduce__ = _reduce_storage

FORBID_CBTOP = """
import sys
class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "cbtop":
            raise ModuleNotFoundError(f"{name} is not installed on this machine")
sys.meta_path.insert(0, Forbid())
"""


def exact(value: Any) -> str:
    """Return text that differs if any bit of the value differs."""
    if isinstance(value, Tensor):
        value = value.detach().contiguous()
        data = value.flatten().view(torch.uint8).numpy().tobytes()
        return f"{value.dtype}{list(value.shape)}:{hashlib.sha256(data).hexdigest()[:16]}"
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, bytes):
        return f"{len(value)} bytes:{hashlib.sha256(value).hexdigest()[:16]}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {exact(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(exact(item) for item in value) + "]"
    return str(value)


def show(*values: Any) -> None:
    """Print the values exactly."""
    print(*(exact(value) for value in values), flush=True)


def attempt(label: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the function and print its result. If it raises an exception, print its type and message."""
    try:
        result = function(*args, **kwargs)
    except Exception as error:
        print(label, type(error).__name__, error, flush=True)
        return None
    show(label, result)
    return result


def read_without_cbtop(data: bytes, code: str) -> str:
    """Run the code in a fresh process that cannot import cbtop. `data` is its standard input. Return its output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CBTOP")}
    environment["CBTOP_RUN"] = "0"
    program = FORBID_CBTOP + code
    done = subprocess.run([sys.executable, "-c", program], input=data, capture_output=True, env=environment)
    return (done.stdout.decode().strip() or done.stderr.decode().strip()[-300:]) + f" (exit code {done.returncode})"


def rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class Attention(nn.Module):
    """Attention with rotary positions and a fused kernel."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width)

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def _merge_heads(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self._split_heads(self.q_proj(x)), self._split_heads(self.k_proj(x))
        v = self._split_heads(self.v_proj(x))
        angles = torch.arange(x.shape[1], dtype=torch.float32)[:, None].expand(-1, q.shape[-1]) / 10
        q, k = apply_rotary_pos_emb(q, k, angles.cos(), angles.sin())
        return self.o_proj(self._merge_heads(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = nn.LayerNorm(width), Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(x)


class Net(nn.Module):
    """A causal language model of three blocks."""

    def __init__(self, width: int = 16, layers: int = 3, words: int = 50) -> None:
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(words, width), nn.Linear(width, words)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


class Simple(nn.Module):
    """A feed-forward block that takes vectors."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Several blocks of one class in sequence."""

    def __init__(self, block: Any = Simple, width: int = 8, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


IDS = torch.tensor([[1, 2, 3, 4]])


def vectors(width: int = 8) -> Tensor:
    return torch.linspace(-1, 1, 4 * width).view(1, 4, width)


def llama(**options: Any) -> Any:
    """Return a Llama with two layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {
        "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128, "eos_token_id": None,
        "pad_token_id": 0,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**small | options)).eval()
