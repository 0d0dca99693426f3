"""The base class of all drawn widgets. Such a widget paints lines, and repaints only the spans that have changed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Self

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.events import Resize
from textual.geometry import Region, Size
from textual.strip import Strip
from textual.widget import Widget

from cbtop.tui.widgets.lines import BLANK, Line, Span, width_of

# The app defines all colour roles (COMPONENT_CLASSES). If each widget defined them, the first frame would take twice
# as long.


class Drawing(Widget):
    """A widget that consists of lines. Subclasses return the lines in `draw`. They call `redraw` to update them."""

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._lines: tuple[Line, ...] = ()
        self._looks: dict[str, _Look] = {}
        # maps a row to (its line, the strip of cells that was painted for this line)
        self._strips: dict[int, tuple[Line, Strip]] = {}
        self._painted_for = 0  # width in cells of the strips that were painted
        # Cache the size and whether there is a gutter, because Textual computes both slowly.
        self._room = Size(0, 0)
        self._has_gutter = False

    @abstractmethod
    def draw(self, width: int, height: int) -> list[Line]:
        """Return the lines that fill `width` x `height` cells. Missing lines are blank, and extra lines are not
        shown.
        """

    def redraw(self) -> None:
        """Draw the widget again, and repaint the cells that differ from the screen."""
        width, height = self._room
        if not (width and height and self.is_attached):  # The screen of the widget may be closed since the request.
            return
        before, lines = self._lines, self.draw(width, height)[:height]
        changed = []
        for y in range(max(len(before), len(lines))):
            was, line = _line_at(before, y), _line_at(lines, y)
            if line == was:
                if line:
                    lines[y] = was  # Keep the old line, because it is already painted.
            elif cells := changed_cells(was, line, width):
                changed.append(Region(cells[0], y, cells[1] - cells[0], 1))
        self._lines = tuple(lines)
        if changed:
            self.refresh(*changed)

    def render_lines(self, crop: Region) -> list[Strip]:
        """Return the painted strips of the region `crop`. Whole rows are painted once and cached.

        Textual's own method takes twice as long: it needs ten styles per row, and filters each row in each frame. It
        is used only for widgets with a border or padding. cbtop's stylesheet sets no opacity and no tints.
        """
        if self._has_gutter:
            return super().render_lines(crop)
        width = self._room.width
        if width != self._painted_for:
            self._strips.clear()
            self._painted_for = width
        if crop.column_span != (0, width):
            return [self._paint(y, *crop.column_span) for y in crop.line_range]
        strips = []
        for y in crop.line_range:
            line, known = _line_at(self._lines, y), self._strips.get(y)
            if known is None or known[0] is not line:
                known = self._strips[y] = line, self.render_line(y)
            strips.append(known[1])
        return strips

    def refresh(self, *regions: Region, repaint: bool = True, layout: bool = False, recompose: bool = False) -> Self:
        if not regions:  # Without regions, repaint everything, because colours may have changed.
            self._strips.clear()
        elif self._room and repaint and not (self._has_gutter or layout or recompose):
            # Textual's own method would also drop styles, sizes and painted strips, which are still valid.
            self._dirty_regions.update(regions)
            self._repaint_regions.update(regions)
            self._repaint_required = True
            self.check_idle()
            return self
        return super().refresh(*regions, repaint=repaint, layout=layout, recompose=recompose)

    def render_line(self, y: int) -> Strip:
        return self._paint(y, 0, self.size.width)

    def _paint(self, y: int, begin: int, end: int) -> Strip:
        """Return a strip with the cells of row `y` from column `begin` to before column `end`."""
        looks = self._looks
        # Join spans that look the same, because a change of colour takes as many bytes as a dozen cells.
        joined: list[tuple[str, Style]] = []
        before: _Look | None = None
        column = 0
        for text, role in _line_at(self._lines, y):
            first, column = column, column + (len(text) if text.isascii() else cell_len(text))
            if column <= begin:
                continue
            if first < begin or column > end:
                text = _cut(text, begin - first, end - first)
            look = looks.get(role) or self._look(role)
            if before is not None and (
                before is look or (before.blank is not None and before.blank == look.blank and text.isspace())
            ):
                joined[-1] = joined[-1][0] + text, before.style
            elif text:
                joined.append((text, look.style))
                before = look
            if column >= end:
                break
        if column < end:
            joined.append((" " * (end - max(column, begin)), (looks.get("") or self._look("")).style))
        # Make a single strip of all segments, because making a strip takes as long as making its segments.
        return Strip([Segment(*span) for span in joined], end - begin)

    def on_resize(self, event: Resize) -> None:
        self._room, self._has_gutter = self.size, bool(self.styles.gutter)
        self.redraw()
        self.refresh()

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._looks.clear()
        self._strips.clear()

    def _look(self, roles: str) -> _Look:
        style = self.rich_style
        for role in roles.split():
            style += self.app.get_component_styles(role).partial_rich_style
        for one in self.get_line_filters():  # Reduce the style to what the terminal can show.
            style = one.apply([Segment(" ", style)], self.background_colors[1])[0].style or style
        # If another role has this style already, use its _Look, so that spans can be joined.
        look = next((known for known in self._looks.values() if known.style == style), _Look(style))
        self._looks[roles] = look
        return look


class _Look:
    """The style for painting a role.

    `blank` is the background colour of blanks. If lines or reversed colours make blanks visible, `blank` is None.
    """

    def __init__(self, style: Style) -> None:
        self.style = style
        self.blank = None if style.underline or style.reverse or style.strike else (style.bgcolor,)


def _cut(text: str, begin: int, end: int) -> str:
    """Return the cells of the string `text` from `begin` to before `end`. Missing cells are left out."""
    begin, end = max(0, begin), max(0, end)
    if _is_narrow(text):
        return text[begin:end]
    return Strip([Segment(text)]).crop(begin, min(end, cell_len(text))).text


def changed_cells(before: Line, now: Line, width: int) -> tuple[int, int] | None:
    """Return one range of columns (within `width`) with all differences of the lines `now` and `before`, or None.

    With several ranges, Textual would also send everything to the left of each.
    """
    if before == now:
        return None
    same = 0
    for was, span in zip(before, now, strict=False):
        if was != span:
            break
        same += 1
    rest, was_rest = now[same:], before[same:]
    begin, drawn, was_drawn = width_of(now[:same]), width_of(rest), width_of(was_rest)
    end = begin + max(drawn, was_drawn)
    shorter = min(len(rest), len(was_rest))
    if shorter:
        begin += _alike(was_rest[0], rest[0], 1)
    if drawn == was_drawn:
        behind = 0
        for was, span in zip(reversed(was_rest), reversed(rest), strict=False):
            if was != span:
                break
            behind += 1
        end -= width_of(rest[len(rest) - behind :])
        if behind < shorter:
            end -= _alike(was_rest[-1 - behind], rest[-1 - behind], -1)
    end = min(end, width)
    return (begin, end) if begin < end else None


def _alike(before: Span, now: Span, step: int) -> int:
    """Return how many cells are equal at the start of two spans. If `step` is -1, count from the end of the spans."""
    one, other = before[0], now[0]
    if before[1] != now[1] or not (_is_narrow(one) and _is_narrow(other)):
        return 0
    alike = 0
    for a, b in zip(one[::step], other[::step], strict=False):
        if a != b:
            break
        alike += 1
    return alike


def _is_narrow(text: str) -> bool:
    """Whether each character of `text` takes exactly one cell."""
    return text.isascii() or cell_len(text) == len(text)


def _line_at(lines: Sequence[Line], y: int) -> Line:
    return lines[y] if y < len(lines) else BLANK
