"""The widget everything on the screen is made of: it paints lines and repaints only the spans that changed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Self

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.events import Resize
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from cbtop.tui.widgets.lines import BLANK, Line, Span, width_of

# The app owns the roles (its COMPONENT_CLASSES): thirty in each widget would double the time to the first frame.


class Drawing(Widget):
    """A widget that is a list of lines. Subclasses say which in `draw`, and call `redraw` for new ones."""

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._lines: tuple[Line, ...] = ()
        self._role_styles: dict[str, Style] = {}
        self._strips: dict[int, tuple[Line, Strip]] = {}  # by row what was painted there, and the line that it is of
        self._painted_for = 0  # in which width

    @abstractmethod
    def draw(self, width: int, height: int) -> list[Line]:
        """The lines to show in `width` x `height` cells; missing ones are blank, further ones not shown."""

    def redraw(self) -> None:
        """Draw again and repaint what differs from what is on the screen."""
        width, height = self.size
        if not (width and height and self.is_mounted):
            return
        before, lines = self._lines, self.draw(width, height)[:height]
        changed = []
        for y in range(max(len(before), len(lines))):
            was, line = _line_at(before, y), _line_at(lines, y)
            if line == was:
                if line:
                    lines[y] = was  # painted already
            elif cells := changed_cells(was, line, width):
                changed.append(Region(cells[0], y, cells[1] - cells[0], 1))
        self._lines = tuple(lines)
        if changed:
            self.refresh(*changed)

    def render_lines(self, crop: Region) -> list[Strip]:
        """The rows of `crop`, each painted once.

        Textual's own way asks ten styles a row, and filters a row anew in each frame: it takes twice the time. What
        has a border or padding goes that way all the same; no stylesheet of ours sets opacity or tints.
        """
        if self.styles.gutter:
            return super().render_lines(crop)
        width = self.size.width
        if width != self._painted_for:
            self._strips.clear()
            self._painted_for = width
        strips = []
        for y in crop.line_range:
            line, known = _line_at(self._lines, y), self._strips.get(y)
            if known is None or known[0] is not line:
                known = self._strips[y] = line, self.render_line(y)
            strips.append(known[1])
        return strips if crop.column_span == (0, width) else [strip.crop(*crop.column_span) for strip in strips]

    def refresh(self, *regions: Region, repaint: bool = True, layout: bool = False, recompose: bool = False) -> Self:
        if not regions:  # colours may be others
            self._strips.clear()
        return super().refresh(*regions, repaint=repaint, layout=layout, recompose=recompose)

    def render_line(self, y: int) -> Strip:
        joined: list[tuple[str, Style]] = []  # each change of colour takes as many bytes as a dozen cells
        styles, before = self._role_styles, None
        line, width = _line_at(self._lines, y), self.size.width
        drawn = width_of(line)
        for text, role in (*line, (" " * (width - drawn), "")):
            style = styles.get(role) or self._style(role)
            if before is not None and (
                before is style or (text.isspace() and _are_alike_in_blanks(before, style)) or not text
            ):
                joined[-1] = joined[-1][0] + text, before
            elif text:
                joined.append((text, style))
                before = style
        # A strip takes as long to make as all its segments.
        strip = Strip([Segment(*span) for span in joined], max(drawn, width))
        return strip if drawn <= width else strip.crop(0, width)

    def on_resize(self, event: Resize) -> None:
        self.redraw()
        self.refresh()

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._role_styles.clear()
        self._strips.clear()

    def _style(self, roles: str) -> Style:
        style = self._role_styles.get(roles)
        if style is None:
            style = self.rich_style
            for role in roles.split():
                style += self.app.get_component_styles(role).partial_rich_style
            # Here, and not of every line anew: what the terminal can show of its colours.
            for one in self.get_line_filters():
                style = one.apply([Segment(" ", style)], self.background_colors[1])[0].style or style
            # Roles that look the same have one style.
            style = next((known for known in self._role_styles.values() if known == style), style)
            self._role_styles[roles] = style
        return style


def _are_alike_in_blanks(one: Style, other: Style) -> bool:
    """Whether blanks look the same in both."""
    return one.bgcolor == other.bgcolor and not any(
        style.underline or style.reverse or style.strike for style in (one, other)
    )


def changed_cells(before: Line, now: Line, width: int) -> tuple[int, int] | None:
    """Where `now` differs from `before` in `width` cells: the first column that does, and the one after the last.

    One stretch: of several Textual would send what lies to the left of each again.
    """
    if before == now:
        return None
    shorter, same = min(len(before), len(now)), 0
    while same < shorter and before[same] == now[same]:
        same += 1
    begin, drawn, was_drawn = width_of(now[:same]), width_of(now), width_of(before)
    end = max(drawn, was_drawn)
    if same < shorter:
        begin += _alike(before[same], now[same], 1)
    if drawn == was_drawn:
        behind = 1
        while behind <= shorter - same and before[-behind] == now[-behind]:
            behind += 1
        end -= width_of(now[len(now) - behind + 1 :])
        if behind <= shorter - same:
            end -= _alike(before[-behind], now[-behind], -1)
    end = min(end, width)
    return (begin, end) if begin < end else None


def _alike(before: Span, now: Span, step: int) -> int:
    """In how many cells, from the first on (`step` -1: from the last on backwards), two spans are alike."""
    one, other = before[0], now[0]
    if before[1] != now[1] or cell_len(one) != len(one) or cell_len(other) != len(other):
        return 0
    pairs = enumerate(zip(one[::step], other[::step], strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _line_at(lines: Sequence[Line], y: int) -> Line:
    return lines[y] if y < len(lines) else BLANK
