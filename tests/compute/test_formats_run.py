"""Tests of models with all matrices in one block format. The models run, from their file to their tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbtop.compute import demo_model
from cbtop.compute.decoder import FAMILIES
from cbtop.compute.decoder.base import Model, read_model
from cbtop.compute.decoder.decoder import Decoder
from cbtop.compute.decoder.int8 import interleaved
from cbtop.compute.decoder.reference import forward_reference
from cbtop.compute.demo_model import TINY, write_model
from cbtop.compute.quantization import FORMATS, INTERLEAVABLE
from cbtop.compute.quantization.base import BlockFormat
from cbtop.compute.quantization.interleaved import InterleavedMatrix

PROMPT = [3, 141, 59, 26, 5]
# The formats that run by default: floats (F16), the demo's (Q4_K), uneven levels (IQ4_NL), and blocks of 64 (NVFP4).
BY_DEFAULT = "F16", "Q4_K", "IQ4_NL", "NVFP4"
# The sizes of this model can be divided by 32 only. Larger blocks have 64, 128 or 256 weights.
NARROW = replace(TINY, hidden=224, heads=7, kv_heads=1, feed_forward=352, layers=1)
WIDE = replace(TINY, layers=1)


@pytest.fixture
def model_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[BlockFormat], Model]:
    """Return a function that creates a model with all matrices in one format."""
    tensors: Any = demo_model.tensors_of

    def made(block_format: BlockFormat) -> Model:
        def of_one_format(shape: demo_model.ModelShape) -> Iterator[Any]:
            for tensor in tensors(shape):
                yield replace(tensor, format=block_format) if len(tensor.shape) == 2 else tensor

        monkeypatch.setattr(demo_model, "tensors_of", of_one_format)
        shape = WIDE if block_format.block_elements > 32 else NARROW
        write_model(tmp_path / "model.gguf", shape, lambda *_: None)
        return read_model(tmp_path / "model.gguf", FAMILIES)

    return made


@pytest.mark.parametrize(
    "block_format",
    [
        pytest.param(one, marks=() if one.name in BY_DEFAULT else pytest.mark.slow, id=one.name)
        for one in FORMATS.values()
    ],
)
def test_a_model_of_any_format_decodes_and_its_checks_hold(
    block_format: BlockFormat, model_of: Callable[[BlockFormat], Model], decoder_for: Callable[[Model, int], Decoder]
) -> None:
    model = model_of(block_format)
    assert model.quantization == block_format.name

    decoder = decoder_for(model, 1)
    assert [result for result in decoder.verify(PROMPT) if not result.passed] == []
    sequence = [*PROMPT, decoder.prefill(PROMPT)]
    sequence.append(decoder.decode(sequence[-1]))
    expected = forward_reference(model, sequence[:-1])
    assert sequence[len(PROMPT) :] == list(expected[len(PROMPT) - 1 :].argmax(axis=1))
    error = np.abs(decoder.logits - expected[-1]).max()
    assert error < 1e-3 * np.abs(expected[-1]).max()


# By default, run one format with blocks of 32, 64, 128 and 256 weights.
@pytest.mark.parametrize(
    "block_format",
    [
        pytest.param(FORMATS[code], marks=() if code in (20, 23, 40, 41) else pytest.mark.slow, id=FORMATS[code].name)
        for code in INTERLEAVABLE
    ],
)
def test_any_interleaved_format_differs_from_float64_by_activation_rounding(
    block_format: BlockFormat, model_of: Callable[[BlockFormat], Model], decoder_for: Callable[[Model, int], Decoder]
) -> None:
    expected = forward_reference(model_of(block_format), PROMPT)[-1]
    model = interleaved(model_of(block_format))
    assert isinstance(model.layers[0].down.weight, InterleavedMatrix)

    decoder = decoder_for(model, 1)
    assert [result for result in decoder.verify(PROMPT) if not result.passed] == []
    decoder.prefill(PROMPT)
    assert 1e-5 < np.abs(decoder.logits - expected).max() / np.abs(expected).max() < 0.03
