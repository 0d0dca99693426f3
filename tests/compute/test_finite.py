"""Tests of weights that are not finite: cbtop finds them by the scales of their blocks and reports them by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cbtop.compute import finite
from cbtop.compute.decoder import FAMILIES
from cbtop.compute.decoder.base import read_model
from cbtop.compute.errors import ModelError
from cbtop.compute.finite import first_not_finite, scale_offsets
from cbtop.compute.quantization import FORMATS
from cbtop.compute.quantization.base import BlockFormat
from tests.representatives import first_by_default

WORDS = {"NaN": (0x7E00, 0x7C01, 0xFFFF), "an infinity": (0x7C00, 0xFC00)}
QUANTISED = [one for one in FORMATS.values() if one.block_elements > 1 and one.suspects is None]


@first_by_default("block_format", FORMATS.values(), 5, ids=lambda one: one.name)
@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_the_format_makes_of_it_is_not_finite_where_it_is_found(
    block_format: BlockFormat, data: st.DataObject
) -> None:
    rows, blocks = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    weights = np.random.default_rng(1).standard_normal((rows, blocks * block_format.block_elements), dtype=np.float32)
    packed = block_format.quantize(weights)
    for _ in range(data.draw(st.integers(0, 3))):
        word = data.draw(st.sampled_from(WORDS["NaN"] + WORDS["an infinity"]))
        row, place = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, packed.shape[1] // 2 - 1))
        packed[row, 2 * place : 2 * place + 2] = np.frombuffer(word.to_bytes(2, "little"), np.uint8)
    with np.errstate(all="ignore"):
        meant = block_format.dequantize(packed).reshape(rows, blocks, -1)
    bad = np.argwhere(~np.isfinite(meant).all(axis=2)).tolist()
    found = first_not_finite(block_format, packed)
    assert (None if found is None else [*found[:2]]) == (bad[0] if bad else None)


@pytest.mark.parametrize("block_format", QUANTISED, ids=lambda one: one.name)
@pytest.mark.parametrize("what", WORDS)
def test_it_says_which_it_is_wherever_the_scale_lies(block_format: BlockFormat, what: str) -> None:
    assert scale_offsets(block_format)
    for offset in scale_offsets(block_format):
        for bits in WORDS[what]:
            packed = block_format.quantize(np.ones((3, 2 * block_format.block_elements), np.float32))
            packed[1].view("<u2")[(block_format.block_bytes + offset) // 2] = bits
            assert first_not_finite(block_format, packed) == (1, 1, what)


@pytest.mark.parametrize(("exponent", "code", "wanted"), [
    (252, 7, None), (253, 5, None), (253, 7, "an infinity"), (254, 15, "an infinity"), (255, 0, None)
])  # fmt: skip
def test_blocks_of_mxfp4_are_infinite_only_beyond_float32(exponent: int, code: int, wanted: str | None) -> None:
    mxfp4 = FORMATS[39]
    packed = np.zeros((3, 2 * mxfp4.block_bytes), np.uint8)
    packed[:, :] = mxfp4.quantize(np.ones((3, 64), np.float32))
    packed[1, mxfp4.block_bytes :] = 0
    packed[1, mxfp4.block_bytes] = exponent
    packed[1, -1] = code << 4
    assert first_not_finite(mxfp4, packed) == (None if wanted is None else (1, 1, wanted))


def test_floats_are_looked_at_to_the_last_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finite, "FLOATS_BYTES", 100)
    values = np.zeros((7, 8), np.float32)
    values[6, 5] = np.nan
    assert first_not_finite(FORMATS[0], values.view(np.uint8)) == (6, 5, "NaN")


@pytest.mark.parametrize(
    ("name", "at", "bits", "wanted"),
    [
        ("blk.1.attn_q.weight", 3 * 144, 0x7E00, "has NaN as the scale of block 0 of row 3"),
        ("blk.1.ffn_down.weight", (5 * 2 + 1) * 144 + 2, 0xFC00, "has an infinity as the scale of block 1 of row 5"),
        ("token_embd.weight", 210 * 511 + 208, 0x7C00, "has an infinity as the scale of block 0 of row 511"),
        ("output_norm.weight", 4 * 17 + 2, 0x7FC0, "has NaN as value 17 of row 0"),
    ],
)
def test_a_damaged_model_is_refused_by_tensor_and_block(
    model_files: dict[str, Path], tmp_path: Path, name: str, at: int, bits: int, wanted: str
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(model_files["qwen2"].read_bytes())
    (tensor,) = (one for one in GGUFReader(path).tensors if one.name == name)
    with path.open("r+b") as stream:
        stream.seek(int(tensor.data_offset) + at)
        stream.write(bits.to_bytes(2, "little"))
    with pytest.raises(ModelError, match=f"tensor '{name}' {wanted}: it is damaged; download or convert it again"):
        read_model(path, FAMILIES)
