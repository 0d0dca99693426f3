"""The header of the screen: the name of the shown source and its most important figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cbtop import units
from cbtop.text import breakdown_text, merge_text, range_text, rate_text, recording_text, source_text, time_text
from cbtop.tui.views.looks import state_badge
from cbtop.tui.widgets.bars import bar
from cbtop.tui.widgets.braille import area
from cbtop.tui.widgets.drawing import Drawing
from cbtop.tui.widgets.lines import BLANK, Line, both_ends, clean, fit_line, join_fitting, width_of
from cbtop.viewmodels.loss import LossView
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.stall import StallKind
from cbtop.viewmodels.steps import NO_STEP, StepsView
from cbtop.viewmodels.time_travel import ReplayView

_HISTORY_WIDTH = 30
_BAR_WIDTH = 30


@dataclass(frozen=True, slots=True)
class Heading:
    """The content of the header: the shown source, and the state of the dashboard."""

    source: SourceView | None
    paused: bool
    position: str  # position of the source in the list, such as "2/3"; "" for a single source
    replay: ReplayView | None = None  # position in the shown recording, or None for live data


class Header(Drawing):
    """The header: a line about the source, and two lines of tiles. A tile is a label above a value.

    If the terminal has few lines, one line with the figures replaces the tiles.
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._heading = Heading(None, paused=False, position="")

    def show_heading(self, heading: Heading) -> None:
        self._heading = heading
        self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        source = self._heading.source
        lines = [_identity(self._heading, width)]
        if source is None:
            return lines
        return lines + (_tiles(source, width) if height >= 3 else [_figures(source, width)])


def _identity(heading: Heading, width: int) -> Line:
    source, replay = heading.source, heading.replay
    state, stall = "waiting" if source is None else source.standing, source.stall if source else None
    if source is not None and source.stale_s is not None:
        state, stall = "stale", None
    is_back = replay is not None and replay.is_history
    badges: Line = ((" cbtop ", "brand"), *(state_badge("past" if is_back else "replay") if replay else ()))
    if heading.paused and not is_back:
        badges += state_badge("paused")
    if not (heading.paused or replay) or (source is not None and source.standing != "live"):
        badges += state_badge(state, f"{stall.age_s:.0f} s" if stall else "")
    if replay and replay.range_s is None:
        at = f"{time_text.date(replay.recorded_s + replay.at_s)}  {time_text.position(replay.at_s)}"
        badges += (("  ", ""), (f"{at}/{time_text.position(replay.duration_s)}", "accent"))
    if source is None:
        return badges
    if source.merged is not None:
        who: Line = ((clean(merge_text.merged(source.merged)), "accent"), (f"  {clean(source.program)}", "strong"))
    else:
        rank = merge_text.rank(source.rank, source.world_size)
        who = (
            (clean(source.program), "strong"),
            (f" {source.pid}@{clean(source.host)}", "dim"),
            *(((f"  {rank}", "accent"),) if rank else ()),
            *(((f"  {heading.position}", "accent"),) if heading.position else ()),
        )
    left: Line = (*badges, (" ", ""), *_of(source), ("  ", ""), *who)
    if width_of(left) > width:  # The name of the program must be readable.
        left = (*badges, (" ", ""), *_of(source, is_short=True), ("  ", ""), *who)
    left = fit_line(left, min(width_of(left), width))
    free = max(0, width - width_of(left) - 4)
    right: Line = join_fitting(([((fact, "dim"),) for fact in _facts(source)]), free, " · ")
    return both_ends(left, (*right, (" ", "")), width) if right else fit_line(left, width)


def _of(source: SourceView, *, is_short: bool = False) -> Line:
    """Return the time range of the figures in the header. If steps are sampled, the interval and the cost of
    recording are added.
    """
    sample = recording_text.sample(source.sample_every)
    if is_short:
        sample = sample.removeprefix(recording_text.SAMPLE_MARK)
    cost = recording_text.limit_of_overhead(source.overhead) if source.overhead else ""
    of_steps: Line = ()
    if sample:
        of_steps = ((f"  {sample}{f', costs {cost}' if source.overhead else ''}", "warn"),)
    elif source.overhead:
        of_steps = ((f"  recording costs {cost}", "dim"),)
    return ((range_text.shown_time(source), "dim" if source.window is None else "accent"), *of_steps)


