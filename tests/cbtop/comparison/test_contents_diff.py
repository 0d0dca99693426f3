"""Tests of differences between the contents of steps: they are reported with brick and layer.

If information is missing, the result is unsure.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.comparison.contents import Piece, PieceKind, Range
from cbtop.comparison.contents_diff import differences_of
from tests.cbtop.comparison.made_contents import GEMM, ONE, kernel, layers, phase

COPY = kernel("Layer 1", "elementwise_kernel")
EXPERT = Piece(PieceKind.BRICK, "Layer 1", "Expert 7")
ADD = Piece(PieceKind.OPERATION, "Layer 0", "DownProjection", name="addmm", dtype="float32")


def said(before: dict[Piece, Range], now: dict[Piece, Range], *, sure: bool = True) -> list[str]:
    found = differences_of(phase(before), phase(now))
    return [": ".join(filter(None, (one.place, one.text))) for one in found if one.is_sure is sure]


@given(st.permutations(list(layers())))
def test_equal_steps_differ_in_nothing_whatever_their_order(order: list[Piece]) -> None:
    assert differences_of(phase(), phase(dict.fromkeys(order, ONE))) == []


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({COPY: ONE}, "Layer 1 › DownProjection: one more kernel elementwise_kernel"),
        ({COPY: (2, 2)}, "Layer 1 › DownProjection: 2 more kernels elementwise_kernel"),
        ({kernel("Layer 2", "gemm"): (3, 3)}, "Layer 2 › DownProjection: 2 more kernels gemm"),
        ({EXPERT: ONE}, "Layer 1 › Expert 7: new"),
        ({Piece(PieceKind.BRICK, "Layer 0", "RmsNorm"): (2, 2)}, "Layer 0 › RmsNorm: called 2 times a step, was 1"),
        # No operations were recorded in the baseline, so operations are not compared.
        ({Piece(PieceKind.OPERATION, name="clone"): ONE, ADD: ONE}, ""),
    ],
)
def test_an_added_piece_is_named_with_its_brick_and_layer(changed: dict[Piece, Range], text: str) -> None:
    assert said(layers(), layers() | changed) == [text] * bool(text)


def test_what_is_gone_is_named_as_that() -> None:
    assert said(layers() | {COPY: ONE}, layers()) == [
        "Layer 1 › DownProjection: one kernel fewer: elementwise_kernel"
    ]
    assert said(layers() | {EXPERT: ONE}, layers()) == ["Layer 1 › Expert 7: gone"]
    # Layer 3 is reported as gone. Its bricks are not listed in addition.
    assert said(layers(4), layers(3)) == ["Layer 3: gone"]


def test_a_brick_outside_of_layers_is_seen_if_one_run_has_none_there() -> None:
    head = Piece(PieceKind.BRICK, brick="LmHead")
    assert said(layers(), layers() | {head: ONE}) == ["LmHead: new"]
    assert said(layers() | {head: ONE}, layers()) == ["LmHead: gone"]
    assert said({head: ONE}, {head: ONE} | layers()) == ["every layer: new"]


def test_a_layer_inside_a_brick_is_seen_if_one_run_lacks_it() -> None:
    model = {Piece(PieceKind.BRICK, brick="Model"): ONE}
    inner = {
        Piece(PieceKind.LAYER, "Layer 0", "Model"): ONE,
        Piece(PieceKind.BRICK, "Layer 0", "Model › RmsNorm"): ONE,
    }
    assert said(model, model | inner) == ["Layer 0 › Model: new"]
    assert said(model | inner, model) == ["Layer 0 › Model: gone"]


def test_another_kernel_in_its_place_is_named_by_both() -> None:
    assert said(layers(name="flash_fwd"), layers(name="math")) == ["every layer › DownProjection: flash_fwd → math"]


def test_a_lost_fusion_is_named_by_all_its_kernels() -> None:
    now = layers()
    del now[kernel("Layer 1", "gemm")]
    now |= {kernel("Layer 1", "silu"): ONE, kernel("Layer 1", "mul"): ONE}
    assert said(layers(), now) == ["Layer 1 › DownProjection: gemm → silu + mul"]


def test_several_new_kernels_of_a_brick_are_one_line_of_limited_length() -> None:
    copies = {kernel("Layer 1", f"copy_{number}"): ONE for number in range(10)}
    assert said(layers(), layers() | copies) == [
        "Layer 1 › DownProjection: more kernels: " + " + ".join(f"copy_{n}" for n in range(8)) + " + 2 more"
    ]


def test_a_changed_type_is_said_once_for_a_brick_and_its_operations() -> None:
    types = ("float32", "bfloat16")
    before, now = (layers(1, dtype=dtype) | {replace(ADD, dtype=dtype): ONE} for dtype in types)
    assert said(before, now) == ["Layer 0 › DownProjection: float32 → bfloat16"]


def test_a_type_that_one_run_does_not_know_is_no_change() -> None:
    assert said(layers(dtype=""), layers(dtype="bfloat16")) == []


def test_another_grid_or_block_is_named_but_other_registers_are_not() -> None:
    now = layers(1)
    del now[kernel("Layer 0", "gemm")]
    wide = replace(GEMM, grid=(64, 1, 1), block=(256, 1, 1), registers=72)
    assert said(layers(1), now | {kernel("Layer 0", "gemm", wide): ONE}) == [
        "Layer 0 › DownProjection: gemm: grid 32×1×1 → 64×1×1",
        "Layer 0 › DownProjection: gemm: block 128×1×1 → 256×1×1",
    ]
    assert said(layers(1), now | {kernel("Layer 0", "gemm", replace(GEMM, registers=72)): ONE}) == []


def test_layers_that_differ_alike_are_one_difference() -> None:
    copies = {kernel(f"Layer {number}", "elementwise_kernel"): ONE for number in range(4)}
    assert said(layers(6), layers(6) | copies) == [
        "Layer 0, Layer 1 and 2 more layers › DownProjection: one more kernel elementwise_kernel"
    ]


def test_bricks_of_one_name_in_a_layer_are_told_apart_by_their_labels() -> None:
    queries = {Piece(PieceKind.BRICK, "Layer 0", "QkvProjection", label, dtype="int8"): ONE for label in "qk"}
    changed = {replace(one, dtype="float32" if one.label == "k" else "int8"): ONE for one in queries}
    assert said(layers(1) | queries, layers(1) | changed) == ["Layer 0 › QkvProjection k: int8 → float32"]


def test_what_varies_in_both_runs_is_equal_and_in_one_is_not_sure() -> None:
    varies, varies_more = {EXPERT: (0, 2)}, {EXPERT: (0, 3)}
    assert differences_of(phase(layers() | varies), phase(layers() | varies_more)) == []
    assert said(layers() | {EXPERT: ONE}, layers() | varies) == []
    assert said(layers() | {EXPERT: ONE}, layers() | varies, sure=False) == [
        "Layer 1 › Expert 7: called 0 to 2 times a step, was 1"
    ]
    kernels = layers() | {COPY: (0, 1)}
    assert said(layers(), kernels) == []
    assert said(layers(), kernels, sure=False) == ["Layer 1 › DownProjection: 0 to 1 more kernels elementwise_kernel"]


def test_a_kind_of_piece_that_one_run_lacks_is_not_sure() -> None:
    assert said(layers(), layers() | {ADD: ONE}, sure=False) == ["operations were recorded only in the new run"]
    assert said(layers() | {ADD: ONE}, layers(), sure=False) == ["operations were recorded only in the baseline"]
