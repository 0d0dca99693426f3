"""The welcome screen, which replaces the views until there is data."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from cbtop import units
from cbtop.text import source_text
from cbtop.tui.views.header import activity_line
from cbtop.tui.widgets.drawing import Drawing
from cbtop.tui.widgets.lines import BLANK, Line, clean, fit_line, width_of
from cbtop.viewmodels.source import SourceView

_WAITING: tuple[Line, ...] = ((("Waiting for a process to watch.", "strong"),), BLANK)
_OWN_PROGRAM: tuple[Line, ...] = (
    (("Or a torch program of yours, as it is:", "dim"),),
    BLANK,
    (("    cbtop run -- python generate.py", "accent"),),
    BLANK,
    (("Or instrument your own process, then leave this open:", "dim"),),
    BLANK,
    (("    from cbtop import BrickId, BrickProfiler", "accent"),),
    (("    profiler = BrickProfiler()", "accent"),),
    (('    with profiler.step("decode", tokens=1):', "accent"),),
    (("        with profiler.brick(BrickId.QKV_PROJECTION):", "accent"),),
    (("            ...", "accent"),),
)
_REFUSED: Line = (("No link to the daemon; it is tried again every second.", "strong"),)


def _how_to_start(install: str) -> tuple[Line, ...]:
    """Return lines with the ways to start a program.

    `install` is the command that installs the demo. It is "" if the demo is installed.
    """
    demo = ["cbtop demo"] if not install else [install, "cbtop demo"]
    return (
        *_WAITING,
        (("Watch a real model decode on this machine:", "dim"),),
        BLANK,
        *[((f"    {command}", "accent"),) for command in demo],
        BLANK,
        *_OWN_PROGRAM,
    )


def _briefly(install: str) -> tuple[Line, ...]:
    """Return the ways to start a program, in fewer lines than `_how_to_start`."""
    if install:
        return (
            *_WAITING,
            (("Start a torch program of yours: ", "dim"), ("cbtop run -- COMMAND", "accent")),
            (("or install the demo: ", "dim"), (install, "accent")),
        )
    return (
        *_WAITING,
        (("Start one in another terminal: ", "dim"), ("cbtop demo", "accent")),
        (("or a torch program of yours: ", "dim"), ("cbtop run -- COMMAND", "accent")),
    )


class Welcome(Drawing):
    """The welcome screen. It shows how to start a program. After a start, it shows the progress until the program has
    data.

    If the daemon refuses this viewer, the screen shows the reason.
    """

    def __init__(self, *, install: str, id: str | None = None) -> None:
        super().__init__(id=id)
        self._install = install
        self._source: SourceView | None = None
        self._status = ""
        self._refused = ""
        self._starting = ""

    def show(self, source: SourceView | None, status: str, refused: str, starting: str = "") -> None:
        self._source, self._status, self._refused, self._starting = source, status, refused, starting
        self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        if self._refused:
            # The reason of a refusal may contain a key. The key gets a line of its own, so that the user can copy the
            # key.
            return _centred((_REFUSED, BLANK, *_wrapped(self._refused, "", width)), width, height)
        if self._source is None:
            status = _wrapped(self._status, "dim", width)
            if self._starting:
                who = _wrapped(f"Started {self._starting}. It has not reported anything yet.", "strong", width)
                return _centred((*who, BLANK, *status), width, height)
            text = _how_to_start(self._install)
            if len(text) + 1 + len(status) > height:
                text = _briefly(self._install)
            return _centred((*text, BLANK, *status), width, height)
        return _centred(_preparing(self._source, min(48, width // 2)), width, height)


def _wrapped(text: str, role: str, width: int) -> list[Line]:
    lines = textwrap.wrap(clean(text), max(16, min(76, width - 4)), break_on_hyphens=False)
    return [((line, role),) for line in lines]


def _preparing(source: SourceView, bar_width: int) -> tuple[Line, ...]:
    if source.state != "live" and source.loss.unread:
        ended: Line = ((clean(source.program), "strong"), (" has ended", "dim"))
        return (ended, BLANK, ((f"not read yet: {units.count(source.loss.unread)} records", "accent"),))
    what = activity_line(source, bar_width) if source.activity else (("waiting for the first step …", "accent"),)
    if source.stall is not None:
        what = ((clean(source_text.stall(source.stall)), "warn"),)
    who: Line = ((clean(source.program), "strong"), (" is getting ready", "dim"))
    return (who, BLANK, what, BLANK, (("The views open with its first step.", "dim"),))


def _centred(text: Sequence[Line], width: int, height: int) -> list[Line]:
    left = max(1, (width - max(width_of(line) for line in text)) // 2)
    above = max(0, (height - len(text)) // 2)
    lines: list[Line] = [((" " * left, ""), *line) if line else BLANK for line in text]
    return [BLANK] * above + [line if width_of(line) <= width else fit_line(line, width) for line in lines]
