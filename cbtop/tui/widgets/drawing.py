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

from cbtop.tui.widgets.lines import BLANK, Line, width_of

# The app owns the roles (its COMPONENT_CLASSES): thirty in each widget would double the time to the first frame.


class Drawing(Widget):
    """A widget that is a list of lines. Subclasses say which in `draw`, and call `redraw` for new ones."""

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._lines: tuple[Line, ...] = ()
        self._role_styles: dict[str, Style] = {}
        self._strips: dict[int, tuple[Line, Strip]] = {}  # by row what was painted there, and the line that it is of
        self._painted_for: object = None  # in which width and colours

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
        (_, background), filters = self.background_colors, self.get_line_filters()
        width = self.size.width
        if (painted_for := (width, background, *filters)) != self._painted_for:
            self._strips.clear()
            self._painted_for = painted_for
        strips = []
        for y in crop.line_range:
            line, known = _line_at(self._lines, y), self._strips.get(y)
            if known is None or known[0] is not line:
                strip = self.render_line(y)
                for one in filters:
                    strip = strip.apply_filter(one, background)
                known = self._strips[y] = line, strip
            strips.append(known[1])
        return strips if crop.column_span == (0, width) else [strip.crop(*crop.column_span) for strip in strips]

    def refresh(self, *regions: Region, repaint: bool = True, layout: bool = False, recompose: bool = False) -> Self:
        if not regions:  # colours may be others
            self._strips.clear()
        return super().refresh(*regions, repaint=repaint, layout=layout, recompose=recompose)

    def render_line(self, y: int) -> Strip:
        joined: list[tuple[str, Style]] = []  # each change of colour takes as many bytes as a dozen cells
        styles, before = self._role_styles, None
        for text, role in _line_at(self._lines, y):
            style = styles.get(role) or self._style(role)
            if before is not None and (
                before is style or (text.isspace() and _are_alike_in_blanks(before, style)) or not text
            ):
                joined[-1] = joined[-1][0] + text, before
            elif text:
                joined.append((text, style))
                before = style
        return Strip([Segment(*span) for span in joined]).adjust_cell_length(self.size.width, self._style(""))

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
    known = _placed(before)
    same, texts = set(known), {(begin, role): text for begin, text, role, _ in known}
    placed = _placed(now)
    new = [_differing(span, texts.get((span[0], span[2]))) for span in placed if span not in same]
    drawn, was_drawn = placed[-1][3] if placed else 0, width_of(before)
    if drawn < was_drawn:
        new.append((drawn, was_drawn))
    inside = [(begin, min(end, width)) for begin, end in new if begin < min(end, width)]
    return (inside[0][0], max(end for _, end in inside)) if inside else None


def _differing(span: tuple[int, str, str, int], before: str | None) -> tuple[int, int]:
    """The cells of `span` in which it differs from the text `before`, that stood there; all where none did."""
    begin, text, _, end = span
    if before is None or end - begin != len(text) or not cell_len(before) == len(before) == len(text):
        return begin, end
    differ = [at for at, (one, other) in enumerate(zip(text, before, strict=True)) if one != other]
    return begin + differ[0], begin + differ[-1] + 1


def _placed(line: Line) -> list[tuple[int, str, str, int]]:
    """The spans of `line`, each with the column that it begins in and the one after its last."""
    found, column = [], 0
    for text, role in line:
        begin = column
        column += len(text) if text.isascii() else cell_len(text)
        found.append((begin, text, role, column))
    return found


def _line_at(lines: Sequence[Line], y: int) -> Line:
    return lines[y] if y < len(lines) else BLANK
