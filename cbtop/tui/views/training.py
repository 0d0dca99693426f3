"""Draw a training step as a bar of its parts, and make table columns with the passes of each brick."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cbtop import units
from cbtop.protocol.vocabulary import BACKWARD, RECOMPUTE, TrainingPart
from cbtop.text import training_text
from cbtop.text.row_filter import BY_NAME
from cbtop.text.statistics import statistic
from cbtop.tui.views.books import books_rule
from cbtop.tui.views.figures import figure
from cbtop.tui.widgets.bars import BarSegment, stacked
from cbtop.tui.widgets.columns import Column
from cbtop.tui.widgets.lines import BLANK, Line, clean, clip, width_of
from cbtop.viewmodels.bricks import BrickRow
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.training import TrainingBrick, TrainingPartRow, TrainingView, pass_of


@dataclass(frozen=True, slots=True)
class PartLook:
    """The look of a part of a training step.

    `role` colours its glyph in the legend, and `fill` its segment of the bar.
    """

    role: str
    fill: str
    glyph: str
    pattern: str = " "  # the character that fills the segment of the bar


LOOKS: dict[str, PartLook] = {
    TrainingPart.DATA_WAIT: PartLook("gap", "fill-gap", "▒", "▒"),
    TrainingPart.FORWARD: PartLook("attention", "fill-attention", "▸"),
    TrainingPart.LOSS: PartLook("norm", "fill-norm", "◆"),
    TrainingPart.BACKWARD: PartLook("ffn", "fill-ffn", "◂"),
    TrainingPart.COMMUNICATION: PartLook("communication", "fill-communication", "⇄"),
    TrainingPart.CLIP: PartLook("attention", "fill-attention", "‖"),
    TrainingPart.OPTIMIZER: PartLook("other", "fill-other", "▲"),
    TrainingPart.ZERO_GRAD: PartLook("norm", "fill-norm", "○"),
    TrainingPart.EVALUATION: PartLook("attention", "fill-attention", "▹"),
    TrainingPart.OTHER: PartLook("unknown", "fill-unknown", "░", "░"),
    TrainingPart.NO_KERNEL: PartLook("gap", "fill-gap", "·", "·"),
}
_UNKNOWN_PART = PartLook("communication", "fill-communication", "■")
PASSES = "", BACKWARD, RECOMPUTE  # suffixes of a brick's name for the forward, backward and recomputed forward pass
_INDENT: Line = (("  ", ""),)
_SPACE: Line = (("  ", ""),)  # blanks between two entries of the legend


def training_lines(source: SourceView, training: TrainingView, width: int, height: int) -> list[Line]:
    """Return a rule with the mean training step, the bar of its parts, and their shares, in at most
    `height` lines.
    """
    title = f"one {source.phase} step, {units.duration(training.mean_us)}, {training_text.of_steps(training)}"
    lines = [books_rule(source, clean(title), width), training_bar(training, width)]
    lines = (lines if height > 2 else lines[1:]) + legend(training, width)[: max(1, height - 2)]
    return (lines + lines_below(source, training, width))[: max(height, len(lines))]


def lines_below(source: SourceView, training: TrainingView, width: int) -> list[Line]:
    """Return three kinds of lines, if known: the norm of the gradients, the loss scale, and the memory of a step."""
    return [(*_INDENT, (clip(clean(text), width - 2), "dim")) for text in training_text.below(source, training)]


def training_bar(training: TrainingView, width: int) -> Line:
    """Return the parts of a training step as one bar. It fills `width` except for a margin."""
    return (*_INDENT, *stacked([_segment(part) for part in training.parts], width - 4))


def _segment(part: TrainingPartRow) -> BarSegment:
    look = LOOKS.get(part.name, _UNKNOWN_PART)
    return BarSegment(part.mean_us, look.fill, f"{look.glyph} {clean(part.name)}", look.pattern)


def legend(training: TrainingView, width: int) -> list[Line]:
    """Return the share of each part of a training step that took time, in as few lines of `width` cells as possible.

    The largest share comes first. Overlapped communication is added at the end, because this time belongs to no part
    of the step.
    """
    entries: list[Line] = []
    for part in sorted(training.parts, key=lambda part: -part.mean_us):
        if not part.mean_us:
            continue
        look = LOOKS.get(part.name, _UNKNOWN_PART)
        name, share = clean(part.name), units.percent(part.percent)
        entries.append(((f"{look.glyph} ", look.role), (f"{name} ", "dim"), (share, "strong")))
    if training.communication is not None:
        entries.append((("overlapped ", "dim"), (training_text.overlapped(training.communication), "strong")))
    lines: list[Line] = []
    for entry in entries:
        if lines and width_of(lines[-1]) + width_of(_SPACE) + width_of(entry) <= width:
            lines[-1] = (*lines[-1], *_SPACE, *entry)
        else:
            lines.append((*_INDENT, *entry))
    return lines or [BLANK]


def training_rows(bricks: Sequence[BrickRow]) -> tuple[BrickRow, ...]:
    """Return one table row for each brick.

    The row belongs to the forward pass of the brick. If this pass was not recorded, the row belongs to another pass.
    The columns of the table show the times of all passes.
    """
    rows: dict[str, BrickRow] = {}
    for row in sorted(bricks, key=lambda row: bool(pass_of(row.name)[1])):
        rows.setdefault(pass_of(row.name)[0], row)
    return tuple(rows.values())


def passes_of(brick: BrickRow, bricks: Sequence[BrickRow]) -> list[BrickRow]:
    """Return the rows of all passes of a brick: forward, backward, recomputed forward. `brick` is one of them."""
    name = pass_of(brick.name)[0]
    found = [row for row in bricks if pass_of(row.name)[0] == name and row.category is brick.category]
    return sorted(found, key=lambda row: PASSES.index(pass_of(row.name)[1])) or [brick]


def training_columns(
    columns: Sequence[Column[BrickRow]], training: TrainingView | None
) -> tuple[Column[BrickRow], ...]:
    """Return the name column of `columns`, followed by columns with the times of a brick's passes."""
    bricks = {brick.name: brick for brick in training.bricks} if training else {}

    def column(
        title: str, priority: int, value: Callable[[TrainingBrick], float | None], doc: str, text: Callable[..., str]
    ) -> Column[BrickRow]:
        def of(row: BrickRow) -> float | None:
            brick = bricks.get(pass_of(row.name)[0])
            return None if brick is None else value(brick)

        def cell(row: BrickRow, width: int) -> Line:
            found = of(row)
            return figure(units.NONE_THERE if found is None else text(found))

        def sort_value(row: BrickRow) -> float:
            found = of(row)
            return -1.0 if found is None else found

        return Column(title, max(9, len(title)), priority, cell, doc, sort_key=sort_value)

    share = statistic("percent")
    return (
        *(column for column in columns if column.title == BY_NAME),
        column(share.title, 1, lambda brick: brick.percent, f"{share.help}, of all passes", units.percent_number),
        column("all µs", 5, lambda brick: brick.us, "exclusive µs a step of all passes", units.number),
        column("forward µs", 2, lambda brick: brick.forward_us, "of these, forward passes", units.number),
        column("backward µs", 3, lambda brick: brick.backward_us, "of these, backward passes", units.number),
        column(
            "recompute µs", 4, lambda brick: brick.recompute_us,
            "of these, forward passes that a backward pass repeats", units.number,
        ),
    )  # fmt: skip
