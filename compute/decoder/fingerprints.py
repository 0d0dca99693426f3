"""Fingerprints of a decoder's run: what every brick wrote, so that two runs can be told apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from cbtop.compute.brick import ComputeBrick
from cbtop.compute.decoder.decoder import Decoder
from cbtop.compute.kernels.base import Arguments
from cbtop.profiler.divergence import Fingerprints


class FingerprintObserver:
    """An observer for `Decoder.prefill` and `Decoder.decode` that records all that their bricks write."""

    def __init__(self, decoder: Decoder) -> None:
        self.fingerprints = Fingerprints()
        self._decoder = decoder
        self._position = 0  # where the pass began; the decoder's own moves on before the last bricks run
        self._layer_of: dict[ComputeBrick, int] = {
            getattr(bricks, field.name): layer
            for layer, bricks in enumerate(decoder.bricks.layers)
            for field in fields(bricks)
        }

    def __call__(self, brick: ComputeBrick, calls: Sequence[Arguments]) -> None:
        if brick is self._decoder.bricks.embedding:
            self._position = self._decoder.position
        for output in brick.outputs(calls):
            self.fingerprints.record(brick.spec.name, self._layer_of.get(brick), self._position, output)
