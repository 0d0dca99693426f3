"""The reference of the decoder: the forward pass in plain NumPy, in float64, with dequantised weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from cbtop.compute.decoder.base import LayerWeights, Model, Norm, Projection, Rope
from cbtop.compute.quantization.interleaved import Matrix

Wide = NDArray[np.float64]
TOGETHER = 1 << 22


def forward_reference(model: Model, tokens: Sequence[int], context: int | None = None) -> Wide:
    """Return the logits of all positions, float64 (tokens, vocabulary). The tokens start at position 0.

    `context` is the context size that RoPE assumes. None means the model's context size.
    """
    *_, last = layer_outputs(model, tokens, context)
    return logits_of(model, last)


def layer_outputs(model: Model, tokens: Sequence[int], context: int | None = None) -> Iterator[Wide]:
    """Yield the residual stream before the first layer and after each layer, float64 (tokens, hidden)."""
    x = model.embedding.dequantized(np.asarray(tokens)).astype(np.float64)
    x *= model.embedding_scale
    context = context or model.context_length
    yield x
    for layer in model.layers:
        attended = _attention(model, layer, context, _norm(x, layer.attention_norm, model.epsilon))
        x = x + _post(model, attended, layer.attention_post_norm)
        inner = _feed_forward(model, layer, _norm(x, layer.ffn_norm, model.epsilon))
        x = x + _post(model, inner, layer.ffn_post_norm)
        yield x


def logits_of(model: Model, x: Wide) -> Wide:
    """Return the logits of the activations x, float64 (tokens, vocabulary).

    The logits are the final norm of x, multiplied by the output matrix.
    """
    normed = _norm(x, model.final_norm, model.epsilon)
    return _held(_times(normed, Projection(model.lm_head, np.zeros(0, np.float32))), model.logit_cap)


def _post(model: Model, x: Wide, norm: Norm | None) -> Wide:
    return x if norm is None else _norm(x, norm, model.epsilon)


def _held(x: Wide, cap: float) -> Wide:
    held: Wide = cap * np.tanh(x / cap) if cap else x
    return held


def _activated(model: Model, gate: Wide) -> Wide:
    slope = np.sqrt(2 / np.pi)
    inner = gate / 2 if model.activation == "silu" else slope * gate + slope * 0.044715 * gate * gate * gate
    activated: Wide = gate * (1 + np.tanh(inner)) / 2  # the logistic function of x is also 0.5 + 0.5 tanh(x / 2)
    return activated


def _times(x: Wide, projection: Projection) -> Wide:
    y = _product(x, projection.weight, 0, projection.weight.rows)
    return y + projection.bias if projection.bias.size else y


def _product(x: Wide, matrix: Matrix, first: int, end: int) -> Wide:
    """Return x times the transposed rows `first` to `end` of the matrix, computed a few rows at a time.

    A whole output matrix in float64 would take gigabytes.
    """
    step = max(TOGETHER // matrix.columns, 1)
    parts = [np.arange(at, min(at + step, end)) for at in range(first, end, step)]
    return np.concatenate([x @ matrix.dequantized(rows).astype(np.float64).T for rows in parts], axis=-1)


def _norm(x: Wide, norm: Norm, epsilon: float) -> Wide:
    if norm.bias is not None:
        x = x - x.mean(axis=-1, keepdims=True)
    normed: Wide = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon) * norm.weight
    return normed if norm.bias is None else normed + norm.bias


def _turns(rope: Rope, tokens: int, context: int) -> NDArray[np.complex128]:
    """Return the complex factors that rotate the pairs of dimensions, complex128 (tokens, 1, pairs)."""
    wavelengths = 2 * np.pi * rope.base ** (2.0 * np.arange(rope.dimensions // 2) / rope.dimensions)
    # YaRN counts turns with the original frequencies, before their division by the factors.
    pair_of = [
        rope.dimensions * np.log(rope.original_context / (2 * np.pi * turns)) / np.log(rope.base) / 2
        for turns in rope.turns
    ]
    factors = rope.short_factors if context <= rope.original_context else rope.long_factors
    if factors is not None:
        wavelengths = wavelengths * factors
    first, last = max(np.floor(pair_of[0]), 0.0), min(np.ceil(pair_of[1]), rope.dimensions - 1.0)
    slow = np.interp(np.arange(len(wavelengths)), [first, max(last, first + 1e-3)], [0.0, 1.0])
    fast = rope.extrapolation * (1 - slow)
    angles = np.arange(tokens)[:, None] * 2 * np.pi / wavelengths * (fast + (1 - fast) * rope.scale)
    turned: NDArray[np.complex128] = rope.magnitude * np.exp(1j * angles)[:, None, :]
    return turned


def _rotated(x: Wide, rope: Rope, turn: NDArray[np.complex128]) -> Wide:
    """Rotate the pairs of dimensions in x, which has shape (tokens, heads, head_dim).

    Each pair is treated as a complex number and multiplied by its factor in `turn`.
    """
    half = rope.dimensions // 2
    rotating = x[..., : rope.dimensions]
    pairs = rotating.reshape(*x.shape[:2], 2, half).swapaxes(2, 3)
    if rope.layout == "normal":
        pairs = rotating.reshape(*x.shape[:2], half, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * turn
    out = x.copy()
    if rope.layout == "normal":
        out[..., 0 : rope.dimensions : 2], out[..., 1 : rope.dimensions : 2] = turned.real, turned.imag
    else:
        out[..., :half], out[..., half : rope.dimensions] = turned.real, turned.imag
    return out


def _attention(model: Model, layer: LayerWeights, context: int, x: Wide) -> Wide:
    rope = model.sliding_rope if layer.slides else model.rope
    turns = _turns(rope, len(x), context)
    tokens, group = len(x), model.heads // model.kv_heads
    q = _times(x, layer.q).reshape(tokens, model.heads, -1)
    k = _times(x, layer.k).reshape(tokens, model.kv_heads, -1)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = _norm(q, layer.q_norm, model.epsilon), _norm(k, layer.k_norm, model.epsilon)
    q, k = _rotated(q, rope, turns), _rotated(k, rope, turns)
    v = _times(x, layer.v).reshape(tokens, model.kv_heads, -1)
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = _held(np.einsum("thd,phd->htp", q, k) * model.attention_scale, model.attention_cap)
    sees = np.tri(tokens, dtype=bool)
    if layer.slides and model.window:
        sees &= ~np.tri(tokens, k=-model.window, dtype=bool)
    scores = np.where(sees, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    return _times(np.einsum("htp,phd->thd", weights, v).reshape(tokens, -1), layer.output)


def _feed_forward(model: Model, layer: LayerWeights, x: Wide) -> Wide:
    if model.experts is None or layer.router is None:
        gate = _times(x, layer.gate)
        return _times(_activated(model, gate) * _times(x, layer.up), layer.down)
    chances = np.exp(_times(x, layer.router))
    chances /= chances.sum(axis=1, keepdims=True)
    weights, chosen = np.zeros_like(chances), np.argsort(-chances, axis=1, kind="stable")[:, : model.experts.used]
    np.put_along_axis(weights, chosen, np.take_along_axis(chances, chosen, 1), 1)
    if model.experts.normalised:
        weights /= weights.sum(axis=1, keepdims=True)
    out = np.zeros_like(x)
    for expert in range(model.experts.count):
        took = np.flatnonzero((chosen == expert).any(axis=1))
        if not took.size:
            continue
        inside, outside = (np.array([expert, expert + 1]) * rows for rows in (model.feed_forward, model.hidden))
        gate, up = (_product(x[took], one.weight, *inside) for one in (layer.gate, layer.up))
        found = _product(_activated(model, gate) * up, layer.down.weight, *outside)
        out[took] += model.experts.scale * weights[took, expert, None] * found
    return out
