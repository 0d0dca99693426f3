"""Tests of the declared work (FLOP and bytes) of kernels.

The declared work equals the work that was computed by hand from the shapes of each kernel.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbtop.compute.brick import BrickLaunch, ComputeBrick, combined_work
from cbtop.compute.brick_specs import LM_HEAD
from cbtop.compute.decoder import bricks
from cbtop.compute.decoder.decoder import Decoder
from cbtop.compute.decoder.int8 import model_to_run
from cbtop.compute.jit.exponential import POWER_FLOPS
from cbtop.compute.kernels import (
    activation,
    add_rms_norm,
    add_rms_norm_int8,
    attention,
    attention_bf16,
    expert_gated,
    expert_linear,
    gated,
    layer_norm,
    linear,
    qkv,
    quantize_rows,
    rms_norm,
    rms_norm_int8,
)
from cbtop.compute.kernels.base import KernelWork
from cbtop.compute.quantization.base import QuantizedMatrix
from cbtop.compute.quantization.interleaved import InterleavedMatrix
from cbtop.compute.quantization.q4_k import Q4_K
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import NodeKind

from .conftest import ListRecorder


def done(work: KernelWork, elements: int) -> tuple[float, float]:
    flops = work.flops_per_call + elements * work.flops_per_element
    return flops, work.bytes_per_call + elements * work.bytes_per_element


def test_a_quantised_product_reads_its_weights_once_a_call() -> None:
    matrix = QuantizedMatrix.of(Q4_K, np.ones((128, 512), np.float32))
    flops, moved = done(linear.work(matrix, has_bias=False), elements=128)
    assert flops == 2 * 128 * 512
    assert moved == pytest.approx(128 * 2 * 144 + 4 * 512 + 4 * 128)  # A block of Q4_K has 256 weights in 144 bytes.


def test_fused_products_do_the_work_of_their_parts_and_read_activations_once() -> None:
    first = QuantizedMatrix.of(Q4_K, np.ones((128, 512), np.float32))
    second = QuantizedMatrix.of(Q4_K, np.ones((64, 512), np.float32))
    tokens, once, bias = 3, 3 * 512 * 4, 64
    apart = [done(linear.work(matrix, has_bias=matrix is second), tokens * matrix.rows) for matrix in (first, second)]
    flops, moved = done(qkv.work((first, second, second), 2 * bias), tokens * (128 + 2 * 64))
    assert flops == pytest.approx(apart[0][0] + 2 * apart[1][0])
    assert moved == pytest.approx(apart[0][1] + 2 * apart[1][1] - 2 * once)
    after = done(activation.work(), tokens * 64)
    flops, moved = done(gated.work(second, second, 2), tokens * 64)
    assert flops == pytest.approx(2 * apart[1][0] + after[0])
    assert moved == pytest.approx(2 * apart[1][1] + after[1] - once)


def test_attention_reads_a_key_and_value_once_for_the_heads_that_share_them() -> None:
    positions, heads, kv_heads, head_dim, float16_bytes = 100, 12, 2, 64, 2
    elements = heads * positions
    flops, moved = done(attention.work(head_dim, heads // kv_heads, float16_bytes), elements)
    products = 2 * 2 * head_dim  # FLOP per position and head: one product with the key and one with the value
    assert flops == elements * (products + POWER_FLOPS + 3)
    assert moved == pytest.approx(2 * positions * kv_heads * head_dim * float16_bytes)


@pytest.mark.parametrize(("hidden", "is_held"), [(64, True), (8192, True), (8448, False), (70, False)])
def test_a_norm_reads_a_row_once_if_gpu_registers_hold_it_else_in_each_pass(hidden: int, is_held: bool) -> None:
    kernels: list[tuple[Any, int]] = [(rms_norm.work, 2), (partial(layer_norm.work, has_bias=True), 3)]
    for work, passes in kernels:
        assert work(hidden, is_on_gpu=True).bytes_per_element == 4 * ((1 if is_held else passes) + 1)
        assert work(hidden).bytes_per_element == 4 * (passes + 1)


def test_a_bias_of_a_norm_is_read_once_and_added_to_each_number() -> None:
    plain, biased = (layer_norm.work(64, has_bias=has_bias) for has_bias in (False, True))
    assert biased.bytes_per_call - plain.bytes_per_call == plain.bytes_per_call == 4 * 64
    assert biased.flops_per_element - plain.flops_per_element == 1


def test_a_norm_that_also_rounds_its_output_does_the_work_of_both() -> None:
    for fused, norm in ((rms_norm_int8.work, rms_norm.work), (add_rms_norm_int8.work, add_rms_norm.work)):
        flops, moved = done(fused(64), 3 * 64)
        alone, rounding = done(norm(64), 3 * 64), done(quantize_rows.work(), 3 * 64)
        assert (flops, moved) == (alone[0] + rounding[0], alone[1] + rounding[1])


def matrix_of(kind: type[QuantizedMatrix | InterleavedMatrix]) -> QuantizedMatrix | InterleavedMatrix:
    plain = QuantizedMatrix.of(Q4_K, np.ones((128, 512), np.float32))
    return plain if kind is QuantizedMatrix else InterleavedMatrix.of(plain)


def test_a_product_says_what_it_multiplies() -> None:
    for kind, dtype in ((QuantizedMatrix, "float32"), (InterleavedMatrix, "int8")):
        one = matrix_of(kind)
        works = (
            linear.work(one, has_bias=False),
            qkv.work((one, one, one), 0),
            gated.work(one, one, 0),
            expert_linear.work(one, 2, 1),
            expert_gated.work(one, one, 2),
        )
        assert {work.dtype for work in works} == {dtype}
    assert rms_norm.work(64).dtype == attention.work(64, 1, 2).dtype == "float32"


def test_a_brick_of_several_types_has_the_highest_ceiling_or_any_on_a_gpu() -> None:
    routed = BrickLaunch(linear.LINEAR[Q4_K.code], linear.work(matrix_of(QuantizedMatrix), has_bias=False))
    rounded = BrickLaunch(linear.LINEAR[Q4_K.code], linear.work(matrix_of(InterleavedMatrix), has_bias=False))
    assert combined_work((routed, rounded)).dtype == "int8"
    assert combined_work((routed,)).dtype == "float32"
    attended = BrickLaunch(attention_bf16.ATTENTION_BF16, attention_bf16.work(64, 6))
    assert combined_work((attended,)).dtype == combined_work((routed, attended)).dtype == "bfloat16"
    assert combined_work((attended, rounded)).dtype == "int8"
    profiler = BrickProfiler(enabled=False)
    on_gpu = ComputeBrick(LM_HEAD, (rounded,), "cuda", profiler, names_launches=True)
    assert on_gpu.definition.work.dtype == ""


@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3moe", "phi3"])
def test_one_token_is_never_recorded_as_bfloat16_but_long_prompts_are(
    model_files: dict[str, Path],
    profiler: BrickProfiler,
    recorder: ListRecorder,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
) -> None:
    """The recorded data type must be that of the kernel that ran.

    Before, the fused QKV product was recorded as bfloat16 in decode steps, so its rate was compared with a wrong peak
    rate.
    """
    monkeypatch.setattr(bricks, "HAS_TILES", True)
    # Switch off attention in bfloat16, because no processor has it together with tiles.
    monkeypatch.setattr(bricks, "BF16_PAYS", False)
    decoder = Decoder(model_to_run(model_files[family]), "numba", 1, profiler, context=64)
    decoder.decode(decoder.prefill(range(32)))
    nodes = {one.id: one for one in recorder.messages if isinstance(one, Node)}

    def dtypes_in(phase: str) -> dict[str, str]:
        inside = {one.id for one in nodes.values() if one.parent is None and one.name == phase}
        for one in nodes.values():  # parents come before children
            if one.parent in inside:
                inside.add(one.id)
        return {nodes[one].name: nodes[one].work.dtype for one in inside if nodes[one].kind is NodeKind.BRICK}

    assert "bfloat16" not in dtypes_in("decode").values()
    of_many = dtypes_in("prefill")
    assert (of_many["QkvProjection"], of_many["OutputProjection"]) == ("bfloat16", "bfloat16")
    assert of_many["LmHead"] == "int8"  # The LM head multiplies only the last token of a prompt.


def test_products_of_many_tokens_are_recorded_as_bfloat16_if_they_use_tiles(
    profiler: BrickProfiler, recorder: ListRecorder
) -> None:
    matrix = matrix_of(InterleavedMatrix)
    rounded = BrickLaunch(
        replace(linear.LINEAR[Q4_K.code], implementation=lambda: None), linear.work(matrix, has_bias=False), 128
    )
    brick = ComputeBrick(LM_HEAD, (rounded,), "numba", profiler, bfloat16_tokens=12)
    for tokens in (1, 11, 12, 128):
        brick(tokens * 128, ())
    brick.fall_back()
    brick.implementations = (lambda: None,)
    brick(128 * 128, ())
    nodes = [one for one in recorder.messages if isinstance(one, Node) and one.name == "LmHead"]
    assert [node.work.dtype for node in nodes] == ["int8", "bfloat16", "float64"]
    assert list(Counter(tag for tag, _ in recorder.records).values()) == [2, 2, 1]
