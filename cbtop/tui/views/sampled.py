"""Draw which Python functions ran in the time that no brick covers."""

from __future__ import annotations

from rich.cells import cell_len

from cbtop.text import sampled_text
from cbtop.tui.widgets.lines import BLANK, Line, clean, clip, rule, wrap_line
from cbtop.viewmodels.cpu_samples import FunctionShare, SampledTimeView
from cbtop.viewmodels.source import SourceView

TITLE = "what ran in the time that no brick covers"
HOW = (
    "A thread of the process looks about a hundred times a second, less often if that would cost too much. It reads "
    "the function that Python runs between steps, outside of bricks in recorded steps, and in the parts data wait "
    "and other of training steps. n is the number of looks. In brackets is the 95 % interval of a share. `waits`: "
    "the thread slept."
)


def shown_places(source: SourceView) -> list[SampledTimeView]:
    """Return the groups with enough samples for shares."""
    return [place for place in source.sampled if place.is_enough]


def most_sampled_lines(source: SourceView) -> int:
    """Return the number of lines that show every function."""
    return sum(1 + len(place.functions) for place in shown_places(source))


def sampled_lines(source: SourceView, width: int, height: int) -> list[Line]:
    """Return one line for each group with its most frequent function, or with all functions if there is room."""
    places = shown_places(source)
    if height >= most_sampled_lines(source):
        return [line for place in places for line in _place(place, width)]
    return [(("  ", ""), (clip(_brief(place, width - 2), width - 2), "")) for place in places[:height]]


def _brief(place: SampledTimeView, width: int) -> str:
    """Return the line with the most frequent function, shortened if it is wider than `width` cells."""
    text = clean(sampled_text.brief(place))
    return text if cell_len(text) <= width else clean(sampled_text.briefest(place))


def sampled_detail(source: SourceView, width: int) -> list[Line]:
    """Return all places with their functions, and how they were found."""
    lines: list[Line] = [rule(((TITLE, "dim"),), width, (("Esc: back", "faint"),))]
    for place in source.sampled:
        lines += [*_place(place, width), BLANK]
    return [*lines, *wrap_line((("  ", ""),), ((HOW, "dim"),), width)]


def _place(place: SampledTimeView, width: int) -> list[Line]:
    head: Line = (("  ", ""), (clip(clean(sampled_text.heading(place)), width - 2), "strong"))
    if not place.is_enough:
        return [(*head[:1], (clip(clean(sampled_text.lines(place)[0]), width - 2), "dim"))]
    shares = [sampled_text.share(one) for one in place.functions]
    longest = max((len(share) for share in shares), default=0)
    rows = zip(place.functions, shares, strict=True)
    return [head, *(_function(one, share, longest, width) for one, share in rows)]


def _function(one: FunctionShare, share: str, longest: int, width: int) -> Line:
    room = max(0, width - longest - 6)
    return ((f"    {share:>{longest}}  ", ""), (clip(clean(sampled_text.function_place(one)), room), ""))