def _facts(source: SourceView) -> list[str]:
    """Return facts about the model of the source, the most important first."""
    facts = [source.model, source.architecture, source.quantization, source.backend]
    words = [clean(fact) for fact in facts if fact]
    for value, unit in ((source.threads, "threads"), (source.layers, "layers")):
        if value is not None:
            words.append(f"{value} {unit if value != 1 else unit[:-1]}")
    if source.weights_bytes is not None:
        words.append(units.size_bytes(source.weights_bytes))
    return words


@dataclass(frozen=True, slots=True)
class _Tile:
    label: str
    value: Line


def _tile_list(source: SourceView) -> list[_Tile]:
    steps = source.steps
    latencies = _latency_tiles(steps)
    tiles = [
        *latencies,
        _Tile("phase", ((clean(source.phase or units.NOT_MEASURED), "accent"),)),
        *_reason_tile(steps),
        _Tile("steps", ((units.count(steps.count if steps else 0), ""), *_recorded(steps))),
        _Tile("mean", ((_ms(steps.mean_us if steps else None), ""), (" ms/step", "dim"))),
        _Tile("tokens", ((units.count(steps.known_tokens if steps else 0), ""),)),
        _Tile("records", ((units.si(source.loss.received), ""),)),
    ]
    if gpu := _gpu_tile(source):
        tiles.insert(len(latencies), gpu)
    if steps and steps.tokens_per_sec_in_steps is not None and not steps.is_training:
        tiles.insert(5, _Tile("tok/s no pauses", ((units.number(steps.tokens_per_sec_in_steps), ""),)))
    if steps and not steps.has_tokens and steps.samples_per_sec is not None:
        tiles.insert(0, _Tile("samples/s", ((rate_text.rate(source, steps.samples_per_sec), "strong"),)))
    if steps and steps.overlap:
        tiles.insert(5, _Tile("at once", ((units.number(steps.at_once), ""),)))
    # The tile with lost records comes first, so that a narrow screen still shows it.
    tiles.insert(0 if source.loss.lost else len(latencies), _Tile("lost", drops(source.loss)))
    return tiles


def _latencies(steps: StepsView) -> tuple[str, tuple[float | None, float | None, float | None]]:
    """Return (word for the unit, (p50, p99, max) in µs) of the shown times.

    The times are of a token. In training, the times are per step. They are also per step if the time of a token is
    unknown.
    """
    if steps.why_no_us_per_token or steps.is_training:
        return "ms/step", (steps.p50_us, steps.p99_us, steps.max_us)
    return "ms/token", (steps.us_per_token_p50, steps.us_per_token_p99, steps.us_per_token_max)


def _latency_tiles(steps: StepsView | None) -> list[_Tile]:
    """Return the tiles with the p50, p99 and maximum of the times. Return [] if no step has ended."""
    if steps is None or not steps.count:
        return []
    unit, times_us = _latencies(steps)
    labels = (f"{unit} p50", "p99", "max")
    return [_Tile(label, ((_ms(us), "strong"),)) for label, us in zip(labels, times_us, strict=True)]


def _reason_tile(steps: StepsView | None) -> list[_Tile]:
    """Return a tile with the reason why the time of a token is unknown.

    Return [] if it is known, in training, or if the process does not report tokens.
    """
    if steps is not None and steps.is_training:
        return []
    why = NO_STEP if steps is None or not steps.count else steps.why_no_us_per_token if steps.tokens else ""
    return [_Tile("ms/token", ((f"{units.NOT_MEASURED}: {why}", "dim"),))] if why else []


