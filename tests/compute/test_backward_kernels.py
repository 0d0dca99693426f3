"""Tests of kernels for gradients: they equal finite differences of the forward references in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cbtop.compute.kernels import (
    activation,
    activation_backward,
    adam_w,
    attention,
    attention_backward,
    cross_entropy,
    cross_entropy_backward,
    layer_norm,
    layer_norm_backward,
    linear,
    linear_backward,
    rms_norm,
    rms_norm_backward,
    rope,
    weight_gradient,
)
from cbtop.compute.kernels.kv_caches import plain_caches
from cbtop.compute.quantization.base import QuantizedMatrix
from cbtop.compute.quantization.floats import F32
from cbtop.compute.quantization.q4_k import Q4_K
from tests.representatives import first_by_default

STEP = 1e-5  # step between two points of a finite difference, in float64
NO_BIAS = np.zeros(0, np.float32)
SCALE, WINDOW = 0.4, 3
Inputs = list[Any]  # float64 arrays
Forward = Callable[..., Any]  # a function from the inputs (float64) to the output
# a function from the inputs and the gradient of the output to the gradients of the inputs
Backward = Callable[..., Inputs]


def normal(*shape: int) -> Any:
    return np.random.default_rng([11, *shape]).standard_normal(shape)


def called(reference: Callable[..., None], shape: Any, *arguments: Any) -> Any:
    """Call a reference that writes into its last argument. Return this output in float64."""
    out = np.zeros(shape)
    reference(*arguments, out)
    return out


def gate(forward: Callable[..., None], backward: Callable[..., None]) -> tuple[Inputs, Forward, Backward]:
    def gradients(gate: Any, up: Any, d_out: Any) -> Inputs:
        outs = [np.zeros_like(gate), np.zeros_like(up)]
        backward(gate, up, d_out, *outs)
        return outs

    return [3 * normal(2, 5), normal(3, 5)[:2]], lambda *both: called(forward, (2, 5), *both), gradients


def norm(forward: Callable[..., None], backward: Callable[..., None], *bias: Any) -> tuple[Inputs, Forward, Backward]:
    weight = normal(7).astype(np.float32)

    def gradients(x: Any, d_out: Any) -> Inputs:
        d_x = np.ones_like(x)
        backward(x, weight, 0.1, d_out, True, d_x)
        return [d_x - 1]

    return [normal(3, 7)], lambda x: called(forward, x.shape, x, weight, *bias, 0.1), gradients


def product(backward: Callable[..., None]) -> tuple[Inputs, Forward, Backward]:
    """Return a product of Q4_K weights, its inputs and its gradient for the test.

    The expected gradient uses the dequantised weights.
    """
    matrix = QuantizedMatrix.of(Q4_K, normal(6, 256).astype(np.float32))
    scratch = linear_backward.scratch_for(1, 256)

    def forward(x: Any) -> Any:
        out = np.zeros((3, 6))
        linear.reference(Q4_K.code, matrix.data, NO_BIAS, x, out, scratch)
        return out

    def gradients(x: Any, d_out: Any) -> Inputs:
        d_x = np.ones_like(x)
        backward(Q4_K.code, matrix.data, d_out, False, d_x, scratch)
        return [d_x]

    return [normal(3, 256)], forward, gradients


def weights(backward: Callable[..., None]) -> tuple[Inputs, Forward, Backward]:
    x = normal(5, 4)

    def gradients(weights: Any, d_out: Any) -> Inputs:
        d_weights = np.zeros_like(weights)
        backward(d_out, x.astype(weights.dtype), d_weights)
        return [d_weights]

    return [normal(3, 4)], lambda weights: x @ weights.T, gradients


def attended(window: int, backward: Callable[..., None]) -> tuple[Inputs, Forward, Backward]:
    """Return attention with two heads of keys and values and six heads of queries, for the test of its gradient."""

    def forward(q: Any, k: Any, v: Any) -> Any:
        k_cache, v_cache = plain_caches(2, len(q), 4, np.float64)
        k_cache[:], v_cache[:] = k.swapaxes(0, 1), v.swapaxes(0, 1)
        out = np.zeros((len(q), 24))
        attention.reference(q.reshape(len(q), -1), k_cache, v_cache, 0, SCALE, window, 0.0, out, None)
        return out.reshape(q.shape)

    def gradients(q: Any, k: Any, v: Any, d_out: Any) -> Inputs:
        outs = [np.ones_like(one) for one in (q, k, v)]
        backward(q, k, v, SCALE, window, d_out, *outs)
        return outs

    return [2 * normal(6, 6, 4), normal(6, 2, 4), normal(7, 2, 4)[1:]], forward, gradients


def rotated(backward: Callable[..., None], neox: bool) -> tuple[Inputs, Forward, Backward]:
    """Return a rotary embedding (rope) for the test of its gradient.

    The gradient is rotated back, by the negated angles.
    """
    table = rope.angle_table(9, np.array([1.0, 0.3]))

    def forward(x: Any) -> Any:
        out = x.copy()
        rope.reference(out, 4, 0, table, neox)
        return out

    def gradients(x: Any, d_out: Any) -> Inputs:
        d_x = d_out.copy()
        backward(d_x, 4, 0, table * np.array([1, -1], np.float32)[:, None, None], neox)
        return [d_x]

    return [normal(5, 8)], forward, gradients


def loss(backward: Callable[..., None]) -> tuple[Inputs, Forward, Backward]:
    """Return the mean loss for the test of its gradient. The gradient of its output is 1."""
    targets = np.array([4, 0, 7])

    def gradients(logits: Any, d_out: Any) -> Inputs:
        d_logits = np.zeros_like(logits)
        backward(logits, targets, d_logits)
        return [d_out * d_logits]

    return [3 * normal(3, 8)], lambda x: called(cross_entropy.reference, 3, x, targets).mean(), gradients


ACTIVATION, NORM, LAYER_NORM = activation_backward, rms_norm_backward, layer_norm_backward
CASES = {
    "swiglu": (gate, (activation.reference,), (ACTIVATION.reference, ACTIVATION.swiglu_backward)),
    "geglu": (gate, (activation.geglu_reference,), (ACTIVATION.geglu_reference, ACTIVATION.geglu_backward)),
    "rms_norm": (norm, (rms_norm.reference,), (NORM.reference, NORM.rms_norm_backward)),
    "layer_norm": (
        lambda *both: norm(*both, NO_BIAS),
        (layer_norm.reference,),
        (LAYER_NORM.reference, LAYER_NORM.layer_norm_backward),
    ),
    "linear": (product, (), (linear_backward.reference, linear_backward.linear_backward)),
    "weights of linear": (weights, (), (weight_gradient.reference, weight_gradient.weight_gradient)),
    "attention": (attended, (0,), (attention_backward.reference, attention_backward.attention_backward)),
    "attention with a window": (
        attended,
        (WINDOW,),
        (attention_backward.reference, attention_backward.attention_backward),
    ),
    "rope": (lambda one: rotated(one, True), (), (rope.reference, rope.rope)),
    "rope of neighbours": (lambda one: rotated(one, False), (), (rope.reference, rope.rope)),
    "cross_entropy": (
        loss,
        (),
        (cross_entropy_backward.reference, cross_entropy_backward.cross_entropy_backward),
    ),
}


def differences(forward: Forward, inputs: Inputs, d_out: Any) -> Inputs:
    """Return the numerical gradient of each input: a central difference for each of its numbers."""
    gradients = []
    for one in inputs:
        gradient = np.zeros_like(one)
        for place in np.ndindex(one.shape):
            value, sums = one[place], []
            for moved in (value + STEP, value - STEP):
                one[place] = moved
                sums.append((forward(*inputs) * d_out).sum())
            one[place] = value
            gradient[place] = (sums[0] - sums[1]) / (2 * STEP)
        gradients.append(gradient)
    return gradients


@first_by_default("name", CASES, 5)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    case, how, (reference, implementation) = CASES[name]
    inputs, forward, exact = case(*how, reference)
    d_out = normal(*np.shape(forward(*inputs))) if np.shape(forward(*inputs)) else 1.0
    expected = differences(forward, inputs, d_out)
    for found, wanted in zip(exact(*inputs, d_out), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7 * np.abs(wanted).max())
    *_, compiled = case(*how, implementation)
    narrow = [np.asarray(one, np.float32) for one in (*inputs, d_out)]
    for found, wanted in zip(compiled(*narrow), expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.slow
def test_adam_w_takes_the_steps_of_torch() -> None:
    torch = pytest.importorskip("torch")
    weights = normal(3, 5).astype(np.float32)
    peer = torch.nn.Parameter(torch.tensor(weights))
    optimizer = torch.optim.AdamW([peer], lr=0.05, weight_decay=0.1)
    mean, square = np.zeros((2, 3, 5), np.float32)
    for step in range(1, 6):
        gradient = normal(3, 5, step)[..., 0].astype(np.float32)
        peer.grad = torch.tensor(gradient)
        optimizer.step()
        adam_w.adam_w(weights, gradient, mean, square, step, 0.05, 0.1)
    np.testing.assert_allclose(weights, peer.detach().numpy(), rtol=1e-5)


@pytest.mark.parametrize("columns", [8, 16])
def test_products_with_the_narrow_factors_of_adapters_are_right(columns: int) -> None:
    factor, x = normal(5, columns).astype(np.float32), normal(6, columns).astype(np.float32)
    out, d_x = np.zeros((6, 5), np.float32), np.zeros_like(x)
    scratch = linear_backward.scratch_for(1, 64)
    linear.linear(F32.code, factor.view(np.uint8), NO_BIAS, x, out, scratch[:1])
    np.testing.assert_allclose(out, x @ factor.T, atol=1e-5)
    linear_backward.linear_backward(F32.code, factor.view(np.uint8), out, False, d_x, scratch)
    np.testing.assert_allclose(d_x, out @ factor, atol=1e-4)
