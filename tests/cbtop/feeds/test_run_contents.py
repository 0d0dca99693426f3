"""Tests of the contents of a run (bricks, kernels and copies in a step): they equal the recorded contents.

The recordings are from GPUs or simulated.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cbtop.cli import main
from cbtop.client.announcements import apply_announcement
from cbtop.client.source_record import SourceRecord
from cbtop.client.window import Window
from cbtop.comparison.contents import Break, Compiled, Contents, PhaseContents, Piece, PieceKind, Total
from cbtop.comparison.judged import Judged
from cbtop.comparison.structure import Structural, judge_structure, parse_any
from cbtop.feeds.run_contents import contents_of
from cbtop.feeds.run_reader import runs_in
from cbtop.protocol.attributes import KernelAttributes
from cbtop.protocol.kernel_messages import KernelBurst, KernelTimes
from cbtop.protocol.messages import CatalogMessage, Node
from cbtop.protocol.structure_messages import (
    CompiledCode,
    Conditions,
    GraphBreak,
    OperationCount,
    RunCondition,
    StepAllocations,
    StepOperations,
)
from cbtop.protocol.vocabulary import NodeKind

H100 = Path(__file__).parents[1]
GEMM = KernelAttributes(grid=(32, 1, 1), block=(128, 1, 1), registers=64)
NODES = (
    Node(1, None, NodeKind.STEP, "decode (warm-up)", "draft"),
    Node(2, 1, NodeKind.LAYER, "0"),
    Node(3, 2, NodeKind.BRICK, "DownProjection"),
    Node(4, 3, NodeKind.KERNEL, "gemm", kernel=GEMM),
    Node(5, 3, NodeKind.KERNEL, "elementwise_kernel", kernel=GEMM),
)
RECORDED = PhaseContents("draft decode", 3, {}, {Total.BRICKS: (1, 1)})


def made(*announced: CatalogMessage) -> Contents:
    record = SourceRecord("here:1:1:0", Window(1.0))
    for message in (*NODES, *announced):
        apply_announcement(record, message)
    return contents_of(record, [RECORDED])


def times(node: int, launches: int, steps: int = 2, **range_: int) -> KernelTimes:
    return KernelTimes(node, steps, launches, 10.0, 1.0, 9, 11, **range_)


def kernel(name: str) -> Piece:
    return Piece(PieceKind.KERNEL, "Layer 0", "DownProjection", name=name, kernel=GEMM)


def judged(text: str, now: Contents, base: Contents) -> list[Judged]:
    threshold = parse_any(text)
    assert isinstance(threshold, Structural)
    return judge_structure(threshold, base, now)


def test_the_kernels_of_a_burst_are_pieces_with_their_range_in_a_step() -> None:
    burst = KernelBurst(1, 2, (times(4, 2, fewest=1, most=1), times(5, 3, fewest=1, most=2)))
    (found,) = made(burst).phases
    assert found.pieces == {kernel("gemm"): (1, 1), kernel("elementwise_kernel"): (1, 2)}
    assert found.totals[Total.LAUNCHES] == (2, 3)


def test_of_an_older_process_only_an_even_mean_is_exact() -> None:
    (found,) = made(KernelBurst(1, 2, (times(4, 4), times(5, 3)))).phases
    assert found.pieces == {kernel("gemm"): (2, 2), kernel("elementwise_kernel"): (1, 2)}


@pytest.mark.parametrize("lacking", [{"unplaced": 1}, {"lost": 1}, {"left_out": 1}])
def test_launches_are_unknown_if_a_burst_lacks_some(lacking: dict[str, int]) -> None:
    (found,) = made(KernelBurst(1, 2, (times(4, 2, fewest=1, most=1),), **lacking)).phases
    assert kernel("gemm") in found.pieces
    assert Total.LAUNCHES not in found.totals


def test_an_added_copy_and_another_kernel_are_named_with_their_brick() -> None:
    base = made(KernelBurst(1, 2, (times(4, 2, fewest=1, most=1),)))
    copied = made(KernelBurst(1, 2, (times(4, 2, fewest=1, most=1), times(5, 2, fewest=1, most=1))))
    (launches,) = judged("launches==base", copied, base)
    assert launches.said == ("2 launches a step, was 1; Layer 0 › DownProjection: one more kernel elementwise_kernel")
    (other,) = judged("graph==base", made(KernelBurst(1, 2, (times(5, 2, fewest=1, most=1),))), base)
    assert other.said == "Layer 0 › DownProjection: gemm → elementwise_kernel"


def test_operations_allocations_and_conditions_are_those_of_their_phase() -> None:
    operations = OperationCount(3, "addmm", "float32", 1, 1), OperationCount(99, "clone", "", 0, 2)
    found = made(
        StepOperations("decode", "draft", 2, operations),
        # These operations belong to the target model, not to the draft model.
        StepOperations("decode", "", 2, operations[:1]),
        StepAllocations("decode", "draft", 2, 7, 8),
        Conditions((RunCondition("Triton", "3.7"),)),
    )
    (phase,) = found.phases
    assert phase.pieces == {
        Piece(PieceKind.OPERATION, "Layer 0", "DownProjection", name="addmm", dtype="float32"): (1, 1),
        Piece(PieceKind.OPERATION, name="clone"): (0, 2),
    }
    assert phase.totals[Total.ALLOCATIONS] == (7, 8)
    assert found.conditions == {"Triton": "3.7"}


@pytest.mark.parametrize(
    ("node", "place"), [(3, "Layer 0 › DownProjection"), (2, "Layer 0"), (1, "draft decode"), (0, ""), (99, "")]
)
def test_a_graph_break_has_the_place_of_its_node(node: int, place: str) -> None:
    found = made(CompiledCode(3, 1, (GraphBreak("print", 2, node),)))
    assert found.compiled == Compiled(3, 1, (Break(place, "print", 2),))


def test_what_a_process_did_not_announce_is_unknown() -> None:
    assert made() == Contents((RECORDED,))


@pytest.mark.slow
def test_a_recording_of_own_kernels_on_an_h100_has_exact_numbers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["decode.launches==313", "decode.bricks==257", "transfers.h2d==1", "transfers.d2d==0"]
    to = tmp_path / "check.json"
    assert main(["check", *words, "--new", str(H100 / "h100_own_kernels.cbtop"), "--format", f"json={to}"]) == 0
    found: dict[str, Any] = json.loads(to.read_text())
    assert [one["outcome"] for one in found["verdicts"]] == ["holds"] * 4
    assert main(["check", "decode.launches<=312", "--new", str(H100 / "h100_own_kernels.cbtop")]) == 4
    assert "313 launches a step" in capsys.readouterr().out


@pytest.mark.slow
def test_a_recording_of_torch_on_an_h100_has_its_bricks_and_no_kernels() -> None:
    (run,) = runs_in(H100 / "h100.cbtop")
    found = {one.phase: one for one in run.contents.phases}
    assert {name: one.totals for name, one in found.items()} == {
        "prefill": {Total.BRICKS: (109, 109)},
        "decode": {Total.BRICKS: (134, 134)},
    }
    assert not any(", launch-bound" in piece.brick for one in found.values() for piece in one.pieces)
