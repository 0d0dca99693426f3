"""A mixture of experts: the buffers it needs beside a pass's own, and which rows of the weights are an expert's."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cbtop.compute.decoder.base import Experts
from cbtop.compute.quantization.interleaved import Matrix

Floats = NDArray[np.float32]
Places = NDArray[np.int64]


def of_expert(matrix: Matrix, expert: int, count: int) -> Matrix:
    """The rows of one expert in the matrix of all `count`, where they lie."""
    rows = matrix.rows // count
    return replace(matrix, data=matrix.data[expert * rows : (expert + 1) * rows])


@dataclass(frozen=True, slots=True)
class ExpertSpace:
    """Buffers for a pass over some tokens; what is (tokens, used) holds a pair of a token and an expert each.

    Pairs stand in the order of their experts, those of expert e from starts[e] to starts[e + 1].
    """

    logits: Floats  # (tokens, experts)
    weights: Floats  # (tokens, used)
    places: Places  # (tokens, used), where the pair stands in that order
    tokens: Places  # (tokens * used,), of which token the pair at a place is
    starts: Places  # (experts + 1,)
    taken: Floats  # (tokens, hidden), the inputs of one expert: no token has it twice
    outputs: Floats  # (tokens * used, hidden), by place

    @classmethod
    def of(cls, experts: Experts, hidden: int, tokens: int) -> ExpertSpace:
        pairs = tokens, experts.used
        return cls(
            logits=np.zeros((tokens, experts.count), np.float32),
            weights=np.zeros(pairs, np.float32),
            places=np.zeros(pairs, np.int64),
            tokens=np.zeros(tokens * experts.used, np.int64),
            starts=np.zeros(experts.count + 1, np.int64),
            taken=np.zeros((tokens, hidden), np.float32),
            outputs=np.zeros((tokens * experts.used, hidden), np.float32),
        )

    def first(self, tokens: int) -> ExpertSpace:
        """The same buffers for a pass over fewer tokens."""
        pairs = tokens * self.weights.shape[1]
        return ExpertSpace(
            self.logits[:tokens],
            self.weights[:tokens],
            self.places[:tokens],
            self.tokens[:pairs],
            self.starts,
            self.taken[:tokens],
            self.outputs[:pairs],
        )
