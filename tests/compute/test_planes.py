"""Tests of planes (the layout of weights on GPUs): planes contain exactly the weights.

The tests read the planes in two ways: as documented, and as the CUDA C++ of each format reads them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.compute.cuda.units import UNITS
from cbtop.compute.errors import ComputeError
from cbtop.compute.gpu.arguments import planes_of
from cbtop.compute.quantization import FORMATS
from cbtop.compute.quantization.base import BlockFormat, Bytes
from cbtop.compute.quantization.planes import ALIGNED, UNIT, PlaneLayout
from tests.compute.cuda_on_cpu import compiler, guarded, loaded

WITH_PLANES = [one for one in FORMATS.values() if one.planes is not None]
IN_PLANES = {one.name: one for one in WITH_PLANES if one.block_elements > 1}
# For each format, the offsets of the binary16 scales in a block. All other bytes may have any value, but the exponent
# of MXFP4 at offset 0 is at most 191.
HALVES = {
    "Q8_0": (0,),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q6_K": (208,),
    "Q5_K": (0, 2),
    "Q4_K": (0, 2),
    "Q3_K": (108,),
    "Q2_K": (80, 82),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (-1,),
    "NVFP4": (),
    "TQ2_0": (64,),
    "Q1_0": (0,),
}
READ = r"""
extern "C" void read_NAME(const uint8_t* planes, int64_t weights, uint32_t* codes, float* scales)
{
    const NAME format(planes, weights);
    for (int64_t unit = 0; unit < weights / 32; unit++) {
        format.codes(unit, codes + 8 * unit);
        float4 found = format.scales(unit);
        std::memcpy(scales + 4 * unit, &found, 16);
    }
}
"""


def layout_of(block_format: BlockFormat) -> PlaneLayout:
    assert block_format.planes is not None
    return block_format.planes


def blocks_of(block_format: BlockFormat) -> st.SearchStrategy[Bytes]:
    """Generate up to twelve blocks of random bytes. Their scales are finite."""

    def made(count: int, data: bytes, seed: int) -> Bytes:
        blocks = np.random.default_rng(seed).integers(0, 256, (count, block_format.block_bytes), np.uint8)
        blocks[0, : len(data)] = np.frombuffer(data, np.uint8)
        for place in HALVES[block_format.name]:
            blocks[:, place + 1] &= 0xBF  # Clear one bit, so that the absolute value of the scale is less than 2.
        return blocks

    some_bytes = st.binary(max_size=block_format.block_bytes)
    return st.builds(made, st.integers(1, 12), some_bytes, st.integers(0, 1 << 32))


def unpacked(plane: Bytes, bits: int) -> Bytes:
    """Return the codes in a plane as uint8, shape (units, 32).

    The codes are read bit by bit, as planes.py documents.
    """
    units = plane.reshape(-1, UNIT * bits // 8)
    codes = np.zeros((len(units), UNIT), np.uint8)
    for weight in range(UNIT):
        byte, shift = {
            8: (weight, 0),
            4: (weight % 16, weight // 16 * 4),
            2: (weight // 16 * 4 + weight % 4, weight % 16 // 4 * 2),
            1: (weight % 4, weight // 4),
        }[bits]
        codes[:, weight] = units[:, byte] >> shift & (1 << bits) - 1
    return codes


@pytest.fixture(scope="module")
def readers() -> Callable[[str], Any]:
    """Return a function that compiles and returns the CUDA C++ that reads a format.

    Skip the test if there is no compiler.
    """
    try:
        compiler()
    except ComputeError as error:
        pytest.skip(str(error))
    bodies = [layout_of(one).source for one in IN_PLANES.values()]
    structs = loaded(UNITS + "".join(bodies), "".join(READ.replace("NAME", name) for name in IN_PLANES))
    return lambda name: structs[f"read_{name}"]


@pytest.mark.parametrize("block_format", IN_PLANES.values(), ids=IN_PLANES)
@given(data=st.data())
def test_planes_hold_the_codes_and_kept_bytes_as_they_are_documented(
    block_format: BlockFormat, data: st.DataObject
) -> None:
    blocks = data.draw(blocks_of(block_format))
    layout, planes = layout_of(block_format), planes_of(block_format, blocks)
    codes, at, shift = (
        np.zeros((blocks.size // block_format.block_bytes, block_format.block_elements), np.uint8),
        0,
        0,
    )
    sizes = list(layout.sizes(len(blocks), block_format.block_elements))
    for bits, size in zip(layout.bits, sizes, strict=False):
        codes |= unpacked(planes[at : at + size], bits).reshape(codes.shape) << shift
        at, shift = at + size + -size % ALIGNED, shift + bits
    assert layout.codes is not None
    assert np.array_equal(codes, layout.codes(blocks))
    for (begin, end), size in zip(layout.kept, sizes[len(layout.bits) :], strict=True):
        assert np.array_equal(planes[at : at + size].reshape(len(blocks), -1), blocks[:, begin:end])
        at += size + -size % ALIGNED
    assert at == len(planes)


@pytest.mark.parametrize("block_format", IN_PLANES.values(), ids=IN_PLANES)
@given(data=st.data())
def test_scale_times_code_and_offset_as_cuda_reads_them_are_the_weights(
    readers: Callable[[str], Any], block_format: BlockFormat, data: st.DataObject
) -> None:
    blocks = data.draw(blocks_of(block_format))
    planes = guarded(planes_of(block_format, blocks))
    units = len(blocks) * block_format.block_elements // UNIT
    codes, scales = np.zeros((units, UNIT), np.int8), np.zeros((units, 4), np.float32)
    pointers = [ctypes.c_void_p(one.ctypes.data) for one in (planes, codes, scales)]
    readers(block_format.name)(pointers[0], ctypes.c_int64(units * UNIT), *pointers[1:])
    scale, offset = scales[:, 0::2].astype(np.float64), scales[:, 1::2].astype(np.float64)
    halves = codes.reshape(units, 2, 16)
    expected = block_format.unpack(blocks).reshape(units, 2, 16)
    products = scale[..., None] * halves
    off = np.abs(products + offset[..., None] - expected)
    assert (off <= 2e-7 * (np.abs(products) + np.abs(offset[..., None]))).all()


@pytest.mark.parametrize("block_format", WITH_PLANES, ids=lambda one: one.name)
def test_planes_that_are_filled_part_by_part_are_those_of_all_blocks(block_format: BlockFormat) -> None:
    blocks = np.random.default_rng(2).integers(0, 256, (9, block_format.block_bytes), np.uint8)
    layout, expected = layout_of(block_format), planes_of(block_format, blocks)
    found = np.zeros_like(expected)
    for first in range(0, 9, 4):
        layout.fill(blocks[first : first + 4], found, first, 9)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_of_floats_the_plane_are_the_rows_as_they_are(name: str) -> None:
    (block_format,) = (one for one in FORMATS.values() if one.name == name)
    rows = block_format.quantize(np.random.default_rng(1).standard_normal((3, 7), dtype=np.float32))
    planes = planes_of(block_format, rows)
    assert planes[: rows.size].tobytes() == rows.tobytes()
    assert len(planes) == ALIGNED


@pytest.mark.parametrize("block_format", WITH_PLANES, ids=lambda one: one.name)
@given(blocks=st.integers(1, 1 << 40))
def test_from_the_size_of_all_planes_it_is_known_where_each_begins(block_format: BlockFormat, blocks: int) -> None:
    layout, elements = layout_of(block_format), block_format.block_elements
    found = layout.blocks_in(layout.size_bytes(blocks, elements), elements)
    assert found >= blocks
    assert [-(-size // ALIGNED) for size in layout.sizes(found, elements)] == [
        -(-size // ALIGNED) for size in layout.sizes(blocks, elements)
    ]


def test_every_format_is_tried_with_scales_that_are_finite() -> None:
    assert set(IN_PLANES) == set(HALVES)