def _gpu_tile(source: SourceView) -> _Tile | None:
    """Return a tile with the load and the power of the source's GPUs.

    If there are several GPUs, it shows their mean load and total power.
    """
    rows = [row for row in source.gpus if not row.is_stale]
    busy = [row.device.utilization_percent for row in rows if row.device.utilization_percent is not None]
    watts = [row.watts for row in rows if row.watts is not None]
    if not (busy or watts):
        return None
    percent = units.percent(sum(busy) / len(rows) if len(busy) == len(rows) else None)
    power = units.with_unit(units.whole(sum(watts) if len(watts) == len(rows) else None), "W")
    label = f"GPU {source_text.labels([clean(row.label) for row in rows])} busy"
    return _Tile(label, ((percent, "strong"), (f" {power}", "dim")))


def _recorded(steps: StepsView | None) -> Line:
    """Return the number of recorded steps as text. Return () if every step was recorded."""
    if steps is None or steps.recorded == steps.count:
        return ()
    return ((f" {units.count(steps.recorded)} recorded", "dim"),)


def _ms(us: float | None) -> str:
    return units.milliseconds(us)


def _tiles(source: SourceView, width: int) -> list[Line]:
    """Return two lines with labels above values. After tokens/s or steps/s comes the curve of the last minutes."""
    history_width = min(_HISTORY_WIDTH, max(8, width // 5))
    unit, per_sec, history = source.rate
    curve = area(history, history_width, 2, "accent")
    rate = rate_text.rate(source, per_sec)
    first = max(len(unit), len(rate))
    above: Line = (("  ", ""), (unit.ljust(first), "dim"), ("  ", ""), *curve[0])
    below: Line = (("  ", ""), (rate.ljust(first), "strong good"), ("  ", ""), *curve[1])
    for tile in _tile_list(source):
        size = max(len(tile.label), width_of(tile.value), 6)
        if width_of(above) + size + 4 > width:
            break
        above += (("   ", ""), (tile.label.ljust(size), "dim"))
        below += (("   ", ""), *fit_line(tile.value, size))
    return [above, below]


def _figures(source: SourceView, width: int) -> Line:
    """Return one line with the most important figures. It replaces the tiles on a terminal with few lines."""
    steps = source.steps
    unit, per_sec, history = source.rate
    curve = area(history, 8, 1, "accent")[0]
    short = {"tokens/s": "tok/s", "ms/token": "ms/tok"}
    parts: list[Line] = [
        ((" ", ""), (rate_text.rate(source, per_sec), "strong good"), (f" {short.get(unit, unit)} ", "dim"), *curve),
        _short_latencies(steps, short),
        ((clean(source.phase or units.NOT_MEASURED), "accent"),),
        ((units.count(steps.count if steps else 0), ""), (" steps", "dim")),
    ]
    parts.insert(1 if source.loss.lost else 2, (("lost ", "dim"), *drops(source.loss)))
    return join_fitting(parts, width)


def _short_latencies(steps: StepsView | None, short: Mapping[str, str]) -> Line:
    """Return p50 and p99 of the times as text with an abbreviated unit.

    If p50 and p99 are unknown, return the reason.
    """
    if steps is None or not steps.count:
        return ((f"{short['ms/token']} {units.NOT_MEASURED}: {NO_STEP}", "dim"),)
    unit, (p50_us, p99_us, _) = _latencies(steps)
    return ((_ms(p50_us), "strong"), (" · ", "dim"), (_ms(p99_us), "strong"), (f" {short.get(unit, unit)}", "dim"))


def drops(loss: LossView) -> Line:
    """Return the number of records that were lost since the daemon found the process. It is highlighted if it is
    above 0.
    """
    line: Line = ((f"! {units.count(loss.lost)}", "bad strong"),) if loss.lost else (("0", ""),)
    if loss.left_out:
        line += ((f" {units.count(loss.left_out)} announcements left out", "bad"),)
    return line


class Notice(Drawing):
    """A line about an unusual state: no link, work in progress, an end, or a failed check.

    It is hidden if there is nothing unusual.
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._notice: Line = BLANK
        self._progress: Line = BLANK
        self._end: Line = BLANK

    def show_source(self, source: SourceView | None, refused: str) -> None:
        if refused:  # If the daemon refuses this viewer, show the refusal. All other notices would be about old data.
            self._notice = (("  ✗ refused: ", "bad strong"), (clean(refused), ""))
        else:
            self._notice = BLANK if source is None else notice(source)
        self._show()

    def show_progress(self, what: str, done: float | None = None) -> None:
        """Show the progress of a user's request instead of notices. An empty `what` hides the progress."""
        self._progress = (("  ", ""), *progress_line(what, done, _BAR_WIDTH)) if what else BLANK
        self._show()

    def show_end(self, status: str) -> None:
        """Show how the started program has ended, before other notices, from now on."""
        self._end = (("  ", ""), (clean(status), "strong"))
        self._show()

    def _show(self) -> None:
        self.display = bool(self._progress or self._end or self._notice)
        self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        return [fit_line((*self._progress, *self._end, *self._notice), width)]


def notice(source: SourceView) -> Line:
    """Return the most urgent notice about `source`, or an empty line.

    The parts of the time breakdown may not add up. Then this error comes before the notice.
    """
    urgent, trouble = _urgent(source), breakdown_text.books_trouble(source.books)
    if not trouble:
        return urgent
    what, _, why = trouble.partition(":")
    return ((f"  ✗ {what}:", "bad strong"), (clean(why), ""), *urgent)


def _urgent(source: SourceView) -> Line:
    if source.stale_s is not None:
        return ((f"  ✗ {source_text.stale(source.stale_s)}: ", "bad strong"), ("its daemon does not answer", ""))
    others = source.merged.troubled if source.merged is not None else ()
    also = ", ".join(f"{clean(member.name)} {member.state}" for member in others)
    beside = (f"also {also}; " if also else "", "strong")
    if source.state in ("gone", "faulty"):
        return ((f"  ✗ {source.state}: ", "bad strong"), beside, (clean(source.state_reason), ""))
    stall = source.stall
    if stall is not None and stall.word is StallKind.STALLED:
        return (("  ✗ ", "bad strong"), beside, (clean(source_text.stall(stall)), ""))
    if stall is not None and stall.word is StallKind.SUSPENDED:
        return (("  ‖ ", "warn strong"), beside, (clean(source_text.stall(stall)), ""))
    if failed := source.failed_checks:
        names = ", ".join(clean(f"{check.brick} {check.assertion}") for check in failed)
        return (
            (f"  ✗ {len(failed)} check{'s' if len(failed) > 1 else ''} failed: ", "bad strong"),
            (names, ""),
        )
    if source.straggler is not None:
        return (("  straggler: ", "warn strong"), (clean(merge_text.straggler(source.straggler)), ""))
    if stall is not None:
        return (("  ", ""), (clean(source_text.stall(stall)), "dim"))
    if source.state == "live" and source.activity:
        return (("  ", ""), *activity_line(source, _BAR_WIDTH))
    if source.merged is not None:
        return (("  derived: ", "dim"), (merge_text.merged_means(source.merged), ""))
    if source.state_reason:
        return ((f"  {clean(source.state)}: ", "dim"), (clean(source.state_reason), ""))
    return BLANK


def activity_line(source: SourceView, bar_width: int) -> Line:
    """Return a line with the activity that the source reports now, and its progress."""
    return progress_line(source.activity, source.activity_done, bar_width)


def progress_line(what: str, done: float | None, bar_width: int) -> Line:
    """Return a line about the progress of a task, such as `compiling kernels ▕████ ▏ 43 %`."""
    line: Line = ((clean(what), "accent"),)
    if done is None:
        return (*line, (" …", "dim"))
    return (
        *line,
        (" ▕", "faint"),
        *bar(done, bar_width, "accent"),
        ("▏", "faint"),
        (f" {100 * done:.0f} %", ""),
    )
