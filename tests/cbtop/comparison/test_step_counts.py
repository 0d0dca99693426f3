"""Tests of step contents: bricks, kernels and copies in a step are counted by name, from the records of the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from cbtop.comparison.contents import PhaseContents, Piece, PieceKind, Total
from cbtop.comparison.step_blocks import StepBlocks
from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.protocol.attributes import TransferAttributes, Work
from cbtop.protocol.messages import Node
from cbtop.protocol.ring import FLAG_AMOUNTS, FLAG_CANCELLED, FLAG_FAILED, FLAG_LOOSE, FLAG_PLAIN
from cbtop.protocol.ring_reader import Batch
from cbtop.protocol.vocabulary import NodeKind, TransferDirection

COPY = TransferAttributes("host", "device", 8, TransferDirection.H2D)
STEP, LAYER, NORM, KERNEL, TRANSFER, EXPERT, NEXT_STEP, NEXT_NORM = range(1, 9)


def table() -> NodeTable:
    """Return nodes of two steps: a warm-up with a layer (norm, kernel, copy, expert), and a step with a norm."""
    found = NodeTable()
    nodes = [
        Node(STEP, None, NodeKind.STEP, "decode (warm-up)"),
        Node(LAYER, STEP, NodeKind.LAYER, "0"),
        Node(NORM, LAYER, NodeKind.BRICK, "RmsNorm, launch-bound", "input", work=Work(dtype="float32")),
        Node(KERNEL, NORM, NodeKind.KERNEL, "norm"),
        Node(TRANSFER, STEP, NodeKind.TRANSFER, "host → device", transfer=COPY),
        Node(EXPERT, LAYER, NodeKind.BRICK, "Expert 7"),
        Node(NEXT_STEP, None, NodeKind.STEP, "decode"),
        Node(NEXT_NORM, NEXT_STEP, NodeKind.BRICK, "RmsNorm"),
    ]
    for node in nodes:
        found.add(node)
    return found


def counted(*steps: Sequence[int], flags: dict[int, int] | None = None) -> list[PhaseContents]:
    """Return the contents of steps.

    Each step is given as the nodes of its records, with the node of the step itself last. `flags` maps the number of
    a step to the flags of the step's last record.
    """
    nodes = [node for step in steps for node in step]
    lasts = np.cumsum([len(step) for step in steps]) - 1
    marks = np.zeros(len(nodes), np.int64)
    for number, flag in (flags or {}).items():
        marks[lasts[number]] = flag
    at = np.arange(len(nodes), dtype=np.int64)
    blocks = StepBlocks(table())
    blocks.take(Batch(np.array(nodes, np.int64), marks, at, at + 1, np.ones_like(at), overwritten=0))
    blocks.blocks()
    return blocks.counts.phases()


WHOLE = [KERNEL, NORM, LAYER, TRANSFER, STEP]
NORM_PIECE = Piece(PieceKind.BRICK, "Layer 0", "RmsNorm", "input", dtype="float32")


def test_pieces_and_totals_are_counted_and_named_by_their_place() -> None:
    (found,) = counted(WHOLE, WHOLE, WHOLE)
    assert (found.phase, found.steps) == ("decode", 3)
    assert found.pieces == {
        Piece(PieceKind.LAYER, "Layer 0"): (1, 1),
        NORM_PIECE: (1, 1),  # A call counts once, whether it was timed on the host or the device.
        Piece(PieceKind.KERNEL, "Layer 0", "RmsNorm", "input", "norm"): (1, 1),
        Piece(PieceKind.TRANSFER, name="host → device"): (1, 1),
    }
    assert found.totals == {
        Total.BRICKS: (1, 1),
        Total.LAUNCHES: (1, 1),
        Total.H2D: (1, 1),
        Total.D2H: (0, 0),  # The process reports its copies, so their number is known to be zero.
        Total.D2D: (0, 0),
    }


def test_the_first_step_does_not_count_once_there_is_another() -> None:
    first = [KERNEL, KERNEL, *WHOLE]
    assert counted(first)[0].totals[Total.LAUNCHES] == (3, 3)
    assert counted(first, WHOLE)[0].totals[Total.LAUNCHES] == (1, 1)
    assert counted(first, WHOLE, WHOLE)[0].totals[Total.LAUNCHES] == (1, 1)


def test_steps_that_differ_make_a_range() -> None:
    (found,) = counted(WHOLE, WHOLE, [EXPERT, *WHOLE], WHOLE)
    assert found.pieces[Piece(PieceKind.BRICK, "Layer 0", "Expert 7")] == (0, 1)
    assert found.totals[Total.BRICKS] == (1, 2)
    assert found.pieces[NORM_PIECE] == (1, 1)


def test_a_warm_up_and_the_steps_after_it_are_one_phase() -> None:
    (found,) = counted(WHOLE, WHOLE, [NEXT_NORM, NEXT_STEP])
    assert (found.phase, found.steps, found.totals[Total.BRICKS]) == ("decode", 3, (1, 1))


@pytest.mark.parametrize("flag", [FLAG_PLAIN, FLAG_FAILED, FLAG_CANCELLED])
def test_a_step_that_was_not_recorded_whole_is_left_out(flag: int) -> None:
    (found,) = counted(WHOLE, WHOLE, [STEP], WHOLE, flags={2: flag})
    assert (found.steps, found.totals[Total.BRICKS]) == (3, (1, 1))


@pytest.mark.parametrize("flag", [FLAG_AMOUNTS, FLAG_LOOSE])
@pytest.mark.parametrize("node", [STEP, NORM])
def test_records_that_say_something_of_a_step_are_no_piece_of_it(flag: int, node: int) -> None:
    said = [node, *WHOLE]
    # The last record comes after the last step, so it belongs to no step.
    nodes = np.array([*WHOLE, *said, *said, NORM], np.int64)
    flags = np.zeros_like(nodes)
    flags[[len(WHOLE), len(WHOLE) + len(said)]] = flag
    at = np.arange(len(nodes), dtype=np.int64)
    blocks = StepBlocks(table())
    blocks.take(Batch(nodes, flags, at, at + 1, np.ones_like(at), overwritten=0))
    blocks.blocks()
    assert blocks.counts.phases() == counted(WHOLE, WHOLE, WHOLE)


def test_steps_that_sampling_left_out_are_counted() -> None:
    (found,) = counted(WHOLE, [STEP], WHOLE, [STEP], flags={1: FLAG_PLAIN, 3: FLAG_PLAIN})
    assert (found.steps, found.plain) == (2, 2)
    assert counted([STEP], [STEP], flags={0: FLAG_PLAIN, 1: FLAG_PLAIN}) == []


def test_a_process_without_copies_or_kernels_reports_none() -> None:
    (found,) = counted([NORM, LAYER, STEP], [NORM, LAYER, STEP])
    assert found.totals == {Total.BRICKS: (1, 1)}


def test_calls_of_an_earlier_part_of_the_recording_count_too() -> None:
    blocks, whole = StepBlocks(table()), np.array(WHOLE * 3, np.int64)
    at = np.arange(len(whole), dtype=np.int64)
    batch = Batch(whole, np.zeros_like(at), at, at + 1, np.ones_like(at), overwritten=0)
    for first in range(0, len(whole), 4):
        blocks.take(batch.only((at >= first) & (at < first + 4)))
    blocks.blocks()
    (found,) = blocks.counts.phases()
    assert replace(found, steps=0) == replace(counted(WHOLE, WHOLE, WHOLE)[0], steps=0)
