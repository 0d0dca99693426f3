"""Tests of a recorded GPU pass: it is divided into the launches of each brick, and into the bricks of each layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cbtop.compute import brick_specs
from cbtop.compute.brick import BrickLaunch, ComputeBrick
from cbtop.compute.gpu.device import BrickLaunches
from cbtop.compute.gpu.passes import Launched, LaunchedPass, PassParts
from cbtop.compute.kernels import take_rows
from cbtop.compute.kernels.linear_bf16 import CudaScratch
from cbtop.compute.kernels.linear_int8 import LINEAR_INT8, Int8Scratch
from cbtop.compute.kernels.residual_add import RESIDUAL_ADD
from cbtop.compute.kernels.rms_norm import RMS_NORM
from cbtop.compute.kernels.rope import ROPE_NEOX
from cbtop.compute.kernels.take_rows import TAKE_ROWS
from cbtop.compute.quantization.q4_k import Q4_K
from cbtop.compute.settings import STATIC_CROSSOVERS, with_crossovers
from cbtop.profiler.analysis.graph.nodes import Transfer
from cbtop.profiler.definitions import KernelDefinition
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.vocabulary import NodeKind, TransferDirection
from tests.compute.fake_gpu import FakeGpu

PROFILER = BrickProfiler(enabled=False)


def brick(spec: brick_specs.BrickSpec) -> ComputeBrick:
    return ComputeBrick(spec, (), "cuda", PROFILER, names_launches=True)


def kernel(name: str) -> KernelDefinition:
    return KernelDefinition(name, "cuda")


def test_a_brick_spans_its_launches_and_a_layer_spans_its_bricks() -> None:
    norm, product, head = brick(brick_specs.RMS_NORM), brick(brick_specs.QKV_PROJECTION), brick(brick_specs.LM_HEAD)
    copy = Transfer("host", "device", 16, TransferDirection.H2D)
    launched = [
        Launched(None, None, 1, copy),
        Launched(norm, 0, 10, kernel("rms_norm")),
        Launched(product, 0, 20, kernel("quantize_rows")),
        Launched(product, 0, 20, kernel("linear_1")),
        Launched(head, None, 30, kernel("linear_1")),
    ]
    parts = PassParts(launched)
    stamps = np.array([(0, 5), (10, 20), (30, 35), (40, 90), (100, 150)], np.uint64)
    layer = (NodeKind.LAYER, 0)
    times = zip(*parts.times(stamps, 1000), strict=True)
    assert [*zip(parts.alike.keys, times, parts.elements({}), strict=True)] == [
        ((copy,), (1000, 1005), 1),
        ((layer, norm.definition, kernel("rms_norm")), (1010, 1020), 1),
        ((layer, norm.definition), (1010, 1020), 10),
        ((layer, product.definition, kernel("quantize_rows")), (1030, 1035), 1),
        ((layer, product.definition, kernel("linear_1")), (1040, 1090), 1),
        ((layer, product.definition), (1030, 1090), 20),
        ((layer,), (1010, 1090), 1),
        ((head.definition, kernel("linear_1")), (1100, 1150), 1),
        ((head.definition,), (1100, 1150), 30),
    ]


def test_given_element_counts_replace_those_noted_at_graph_capture() -> None:
    one = brick(brick_specs.ATTENTION)
    parts = PassParts([Launched(one, 3, 7, kernel("attention"))])
    assert parts.elements({one: 99}) == [1, 99, 1]
    assert parts.elements({}) == [1, 7, 1]


def test_a_brick_run_once_per_expert_is_recorded_each_time_with_its_elements() -> None:
    gpu: Any = FakeGpu()
    taking = BrickLaunch(TAKE_ROWS, take_rows.work())
    experts = ComputeBrick(brick_specs.MOE_EXPERTS, (taking,), "cuda", PROFILER, names_launches=True)
    ran = LaunchedPass(gpu)
    x, tokens = np.zeros((4, 8), np.float32), np.zeros(4, np.int64)
    with ran.layer(2):
        for count in (3, 1):
            ran.run(experts, 8 * count, (x, tokens[:count], np.zeros((count, 8), np.float32)))
    parts = PassParts(ran.launched)
    assert [key[-1] == experts.definition for key in parts.alike.keys] == [False, True, False, True, False]
    assert parts.elements({}) == [1, 24, 1, 8, 1]


def launches_of_norm_and_product(rows: int, *, is_other: bool) -> list[str]:
    """Return the launches of a norm followed by a product.

    The product reads the output of the norm. With `is_other`, it reads other activations.
    """
    x, normed, other = (np.zeros((rows, 256), np.float32) for _ in range(3))
    space = Int8Scratch(np.zeros((8, 256), np.uint8), np.zeros((8, 32), np.float32), 4, None)
    launches = BrickLaunches(space)
    out, no_bias = np.zeros((rows, 64), np.float32), np.zeros(0, np.float32)
    norm = launches.of([RMS_NORM], ((x, np.ones(256, np.float32), 1e-6, normed),))
    given = Q4_K.code, np.zeros(64 * 256, np.uint8), no_bias, other if is_other else normed, out, space
    return [one.entry for _, one in [*norm, *launches.of([LINEAR_INT8[Q4_K.code]], (given,))]]


def test_activations_are_rounded_unless_a_norm_has_already_made_their_codes() -> None:
    assert launches_of_norm_and_product(1, is_other=False) == ["rms_norm_int8", "linear_in_turn"]
    assert launches_of_norm_and_product(1, is_other=True) == ["rms_norm_int8", "quantize_rows", "linear_in_turn"]
    assert launches_of_norm_and_product(3, is_other=False) == ["rms_norm", "quantize_rows", "linear_4"]


def test_codes_that_another_product_has_written_over_are_made_again() -> None:
    x, normed, other = (np.zeros((1, 256), np.float32) for _ in range(3))
    space = Int8Scratch(np.zeros((8, 256), np.uint8), np.zeros((8, 32), np.float32), 4, None)
    launches = BrickLaunches(space)
    out, no_bias = np.zeros((1, 64), np.float32), np.zeros(0, np.float32)

    def product(of: Any) -> list[str]:
        call = Q4_K.code, np.zeros(64 * 256, np.uint8), no_bias, of, out, space
        return [one.entry for _, one in launches.of([LINEAR_INT8[Q4_K.code]], (call,))]

    assert len([*launches.of([RMS_NORM], ((x, np.ones(256, np.float32), 1e-6, normed),))]) == 1
    assert product(other) == ["quantize_rows", "linear_in_turn"]
    assert product(normed) == ["quantize_rows", "linear_in_turn"]


# With 256 columns, one launch computes the norm and its int8 codes. Rows of 8,448 are too long for that.
@pytest.mark.parametrize("hidden", [256, 8448])
def test_codes_of_an_array_are_not_used_after_it_was_written_again(hidden: int) -> None:
    x, normed = (np.zeros((1, hidden), np.float32) for _ in range(2))
    space = Int8Scratch(np.zeros((8, hidden), np.uint8), np.zeros((8, hidden // 8), np.float32), 4, None)
    launches = BrickLaunches(space)

    def norm() -> list[str]:
        call = x, np.ones(hidden, np.float32), 1e-6, normed
        return [one.entry for _, one in launches.of([RMS_NORM], (call,))]

    first = norm()
    assert norm() == first
    call = normed, np.zeros((1, hidden), np.float32)
    assert [one.entry for _, one in launches.of([RESIDUAL_ADD], (call,))] == ["residual_add"]
    given = Q4_K.code, np.zeros(64 * hidden, np.uint8), np.zeros(0, np.float32), normed, np.zeros((1, 64)), space
    assert next(launches.of([LINEAR_INT8[Q4_K.code]], (given,)))[1].entry == "quantize_rows"


def test_a_norm_makes_the_codes_or_bfloat16_that_the_products_after_it_use() -> None:
    x, normed = (np.zeros((1, 256), np.float32) for _ in range(2))
    tiles = CudaScratch(np.zeros(256, np.uint16), np.zeros(64 * 256, np.uint16), np.zeros(64, np.float32))
    space = Int8Scratch(np.zeros((8, 256), np.uint8), np.zeros((8, 32), np.float32), 4, tiles)
    with with_crossovers(replace(STATIC_CROSSOVERS, bf16_tokens=1)):
        ((_, one),) = BrickLaunches(space).of([RMS_NORM], ((x, np.ones(256, np.float32), 1e-6, normed),))
    assert one.entry == "rms_norm_bf16"


def test_queries_and_keys_rotate_in_one_launch_with_a_thread_for_each_pair() -> None:
    q, k, table = np.zeros((1, 512), np.float32), np.zeros((1, 128), np.float32), np.zeros((2, 9, 32), np.float32)
    start = np.zeros(1, np.int32)
    calls = tuple((one, 64, start, table, True) for one in (q, k))
    ((_, one),) = BrickLaunches().of([ROPE_NEOX, ROPE_NEOX], calls)
    assert one.grid[0] * one.block[0] >= (512 + 128) // 2
    assert [one.arguments[at] is x for at, x in ((0, q), (3, k))] == [True, True]
