"""A tiny random model that transformers writes, and its tokens by cbtop and by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbtop.compute.decoder import FAMILIES
from cbtop.compute.decoder.base import read_model
from cbtop.compute.decoder.decoder import Decoder
from cbtop.compute.settings import DecoderSettings
from cbtop.profiler.profiler import BrickProfiler

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
PROMPT, STEPS = [3, 17, 41, 5, 88], 12


def saved(folder: Path, kind: str, dtype: Any = None, **options: Any) -> Any:
    """Write a tiny random model with transformers, and return it."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**SIZES | options)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for parameter in model.parameters():  # so that the largest logit is far from the others
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.15)
    model = model.to(dtype or torch.float32)
    model.save_pretrained(folder)
    return model.float()


def decoded(path: Path) -> tuple[list[int], Any]:
    """Return the tokens that cbtop decodes after PROMPT, and the logits before each of them."""
    model = read_model(path, FAMILIES)
    decoder = Decoder(model, "numba", 1, BrickProfiler(enabled=False), 64, DecoderSettings("f32"))
    tokens, logits = [decoder.prefill(PROMPT)], [decoder.logits.copy()]
    for _ in range(STEPS - 1):
        tokens.append(decoder.decode(tokens[-1]))
        logits.append(decoder.logits.copy())
    return tokens, np.array(logits)


def expected(model: Any) -> tuple[list[int], Any]:
    """Return the same of transformers, in float32."""
    torch = pytest.importorskip("torch")
    tokens: list[int] = []
    logits = []
    for _ in range(STEPS):
        with torch.no_grad():
            row = model(torch.tensor([PROMPT + tokens])).logits[0, -1].numpy()
        logits.append(row)
        tokens.append(int(row.argmax()))
    return tokens, np.array(logits)
