"""The help screen: the keys of all views, the views' help texts, and the glossary."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen

from cbtop.tui.views.base import View
from cbtop.tui.widgets.footer import KeyFooter, key_name
from cbtop.tui.widgets.lines import BLANK, Line, fit_line, rule
from cbtop.tui.widgets.pager import Page, Pager
from cbtop.tui.widgets.sorted_table import SortedTable
from cbtop.tui.widgets.steady_order import RARE_APART, STEADY_MARGIN, STEADY_REDRAWS
from cbtop.tui.widgets.table import Table

WORDS = (
    ("measured", "read from a clock or a counter while it ran; numbers without a word are measured"),
    ("derived", "computed from measured numbers or from shapes: GB/s, GFLOP/s, FLOP/B"),
    (
        "last 10 s",
        "which time the numbers are of: the last seconds or, with `r`, all since the first step that was seen",
    ),
    ("static", "declared or read from a file: true whether or not anything ran"),
    ("n/a", "nobody measured it; never a guess, never zero"),
    ("exclusive", "a brick's time without that of bricks inside it: these add up; inclusive times do not"),
    ("rest of step", "wall time of a step that is in no brick and in no layer (JSON: unattributed); ░ in the bar"),
    ("inside layers", "a gap: time in layers, but in none of their bricks"),
    ("between layers", "a gap: time in layers that hold layers, but in none of these"),
    ("steps inside", "a gap: steps that ran inside a step, which have a breakdown of their own"),
    ("overlap", "time in which two bricks or layers ran, as on two streams of a device: in both, so it is taken off"),
    ("tokens/s", "tokens a second of wall-clock time, pauses included; the curve is the same, second by second"),
    ("no pauses", "tokens a second of the time in which at least one of the ended steps ran (tok/s without pauses)"),
    ("between steps", "wall-clock time in which no step of any phase ran: what the host does between two of them"),
    ("at once", "how many steps ran at the same time, on average; a step's time is its own, waiting included"),
    ("lost", "records lost since the daemon looked: with any, totals are too low"),
    (
        "order of rows",
        f"exact when you sort; then a row passes another once it has been {STEADY_MARGIN:.0%} ahead of it "
        f"in {STEADY_REDRAWS} redraws (by p99, max and min, of few calls, {RARE_APART} times as long), so that "
        "rows can be read while numbers move; text and JSON are in exact order",
    ),
    (
        "backend",
        "what runs the kernels: numba-avx2-omp×2 is code compiled by Numba for AVX2, on 2 threads of OpenMP or TBB",
    ),
    (
        "time bar",
        "✗ a process stalled or was suspended, ▲ a warning or an error among the verdicts began while a view had it, "
        "■ one ended, ▸ one started, │ one spends most of its time in another phase than before; ═ is a range",
    ),
    (
        "read here",
        "no `cbtop daemon` runs: this viewer reads the processes itself, and other viewers ask it",
    ),
    ("budget", "the µs/token set for a brick; ! and red: used up"),
)
_TERM_WIDTH = 16
TWO_COLUMNS_FROM = 100 - 4  # width of a help page in cells if the terminal has 100 cells


class HelpScreen(Screen[None]):
    """The screen with the complete help on one page."""

    AUTO_FOCUS = "Pager"

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,f1", "dismiss", "close help", key_display="esc"),
    ]

    def __init__(self, app_bindings: Iterable[Binding], views: Sequence[type[View]]) -> None:
        super().__init__()
        self._app_bindings = tuple(app_bindings)
        self._shown = views

    def compose(self) -> ComposeResult:
        with Pager(id="help"):
            yield HelpPage(self._app_bindings, self._shown, id="help-page")
        yield KeyFooter(id="help-footer")


class HelpPage(Page):
    """The page with the text of the help."""

    def __init__(
        self, app_bindings: Sequence[Binding], views: Sequence[type[View]], *, id: str | None = None
    ) -> None:
        super().__init__(id=id)
        self._app_bindings = app_bindings
        self._shown = views

    def text(self, width: int) -> Sequence[Line]:
        return help_lines(self._app_bindings, self._shown, width)


def help_lines(app_bindings: Iterable[Binding], views: Iterable[type[View]], width: int) -> list[Line]:
    """Return the whole help for a width of `width` cells.

    The order is: keys of the first view in `views`, then general keys, then everything else.
    """
    first, *others = views
    in_lists = [*_declared(Table), *_declared(SortedTable)]
    lines = [*_view(first, width), BLANK]
    lines += [rule((("keys everywhere", "accent"),), width), *_keys(app_bindings, width), BLANK]
    lines += [rule((("keys in lists", "accent"),), width), *_keys(in_lists, width), BLANK]
    for view in others:
        lines += [*_view(view, width), BLANK]
    return [*lines, rule((("words", "accent"),), width), *_terms(WORDS, width)]


def _view(view: type[View], width: int) -> list[Line]:
    lines = [rule(((view.title, "accent"),), width), *_paragraph(view.doc, width), BLANK]
    if keys := _keys(_declared(view), width):
        lines += [*keys, BLANK]
    lines += _terms(view.columns_doc, width)
    if view.details_doc:
        lines += [BLANK, (("  in the details", "accent"),), *_terms(view.details_doc, width)]
    return lines


def _declared(owner: type[Table[object]] | type[SortedTable[object]] | type[object]) -> list[Binding]:
    return list(Binding.make_bindings(vars(owner).get("BINDINGS", ())))


def _keys(bindings: Iterable[Binding], width: int) -> list[Line]:
    """Return one line for each action, with all keys of the action."""
    keys: dict[tuple[str, str], list[str]] = {}
    for binding in bindings:
        keys.setdefault((binding.action, binding.description), []).append(key_name(binding.key))
    return _terms(((" ".join(names), description) for (_, description), names in keys.items()), width, "key", "")


def _paragraph(text: str, width: int) -> list[Line]:
    return [((f"  {line}", ""),) for line in textwrap.wrap(text, max(20, min(width, 110) - 4))]


def _terms(
    terms: Iterable[tuple[str, str]], width: int, role: str = "strong", meaning_role: str = "dim"
) -> list[Line]:
    """Return terms of the glossary with their meanings, in one or two columns."""
    room = max(20, min(width // _columns(width), 120) - _TERM_WIDTH - 4)
    entries: list[list[Line]] = []
    for term, meaning in terms:
        first, *rest = textwrap.wrap(meaning, room) or [""]
        entries.append([(("  ", ""), (term.ljust(_TERM_WIDTH), role), (f" {first}", meaning_role))])
        entries[-1] += [((" " * (_TERM_WIDTH + 3) + line, meaning_role),) for line in rest]
    return _in_columns(entries, width)


def _columns(width: int) -> int:
    return 2 if width >= TWO_COLUMNS_FROM else 1


def _in_columns(entries: Sequence[Sequence[Line]], width: int) -> list[Line]:
    """Return the entries of the help one below the other, or in two columns if they fit. The first entries are in the
    left column.
    """
    lines = [line for entry in entries for line in entry]
    if _columns(width) == 1:
        return lines
    left: list[Line] = []
    for entry in entries:
        if len(left) * 2 >= len(lines):
            break
        left += entry
    pairs = zip_longest(left, lines[len(left) :], fillvalue=BLANK)
    return [(*fit_line(one, width // 2), *other) for one, other in pairs]
