"""A mixture of experts: the buffers it needs beside a pass's own, and which of the weights are an expert's."""

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
    """The rows of one expert in the matrix of all `count`, where they lie."""
    if isinstance(matrix, DeviceMatrix):
        return matrix.of_expert(expert)
    rows = matrix.rows // count
    return replace(matrix, data=matrix.data[expert * rows : (expert + 1) * rows])


def of_all(matrix: Matrix | DeviceMatrix, count: int) -> Any:
    """The weights of all `count` experts, where they lie, as `expert_linear` takes them."""
    return matrix.data if isinstance(matrix, DeviceMatrix) else matrix.data.reshape(count, matrix.rows // count, -1)


@dataclass(frozen=True, slots=True)
class ExpertSpace:
    """Buffers for a pass over some tokens; what is (tokens, used) holds a pair of a token and an expert each.

    Pairs stand in the order of their experts, those of expert e from starts[e] to starts[e + 1].
    """

    logits: Floats  # (tokens, experts)
    weights: Floats  # (tokens, used)
    places: Places  # (tokens, used), where the pair stands in that order
    tokens: Places  # (tokens * used,), of which token the pair at a place is
    experts: Places  # (tokens * used,), and of which expert
    starts: Places  # (experts + 1,)
    taken: Floats  # (tokens, hidden), the inputs of one expert: no token has it twice
    outputs: Floats  # (tokens * used, hidden), by place
    gate: Floats  # (used, feed_forward), of all experts of one token
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
        """`zeros(shape, dtype)` makes them."""
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
        """The same buffers for a pass over fewer tokens."""
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
