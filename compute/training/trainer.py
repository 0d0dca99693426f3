"""Train a decoder's adapters.

A step has four parts: a forward pass (it keeps activations), the loss, a backward pass and AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from cbtop.compute import brick_specs
from cbtop.compute.brick import BrickLaunch, ComputeBrick, Profiler
from cbtop.compute.brick_specs import backward_of
from cbtop.compute.checks import AssertionResult, summary
from cbtop.compute.decoder.base import Model, Projection
from cbtop.compute.decoder.bricks import LayerBricks
from cbtop.compute.decoder.decoder import Decoder, Scope, one_call_at_a_time
from cbtop.compute.decoder.mixture import Run
from cbtop.compute.errors import LossError, ModelError
from cbtop.compute.kernels import adam_w, cross_entropy, cross_entropy_backward, linear, linear_backward, residual_add
from cbtop.compute.kernels.base import Arguments
from cbtop.compute.settings import DecoderSettings
from cbtop.compute.training.adapters import Adapter, Parameters
from cbtop.compute.training.backward import BackwardPlanner, BrickCall, Gradients, LayerActivations, Part
from cbtop.compute.training.times import PartTimes
from cbtop.protocol.messages import CheckResult
from cbtop.protocol.vocabulary import TRAIN, TrainingPart

Floats = NDArray[np.float32]
RANK = 8
RATE, DECAY = 3e-3, 0.01  # learning rate and weight decay of AdamW
SEED = 11


def require_trainable(model: Model) -> None:
    """Raise ModelError if gradients cannot pass through `model`."""
    unsupported = {
        "a mixture of experts": model.experts is not None,
        "soft caps": bool(model.attention_cap or model.logit_cap),
    }
    if found := [name for name, is_there in unsupported.items() if is_there]:
        raise ModelError(f"{model.name} has {' and '.join(found)}, which cannot be trained here; give a dense model")
    products = [
        one.weight
        for layer in model.layers
        for one in (layer.q, layer.k, layer.v, layer.output, layer.gate, layer.up, layer.down)
    ]
    if any(one.takes_int8 for one in (*products, model.lm_head)):
        raise ModelError(f"{model.name} has interleaved weights, which cannot be trained; read it with is_exact=True")


class Trainer(Decoder):
    """Trains adapters of the queries and values of `model`, on sequences of `tokens` tokens.

    All weights of the model are frozen. Products use unrounded activations, so `model` must not be interleaved. With
    `check_contracts`, bricks check the conditions of their contracts. `prefill` and `decode` do not use the adapters.
    """

    def __init__(
        self,
        model: Model,
        backend: str,
        threads: int,
        profiler: Profiler,
        tokens: int,
        *,
        check_contracts: bool = False,
    ) -> None:
        require_trainable(model)
        super().__init__(
            model, backend, threads, profiler, tokens, DecoderSettings("f32", check_contracts=check_contracts)
        )
        self.times = PartTimes()
        self.parameters = Parameters.of(model, RANK, SEED)
        self._done = 0  # number of steps that the optimizer has done
        self._buffers = self._space.first(tokens)
        self._gradients = Gradients(model, tokens, RANK)
        self._normed = np.zeros_like(self._buffers.x)
        self._logits = np.zeros_like(self._gradients.logits)
        self._targets, self._losses = np.zeros(tokens, np.int64), np.zeros(tokens, np.float32)
        columns = max(model.hidden, model.feed_forward, model.heads * model.head_dim)
        scratch = linear_backward.scratch_for(threads, columns)
        self._planner = BackwardPlanner(model, backend, profiler, self._gradients, scratch)
        # Brick of the forward pass -> the copies of activations to make after the brick has run, and the adapters
        # that run next.
        self._copies: dict[ComputeBrick, list[tuple[Floats, Floats]]] = {}
        self._adapted: dict[ComputeBrick, BrickCall] = {}
        self._backward = [
            self._layer_backward(index, layer.bricks, layer.angles, layer.window)
            for index, layer in enumerate(self._layers)
        ]
        self._loss, self._d_head = self._ends()
        self._optimizer = self._planner.call(brick_specs.OPTIMIZER, self._update()).brick

    @one_call_at_a_time
    def step(self, batches: Iterator[Sequence[int]]) -> float:
        """Train on the next batch. Returns its mean loss in nats, from before the update.

        A batch has one token more than the model reads, because its last token is only a target. If the loss is NaN
        or infinite, LossError is raised, and no weight changes.
        """
        times, profiler = self.times, self._profiler
        if not self._done:
            times.begin()
        with profiler.step(TRAIN, tokens=self.context) as step:
            step.start_ns, step.sequences = times.ended_ns, 1
            with profiler.brick("DataWait", elements=self.context):
                batch = next(batches)
            times.end(TrainingPart.DATA_WAIT)
            with profiler.brick("ZeroGrad", elements=self.parameters.gradient.size):
                self.parameters.gradient.fill(0)
            times.end(TrainingPart.ZERO_GRAD)
            with self._machine.turn():
                loss = self._forward_and_backward(batch, self._run_brick, profiler.layer, times.end)
                if not math.isfinite(loss):
                    raise LossError(loss, self._done + 1)
                self._done += 1
                self._run_brick(self._optimizer, self.parameters.weights.size, self._update()[1])
            times.end(TrainingPart.OPTIMIZER)
        times.end_step()
        return loss

    @one_call_at_a_time
    def gradients(self, batch: Sequence[int]) -> float:
        """Add the gradients of a batch to `parameters.gradient`. Returns the mean loss. Records nothing."""
        return self._forward_and_backward(batch, self._run_brick, lambda index: nullcontext(), lambda part: None)

    @one_call_at_a_time
    def verify_step(self, batch: Sequence[int]) -> list[CheckResult]:
        """Check each brick of a step, except the optimizer, against its reference.

        Nothing is timed. See `Decoder.verify`.
        """
        findings: list[tuple[str, str, AssertionResult]] = []
        run = self._checking(findings, [])
        self._forward_and_backward(batch, run, lambda index: nullcontext(), lambda part: None)
        return summary(findings)

    def _forward_and_backward(
        self, batch: Sequence[int], run: Run, scope: Scope, end: Callable[[TrainingPart], None]
    ) -> float:
        """Compute the loss of a batch and add its gradients. `end` is called when a part of the step has ended."""
        tokens = batch[:-1]
        self._begin()
        self._check(tokens)
        self._targets[:] = batch[1:]
        self._forward_of_all(tokens, run, scope)
        end(TrainingPart.FORWARD)
        _run(self._loss, run)
        loss = float(self._losses.mean(dtype=np.float64))
        end(TrainingPart.LOSS)
        for call in self._d_head:
            _run(call, run)
        for index in reversed(range(len(self._backward))):
            with scope(index):
                for call in self._backward[index]:
                    _run(call, run)
        end(TrainingPart.BACKWARD)
        return loss

    def _forward_of_all(self, tokens: Sequence[int], run: Run, scope: Scope) -> None:
        """Compute the logits of every token, and keep what the backward pass reads."""

        def run_and_keep(brick: ComputeBrick, elements: int, *calls: Arguments) -> None:
            run(brick, elements, *calls)
            if brick in self._adapted:
                _run(self._adapted[brick], run)
            for copy, array in self._copies.get(brick, ()):
                np.copyto(copy, array)

        model, bricks, arguments = self.model, self.bricks, self._arguments
        space = self._through_layers(tokens, run_and_keep, scope)
        run(bricks.final_norm, space.x.size, arguments.norm(space.x, model.final_norm, self._normed))
        head = Projection(model.lm_head, self._no_bias)
        run(bricks.lm_head, self._logits.size, arguments.product(head, self._normed, self._logits))

    def _kept(self, brick: ComputeBrick, *arrays: Floats) -> list[Floats]:
        """Return buffers for copies of `arrays`.

        Each time that the brick has run, the arrays are copied into the buffers.
        """
        copies = [np.zeros_like(array) for array in arrays]
        self._copies.setdefault(brick, []).extend(zip(copies, arrays, strict=True))
        return copies

    def _layer_backward(self, index: int, bricks: LayerBricks, angles: Floats, window: int) -> list[BrickCall]:
        """Plan the backward pass of a layer, and make the forward pass keep the activations that it needs."""
        space, adapters = self._buffers, self.parameters.layers[index]
        x, normed = self._kept(bricks.attention_norm, space.x, space.normed)
        products = self._kept(bricks.qk_norm, space.q_product, space.k_product) if bricks.qk_norm else None
        q, k, v = self._kept(bricks.rope, space.q, space.k, space.v)
        (middle,) = self._kept(bricks.ffn_norm, space.x)
        activation = bricks.gated or bricks.activation
        assert activation is not None  # if gate and up are both None, the layer has a mixture of experts
        assert bricks.down is not None
        gate, up = self._kept(activation, space.gate, space.up)
        deltas = [
            self._kept(before, space.delta_product)[0] if norm is not None else None
            for before, norm in (
                (bricks.output_projection, bricks.attention_post_norm),
                (bricks.down, bricks.ffn_post_norm),
            )
        ]
        inner = np.zeros((2, self.context, RANK), np.float32)
        parts = map(self._adapter, adapters, inner, (space.q_product, space.v))
        self._adapted[bricks.qkv] = self._planner.call(brick_specs.LORA, *chain.from_iterable(parts))
        kept = LayerActivations(
            x=x,
            normed=normed,
            inner=(inner[0], inner[1]),
            qk_products=None if products is None else (products[0], products[1]),
            q=q,
            k=k,
            v=v,
            attention_delta=deltas[0],
            middle=middle,
            gate=gate,
            up=up,
            ffn_delta=deltas[1],
        )
        weights = self.model.layers[index]
        return self._planner.layer(weights, bricks, kept, adapters, angles, window, is_first=index == 0)

    def _adapter(self, adapter: Adapter, inner: Floats, out: Floats) -> list[Part]:
        """Return the kernel calls that add the product of an adapter to the output of its projection."""
        delta = np.zeros_like(out)
        parts: list[Part] = []
        for factor, x, product in ((adapter.down, self._buffers.normed, inner), (adapter.up, inner, delta)):
            projection = factor.projection
            launch = BrickLaunch(
                linear.LINEAR[projection.weight.format.code],
                linear.work(projection.weight, has_bias=False),
                projection.weight.rows,
            )
            parts.append((launch, self._arguments.product(projection, x, product)))
        add = BrickLaunch(residual_add.RESIDUAL_ADD, residual_add.work(), out.shape[1])
        return [*parts, (add, (out, delta))]

    def _ends(self) -> tuple[BrickCall, list[BrickCall]]:
        """Return the brick of the loss, and the bricks of the backward pass down to the last layer's output."""
        model, d, planner, bricks = self.model, self._gradients, self._planner, self.bricks
        loss = BrickLaunch(cross_entropy.CROSS_ENTROPY, cross_entropy.work(), model.vocabulary)
        kernel = cross_entropy_backward.CROSS_ENTROPY_BACKWARD
        d_loss = BrickLaunch(kernel, cross_entropy_backward.work(), model.vocabulary)
        norm = planner.norm(model.final_norm, self._buffers.x, d.normed, d.x, adds=False)
        return planner.call(brick_specs.LOSS, (loss, (self._logits, self._targets, self._losses))), [
            planner.call(backward_of(brick_specs.LOSS), (d_loss, (self._logits, self._targets, d.logits))),
            planner.call(backward_of(bricks.lm_head.spec), planner.through(model.lm_head, d.logits, d.normed)),
            planner.call(backward_of(bricks.final_norm.spec), norm),
        ]

    def _update(self) -> Part:
        """Return the kernel call that updates the weights in step number `_done`."""
        own = self.parameters
        launch = BrickLaunch(adam_w.ADAM_W, adam_w.work())
        return launch, (own.weights, own.gradient, own.mean, own.square, self._done, RATE, DECAY)


def _run(call: BrickCall, run: Run) -> None:
    run(call.brick, call.elements, *call.calls)
