"""The buffers of a mixture of experts for a pass, and functions that return the weights of one expert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbtop.compute.decoder.base import Experts
from cbtop.compute.gpu.matrix import DeviceMatrix
from cbtop.compute.quantization.interleaved import Matrix

Floats = NDArray[np.float32]
Places = NDArray[np.int64]


def of_expert(matrix: Matrix | DeviceMatrix, expert: int, count: int) -> Any:
    """Return a view of the rows of one expert in a matrix that holds `count` experts."""
    if isinstance(matrix, DeviceMatrix):
        return matrix.of_expert(expert)
    rows = matrix.rows // count
    return replace(matrix, data=matrix.data[expert * rows : (expert + 1) * rows])


def of_all(matrix: Matrix | DeviceMatrix, count: int) -> Any:
    """Return a view of the weights of all `count` experts, in the shape that `expert_linear` expects."""
    return matrix.data if isinstance(matrix, DeviceMatrix) else matrix.data.reshape(count, matrix.rows // count, -1)


@dataclass(frozen=True, slots=True)
class ExpertSpace:
    """The buffers of a mixture of experts for a pass over some tokens.

    A pair is a token and one of its experts. An array of shape (tokens, used) has one element for each pair.

    The pairs are ordered by expert. Expert e has the pairs from starts[e] to starts[e + 1] - 1.
    """

    logits: Floats  # (tokens, experts)
    weights: Floats  # (tokens, used)
    places: Places  # (tokens, used): the index of each pair (token, expert) in the order by expert
    tokens: Places  # (tokens * used,): the token of each pair, in the order by expert
    experts: Places  # (tokens * used,): the expert of each pair, in the order by expert
    starts: Places  # (experts + 1,)
    taken: Floats  # (tokens, hidden): the inputs of one expert, which gets each token at most once
    outputs: Floats  # (tokens * used, hidden): the output of each pair, in the order by expert
    gate: Floats  # (used, feed_forward): the values of all experts of one token
    up: Floats
    activated: Floats

    @classmethod
    def of(
        cls,
        experts: Experts,
        hidden: int,
        feed_forward: int,
        tokens: int,
        zeros: Callable[[Any, Any], Any] = np.zeros,
    ) -> ExpertSpace:
        """Make the buffers with `zeros(shape, dtype)`."""
        pairs = tokens, experts.used
        return cls(
            logits=zeros((tokens, experts.count), np.float32),
            weights=zeros(pairs, np.float32),
            places=zeros(pairs, np.int64),
            tokens=zeros((tokens * experts.used,), np.int64),
            experts=zeros((tokens * experts.used,), np.int64),
            starts=zeros((experts.count + 1,), np.int64),
            taken=zeros((tokens, hidden), np.float32),
            outputs=zeros((tokens * experts.used, hidden), np.float32),
            gate=zeros((experts.used, feed_forward), np.float32),
            up=zeros((experts.used, feed_forward), np.float32),
            activated=zeros((experts.used, feed_forward), np.float32),
        )

    def first(self, tokens: int) -> ExpertSpace:
        """Return views of these buffers that fit a pass over fewer tokens."""
        pairs = tokens * self.weights.shape[1]
        return replace(
            self,
            logits=self.logits[:tokens],
            weights=self.weights[:tokens],
            places=self.places[:tokens],
            tokens=self.tokens[:pairs],
            experts=self.experts[:pairs],
            taken=self.taken[:tokens],
            outputs=self.outputs[:pairs],
        )
