"""The widget that draws a timeline, with its visible part and its cursor, and the keys that move both."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Sequence

from cbtop import units
from cbtop.comparison.comparison import Comparison
from cbtop.comparison.items import Place
from cbtop.protocol.vocabulary import BrickCategory, NodeKind, SourceStatus
from cbtop.text import comparison_text, time_text, timeline_text
from cbtop.tui.views.base import SourceDrawing
from cbtop.tui.views.timeline_lanes import (
    RowBlocks,
    axis,
    label_width,
    legend,
    like_newest,
    longest,
    row_blocks,
    sums,
)
from cbtop.tui.widgets.columns import Cells
from cbtop.tui.widgets.lines import BLANK, Line, clean, fit, fit_line, join_fitting, plain, rule, width_of, wrap_line
from cbtop.tui.widgets.parts import beside, even_widths
from cbtop.tui.widgets.time_row import GAP, Block, Scale, time_row
from cbtop.viewmodels.lanes import Gap, Lane, TimelineSpan
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.timeline import TimelineView

MIN_SHOWN_NS = 100
ZOOM = 2
TWO_LISTS = 160  # In a widget of at least this width in cells, the sums are to the right of the longest blocks.
ROOM_FOR_LONGEST = 5  # The longest blocks are listed if at least this many lines are free.
MARGIN = 0.05  # When a block is moved into view, this share of the visible time stays free at the side of the block.
HELD = "held, G goes to the newest"
FOLLOWS = "follows the newest step"
RECEIVED = "they are received while this view is open"
# A newer step replaces the shown step only after this many seconds, because users cannot read two steps a second.
FOLLOWED_S = 1.0


class TimelineMap(SourceDrawing, can_focus=True):
    """The visible part of a timeline, with a cursor that the user moves."""

    def __init__(self, *, id: str | None = None, clock_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__(id=id)
        self.shown: TimelineView | None = None  # the timeline that is on the screen, or None
        # The timeline that the user has frozen. If no timeline is frozen, the screen follows the newest step.
        self._held: TimelineView | None = None
        # the timeline that is shown while the screen follows the newest step
        self._newest: TimelineView | None = None
        self._clock_s = clock_s
        self._newest_since_s = 0.0
        self._offered: TimelineView | None = None
        self._who: object = None  # a value that identifies the source of this timeline
        # begin and end of the visible range, counted from the beginning of the timeline
        self._begin_ns = self._end_ns = 0
        # (lane, row) of the timeline's cursor; None puts the cursor on the bricks of the first lane
        self._row: tuple[str, str] | None = None
        self._at: int | None = None  # index of the block under the cursor, counted in the cursor's row
        self._drawn: Sequence[Lane] = ()
        self._rows: list[RowBlocks] = []
        self._row_at: dict[int, int] = {}  # maps a drawn line of the widget to its index in `_rows`

    def show_source(self, source: SourceView) -> None:
        who = source.key, source.phase, source.merged is not None
        if who != self._who:
            self._who, self._held, self._at, self._newest = who, None, None, None
        self._source = source
        before, self._offered = self._offered, source.timeline
        # If no newer timeline has come, show this one at once. In a slow recording, the next timeline may take long.
        is_old = self._clock_s() - self._newest_since_s >= FOLLOWED_S
        if self._held is None and (self._offered is before or is_old or _is_due(self._newest, self._offered)):
            self._newest, self._newest_since_s = self._offered, self._clock_s()
            self.redraw()

    def redraw(self) -> None:
        self.shown = shown = self._held or self._newest
        if shown is not None and self._held is None:
            self._begin_ns, self._end_ns = _newest_in_sight(shown)
        self._show_lanes()
        super().redraw()

    def _show_lanes(self) -> None:
        """Prepare the lanes of the frozen timeline.

        If no timeline is frozen, prepare only the lanes of the newest step.
        """
        shown = self.shown
        lanes = () if shown is None else shown.lanes if self._held else shown.newest_lanes
        if lanes is not self._drawn:
            self._drawn, self._rows = lanes, row_blocks(lanes)

    def _hold(self) -> bool:
        """Freeze the shown timeline, and stop following the newest step. Returns False if no timeline is shown."""
        self._held = self._held or self.shown
        self._show_lanes()
        return self._held is not None

    @property
    def _selected(self) -> int:
        """The index of the timeline's row with the cursor."""
        keys = [(row.lane.name, row.title) for row in self._rows]
        if self._row in keys:
            return keys.index(self._row)
        return next((at for at, row in enumerate(self._rows) if row.is_bricks), 0)

    @property
    def row(self) -> RowBlocks | None:
        """The timeline's row with the cursor, or None without a timeline."""
        return self._rows[self._selected] if self._rows else None

    @property
    def in_sight_ns(self) -> tuple[int, int]:
        """The visible time range: begin and end in ns, counted from the beginning of the timeline."""
        return self._begin_ns, self._end_ns

    @property
    def block(self) -> Block | None:
        """The block of the timeline under the cursor, or None."""
        if self._at is None or (row := self.row) is None:
            return None
        blocks = row.blocks
        return blocks[min(self._at, len(blocks) - 1)] if blocks else None

    def zoom(self, steps: int) -> None:
        """Halve or double the visible time around the cursor."""
        if not self._hold() or self.shown is None:
            return
        length_ns = self._end_ns - self._begin_ns
        wanted_ns = length_ns // ZOOM if steps > 0 else length_ns * ZOOM
        wanted_ns = min(max(wanted_ns, MIN_SHOWN_NS), max(self.shown.length_ns, MIN_SHOWN_NS))
        around_ns = (self._begin_ns + self._end_ns) // 2
        if (block := self.block) is not None:
            around_ns = (max(block.start_ns, self._begin_ns) + min(block.end_ns, self._end_ns)) // 2
        share = (around_ns - self._begin_ns) / max(1, length_ns)
        self._show_from(around_ns - round(share * wanted_ns), wanted_ns)

    def zoom_to(self) -> None:
        """Zoom in until the block under the cursor fills the screen."""
        if (block := self.block) is not None and self._hold():
            length_ns = max(block.end_ns - block.start_ns, MIN_SHOWN_NS)
            self._show_from(block.start_ns, length_ns)

    def fit(self) -> None:
        """Zoom out until the whole timeline is visible."""
        if self._hold() and self.shown is not None:
            self._show_from(0, self.shown.length_ns)

    def newest(self) -> None:
        """Go to the newest step, and follow new steps from now on."""
        self._held = self._at = None
        self._newest = self._offered
        self.redraw()

    def let_go(self) -> None:
        """Drop the frozen timeline, because the screen moves to a different moment."""
        self._held = self._at = self._newest = None

    def oldest(self) -> None:
        """Scroll to the beginning of the timeline."""
        if self._hold():
            self._at = None
            self._show_from(0, self._end_ns - self._begin_ns)

    def pan(self, halves: int) -> None:
        """Move the visible range by `halves` times half of its length. The cursor disappears."""
        if self._hold():
            length_ns = self._end_ns - self._begin_ns
            self._at = None
            self._show_from(self._begin_ns + halves * (length_ns // 2), length_ns)

    def step(self, blocks: int) -> None:
        """Move the cursor by `blocks` blocks in its row. Without a cursor, put it on a block in the middle."""
        if not self._hold() or (row := self.row) is None:
            return
        if self._at is None:
            self._at = row.nearest((self._begin_ns + self._end_ns) // 2)
        else:
            self._at = max(0, min(len(row.blocks) - 1, self._at + blocks))
        if (block := self.block) is not None:
            length_ns = self._end_ns - self._begin_ns
            margin_ns = round(MARGIN * length_ns)
            if block.start_ns < self._begin_ns and block.end_ns - block.start_ns <= length_ns:
                self._show_from(block.start_ns - margin_ns, length_ns)
            elif block.end_ns > self._end_ns and block.end_ns - block.start_ns <= length_ns:
                self._show_from(block.end_ns + margin_ns - length_ns, length_ns)
            # The block is longer than the visible range. If a part of the block is visible, do not scroll.
            elif block.end_ns <= self._begin_ns or block.start_ns >= self._end_ns:
                self._show_from(block.start_ns - margin_ns, length_ns)
        self.redraw()

    def move_row(self, rows: int) -> None:
        """Move the cursor to the block at the same time in another row."""
        if not self._rows:
            return
        block = self.block
        at = max(0, min(len(self._rows) - 1, self._selected + rows))
        self._row = self._rows[at].lane.name, self._rows[at].title
        if block is not None:
            middle_ns = (max(block.start_ns, self._begin_ns) + min(block.end_ns, self._end_ns)) // 2
            self._at = self._rows[at].nearest(middle_ns)
        self.redraw()

    def select_at(self, x: int, y: int) -> None:
        """Put the cursor on the block in the cell (x, y) of the widget. Do nothing if there is no block."""
        labels = label_width(self.size.width)
        if y not in self._row_at or x < labels:
            return
        row = self._rows[self._row_at[y]]
        self._row = row.lane.name, row.title
        if self._hold() and (held := self.row) is not None and held.parts:
            cells = max(1, self.size.width - labels)
            length_ns = self._end_ns - self._begin_ns
            self._at = held.nearest(self._begin_ns + (2 * (x - labels) + 1) * length_ns // (2 * cells))
            self.redraw()

    def _show_from(self, begin_ns: int, length_ns: int) -> None:
        assert self.shown is not None
        self._begin_ns = max(0, min(begin_ns, self.shown.length_ns - length_ns))
        self._end_ns = self._begin_ns + length_ns
        self.redraw()

    def cells(self) -> Cells:
        zero_ns = _zero_ns(self.shown) if self.shown else 0
        rows = [
            (clean(row.lane.name), row.title, *times, clean(part.name), clean(" · ".join(part.where)))
            for row in self._rows
            for part in row.parts
            if part.start_ns < self._end_ns and part.end_ns > self._begin_ns
            for times in [[units.exact(ns)[:-3] for ns in (part.start_ns - zero_ns, part.duration_ns)]]
        ]
        return Cells(("lane", "row", "start µs", "duration µs", "what", "in"), tuple(rows))

    def draw(self, width: int, height: int) -> list[Line]:
        if self.shown is None:
            said = textwrap.wrap(_nothing(self._source), max(20, width - 2))
            return [fit_line(((f" {row}", "dim"),), width) for row in said[:height]]
        labels = label_width(width)
        scale = Scale(self._begin_ns, self._end_ns, max(1, width - labels))
        head = [
            _headline(self.shown, self.in_sight_ns, width, is_held=self._held is not None),
            *_beside_baseline(self._baseline, self.shown),
            axis(scale, _zero_ns(self.shown), labels),
        ]
        foot = [rule((("under the cursor", "dim"),), width), *self._detail(self.shown, width)]
        lines, at, row_of_line = self._lanes(scale, labels)
        free = max(1, height - len(head) - len(foot))
        first = max(0, min(at - free // 2, len(lines) - free))
        shown = lines[first : first + free]
        self._row_at = {
            len(head) + line - first: row for line, row in row_of_line.items() if 0 <= line - first < free
        }
        cut = len(lines) - len(shown)
        if cut and len(shown) > 1:
            where = f"{first} lines above, {cut - first} below: j k go there"
            foot[0] = rule((("under the cursor", "dim"),), width, ((where, "warn"),))
        room = free - len(shown)
        if room > 1:
            shown += [BLANK, legend(width)]
        if room > ROOM_FOR_LONGEST and (row := self.row) is not None:
            zero_ns = _zero_ns(self.shown)
            widths = even_widths(width, 2) if width >= TWO_LISTS else [width]
            lists = [longest(row, scale, zero_ns, room - 3, widths[0])]
            if len(widths) > 1:
                beside_it = sums(row, scale, room - 3, widths[1])
                lists.append([*beside_it, *like_newest(self.shown, room - 3 - len(beside_it), widths[1])])
            shown += beside(lists, widths)
        shown += [BLANK] * (free - len(shown))
        return [fit_line(line, width) for line in (*head, *shown, *foot)][:height]

    @property
    def _baseline(self) -> Comparison | None:
        return self._source.baseline if self._source is not None else None

    def _lanes(self, scale: Scale, labels: int) -> tuple[list[Line], int, dict[int, int]]:
        """Return the lines of all lanes, the index of the line with the cursor, and the row of each line.

        The title of a lane has the sums of the lane's visible time.
        """
        lines: list[Line] = []
        selected, at, before = self._selected, 0, None
        row_of_line: dict[int, int] = {}
        for number, row in enumerate(self._rows):
            if row.lane is not before:
                before = row.lane
                told = timeline_text.lane_sum(row.lane, scale.begin_ns, scale.end_ns)
                title: Line = ((fit(f" {row.lane.name}", labels), "accent"), (told, ""))
                of: Line = ((f" · {clean(', '.join(row.lane.backends))}", "dim"),) if row.lane.backends else BLANK
                lines.append((*title, *of) if width_of((*title, *of)) <= labels + scale.width else title)
            is_here = number == selected
            if is_here:
                at = len(lines)
            current = self._at if is_here else None
            label: Line = (("▸" if is_here else " ", "accent"), (fit(f" {row.title}", labels - 1), "dim"))
            row_of_line[len(lines)] = number
            lines.append((*label, *time_row(row.blocks, scale, current)))
        return lines, at, row_of_line

    def _detail(self, shown: TimelineView, width: int) -> list[Line]:
        """Return lines with the exact figures of the block under the cursor, and notes about data that is not
        drawn.
        """
        notes = "; ".join(timeline_text.timeline_notes(shown))
        last: Line = ((f"  {notes}", "faint"),)
        if self._at is None or (row := self.row) is None or (block := self.block) is None:
            how: Line = (("  h l put the cursor on a block and go on to the next, j k to another row", "dim"),)
            wrapped = wrap_line((("  ", ""),), ((notes, "faint"),), width)
            return [how, *([BLANK, last] if len(wrapped) != 2 else wrapped)]
        part = row.parts[min(self._at, len(row.parts) - 1)]
        where = clean(" · ".join(part.where)) or "in no step"
        first = join_fitting(
            [
                ((f"  {block.glyph or GAP} ", block.role), (clean(part.name), "strong")),
                ((units.exact(part.duration_ns), "strong"),),
                *([((usual, ""),)] if (usual := _usual(self._baseline, part)) else []),
                ((f"from {units.exact(part.start_ns - _zero_ns(shown))}", ""),),
                ((f"{self._at + 1} of {len(row.parts)} in its row", "dim"),),
            ],
            width,
        )
        second: list[Line] = [
            ((f"  in {where}" if part.where else f"  {where}", ""),),
            ((f"lane {row.lane.name}", "dim"),),
        ]
        if isinstance(part, TimelineSpan):
            second.append(((clean(part.backend), "dim"),))
            second.append((("" if part.elements is None else f"{part.elements:,} elements", "dim"),))
            second.append((("failed" if part.is_failed else "", "bad"),))
            second.append((("timed as a whole" if part.is_plain else "", "dim"),))
        return [first, join_fitting([line for line in second if plain(line)], width), last]


def _headline(shown: TimelineView, in_sight_ns: tuple[int, int], width: int, *, is_held: bool) -> Line:
    parts: list[Line] = []
    if shown.newest is not None:
        name, us = clean(shown.newest.name), units.duration(shown.newest.duration_ns / 1e3)
        parts.append(((name, "strong"), (f" {us}", "")))
        if shown.newest_s is not None:
            parts[0] += ((f", ended {time_text.moment(shown.newest_s)}", "dim"),)
    held: Line = ((f"‖ {HELD}", "warn"),) if is_held else ((FOLLOWS, "dim"),)
    seen = f"{units.duration((in_sight_ns[1] - in_sight_ns[0]) / 1e3)} in sight"
    steps = f"{units.counted(shown.steps, 'step')} in {units.duration(shown.length_ns / 1e3)}"
    return join_fitting([((" ", ""), *held), *parts, ((seen, "dim"),), ((steps, "dim"),)], width, " · ")


def _beside_baseline(found: Comparison | None, shown: TimelineView) -> list[Line]:
    """Return a line that compares the newest step with the baseline's median step. Return [] without a baseline."""
    if shown.newest is None or found is None:
        return []
    text = clean(comparison_text.step_beside(found, shown.newest))
    return [((" Δ ", "accent"), (text, ""), (" (derived)", "dim"))]


def _usual(found: Comparison | None, part: TimelineSpan | Gap) -> str:
    """Return the median time of a layer or brick in the baseline as text. Return "" if the time is unknown."""
    if found is None or not isinstance(part, TimelineSpan) or not part.where:
        return ""
    phase, *outer = part.where
    place: Place = (
        (None, part.name)
        if part.kind is NodeKind.LAYER
        else ((part.name, part.category or BrickCategory.OTHER), outer[0] if outer else None)
    )
    median_us = found.median_us(phase, place)
    return "" if median_us is None else f"baseline's median {units.duration(median_us)}"


def _is_due(shown: TimelineView | None, newest: TimelineView | None) -> bool:
    """Return whether the newest timeline should replace the shown one now."""
    if shown is None or newest is None or shown.newest_s is None or newest.newest_s is None:
        return True
    return not 0 <= newest.newest_s - shown.newest_s < FOLLOWED_S


def _zero_ns(shown: TimelineView) -> int:
    """Return the zero of the time axis, in ns after the beginning of the timeline."""
    return shown.newest.start_ns if shown.newest else 0


def _newest_in_sight(shown: TimelineView) -> tuple[int, int]:
    """Return the time range of the newest step with a margin. Return the whole timeline if it has no steps."""
    if shown.newest is None:
        return 0, max(1, shown.length_ns)
    margin_ns = round(MARGIN * shown.newest.duration_ns) + 1
    return max(0, shown.newest.start_ns - margin_ns), min(shown.length_ns, shown.newest.end_ns + margin_ns)


def _nothing(source: SourceView | None) -> str:
    if source is not None and source.merged is not None:
        return "n/a: of several processes merged there is no timeline; m shows one"
    if source is not None and source.state is not SourceStatus.LIVE:
        last = "of a recording its last ones are read where it ended less than two minutes before"
        return f"n/a: it has ended, and none of its records is here: {RECEIVED}; {last}"
    return f"no records of steps are here: {RECEIVED}; of a recording those of the last ten seconds are read"
