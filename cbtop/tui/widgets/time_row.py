"""Draw blocks of time next to each other on one line. Each is drawn once, and never longer than it is.

A block with at least one whole cell is drawn in its cells, with its name. Its ends are drawn in the adjacent cells,
by eighths of a cell.

A smaller block counts in the cell of its middle. Adjacent cells with such blocks are a cluster, which shows their
number if there is room. The shade of a cell shows how much of its time they take.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from rich.cells import cell_len

from cbtop.tui.widgets.lines import Line, fit

_EIGHTHS = " ▏▎▍▌▋▊▉█"
HALF, LEAST = "▐", "▕"  # characters that fill the right half of a cell, and its right eighth
LEAST_NAME = 4  # A name is written only if it gets at least this many cells.
SHADES, GAP = "░▒▓", "·"


class Block(NamedTuple):
    """A block from `start_ns` to `end_ns`. Its label is the first name that fits. If none fits, it is the last name,
    cut off.

    `names` is a function, because most blocks are in clusters, which show no names. `role` colours text, and `fill`
    the inside. A block without a `glyph` is a gap, dotted and not counted.
    """

    start_ns: int
    end_ns: int
    names: Callable[[], tuple[str, ...]]
    role: str
    fill: str = ""
    glyph: str = ""


class Timed(Protocol):
    """Anything with a begin and an end in ns, such as a record."""

    @property
    def start_ns(self) -> int: ...

    @property
    def end_ns(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Scale:
    """The scale of a line: the time from `begin_ns` to `end_ns`, drawn over `width` cells."""

    begin_ns: int
    end_ns: int
    width: int
    _length_ns: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_length_ns", max(1, self.end_ns - self.begin_ns))

    def whole(self, block: Block) -> tuple[int, int]:
        """Return the cells that `block` covers completely, as (first cell, last cell + 1).

        The range may be empty.
        """
        begin = -(-(block.start_ns - self.begin_ns) * self.width // self._length_ns)
        end = (block.end_ns - self.begin_ns) * self.width // self._length_ns
        return max(0, begin), min(self.width, end)

    def eighths(self, moment_ns: int) -> int:
        """Return how many eighths of a moment's cell are before the moment."""
        return 8 * ((moment_ns - self.begin_ns) * self.width % self._length_ns) // self._length_ns

    def eighths_left(self, moment_ns: int) -> int:
        """Return how many eighths of a moment's cell are after the moment.

        Return 0 if the moment is at the border of two cells.
        """
        into = (moment_ns - self.begin_ns) * self.width % self._length_ns
        return 8 * (self._length_ns - into) // self._length_ns if into else 0

    def cell(self, block: Block) -> int:
        """Return the cell at the middle of the visible part of `block`."""
        begin, end = max(block.start_ns, self.begin_ns), min(block.end_ns, self.end_ns)
        at = (begin + end - 2 * self.begin_ns) * self.width // (2 * self._length_ns)
        return min(max(at, 0), self.width - 1)

    def shade(self, busy_ns: int) -> str:
        """Return the shade of a cell. Its blocks take `busy_ns` of its time."""
        return SHADES[min(len(SHADES) - 1, len(SHADES) * busy_ns * self.width // self._length_ns)]

    def about(self, blocks: Sequence[Timed]) -> range:
        """Return a range of indices that includes all visible `blocks` and few others.

        Blocks are disjoint and in order.
        """
        first = bisect_left(blocks, self.begin_ns, key=lambda block: block.end_ns)
        return range(first, bisect_left(blocks, self.end_ns, lo=first, key=lambda block: block.start_ns))

    def sees(self, block: Timed) -> bool:
        """Return whether any part of `block` is in the visible range."""
        return block.start_ns < self.end_ns and block.end_ns >= self.begin_ns and not (
            block.end_ns == self.begin_ns > block.start_ns
        )  # fmt: skip


class CellSpan(NamedTuple):
    """Adjacent cells of a line, from `first` to before `end`, and the indices of their blocks: a single one, or a
    cluster.

    For a cluster, `cells` has the cell of each block. Otherwise it is empty.
    """

    first: int
    end: int
    blocks: tuple[int, ...]
    cells: tuple[int, ...] = ()


def places(blocks: Sequence[Block], scale: Scale) -> list[CellSpan]:
    """Return the cells that draw or count `blocks`, from left to right. Blocks are disjoint and in order."""
    return _places(_in_sight(blocks, scale), scale)


def _in_sight(blocks: Sequence[Block], scale: Scale) -> dict[int, Block]:
    """Return the visible blocks, with their index as key. Each block is accessed only once."""
    about = ((number, blocks[number]) for number in scale.about(blocks))
    return {number: block for number, block in about if scale.sees(block)}


def _places(blocks: Mapping[int, Block], scale: Scale) -> list[CellSpan]:
    found: list[CellSpan] = []
    for number, block in blocks.items():
        last = found[-1] if found else None
        begin, end = scale.whole(block)
        if last and begin < last.end:
            # The first cell may already belong to the previous block, because the previous block has zero length.
            begin = last.end
        if begin < end:
            found.append(CellSpan(begin, end, (number,)))
        elif block.glyph:
            at = scale.cell(block)
            if last and last.cells and at <= last.end:
                found[-1] = CellSpan(last.first, max(last.end, at + 1), (*last.blocks, number), (*last.cells, at))
            else:
                found.append(CellSpan(at, at + 1, (number,), (at,)))
    return found


def time_row(blocks: Sequence[Block], scale: Scale, current: int | None = None) -> Line:
    """Return one line with all blocks. The block with the index `current` is highlighted."""
    seen = _in_sight(blocks, scale)
    cells: list[tuple[str, str]] = []
    at = 0
    before: Block | None = None  # the previous block that was drawn over whole cells
    for place in (*_places(seen, scale), None):
        first = place.first if place else scale.width
        after = seen[place.blocks[0]] if place and not place.cells else None
        cells += _edges(before, after, first - at, scale)
        if place is None:
            break
        at = place.end
        if place.cells:
            cells += _cluster(seen, place, scale, current)
            before = None
        else:
            before = after
            cells.append(_whole(seen[place.blocks[0]], place.end - place.first, is_lit=place.blocks[0] == current))
    return _merged(cells)


def _whole(block: Block, width: int, *, is_lit: bool) -> tuple[str, str]:
    names = block.names()
    if not block.glyph:
        name = next((f" {name} " for name in names if cell_len(name) + 4 <= width), "")
        left = (width - cell_len(name)) // 2
        text = GAP * left + name + GAP * (width - left - cell_len(name))
        return text, "lit" if is_lit else block.role
    room = width - cell_len(block.glyph)
    name = next((name for name in names if cell_len(name) <= room), "")
    if not name and names and room >= LEAST_NAME:
        name = names[-1]
    return fit(block.glyph + name, width), "lit" if is_lit else block.fill


def _edges(before: Block | None, after: Block | None, width: int, scale: Scale) -> list[tuple[str, str]]:
    """Return the cells between two blocks that were drawn.

    These cells may show the end of the first block and the start of the second.
    """
    if width <= 0:
        return []
    left = right = ("", "")
    if before is not None and before.glyph and (eighths := scale.eighths(before.end_ns)):
        touches = width == 1 and after is not None and after.glyph and scale.eighths(after.start_ns) == eighths
        left = _EIGHTHS[eighths], f"{after.fill} {before.role}" if touches and after else before.role
    if after is not None and after.glyph and not (left[0] and width == 1):
        eighths = scale.eighths_left(after.start_ns)
        if eighths:
            right = (HALF if eighths > 2 else LEAST), after.role
    gap = GAP if any(one is not None and not one.glyph for one in (before, after)) else " "
    free = width - bool(left[0]) - bool(right[0])
    return [cell for cell in (left, (gap * free, "gap"), right) if cell[0]]


def _cluster(
    blocks: Mapping[int, Block], place: CellSpan, scale: Scale, current: int | None
) -> list[tuple[str, str]]:
    """Return the cells of a cluster in the colour of its longest block. The number of blocks is in the middle."""
    inside: dict[int, list[int]] = {}
    for number, cell in zip(place.blocks, place.cells, strict=True):
        inside.setdefault(cell, []).append(number)
    count = str(len(place.blocks))
    begin = place.first + (place.end - place.first - len(count)) // 2
    text = dict(enumerate(count, begin)) if len(count) <= place.end - place.first else {}
    drawn = []
    for cell in range(place.first, place.end):
        here = inside.get(cell, [])
        lengths = {number: (block := blocks[number]).end_ns - block.start_ns for number in here}
        longest = max(lengths, key=lengths.__getitem__, default=None)
        role = "gap" if longest is None else "lit" if current in lengths else f"track {blocks[longest].role}"
        drawn.append((text.get(cell) or scale.shade(sum(lengths.values())), role))
    return drawn


def _merged(cells: Sequence[tuple[str, str]]) -> Line:
    line: list[tuple[str, str]] = []
    for text, role in cells:
        if line and line[-1][1] == role and not role.startswith("fill"):
            line[-1] = line[-1][0] + text, role
        else:
            line.append((text, role))
    return tuple(line)
