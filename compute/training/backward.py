"""Plan the backward pass of a layer: its bricks in order, and their buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbtop.compute import brick_specs
from cbtop.compute.brick import BrickLaunch, ComputeBrick, Profiler
from cbtop.compute.brick_specs import BrickSpec, backward_of
from cbtop.compute.decoder.base import LayerWeights, Model, Norm
from cbtop.compute.decoder.bricks import LayerBricks
from cbtop.compute.kernels import (
    activation_backward,
    attention,
    attention_backward,
    layer_norm_backward,
    linear_backward,
    rms_norm_backward,
    rope,
    weight_gradient,
)
from cbtop.compute.kernels.base import Arguments
from cbtop.compute.quantization.interleaved import Matrix
from cbtop.compute.training.adapters import Adapter, Factor

Floats = NDArray[np.float32]
Part = tuple[BrickLaunch, Arguments]  # a part of a brick: a kernel, and the arguments of its call


@dataclass(frozen=True, slots=True)
class BrickCall:
    """A brick with all arguments of its call. The buffers are the same in every step."""

    brick: ComputeBrick
    elements: int
    calls: tuple[Arguments, ...]


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """Copies of a layer's activations that its backward pass reads. All have one row per token.

    Products before a norm are None if the model does not have that norm.
    """

    x: Floats  # (tokens, hidden): the input of the norm before attention
    normed: Floats
    # (tokens, rank): the values between the two factors of the adapters of queries and values.
    inner: tuple[Floats, Floats]
    qk_products: tuple[Floats, Floats] | None  # the queries and keys before their norm, or None without such norms
    q: Floats  # queries after rotation
    k: Floats
    v: Floats
    attention_delta: Floats | None  # the output of attention before its norm, or None without such a norm
    middle: Floats  # (tokens, hidden): the input of the norm before the feed-forward network
    gate: Floats
    up: Floats
    ffn_delta: Floats | None


class Gradients:
    """The gradients of activations, float32 with a row per token. All layers use the same buffers."""

    def __init__(self, model: Model, tokens: int, rank: int) -> None:
        def floats(columns: int) -> Floats:
            return np.zeros((tokens, columns), np.float32)

        query_rows, kv_rows = model.heads * model.head_dim, model.kv_heads * model.head_dim
        self.x, self.normed, self.delta = floats(model.hidden), floats(model.hidden), floats(model.hidden)
        self.q, self.k, self.v = floats(query_rows), floats(kv_rows), floats(kv_rows)
        self.q_product, self.k_product = self.q, self.k  # the gradients of queries and keys before their norm
        if model.layers[0].q_norm is not None:
            self.q_product, self.k_product = floats(query_rows), floats(kv_rows)
        self.attended = floats(query_rows)
        self.inner = floats(rank)
        self.gate, self.up, self.activated = (floats(model.feed_forward) for _ in range(3))
        self.logits = floats(model.vocabulary)


class BackwardPlanner:
    """Makes the bricks of backward passes over `tokens` tokens from position 0. `scratch` is from
    `linear_backward.scratch_for`."""

    def __init__(self, model: Model, backend: str, profiler: Profiler, gradients: Gradients, scratch: Any) -> None:
        self._model = model
        self._backend = backend
        self._profiler = profiler
        self._d = gradients
        self._scratch = scratch
        self._tokens = len(gradients.x)

    def call(self, spec: BrickSpec, *parts: Part) -> BrickCall:
        """Return a call of a new brick that runs the kernels in `parts`, each with its arguments."""
        brick = ComputeBrick(spec, [launch for launch, _ in parts], self._backend, self._profiler)
        of_token = sum(launch.elements_per_token for launch, _ in parts)
        return BrickCall(brick, round(self._tokens * of_token), tuple(arguments for _, arguments in parts))

    def through(self, weight: Matrix, d_out: Floats, d_x: Floats, *, adds: bool = False) -> Part:
        """Return the kernel call that computes the gradient of a product's input. It sets d_x, or adds to d_x if
        `adds`.
        """
        kernel, code = linear_backward.LINEAR_BACKWARD[weight.format.code], weight.format.code
        launch = BrickLaunch(kernel, linear_backward.work(weight), weight.columns)
        return launch, (code, weight.data, d_out, adds, d_x, self._scratch)

    def norm(self, norm: Norm, x: Floats, d_out: Floats, d_x: Floats, *, adds: bool = True) -> Part:
        """Return the kernel call that computes the gradient of a norm's input. It sets d_x, or adds to d_x if
        `adds`.
        """
        columns = norm.weight.size
        kernel, work = rms_norm_backward.RMS_NORM_BACKWARD, rms_norm_backward.work(columns)
        if norm.bias is not None:
            kernel, work = layer_norm_backward.LAYER_NORM_BACKWARD, layer_norm_backward.work(columns)
        x, d_out, d_x = (one.reshape(-1, columns) for one in (x, d_out, d_x))
        launch = BrickLaunch(kernel, work, x.size / self._tokens)
        return launch, (x, norm.weight, self._model.epsilon, d_out, adds, d_x)

    def layer(
        self,
        weights: LayerWeights,
        bricks: LayerBricks,
        kept: LayerActivations,
        adapters: tuple[Adapter, Adapter],
        angles: Floats,
        window: int,
        *,
        is_first: bool,
    ) -> list[BrickCall]:
        """Return the backward pass of a layer, in order.

        Before the pass, `gradients.x` holds the gradient of the layer's output. Afterwards `gradients.x` holds the
        gradient of the layer's input. The pass of the first layer ends at the adapters, because nothing before them
        is trained.
        """
        return [
            *self._feed_forward(weights, bricks, kept),
            *self._attention(weights, bricks, kept, angles, window),
            *self._adapters(weights, bricks, kept, adapters, is_first=is_first),
        ]

    def _feed_forward(self, weights: LayerWeights, bricks: LayerBricks, kept: LayerActivations) -> list[BrickCall]:
        d, d_delta, calls = self._d, self._d.x, []
        if weights.ffn_post_norm is not None and bricks.ffn_post_norm is not None and kept.ffn_delta is not None:
            d_delta = d.delta
            part = self.norm(weights.ffn_post_norm, kept.ffn_delta, d.x, d_delta, adds=False)
            calls.append(self.call(backward_of(bricks.ffn_post_norm.spec), part))
        down = self.through(weights.down.weight, d_delta, d.activated)
        calls.append(self.call(backward_of(brick_specs.DOWN_PROJECTION), down))
        kernel = activation_backward.ACTIVATIONS_BACKWARD[self._model.activation]
        activation = BrickLaunch(kernel, kernel.work(), self._model.feed_forward)
        parts = (
            (activation, (kept.gate, kept.up, d.activated, d.gate, d.up)),
            self.through(weights.gate.weight, d.gate, d.normed),
            self.through(weights.up.weight, d.up, d.normed, adds=True),
        )
        specs = brick_specs.ACTIVATION, brick_specs.GATE_PROJECTION, brick_specs.UP_PROJECTION
        if bricks.gated is not None:
            calls.append(self.call(backward_of(bricks.gated.spec), *parts))
        else:
            calls += [self.call(backward_of(spec), part) for spec, part in zip(specs, parts, strict=True)]
        norm = self.norm(weights.ffn_norm, kept.middle, d.normed, d.x)
        return [*calls, self.call(backward_of(bricks.ffn_norm.spec), norm)]

    def _attention(
        self, weights: LayerWeights, bricks: LayerBricks, kept: LayerActivations, angles: Floats, window: int
    ) -> list[BrickCall]:
        model, d, d_delta, calls = self._model, self._d, self._d.x, []
        norm, delta = weights.attention_post_norm, kept.attention_delta
        if norm is not None and bricks.attention_post_norm is not None and delta is not None:
            d_delta = d.delta
            part = self.norm(norm, delta, d.x, d_delta, adds=False)
            calls.append(self.call(backward_of(bricks.attention_post_norm.spec), part))
        output = self.through(weights.output.weight, d_delta, d.attended)
        calls.append(self.call(backward_of(brick_specs.OUTPUT_PROJECTION), output))
        of_tokens = kept.q, kept.k, kept.v, d.attended, d.q, d.k, d.v
        q, k, v, d_out, d_q, d_k, d_v = (one.reshape(self._tokens, -1, model.head_dim) for one in of_tokens)
        seen = model.heads * attention.positions_seen(0, self._tokens, window) / self._tokens
        work = attention_backward.work(model.head_dim, model.heads // model.kv_heads)
        launch = BrickLaunch(attention_backward.ATTENTION_BACKWARD, work, seen)
        arguments = q, k, v, model.attention_scale, window, d_out, d_q, d_k, d_v
        calls.append(self.call(backward_of(brick_specs.ATTENTION), (launch, arguments)))
        # In the backward pass, gradients are rotated back by the angles of the forward pass.
        back, is_neox = angles * np.array([1, -1], np.float32)[:, None, None], model.rope.layout == "neox"
        kernel = rope.ROPE_NEOX if is_neox else rope.ROPE_NORMAL
        turned: list[Part] = [
            (
                BrickLaunch(kernel, rope.work(), heads * model.rope.dimensions),
                (one, model.head_dim, 0, back, is_neox),
            )
            for one, heads in ((d.q, model.heads), (d.k, model.kv_heads))
        ]
        calls.append(self.call(backward_of(brick_specs.ROPE_EMBEDDING), *turned))
        if kept.qk_products is not None and weights.q_norm is not None and weights.k_norm is not None:
            q_product, k_product = kept.qk_products
            parts = (
                self.norm(weights.q_norm, q_product, d.q, d.q_product, adds=False),
                self.norm(weights.k_norm, k_product, d.k, d.k_product, adds=False),
            )
            calls.append(self.call(backward_of(brick_specs.RMS_NORM), *parts))
        return calls

    def _adapters(
        self,
        weights: LayerWeights,
        bricks: LayerBricks,
        kept: LayerActivations,
        adapters: tuple[Adapter, Adapter],
        *,
        is_first: bool,
    ) -> list[BrickCall]:
        d, calls, parts = self._d, [], []
        if not is_first:
            through = (
                self.through(weights.q.weight, d.q_product, d.normed),
                self.through(weights.k.weight, d.k_product, d.normed, adds=True),
                self.through(weights.v.weight, d.v, d.normed, adds=True),
            )
            calls.append(self.call(backward_of(brick_specs.QKV_PROJECTION), *through))
        for adapter, inner, d_out in zip(adapters, kept.inner, (d.q_product, d.v), strict=True):
            parts.append(_gradient(adapter.up, d_out, inner))
            parts.append(self.through(adapter.up.projection.weight, d_out, d.inner))
            parts.append(_gradient(adapter.down, d.inner, kept.normed))
            if not is_first:
                parts.append(self.through(adapter.down.projection.weight, d.inner, d.normed, adds=True))
        calls.append(self.call(backward_of(brick_specs.LORA), *parts))
        if not is_first:
            norm = self.norm(weights.attention_norm, kept.x, d.normed, d.x)
            calls.append(self.call(backward_of(bricks.attention_norm.spec), norm))
        return calls


def _gradient(factor: Factor, d_out: Floats, x: Floats) -> Part:
    """Return the kernel call that computes the gradient of a trained matrix, and adds it to `factor.gradient`."""
    rows, columns = factor.weights.shape
    launch = BrickLaunch(weight_gradient.WEIGHT_GRADIENT, weight_gradient.work(rows, columns), columns)
    return launch, (d_out, x, factor.gradient)
