"""A model whose matrices are of one block format, from the file to its tokens."""

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
from cbtop.compute.decoder.reference import forward_reference
from cbtop.compute.demo_model import TINY, write_model
from cbtop.compute.quantization import FORMATS
from cbtop.compute.quantization.base import BlockFormat

PROMPT = [3, 141, 59, 26, 5]
NARROW = replace(TINY, hidden=224, heads=7, kv_heads=1, feed_forward=352, layers=1)  # no multiples of 256
WIDE = replace(TINY, layers=1)


@pytest.mark.parametrize("block_format", FORMATS.values(), ids=lambda one: one.name)
def test_a_model_of_any_format_decodes_and_its_checks_hold(
    block_format: BlockFormat,
    decoder_for: Callable[[Model, int], Decoder],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors: Any = demo_model._tensors

    def of_one_format(shape: demo_model.Shape) -> Iterator[Any]:
        for tensor in tensors(shape):
            yield replace(tensor, format=block_format) if len(tensor.shape) == 2 else tensor

    monkeypatch.setattr(demo_model, "_tensors", of_one_format)
    write_model(tmp_path / "model.gguf", WIDE if block_format.block_elements == 256 else NARROW, lambda *_: None)
    model = read_model(tmp_path / "model.gguf", FAMILIES)
    assert model.quantization == block_format.name

    decoder = decoder_for(model, 1)
    assert [result for result in decoder.verify(PROMPT) if not result.passed] == []
    sequence = [*PROMPT, decoder.prefill(PROMPT)]
    sequence.append(decoder.decode(sequence[-1]))
    expected = forward_reference(model, sequence[:-1])
    assert sequence[len(PROMPT) :] == list(expected[len(PROMPT) - 1 :].argmax(axis=1))
    error = np.abs(decoder.logits - expected[-1]).max()
    assert error < 1e-3 * np.abs(expected[-1]).max()
