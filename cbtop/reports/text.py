"""The text report. It has the content of the screens as plain lines for a log."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cbtop import units
from cbtop.comparison.comparison import Comparison, WorkChange
from cbtop.comparison.items import Place
from cbtop.comparison.noise import Change
from cbtop.protocol.vocabulary import LAUNCH_BOUND, UNTIL_THERE, Provenance, is_warm_up
from cbtop.reports import DEVICES, SOURCES
from cbtop.reports.layers import layers_table
from cbtop.reports.machines import machines_of, machines_text
from cbtop.reports.serving import serving_tables
from cbtop.reports.sources import listed_in, listed_text
from cbtop.reports.tables import Table, table
from cbtop.reports.timeline import timeline_section
from cbtop.reports.traces import traces_section
from cbtop.reports.training import training_tables, why_none
from cbtop.text import (
    breakdown_text,
    comparison_text,
    kernel_text,
    merge_text,
    range_text,
    rate_text,
    recording_text,
    roof_text,
    sampled_text,
    source_text,
    time_text,
)
from cbtop.text.row_filter import AS_THEY_COME, RowChoice
from cbtop.text.statistics import (
    CALL_REPORT,
    CATEGORY_REPORT,
    HOST_REPORT,
    OWN_REPORT,
    POINT_REPORT,
    ROOF_REPORT,
    SPREAD_REPORT,
    TREND_REPORT,
    WORK_REPORT,
    Statistic,
)
from cbtop.viewmodels.bricks import BrickRow, has_launches
from cbtop.viewmodels.categories import CategoryRow
from cbtop.viewmodels.graph import GraphRow, tree_text
from cbtop.viewmodels.layers import ODD, LayerBrick
from cbtop.viewmodels.merged import RanksView
from cbtop.viewmodels.roofline import CeilingRow, missing_ceilings
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.steps import SpanView, StepsView
from cbtop.viewmodels.time_travel import ReplayView

PROVENANCE_LINE = "times and counts are measured; FLOP, bytes and what is made of them are derived from shapes"
TIMES_LINE = (
    "times are µs: excl without the bricks that ran inside (derived), incl with them; incl avg × count = incl"
)
TREND_LINE = "last, least, most s: µs a token (without steps: a call) in one second of the last 60 (derived)"
HOST_LINE = "host: the median call, without bricks inside; launches: kernels a step; both of the newest steps"
LAYERS_LINE = f"median, slowest: the median call of the median and the slowest layer; over {ODD}×: so many stand out"
OPEN_LINE = "the shares are no parts of one whole: bricks ran at the same time, or are of several ranks"
MAX_CHANGES = 10  # At most this many changes of layers are listed, and as many changes of bricks in layers.
BUDGET_LINE = "budgets are static, in µs/token, as the process declared them: n/a where it declared none"


def text_report(
    sources: Sequence[SourceView], sections: Sequence[str], replay: ReplayView | None = None,
    rows: RowChoice | None = None,
) -> str:  # fmt: skip
    """Return the chosen sections of each source, then the list of all sources and their machines.

    `rows` filters and sorts the bricks. By default, all bricks are included, in the order of the view.
    """
    chosen = [section for section in sections if section in SECTIONS]
    is_list_alone = [*sections] == [SOURCES]
    parts = [] if is_list_alone else [_source(source, chosen, rows or AS_THEY_COME) for source in sources]
    if SOURCES in sections and (is_list_alone or listed_in(sources)):
        parts.append(listed_text(listed_in(sources)))
    if DEVICES in sections and (sections == [DEVICES] or machines_of(sources)):
        parts.append(machines_text(machines_of(sources)))
    text = "\n\n\n".join(parts)
    return text if replay is None else f"{replay_text(replay)}\n\n{text}"


def replay_text(replay: ReplayView) -> str:
    if replay.is_history:
        back_s, when = replay.duration_s - replay.at_s, time_text.date(replay.recorded_s + replay.at_s)
        return f"LOOKING BACK on {replay.host} at {when}, {back_s:.1f} s before the daemon was asked"
    at, duration = time_text.position(replay.at_s), time_text.position(replay.duration_s)
    cut = "" if replay.is_complete else " (it was not closed: killed, or still being written)"
    date = time_text.date(replay.recorded_s)
    return f"REPLAY of {replay.file}, recorded {date} on {replay.host}, at {at} of {duration}{cut}"


def _source(view: SourceView, sections: Sequence[str], rows: RowChoice) -> str:
    parts = [head_text(view), baseline_text(view.baseline), verdicts_text(view)]
    shown = rows.of(view)
    if rows.filter and not set(sections).isdisjoint(OF_BRICKS):
        parts.append(filtered_text(view, shown, rows.filter))
        sections = [name for name in sections if name not in OF_BRICKS or shown.bricks or not view.bricks]
    drawn = [SECTIONS[section](shown) for section in sections]
    parts += drawn if any(drawn) or not sections else [f"{', '.join(sections)}: n/a ({why_none(view, sections)})"]
    parts.append(foot_text(view))
    return "\n\n".join(part for part in parts if part)


def filtered_text(view: SourceView, shown: SourceView, text: str) -> str:
    """Return a line with the number of bricks that match the filter. The filter does not change other figures."""
    return f"bricks shown: {len(shown.bricks)} of {len(view.bricks)}, with {text!r} in name or category"


def head_text(view: SourceView) -> str:
    state = source_text.standing(view) + (f" ({view.state_reason})" if view.state_reason else "")
    facts = [view.model, view.architecture, view.quantization, view.backend]
    who = [view.program, f"pid {view.pid} on {view.host}", merge_text.rank(view.rank, view.world_size)]
    if view.merged is not None:
        who = [view.program, merge_text.merged(view.merged)]
    lines = [
        f"{', '.join(word for word in who if word)}: {state}",
        " · ".join(fact for fact in facts if fact) or "model n/a",
    ]
    if view.merged is not None:
        lines.append(f"derived: {merge_text.merged_means(view.merged)}")
    if view.stall is not None:
        lines.append(source_text.stall(view.stall))
    lines += [source_text.troubled(member) for member in (view.merged.troubled if view.merged else ())]
    if view.straggler is not None and (view.merged is not None or view.straggler.key == view.key):
        lines.append(
            f"straggler: {merge_text.straggler(view.straggler)} (derived, over the last {view.straggler.steps} steps)"
        )
    if view.stale_s is not None:
        lines.append(f"{source_text.stale(view.stale_s)}: what follows is so old")
    if view.clock is not None and view.clock.uncertainty_us:
        offset = source_text.clock_offset(view.clock.offset_us, view.clock.uncertainty_us)
        lines.append(f"clock of {view.host}: {offset} (derived)")
    if sample := recording_text.sample(view.sample_every):
        lines.append(f"{sample}; what lies in steps is of the recorded ones, nothing is multiplied")
    if view.overhead is not None:
        lines.append(recording_text.overhead(view.overhead))
    lines.append(_shown_time(view))
    if view.warm_up is not None:
        lines.append(recording_text.warm_up(view.warm_up))
    if few := recording_text.inside_of_all(view):
        lines.append(few)
    if ahead := recording_text.ahead(view):
        lines.append(ahead)
    shown = [steps for steps in view.phases if steps.phase == view.phase or not is_warm_up(steps.phase)]
    for steps in shown:
        chosen = "" if len(shown) == 1 else ("* " if steps.phase == view.phase else "  ")
        lines.append(
            f"{chosen}{steps.phase}: {_counted(steps)}, {_rates(view, steps)}, "
            f"step p50 {units.duration(steps.p50_us)}, "
            f"p95 {units.duration(steps.p95_us)}, p99 {units.duration(steps.p99_us)}, "
            f"min {units.duration(steps.min_us)}, max {units.duration(steps.max_us)}"
        )
        lines.append(f"{'' if len(shown) == 1 else '  '}{_in_steps(view, steps)}")
        if steps.sequences or steps.cached:
            lines.append(f"{'' if len(shown) == 1 else '  '}{_held(steps)}")
    if any(steps.failed for steps in view.phases):
        lines.append("of failed steps tokens count, too: an exception ended them, or they were cancelled")
    if len(shown) > 1:
        lines.append(f"* what follows is {view.phase}")
    if any(row.backend.endswith(UNTIL_THERE) for row in view.bricks):
        lines.append(f"{LAUNCH_BOUND}: the device waited for the host; times are {UNTIL_THERE}, and no rate is made")
    return "\n".join(lines)


def verdicts_text(view: SourceView, most: int | None = None) -> str:
    """Return the `most` worst verdicts, each with its advice, and the number of withheld verdicts. Return "" without
    any verdict.
    """
    verdicts = view.verdicts[:most]
    withheld = source_text.withheld(view.withheld)
    lines = ["verdicts"] if verdicts or withheld else []
    for verdict in verdicts:
        lines.append(f"  {verdict.severity} {verdict.id}: {verdict.sentence}")
        gain = rate_text.gain(verdict)
        lines.append(f"    {f'{gain}. ' if gain else ''}{verdict.advice}")
    return "\n".join([*lines, *([f"  {withheld}"] if withheld else [])])


def baseline_text(found: Comparison | None) -> str:
    """Return the changes of a source since the baseline, or why they are unknown. Return "" without a baseline."""
    if found is None:
        return ""
    lines = [f"baseline: {comparison_text.baseline(found)} (derived)"]
    if found.why_not:
        return "\n".join((*lines, f"  Δ n/a: {found.why_not}"))
    lines += [
        f"  {part}" for part in (*comparison_text.baseline_rates(found), *(f"but {note}" for note in found.notes))
    ]
    unit = f"µs/{found.unit}"
    rows: Table = [(unit, "baseline", f"last {found.now.covers_s:.1f} s", "Δ", "±", "Δ %")]
    shown = [one for one in found.changes if one.layer is None]
    cells = [one for one in found.changes if one.layer is not None and one.change.is_beyond_noise]
    for one in (*shown, *cells[:MAX_CHANGES]):
        change = one.change.decisive
        figures = (change.before, change.now, change.delta, change.half)
        beside = "" if change is one.change else comparison_text.RELATIVE_TO_OTHERS
        calls = f", {one.calls.text}" if one.calls and one.calls.text else ""
        rows.append((one.name, *map(units.number, figures), f"{_percent(one.change)}{beside}{calls}"))
    more = len(cells) - MAX_CHANGES
    left_out = (
        [f"{units.counted(more, 'smaller change')} of layers and of bricks in them: in the JSON"] if more > 0 else []
    )
    return "\n".join((*lines, table(rows, left=1), *left_out))


def _percent(change: Change) -> str:
    """Return a change in percent as text. A change within noise is marked."""
    noise = "" if change.is_beyond_noise else " (noise)"
    percent = change.decisive.percent
    return units.NOT_MEASURED if percent is None else f"{percent:+,.1f}{noise}"


def _counted(steps: StepsView) -> str:
    """Return the number of steps of a phase as text.

    The text also has the numbers of steps without recorded bricks and of failed steps.
    """
    failed = [f"{units.count(steps.failed)} failed"] if steps.failed else []
    if steps.recorded < steps.count:
        lost = ["some inside others left nothing"] if steps.is_sample else []
        words = [f"{units.count(steps.recorded)} recorded", *lost, *failed]
        return f"{units.count(steps.count)} steps ({', '.join(words)})"
    words = [*(["others, if any, left nothing"] if steps.is_sample else []), *failed]
    what = units.counted(steps.count, "recorded step" if steps.is_sample else "step")
    return f"{what} ({', '.join(words)})" if words else what


def _rates(view: SourceView, steps: StepsView) -> str:
    """Return the tokens and the tokens/s. If no step has tokens, return steps/s and samples/s instead."""
    if _is_without_tokens(steps):
        return rate_text.throughput(view, steps)
    tokens = f"{units.count(steps.known_tokens)} tokens, {rate_text.rate(view, steps.tokens_per_sec)} tokens/s"
    return tokens if steps.has_tokens else f"{tokens}, {rate_text.throughput(view, steps)}"


def _is_without_tokens(steps: StepsView) -> bool:
    """Return whether the steps have no tokens at all, for example because the model processes images."""
    return steps.known_tokens is None and not steps.has_tokens


def _in_steps(view: SourceView, steps: StepsView) -> str:
    """Return a text with the rate over the time in steps, the mean number of concurrent steps, and the time of a
    token.
    """
    at_once = f"; {units.number(steps.at_once)} steps at once" if steps.overlap else ""
    ran = range_text.steps_ran(view, steps)
    if steps.is_training:  # all rates of training are rates in steps
        return f"  rates of the time in training steps: {ran}{at_once}"
    if _is_without_tokens(steps) and steps.union_us:
        return f"  {units.number(steps.count / steps.union_us * 1e6)} steps/s without pauses: {ran}{at_once}"
    return f"  {units.number(steps.tokens_per_sec_in_steps)} tok/s without pauses: {ran}{at_once}{_a_token(steps)}"


def _a_token(steps: StepsView) -> str:
    """Return the time of a token as text: in the median step, at the p99 and in the slowest step.

    If it is unknown, the reason.
    """
    if steps.why_no_us_per_token and steps.tokens:
        return f"; ms/token {units.NOT_MEASURED} ({steps.why_no_us_per_token})"
    if steps.us_per_token_p50 is None:
        return ""
    named = (("p50", steps.us_per_token_p50), ("p99", steps.us_per_token_p99), ("max", steps.us_per_token_max))
    return "; ms/token " + ", ".join(f"{name} {units.milliseconds(us)}" for name, us in named)


def _held(steps: StepsView) -> str:
    """Return the numbers of sequences and of cached positions per step as text."""
    found = [
        f"{_span(span)} {what}{'' if _span(span) == '1' else 's'} {where}"
        for span, what, where in (
            (steps.sequences, "sequence", "a step"),
            (steps.cached, "position", "cached before it"),
        )
        if span is not None
    ]
    return "  " + ", ".join(found)


def _span(span: SpanView) -> str:
    if span.least is None or span.most is None:
        return f"on average {units.number(span.mean)}"
    least, most = units.count(span.least), units.count(span.most)
    return least if span.least == span.most else f"{least} to {most}"


def _shown_time(view: SourceView) -> str:
    """Return the time range of the figures as text."""
    shown, window = range_text.shown_time(view, with_date=True), view.window
    if window is None:
        return f"figures: {shown}"
    why = f" ({time_text.seconds(window.asked_s)} were asked for: that is all there is)" if window.is_short else ""
    the = "the " if shown.startswith("last") else ""
    return f"figures: {the}{shown}{why}; records, checks and traces: all that was seen"


def _bricks(view: SourceView) -> str:
    """Return tables of 80 columns: the times of the bricks, their work, and their distance from the roof."""
    if view.ranks is not None:
        return "\n".join((ranks_text(view.ranks), books_text(view)))
    if not view.bricks:
        return f"bricks: n/a ({recording_text.no_bricks(view)})\n{books_text(view)}"
    of_ranks = any(row.rank is not None for row in view.bricks)
    owns = [("brick", "category", *heads(OWN_REPORT), *(("of",) if of_ranks else ()))]
    calls = [("brick", *heads(CALL_REPORT))]
    spreads = [("brick", *heads(SPREAD_REPORT))]
    trends = [("brick", *heads(TREND_REPORT))]
    hosts = [("brick", *heads(HOST_REPORT))]
    works = [("brick", *heads(WORK_REPORT))]
    roofs = [("brick", *heads(ROOF_REPORT))]
    for row in view.bricks:
        rank = (row.rank or "",) if of_ranks else ()
        owns.append((row.name, row.category.display_name, *cells(OWN_REPORT, row), *rank))
        calls.append((row.name, *cells(CALL_REPORT, row)))
        spreads.append((row.name, *cells(SPREAD_REPORT, row)))
        trends.append((row.name, *cells(TREND_REPORT, row)))
        hosts.append((row.name, *cells(HOST_REPORT, row)))
        works.append((row.name, *cells(WORK_REPORT, row)))
        roofs.append((row.name, *cells(ROOF_REPORT, row)))
    tables = [table(owns, left=2), *(table(rows, left=1) for rows in (calls, spreads))]
    notes = [TIMES_LINE]
    if any(row.trend_last_us is not None for row in view.bricks):
        tables.append(table(trends, left=1))
        notes.append(TREND_LINE)
    if has_launches(view.bricks):
        tables.append(table(hosts, left=1))
        notes.append(HOST_LINE)
    tables.append(table(works, left=1))
    if len(layers := _in_layers(view)) > 1:
        tables.append(table(layers, left=1))
        notes.append(LAYERS_LINE)
    if view.roofline.points:
        tables.append(table(roofs, left=1))
    notes += [PROVENANCE_LINE, BUDGET_LINE, *_shares(view), books_text(view)]
    return "\n".join(("\n\n".join(tables), *notes))


def _in_layers(view: SourceView) -> Table:
    """Return a table with the median call of each brick in the median layer and in the slowest layer."""
    rows: Table = [("brick", "layers", "median µs", "slowest µs", "slowest layer", f"over {ODD}×")]
    for row in view.bricks:
        found = view.layer_times.of_brick(LayerBrick(*row.key)) if view.layer_times else None
        if view.layer_times and found:
            slowest = view.layer_times.rows[found.slowest].name
            us = (units.number(found.median_us), units.number(found.p50_us[found.slowest]))
            rows.append((row.name, str(sum(p50 is not None for p50 in found.p50_us)), *us, slowest,
                         str(sum(found.odd))))  # fmt: skip
    return rows


def _shares(view: SourceView) -> list[str]:
    """Return a line with a warning if the shares of the bricks do not add up to one whole. Otherwise return []."""
    return [OPEN_LINE] if view.shares_close is False else []


def heads(statistics: Sequence[Statistic]) -> tuple[str, ...]:
    return tuple(statistic.report_title or statistic.title for statistic in statistics)


def cells(statistics: Sequence[Statistic], row: BrickRow | CategoryRow) -> tuple[str, ...]:
    return tuple(_cell(statistic, row) for statistic in statistics)


def _cell(statistic: Statistic, row: BrickRow | CategoryRow) -> str:
    if statistic.key == "checks_failed" and isinstance(row, BrickRow):
        checked = row.checks_passed + row.checks_failed
        return f"{row.checks_passed}/{checked}" if checked else units.NOT_MEASURED
    if statistic.key == "percent_of_roof" and isinstance(row, BrickRow) and row.roof is not None:
        return f"{'!' * row.above_roof}{'~' * bool(row.roof_unsure)}{statistic.bare(row)}"
    if statistic.unit == "count":
        return units.exact_count(getattr(row, statistic.key))
    return statistic.bare(row)


def ranks_text(view: RanksView) -> str:
    """Return a table of bricks with a column per rank. The slowest rank of each row is marked."""
    rows: Table = [(f"µs a {view.unit}", *(column.name for column in view.ranks), "slowest over median")]
    for row in view.rows:
        cells = [units.number(us) + ("*" if at == row.slowest else " ") for at, us in enumerate(row.us)]
        rows.append((row.brick, *cells, units.percent(row.spread_percent)))
    if any(column.step_us is not None for column in view.ranks):
        rows.append(("whole step", *(f"{units.number(column.step_us)} " for column in view.ranks), ""))
    return table(rows, left=1)


def books_text(view: SourceView) -> str:
    books = view.books
    if books is None and view.merged is not None:
        return "step time: n/a (what is taken from several ranks adds up to nothing)"
    if books is None:
        return "step time: n/a (the process marks no steps)"
    gaps = "".join(f" + {gap.name} {units.duration(gap.us)}" for gap in books.gaps)
    shared = f" - {breakdown_text.OVERLAP} {units.duration(books.overlap_us)}" if books.overlap_us else ""
    still_open = f"; {units.duration(books.open_us)} in a step still running" if books.open_us else ""
    time_range = f"\n{found}" if (found := range_text.time_range(view)) else ""
    time_range += "".join(f"\n{line}" for place in view.sampled for line in sampled_text.lines(place))
    outside = f"\n{found}" if (found := source_text.not_instrumented(view)) else ""
    if none := breakdown_text.no_books(view):
        return f"step time: n/a ({none}){still_open}{time_range}"
    return (
        f"step time: wall {units.duration(books.wall_us)}{_of_recorded(view.steps)} "
        f"= bricks {units.duration(books.bricks_us)}{gaps}{shared} "
        f"+ {breakdown_text.REST} {units.duration(books.unattributed_us)} ({units.percent(books.residual_percent)})"
        f"{still_open}{outside}{time_range}"
    )


def _of_recorded(steps: StepsView | None) -> str:
    if steps is None or steps.recorded == steps.count:
        return ""
    return f" of {units.counted(steps.recorded, 'recorded step')}"


def _categories(view: SourceView) -> str:
    if not view.categories:
        return f"categories: n/a ({recording_text.no_bricks(view)})"
    rows = [("category", *heads(CATEGORY_REPORT))]
    rows += [(row.name, *cells(CATEGORY_REPORT, row)) for row in view.categories]
    return "\n".join((table(rows, left=1), *_shares(view)))


def _roofline(view: SourceView) -> str:
    roofs = view.roofline
    compared = view.baseline if view.merged is None else None
    work = {} if compared is None else compared.work
    since = () if compared is None else ("baseline", "Δ GFLOP/s")
    rows: Table = [("brick", *heads(POINT_REPORT), *since, "")]
    for point in roofs.points:
        above = "above the roof: from a nearer cache, or the work declared is too much" if point.above_roof else ""
        doubt = above or ("unsure" if point.roof_unsure else "")
        change = () if compared is None else _work_cells(work.get(point.key))
        rows.append((point.name, *cells(POINT_REPORT, point), *change, doubt))
    lines = [f"ceiling: {c.name} {units.number(c.value)} {c.unit} ({_measured(c)})" for c in roofs.ceilings]
    lines += [
        f"ridge point: {units.number(one.flop_per_byte)} FLOP/byte of {one.bandwidth} and {one.compute}"
        for one in roofs.ridges
    ]
    lines += [f"roofs {doubt}" for doubt in roof_text.ceiling_doubts(roofs.ceilings)]
    lines += filter(None, [missing_ceilings(roofs) or roofs.note])
    if view.roofline.points:
        lines += [table(rows, left=2), PROVENANCE_LINE]
    if view.roofline.without_work:
        lines.append(f"not on the roofline, {roof_text.without_work(view.roofline.without_work)}")
    return "\n".join(lines)


def _work_cells(found: WorkChange | None) -> tuple[str, str]:
    if found is None:
        return units.NOT_MEASURED, units.NOT_MEASURED
    return units.number(found.gflops), units.NOT_MEASURED if found.change is None else comparison_text.change(
        found.change
    )


def _measured(ceiling: CeilingRow) -> str:
    """Return how the value of a roof is known. For a measured roof, add the day and the number of rounds."""
    if ceiling.provenance is not Provenance.MEASURED:
        return ceiling.provenance.value
    day = f" {time_text.day(ceiling.measured_on)}" if ceiling.measured_on else ""
    return f"{ceiling.provenance.value}{day}, age {time_text.age(ceiling.age_s)}, {roof_text.ceiling_rounds(ceiling)}"


def _tree(view: SourceView) -> str:
    if view.merged is not None and not view.graph:
        return "tree: n/a (what is taken from several ranks is no graph)"
    path = view.critical_path
    # Mark the nodes on the critical path only if there are also nodes off this path.
    is_beside = path is not None and path.nodes < path.timed_nodes
    changes = view.baseline.places if view.baseline is not None and view.merged is None else {}

    def note(row: GraphRow) -> str:
        return _copy_note(row) + _burst_note(row) + _path_note(row) * is_beside + _change_note(row, changes)

    tree = tree_text(view.graph, note)
    return tree if path is None else f"{tree}\n{kernel_text.critical_path(path)}"


def _change_note(row: GraphRow, changes: Mapping[Place, Change]) -> str:
    found = None if row.place is None else changes.get(row.place)
    return "" if found is None else f"  [Δ {comparison_text.change(found)}]"


def _copy_note(row: GraphRow) -> str:
    return "" if row.copied_gb_per_sec is None else f"  [{units.number(row.copied_gb_per_sec)} GB/s]"


def _burst_note(row: GraphRow) -> str:
    return "" if row.burst is None else f"  [{kernel_text.in_burst(row.burst)}]"


def _path_note(row: GraphRow) -> str:
    if row.on_critical_path:
        return "  [critical]"
    return "" if row.slack_us is None else f"  [slack {units.duration(row.slack_us)}]"


def foot_text(view: SourceView) -> str:
    loss = view.loss
    produced, received, dropped = map(units.exact_count, (loss.produced, loss.received, loss.dropped))
    line = f"records: {produced} produced = {received} received + {dropped} dropped"
    about_books = [breakdown_text.books_trouble(view.books), *breakdown_text.books_notes(view.books, view.outside)]
    parts = []
    if loss.before_attach:
        parts.append(f"{units.exact_count(loss.before_attach)} before the daemon looked")
    if loss.rejected > loss.without_node:
        parts.append(f"{units.exact_count(loss.rejected - loss.without_node)} rejected")
    if loss.without_node:
        parts.append(f"{units.exact_count(loss.without_node)} too deep: their time is in the calls around them")
    if parts:
        line += f" ({', '.join(parts)})"
    if loss.left_out:
        line += f"; {units.exact_count(loss.left_out)} announcements left out"
    uncounted = sum(row.uncounted for row in view.bricks)
    if uncounted:
        line += (
            f"\n{units.exact_count(uncounted)} calls gave no count of elements: what is made of their elements is n/a"
        )
    failed = view.failed_checks
    checks = [
        f"check FAILED: {check.brick} {check.assertion}, "
        + (
            f"met {check.not_finite}"
            if check.not_finite
            else f"error {units.scientific(check.max_error)}, tolerance {units.scientific(check.tolerance)}"
        )
        + (f" ({check.note})" if check.note else "")
        for check in failed
    ]
    skipped = [check for check in view.checks if check.skipped]
    evaluated = len(view.checks) - len(skipped)
    if evaluated and not failed:
        checks = [f"checks: {evaluated} of {evaluated} passed"]
    if skipped:
        checks.append(f"checks skipped: {len(skipped)} ({skipped[0].skipped})")
    return "\n".join([*filter(None, about_books), line, *checks])


OF_BRICKS = ("bricks", "roofline")
SECTIONS: dict[str, Callable[[SourceView], str]] = {
    "training": training_tables,
    "requests": serving_tables,
    "bricks": _bricks,
    "categories": _categories,
    "layers": layers_table,
    "timeline": timeline_section,
    "roofline": _roofline,
    "tree": _tree,
    "trace": traces_section,
}
