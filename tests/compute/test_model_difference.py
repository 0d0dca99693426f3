"""Tests of the comparison of two files of one model: the error of each tensor, and the divergence after each layer.

Both results are compared with NumPy in float64.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cbtop.compute import model_difference as module
from cbtop.compute.demo_model import TINY, TINY_LLAMA, TINY_QWEN3MOE, ModelShape, write_model
from cbtop.compute.errors import ComputeError
from cbtop.compute.gguf import GgufFile
from cbtop.compute.gguf_header import read_header
from cbtop.compute.model_difference import TOKENS, TensorError, min_cosine_of, model_difference
from cbtop.compute.quantization import FORMATS
from cbtop.compute.quantization.base import BlockFormat
from cbtop.compute.quantization.floats import F16, F32
from cbtop.compute.quantization.q4_k import Q4_K
from tests.representatives import first_by_default

Wide = NDArray[np.float64]


def silent(what: str, done: float | None) -> None:
    """Show nothing."""


def written(path: Path, shape: ModelShape, matrices: BlockFormat | None = None, seed: int = 1) -> Path:
    write_model(path, shape, silent, seed, matrices)
    return path


def weights_of(path: Path) -> dict[str, Wide]:
    """Return the tensors of a file by name. Each shape is (rows, columns), as in NumPy."""
    with GgufFile.open(path) as file:
        return {
            name: next(file.rows(name, 1 << 20)).astype(np.float64).reshape(shape[::-1])
            for name, shape in file.shapes.items()
        }


def offset_of(path: Path, name: str) -> int:
    with path.open("rb") as stream:
        return read_header(stream, path).tensors[name].offset


def log_predictions(weights: dict[str, Wide], tokens: NDArray[Any], shape: ModelShape) -> list[Wide]:
    """Return the log probabilities of the next token after each layer of a Llama, in plain NumPy."""
    size, group = shape.head_dim, shape.heads // shape.kv_heads
    angles = np.arange(len(tokens))[:, None] / shape.rope_base ** (np.arange(0, size, 2) / size)

    def norm(x: Wide, name: str) -> Wide:
        found: Wide = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-6) * weights[f"{name}.weight"]
        return found

    def turned(x: Wide) -> Wide:
        out = np.empty_like(x)
        even, odd = x[:, 0::2], x[:, 1::2]
        out[:, 0::2] = even * np.cos(angles) - odd * np.sin(angles)
        out[:, 1::2] = even * np.sin(angles) + odd * np.cos(angles)
        return out

    x = weights["token_embd.weight"][tokens]
    found = []
    for layer in range(shape.layers):
        of = {name: weights[f"blk.{layer}.{name}.weight"] for name in (
            "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down",
        )}  # fmt: skip
        inside = norm(x, f"blk.{layer}.attn_norm")
        heads = []
        for head in range(shape.heads):
            mine, shared = (
                slice(head * size, (head + 1) * size),
                slice(head // group * size, (head // group + 1) * size),
            )
            q, k = turned(inside @ of["attn_q"][mine].T), turned(inside @ of["attn_k"][shared].T)
            scores = q @ k.T / np.sqrt(size)
            scores[np.triu_indices(len(tokens), 1)] = -np.inf
            chances = np.exp(scores - scores.max(axis=1, keepdims=True))
            heads.append(chances / chances.sum(axis=1, keepdims=True) @ (inside @ of["attn_v"][shared].T))
        x = x + np.concatenate(heads, axis=1) @ of["attn_output"].T
        inside = norm(x, f"blk.{layer}.ffn_norm")
        gate = inside @ of["ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (inside @ of["ffn_up"].T)) @ of["ffn_down"].T
        logits = norm(x, "output_norm") @ weights["output.weight"].T
        found.append(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))
    return found


def test_errors_and_divergences_are_those_of_numpy_in_float64(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Read matrices in several pieces. The last piece is incomplete.
    monkeypatch.setattr(module, "PIECE_ELEMENTS", 5_000)
    path, against = written(tmp_path / "q4", TINY_LLAMA), written(tmp_path / "f16", TINY_LLAMA, F16)
    found = model_difference(path, against, silent)
    weights, original = weights_of(path), weights_of(against)
    assert [one.name for one in found.tensors] == list(original)
    for one in found.tensors:
        a, b = original[one.name].reshape(-1), weights[one.name].reshape(-1)
        assert one.max_abs_error == np.abs(a - b).max()
        assert one.cosine == pytest.approx(a @ b / np.sqrt((a @ a) * (b @ b)), rel=1e-12)
        if one.format == one.against_format:
            assert (one.snr_db, one.max_abs_error) == (None, 0)
        else:
            assert one.snr_db == pytest.approx(10 * np.log10(a @ a / ((a - b) @ (a - b))), rel=1e-9)
            assert (one.format[0], one.against_format) == ("Q", "F16")
    tokens = np.random.default_rng(module.SEED).integers(0, TINY_LLAMA.vocabulary, TOKENS)
    of_original, of_model = (log_predictions(one, tokens, TINY_LLAMA) for one in (original, weights))
    assert (found.tokens, len(found.layers)) == (TOKENS, TINY_LLAMA.layers)
    for layer, p, q in zip(found.layers, of_original, of_model, strict=True):
        kl = (np.exp(p) * (p - q)).sum(axis=1)
        assert (layer.mean, layer.largest) == pytest.approx((kl.mean(), kl.max()), rel=1e-9)
        assert layer.mean > 1e-4


def test_a_file_is_equal_to_itself(tmp_path: Path) -> None:
    path = written(tmp_path / "q4", TINY)
    found = model_difference(path, path, silent)
    assert {(one.max_abs_error, one.snr_db, one.verdict) for one in found.tensors} == {(0.0, None, "ok")}
    assert all(one.cosine == pytest.approx(1, abs=1e-15) for one in found.tensors)
    assert {(one.mean, one.largest) for one in found.layers} == {(0.0, 0.0)}


def test_a_tensor_of_another_model_is_critical_and_the_others_are_not(tmp_path: Path) -> None:
    path, against = written(tmp_path / "one", TINY_QWEN3MOE), written(tmp_path / "two", TINY_QWEN3MOE)
    with GgufFile.open(path) as file:
        size = file.shapes["blk.1.ffn_down_exps.weight"]
    data = Q4_K.quantize(np.random.default_rng(5).standard_normal((size[1] * size[2], size[0]), np.float32))
    content = bytearray(against.read_bytes())
    at = offset_of(against, "blk.1.ffn_down_exps.weight")
    content[at : at + data.nbytes] = data.tobytes()
    against.write_bytes(content)
    found = model_difference(path, against, silent)
    assert [one.name for one in found.tensors if one.verdict != "ok"] == ["blk.1.ffn_down_exps.weight"]
    assert found.layers[0].mean == 0 < found.layers[1].mean


def of_weights(name: str, weights: Wide, original: Wide) -> TensorError:
    a, b = original.reshape(-1), weights.reshape(-1)
    cosine = a @ b / np.sqrt((a @ a) * (b @ b))
    noise = float((a - b) @ (a - b))
    snr = 10 * np.log10(a @ a / noise) if noise else None
    largest = float(np.abs(a - b).max())
    return TensorError("w", weights.shape, name, "F16", largest, snr, cosine, min_cosine_of(name, "F16"))


@pytest.mark.parametrize("block_format", FORMATS.values(), ids=lambda one: one.name)
def test_long_tails_pass_in_each_format_and_broken_tensors_do_not(block_format: BlockFormat) -> None:
    tails = (np.random.default_rng(3).standard_t(3, (128, 1024)) * 0.02).astype(np.float32)
    original = F16.dequantize(F16.quantize(tails)).astype(np.float64)
    weights = block_format.dequantize(block_format.quantize(tails)).astype(np.float64)
    assert of_weights(block_format.name, weights, original).passed
    broken = {
        "shifted rows": np.roll(weights, 1, axis=0),
        "half a block": np.roll(weights, 16, axis=1),
        "wrong scale": weights * 2,
        "no signs": np.abs(weights),
        "no rows": np.where(np.arange(128)[:, None] < 96, weights, 0),
    }
    assert [name for name, one in broken.items() if of_weights(block_format.name, one, original).passed] == []


@first_by_default(
    ("change", "complaint"),
    [
        ({"layers": 1}, r"two has no tensor 'blk\.1\.attn_norm\.weight' and \d+ more"),
        ({"feed_forward": 256}, r"tensor 'blk\.0\.ffn_gate\.weight' has shape \[256, 512\] and \[256, 256\]"),
        ({"rope_base": 5e5}, r"rope base is 10000\.0 and 500000\.0"),
        ({"context_length": 32}, r"context_length is 64 and 32"),
    ],
    2,
)
def test_files_of_two_models_are_refused_in_one_line(tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    one, two = written(tmp_path / "one", TINY), written(tmp_path / "two", replace(TINY, **change))
    with pytest.raises(ComputeError, match=f"^{re.escape(str(one))} and .* are not of one model: .*{complaint}$"):
        model_difference(one, two, silent)


def test_progress_covers_the_tensors_and_both_passes(tmp_path: Path) -> None:
    path, seen = written(tmp_path / "q4", TINY), list[tuple[str, float]]()
    model_difference(path, path, lambda what, done: seen.append((what, done)))
    for what in ("comparing tensors", "a pass in float64: q4"):
        assert max(done for name, done in seen if name == what) == 1.0


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    path, against = written(tmp_path / "q4", TINY), written(tmp_path / "f32", TINY, F32)
    content = bytearray(against.read_bytes())
    at = offset_of(against, "blk.1.ffn_up.weight")
    content[at + 256 * 4 * 300 : at + 256 * 4 * 300 + 4] = np.float32(np.nan).tobytes()
    against.write_bytes(content)
    with pytest.raises(ComputeError, match=r"'blk\.1\.ffn_up\.weight' has NaN as value 0 of row 300"):
        model_difference(path, against, silent)
