"""Run the feed-forward half of a layer that is a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cbtop.compute.brick import ComputeBrick
from cbtop.compute.decoder.arguments import KernelArguments
from cbtop.compute.decoder.base import Experts, LayerWeights, Model, Projection
from cbtop.compute.decoder.bricks import ExpertBricks
from cbtop.compute.decoder.experts import ExpertSpace, of_all, of_expert
from cbtop.compute.decoder.machine import Machine
from cbtop.compute.decoder.workspace import Workspace
from cbtop.compute.kernels.base import Arguments

Run = Callable[..., None]  # a function that runs one brick of a pass; it is called with (brick, elements, *calls)


class Mixture:
    """The experts of a model, with buffers for at most `most` tokens on a machine."""

    def __init__(
        self, model: Model, experts: Experts, machine: Machine, arguments: KernelArguments, most: int
    ) -> None:
        self._model, self._experts, self._machine, self._arguments = model, experts, machine, arguments
        self._space = ExpertSpace.of(experts, model.hidden, model.feed_forward, most, machine.zeros)

    def plan(self, tokens: int) -> None:
        """Set the numbers of tokens per expert for a plan of a pass. No router runs in a plan.

        All tokens go to the same experts, as many experts as one token uses.
        """
        starts = self._space.starts
        starts[:] = tokens * np.minimum(np.arange(len(starts)), self._experts.used)

    def mix(self, weights: LayerWeights, bricks: ExpertBricks, space: Workspace, count: int, run: Run) -> None:
        """Compute the output of a mixture of experts from space.normed, and write it into space.delta_product."""
        experts = self._experts
        assert weights.router is not None
        mixed = self._space.first(count)
        pairs = mixed.places, mixed.tokens, mixed.experts, mixed.starts
        run(
            bricks.router,
            2 * mixed.logits.size,
            self._arguments.product(weights.router, space.normed, mixed.logits),
            (mixed.logits, experts.normalised, experts.scale, mixed.weights, *pairs),
        )
        if count == 1:
            self._of_token(weights, bricks.of_token, space, mixed, run)
        else:
            self._of_tokens(weights, bricks.experts, space, mixed, run)
        run(bricks.combine, space.delta.size, (mixed.outputs, mixed.places, mixed.weights, space.delta_product))

    def _of_token(
        self, weights: LayerWeights, brick: ComputeBrick, space: Workspace, mixed: ExpertSpace, run: Run
    ) -> None:
        """Compute the outputs of the experts that one token has chosen, and write them into mixed.outputs.

        The host does not read which experts were chosen.
        """
        model, experts = self._model, self._experts
        chosen, outs = mixed.experts, (mixed.gate, mixed.up, mixed.activated)
        gate, up, down = (
            ((one.weight.format.code, of_all(one.weight, experts.count)), self._arguments.scratch_of(one.weight))
            for one in (weights.gate, weights.up, weights.down)
        )
        inner: tuple[Arguments, ...] = ((*gate[0], *up[0], chosen, space.normed, *outs, gate[1]),)
        if len(brick.kernels) > 2:  # if the brick is not fused, it runs three kernels instead of the fused kernel
            pair = (gate, mixed.gate), (up, mixed.up)
            inner = *((*matrix, chosen, space.normed, out, scratch) for (matrix, scratch), out in pair), outs
        run(
            brick,
            experts.used * (model.hidden + len(inner) * model.feed_forward),
            *inner,
            (*down[0], chosen, mixed.activated, mixed.outputs, down[1]),
        )

    def _of_tokens(
        self, weights: LayerWeights, brick: ComputeBrick, space: Workspace, mixed: ExpertSpace, run: Run
    ) -> None:
        """Compute the outputs of all experts that the tokens have chosen, one expert after another, and write them
        into mixed.outputs.
        """
        model, experts = self._model, self._experts
        starts = self._machine.host(mixed.starts)
        for expert in np.flatnonzero(np.diff(starts)).tolist():
            first, end = starts[expert : expert + 2].tolist()
            tokens = end - first
            gate, up, down = (
                Projection(of_expert(one.weight, expert, experts.count), one.bias)
                for one in (weights.gate, weights.up, weights.down)
            )
            taken, gated, upped = mixed.taken[:tokens], space.gate[:tokens], space.up[:tokens]
            activated = space.activated[:tokens]
            inner: tuple[Arguments, ...] = (self._arguments.gated(gate, up, taken, gated, upped, activated),)
            if len(brick.kernels) > 3:  # if the brick is not fused, it runs three kernels instead of the fused kernel
                products = self._arguments.product(gate, taken, gated), self._arguments.product(up, taken, upped)
                inner = (*products, (gated, upped, activated))
            run(
                brick,
                tokens * (2 * model.hidden + len(inner) * model.feed_forward),
                (space.normed, mixed.tokens[first:end], taken),
                *inner,
                self._arguments.product(down, activated, mixed.outputs[first:end]),
            )
