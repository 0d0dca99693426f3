"""Make the arguments of the kernels in a pass, from the weights of the model and the buffers of the pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbtop.compute import brick_specs
from cbtop.compute.brick import ComputeBrick
from cbtop.compute.decoder.base import LayerWeights, Norm, Projection
from cbtop.compute.decoder.workspace import Workspace
from cbtop.compute.kernels.base import Arguments
from cbtop.compute.kernels.linear_int8 import Int8Scratch
from cbtop.compute.quantization.interleaved import Matrix

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class KernelArguments:
    """Makes the arguments of kernel calls.

    A product uses either the scratch memory for floats or the scratch memory for int8. All norms use `epsilon`.
    """

    epsilon: float
    scratch: Any
    int8_scratch: Any

    def qkv(
        self, brick: ComputeBrick, weights: LayerWeights, space: Workspace, codes: Int8Scratch | None
    ) -> tuple[Arguments, ...]:
        """Return the calls that compute a layer's queries, keys and values.

        This is one call if the brick is fused, otherwise three.
        """
        q, k, v, x = weights.q, weights.k, weights.v, space.normed
        outs = space.q_product, space.k_product, space.v
        if len(brick.kernels) > 1:
            return tuple(self.product(one, x, out, codes) for one, out in zip((q, k, v), outs, strict=True))
        return ((*_of(q), *_of(k), *_of(v), x, *outs, self.scratch_of(q.weight, codes)),)

    def norm_of_stream(
        self, brick: ComputeBrick, norm: Norm, space: Workspace, codes: Int8Scratch | None
    ) -> Arguments:
        """Return the arguments of the norm of space.x. The norm is written into space.normed.

        A fused brick first adds space.delta to space.x.
        """
        x, *others = self.norm(space.x, norm, space.normed, codes)
        return (x, space.delta, *others) if brick.spec is brick_specs.ADD_RMS_NORM else (x, *others)

    def norm(self, x: Floats, norm: Norm | None, out: Floats, codes: Int8Scratch | None = None) -> Arguments:
        """Return the arguments of a norm.

        Unless `codes` is None, the kernel also writes its output as int8 codes into `codes`.
        """
        assert norm is not None  # a model without this norm has no brick that needs these arguments
        of_both = (norm.weight,) if norm.bias is None else (norm.weight, norm.bias)
        in_int8 = () if codes is None else (out, codes.codes, codes.factors)
        return x, *of_both, self.epsilon, out, *in_int8

    def gated(
        self, gate: Projection, up: Projection, x: Floats, *outs: Floats, codes: Int8Scratch | None = None
    ) -> Arguments:
        """Return the arguments for computing gate, up and their SwiGLU.

        The kernel writes into `outs`. `codes` are the int8 codes of `x`, or None if no norm made them.
        """
        return (*_of(gate), *_of(up), x, *outs, self.scratch_of(gate.weight, codes))

    def product(self, projection: Projection, x: Floats, out: Floats, codes: Int8Scratch | None = None) -> Arguments:
        """Return the arguments of a product. `codes` are the int8 codes of `x`, or None if no norm made them."""
        return (*_of(projection), x, out, self.scratch_of(projection.weight, codes))

    def scratch_of(self, weight: Matrix, codes: Int8Scratch | None = None) -> Any:
        """Return the scratch memory that a product with these weights uses."""
        if not weight.takes_int8:
            return self.scratch
        return self.int8_scratch if codes is None else codes


def _of(projection: Projection) -> Arguments:
    weight = projection.weight
    return weight.format.code, weight.data, projection.bias
