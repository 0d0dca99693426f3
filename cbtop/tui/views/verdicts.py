"""Draw the verdicts. Each verdict has a sentence with figures, advice, and the possible gain."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from cbtop import units
from cbtop.protocol.vocabulary import is_warm_up
from cbtop.text import source_text
from cbtop.tui.widgets.lines import BLANK, Line, clean, fit_line, join, plain, rule, wrap_line
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.verdict import Severity, Verdict

_LOOKS = {Severity.ERROR: ("✗", "strong bad"), Severity.WARNING: ("▲", "strong warn"), Severity.NOTE: ("·", "accent")}
_LEAST_WITHHELD = 5  # In a view of at least this height in lines, withheld verdicts are named.
# The possible gain of a verdict is written after its sentence, on the same line. This is done only if the sentence
# keeps at least this width in cells.
_LEAST_SENTENCE = 40


def verdict_lines(source: SourceView, width: int, height: int) -> list[Line]:
    """Return lines with the verdicts, the worst first. The last line has the number of verdicts that do not fit.

    Free lines show advice and the complete texts. If the advice does not fit, the gain follows the sentence.
    """
    verdicts = source.verdicts
    if withheld := _withheld(source, width):
        if height < _LEAST_WITHHELD:
            return _lines(source, verdicts, width, height)
        return [*_lines(source, verdicts, width, height - len(withheld)), *withheld]
    return _lines(source, verdicts, width, height)


def _withheld(source: SourceView, width: int) -> list[Line]:
    """Return how many verdicts are withheld and why, or [] without any."""
    said = source_text.withheld(source.withheld)
    return wrap_line((("  · ", "faint"),), ((said, "dim"),), width) if said else []


def _lines(source: SourceView, verdicts: Sequence[Verdict], width: int, height: int) -> list[Line]:
    if not verdicts:
        return [rule((("verdicts", "dim"),), width), _no_verdict(source)]
    shown = verdicts[: height - 1]
    texts = [_texts(verdict, width) for verdict in shown]
    room = _dealt(texts, height - 1 - len(shown))
    left_out = len(verdicts) - len(shown)
    more: Line = ((f"{left_out} more", "warn"),) if left_out else BLANK
    derived: Line = BLANK
    lines: list[Line] = []
    for verdict, (sentence, advice), (for_sentence, for_advice) in zip(shown, texts, room, strict=True):
        said = _cut(sentence, for_sentence, width)
        gain = "" if for_advice else _gain(verdict)
        if gain and width - len(gain) - 2 >= _LEAST_SENTENCE:
            said = [(*fit_line(said[0], width - len(gain) - 2), ("  ", ""), (gain, "good"))]
            derived = (("gains are derived", "faint"),)
        lines += [*said, *_cut(advice, for_advice, width)]
    return [rule((("verdicts", "dim"),), width, join((derived, more), " · ")), *lines]


def whole_verdict(verdict: Verdict, width: int) -> list[Line]:
    """Return the complete sentence, gain and advice of a verdict."""
    sentence, advice = _texts(verdict, width)
    return [*sentence, *advice]


def verdict_of_each_line(source: SourceView, width: int, height: int) -> list[Verdict | None]:
    """Return the verdict that each line of `verdict_lines` belongs to, or None for a line of no verdict."""
    if (withheld := _withheld(source, width)) and height >= _LEAST_WITHHELD:
        height -= len(withheld)
    shown = source.verdicts[: height - 1]
    room = _dealt([_texts(verdict, width) for verdict in shown], height - 1 - len(shown))
    return [None, *(verdict for verdict, lines in zip(shown, room, strict=True) for _ in range(sum(lines)))]


def _no_verdict(source: SourceView) -> Line:
    steps = source.steps
    if steps is not None and not steps.count:
        return (("  · not judged: no step of this phase ended in this time", "dim"),)
    if source.phase is not None and is_warm_up(source.phase):
        return (("  · not judged: the speed of a warm-up says nothing of the steps that follow", "dim"),)
    return (("  ✓ no problem found", "good"),)


def most_verdict_lines(source: SourceView, width: int) -> int:
    """Return how many lines the complete texts of all verdicts need."""
    texts = sum(len(lines) for verdict in source.verdicts for lines in _texts(verdict, width))
    return 1 + max(1, texts) + len(_withheld(source, width))


# Cache the texts, because each frame needs the texts of a verdict twice, and a verdict does not change for a second
# or more.
@lru_cache(maxsize=64)
def _texts(verdict: Verdict, width: int) -> tuple[tuple[Line, ...], tuple[Line, ...]]:
    """Return the sentence and the advice of a verdict, each wrapped to lines."""
    glyph, role = _LOOKS[verdict.severity]
    gain = _gain(verdict)
    if_so: Line = ((f"{gain} if {clean(verdict.gain_if)} (derived). ", "good"),) if gain else BLANK
    return (
        tuple(wrap_line(((f"  {glyph} ", role),), ((clean(verdict.sentence), "strong"),), width)),
        tuple(wrap_line((("    → ", "faint"),), (*if_so, (clean(verdict.advice), "dim")), width)),
    )


def _gain(verdict: Verdict) -> str:
    more = verdict.gain_tokens_per_sec
    return "" if more is None else f"+{units.number(more)} tokens/s"


def _dealt(texts: Sequence[tuple[Sequence[Line], Sequence[Line]]], free: int) -> list[tuple[int, int]]:
    """Return (lines of the sentence, lines of the advice) for each verdict. Each sentence has at least one line.

    Each verdict first gets one of the `free` lines for its advice. Then the complete texts are shown, verdict by
    verdict.
    """
    first = [min(1, max(0, free - at)) for at in range(len(texts))]
    free -= sum(first)
    room = []
    for (sentence, advice), for_advice in zip(texts, first, strict=True):
        more_sentence = min(free, len(sentence) - 1)
        more_advice = min(free - more_sentence, len(advice) - 1) if for_advice else 0
        free -= more_sentence + more_advice
        room.append((1 + more_sentence, for_advice + more_advice))
    return room


def _cut(lines: Sequence[Line], room: int, width: int) -> list[Line]:
    """Return the first `room` lines of a text. If lines are left out, the end of the last line has a mark."""
    if len(lines) <= room or not room:
        return list(lines[:room])
    *whole, last = lines[:room]
    rest = plain(lines[room]).lstrip()
    return [*whole, fit_line((*last, (f" {rest}", last[-1][1])), width)]
