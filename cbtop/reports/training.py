"""Write tables about training steps as text: the parts of a step, and the forward and backward passes of
each brick.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from cbtop import units
from cbtop.reports.tables import Table, table
from cbtop.text import training_text
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.training import TrainingBrick, TrainingView
from cbtop.viewmodels.training_memory import BrickMemoryRow, TrainingMemoryView

MAX_MEMORY_ROWS = 12  # The text lists at most this many bricks with their memory.
PASSES_LINE = "a row has the passes of one brick, in exclusive µs a recorded step (derived)"


def training_tables(view: SourceView) -> str:
    """Return a table of the parts of a training step, and a table of its bricks. Return "" if the view has no
    training steps.
    """
    found = view.training
    if found is None:
        return ""
    parts = _parts(view, found) if found.parts else training_text.parts(view, found)
    communication = [training_text.communication(found)] if found.communication is not None else []
    memory = ["", _memory(found.memory)] if found.memory is not None else []
    text = "\n".join([parts, *communication, *training_text.gradients(view, found), *memory])
    return "\n".join([text, "", _bricks(found.bricks), PASSES_LINE]) if found.bricks else text


def why_none(view: SourceView, sections: Sequence[str]) -> str:
    """Return why the chosen sections of `view` show no training steps.

    If another phase has training steps, the text names this phase.
    """
    trains = [steps.phase for steps in view.phases if steps.is_training and steps.phase != view.phase]
    if trains and [*sections] == ["training"]:
        return f"{view.phase} steps do not train; pass --phase {shlex.quote(trains[0])}"
    return "none has come"


def _parts(view: SourceView, found: TrainingView) -> str:
    rows: Table = [(f"{view.phase}, {training_text.of_steps(found)}", "share %", "mean ms", "p50 ms")]
    for part in found.parts:
        times = map(units.milliseconds, (part.mean_us, part.p50_us))
        rows.append((part.name, units.percent_number(part.percent), *times))
    rows.append(("step", units.percent_number(100.0), units.milliseconds(found.mean_us), ""))
    if found.own_us:
        rows.append(("cbtop itself, in no part", "", units.milliseconds(found.own_us), ""))
    return table(rows, left=1)


def _memory(found: TrainingMemoryView) -> str:
    line = training_text.memory(found)
    bricks = ["", _brick_memory(found.bricks)] if found.bricks else []
    if not found.steps:
        return "\n".join([line, *bricks])
    rows: Table = [("memory, at least", "allocated", "reserved")]
    rows += [
        (part.name, units.size_bytes(part.allocated_bytes), units.size_bytes(part.reserved_bytes))
        for part in found.parts
    ]
    return "\n".join([table(rows, left=1), line, training_text.memory_details(found), *bricks])


def _brick_memory(bricks: tuple[BrickMemoryRow, ...]) -> str:
    is_measured = any(row.allocated_bytes is not None for row in bricks)
    measured = ("allocated", "reserved", "kept") if is_measured else ()
    rows: Table = [("memory of a recorded step", *measured, "outputs (derived)")]
    for row in bricks[:MAX_MEMORY_ROWS]:
        sizes = (row.allocated_bytes, row.reserved_bytes, row.kept_bytes) if is_measured else ()
        rows.append((" → ".join(row.path), *map(units.size_bytes, (*sizes, row.output_bytes))))
    more = len(bricks) - MAX_MEMORY_ROWS
    return table(rows, left=1) + (f"\n… and {units.counted(more, 'brick')} more in JSON" if more > 0 else "")


def _bricks(bricks: tuple[TrainingBrick, ...]) -> str:
    rows: Table = [("brick", "all µs", "forward µs", "backward µs", "recompute µs", "step %")]
    for row in bricks:
        times = (row.forward_us, row.backward_us, row.recompute_us)
        passes = [units.NONE_THERE if us is None else units.number(us) for us in times]
        rows.append((row.name, units.number(row.us), *passes, units.percent_number(row.percent)))
    return table(rows, left=1)
