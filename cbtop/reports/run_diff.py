"""Write the changes between two runs as text, Markdown, JSON, folded stacks and speedscope profiles."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from cbtop.comparison.causes import THREADS, Causes, causes_of
from cbtop.comparison.contents import BESIDE
from cbtop.comparison.judged import BLIND_PERCENT
from cbtop.comparison.memory_peaks import MemoryPeak, PeakChange, peak_changes
from cbtop.comparison.noise import CONFIDENCE, Change
from cbtop.comparison.part_diff import FOUND, PartDiff, PlaceDiff, findable_percent
from cbtop.comparison.phase_rates import IN_STEPS, RATE_UNITS
from cbtop.comparison.run_diff import RunDiff
from cbtop.comparison.runs import Run
from cbtop.comparison.tails import tails_of
from cbtop.exporters.differential import DiffStack, folded, speedscope
from cbtop.profiler.analysis.layers import MIN_PEERS
from cbtop.profiler.analysis.markup import plain, table_html
from cbtop.reports.calls import calls_fields
from cbtop.reports.html import in_scope
from cbtop.reports.html_drawings import change_drawing
from cbtop.reports.other_changes import other_changes
from cbtop.reports.tables import Table, escaped, markdown_table, table
from cbtop.units import NOT_MEASURED, count, counted, duration, number, percent

SCHEMA = "cbtop.diff/1"
# The report lists this many cells (a brick in one layer) with the largest increases, and as many with the largest
# decreases.
LISTED_CELLS = 8
LISTED_GRAPH = 12  # At most this many differences between the contents of steps are listed.
_HEAD = ("", "median", "now", "ratio", "p99", "now", "Δ µs/{unit}", "")
_NAME_COLUMNS = 1
# In JSON, these rates have a key that differs from their name, as in cbtop's other JSON documents.
_RATE_KEYS = {IN_STEPS: "tokens_per_sec_in_steps"}


def diff_text(found: RunDiff, *, with_verdicts: bool = True) -> str:
    """Return the comparison of two runs as text for terminals and logs.

    `with_verdicts` is false for a gate, which has its own verdicts.
    """
    causes = causes_of(found.base, found.now)
    lines = [f"{named(found.base)} → {named(found.now)}"]
    lines += [f"  {note}" for note in (*found.notes, *_conditions(causes), *_graph(causes, found))]
    if found.why_not:
        return "\n".join([*lines, f"not comparable: {found.why_not}"])
    lines += ["", *rate_lines(found)]
    for part in found.parts:
        lines += ["", head(part), *(f"  {line}" for line in _sums(part)), ""]
        lines.append(table(_rows(part, part.bricks, causes), left=_NAME_COLUMNS))
        if part.layers:
            lines += ["", table(_rows(part, part.layers, causes), left=_NAME_COLUMNS)]
        if cells := _listed_cells(part):
            lines += ["", table(_rows(part, cells, causes), left=_NAME_COLUMNS)]
            if more := len(part.cells) - len(cells):
                lines.append(f"{counted(more, 'more brick')} in layers without a change beyond noise: --format json")
        lines += ["", *(_verdicts(found, part, causes) if with_verdicts else ()), power(part)]
    return "\n".join(lines)


def diff_markdown(found: RunDiff, *, with_verdicts: bool = True) -> str:
    """Return the comparison of two runs as a Markdown summary for a CI step of GitHub or GitLab.

    `with_verdicts` is false for a gate, which has its own verdicts.
    """
    causes = causes_of(found.base, found.now)
    lines = [f"### {escaped(named(found.base))} → {escaped(named(found.now))}", ""]
    lines += [f"- {escaped(note)}" for note in (*found.notes, *_conditions(causes), *_graph(causes, found))]
    if found.why_not:
        return "\n".join([*lines, f"**Not comparable**: {escaped(found.why_not)}"])
    lines += ["", *(f"{escaped(line)}  " for line in rate_lines(found))]
    for part in found.parts:
        lines += ["", f"**{escaped(head(part))}**", "", *(f"{escaped(line)}  " for line in _sums(part)), ""]
        lines += [f"- {escaped(line)}" for line in (_verdicts(found, part, causes) if with_verdicts else ())]
        for title, places in (("", part.bricks), ("layers", part.layers), ("bricks in a layer", _listed_cells(part))):
            if places:
                lines += ["", *(["<details><summary>" + title + "</summary>", ""] if title else [])]
                lines += markdown_table(_rows(part, places, causes))
                lines += ["", "</details>"] if title else []
        lines += ["", escaped(power(part))]
    return "\n".join(lines)


def diff_html(found: RunDiff) -> str:
    """Return the comparison of two runs as a part of another page, such as a notebook."""
    causes = causes_of(found.base, found.now)
    lines = [f"<h2>{plain(f'{named(found.base)} → {named(found.now)}')}</h2>"]
    lines += [f"<p>{plain(note)}</p>" for note in (*found.notes, *_conditions(causes), *_graph(causes, found))]
    if found.why_not:
        return in_scope(
            "".join([*lines, f'<div class="verdict warning">not comparable: {plain(found.why_not)}</div>'])
        )
    lines += [f"<p>{plain(line)}</p>" for line in rate_lines(found)]
    for part in found.parts:
        lines += [f"<h2>{plain(head(part))}</h2>", *(f"<p>{plain(line)}</p>" for line in _sums(part))]
        lines += [f'<div class="verdict">{plain(line)}</div>' for line in _verdicts(found, part, causes)]
        changes = [(place.name, place.delta_us, bool(place.verdict)) for place in part.bricks]
        lines.append(change_drawing(changes, f"µs/{part.unit}"))
        tables = [places for places in (part.bricks, part.layers, _listed_cells(part)) if places]
        lines += [table_html(_rows(part, places, causes)) for places in tables]
        lines.append(f"<p>{plain(power(part))}</p>")
    return in_scope("".join(lines))


def diff_tree(found: RunDiff) -> str:
    """Return the time per unit (token or step) of both runs as a tree of layers and bricks.

    The time of a row is the sum of its parts. The part with the largest change comes first.
    """
    lines = [f"{named(found.base)} → {named(found.now)}"]
    if found.why_not:
        return "\n".join([*lines, f"not comparable: {found.why_not}"])
    lines += ["", *rate_lines(found)]
    for part in found.parts:
        rows: Table = [("", f"µs/{part.unit}", "now", "Δ", "ratio", "")]
        lines += ["", head(part), table([*rows, *_tree(part)], left=_NAME_COLUMNS)]
    return "\n".join(lines)


def diff_json(found: RunDiff) -> str:
    """Return all numbers of the comparison as JSON. A number that is unknown is null."""
    return json.dumps(diff_fields(found), allow_nan=False)


def diff_folded(found: RunDiff) -> str:
    """Return the stacks of both runs for differential flame graphs.

    A line is `phase;layer;brick before now`, with times in ns per unit (token or step).
    """
    return folded(_stacks(found))


def diff_speedscope(found: RunDiff) -> str:
    """Return speedscope profiles of both runs, of the added time, and of the saved time."""
    return speedscope(_stacks(found), f"{found.base.name} → {found.now.name}")


def diff_fields(found: RunDiff) -> dict[str, Any]:
    """Return the fields of the JSON document about the comparison of two runs."""
    return {
        "schema": SCHEMA,
        "base": _run_fields(found.base) if found.has_baseline else None,
        "now": _run_fields(found.now),
        "not_comparable": found.why_not or None,
        "too_little": found.is_too_little,
        "notes": list(found.notes),
        "confidence": CONFIDENCE,
        "rates": _rates_fields(found),
        "memory": [_peak_fields(one) for one in _peaks(found)],
        "causes": asdict(causes_of(found.base, found.now)),
        "parts": [_part_fields(part) for part in found.parts],
    }


def head(part: PartDiff) -> str:
    """Return the number of steps as text, such as `decode, 296 steps, 300 before`."""
    cached = f", at {count(part.cached)} positions cached" if part.cached is not None else ""
    return f"{work_done(part)}: {counted(part.now.steps, 'step')}, {count(part.before.steps)} before{cached}"


def work_done(part: PartDiff) -> str:
    """Return the name of a group of steps, such as `decode of 4 tokens on 4 sequences`.

    If the phase has several batches: `decode, batch 6`.
    """
    if part.name != part.phase:
        return part.name
    batch = f" on {_amount(part.now.sequences)} sequences" if part.now.sequences not in (None, 1.0) else ""
    tokens = f" of {_amount(part.now.tokens)} tokens" if part.now.tokens not in (None, 1.0) else ""
    return f"{part.phase}{tokens}{batch}"


def _amount(value: float | None) -> str:
    """Format a mean number of tokens or sequences: `4`, or `4.25` if steps differ."""
    return count(value) if value is not None and value.is_integer() else number(value)


def rate_lines(found: RunDiff) -> list[str]:
    """Return a line for the rate of each phase, such as `decode: 27.62 → 27.55 tokens/s, wall clock a token +0.3 % ±
    1.2`.
    """
    lines = []
    for one in found.rates:
        at = f" at {count(one.cached)} positions cached" if one.cached is not None else ""
        a_unit = one.unit.partition("s/")[0]
        lines.append(
            f"{one.phase}: {number(one.before)} → {number(one.now)} {one.unit}, "
            f"a {a_unit} takes {_percents(one.time_us)}{at} by the wall clock"
        )
    # A single run is not compared, so its memory has no change.
    return [*lines, *(f"{one.phase}: {one.name} {one.text}" for one in _peaks(found) if found.has_baseline)]


def _peaks(found: RunDiff) -> list[PeakChange]:
    phases = {part.phase for part in found.parts}
    return [one for one in peak_changes(found.base.memory, found.now.memory) if one.phase in phases]


def _peak_fields(one: PeakChange) -> dict[str, Any]:
    return {
        "phase": one.phase,
        "name": one.name,
        "before": _bytes_fields(one.before),
        "now": _bytes_fields(one.now),
        "ratio": one.ratio,
        "verdict": one.verdict or None,
    }


def _bytes_fields(one: MemoryPeak) -> dict[str, int | None]:
    """Return the bounds of a peak. `at_least_bytes` was seen, and `at_most_bytes` is torch's own peak."""
    return {"at_least_bytes": one.most_bytes, "lowest_step_bytes": one.lowest_bytes, "at_most_bytes": one.bound_bytes}


def sentence(part: PartDiff, place: PlaceDiff) -> str:
    """Return one line about the change of a brick or layer between two runs."""
    assert place.change is not None
    calls = ""
    if place.p50:
        calls = f", median call {duration(place.p50.before)} → {duration(place.p50.now)}"
    if place.calls and place.calls.text:
        calls = f", {place.calls.text}{calls}"
    cost = f"{_signed(place.delta_us)} µs/{part.unit}{place.moved_by}"
    return f"{part.name}: {place.name} is {_decisive(place)} of before{_beside(place)}{calls}, {cost}"


def _run_fields(run: Run) -> dict[str, Any]:
    return {
        "name": run.name,
        "runs": run.runs,
        "covers_s": run.covers_s,
        "lost_percent": run.lost_percent,
        "untrusted": run.untrusted or None,
        **asdict(run.surroundings),
    }


def _rates_fields(found: RunDiff) -> list[dict[str, Any]]:
    """Return JSON fields about the rates of each phase over the whole runs.

    Each rate is a pair [before, now]. The fields also contain the change of the time per token.
    """
    before = {rates.phase: rates for rates in found.base.rates}
    changes = {one.phase: one for one in found.rates}
    fields = []
    for now in found.now.rates:
        then = before.get(now.phase)
        change = changes.get(now.phase)
        named = {
            _RATE_KEYS.get(rate, rate): [then.per_sec(rate) if then else None, now.per_sec(rate)]
            for rate in RATE_UNITS
        }
        fields.append({"phase": now.phase, **named, "wall_us": _change_fields(change.time_us if change else None)})
    return fields


def _part_fields(part: PartDiff) -> dict[str, Any]:
    balance = part.balance
    return {
        "phase": part.phase,
        "name": part.name,
        "unit": part.unit,
        "steps": [part.before.steps, part.now.steps],
        "tokens_a_step": [part.before.tokens, part.now.tokens],
        "sequences": [part.before.sequences, part.now.sequences],
        "cached": [part.before.cached, part.now.cached],
        "compared_at_cached": part.cached,
        "wall_us": _change_fields(part.wall),
        "balance_us": {
            "wall": balance.wall,
            "bricks": balance.bricks,
            "between_bricks": balance.between_bricks,
            "not_recorded": balance.not_recorded,
            "between_steps": balance.between_steps,
            "off": balance.off_us,
        },
        "drift": part.drift
        and {**(_change_fields(part.drift.change) or {}), "base_ratios": list(part.drift.base_ratios)},
        "step": _place_fields(part.step),
        "training": {name: _change_fields(one) for name, one in part.training.items()},
        "places": [_place_fields(place) for place in part.places],
        "longer_p99": [tail.place.name for tail in tails_of(part) if tail.is_longer],
        "slower": [[place.brick[0] if place.brick else None, place.layer] for place in part.slower],
    }


def _place_fields(place: PlaceDiff) -> dict[str, Any]:
    return {
        "brick": place.brick[0] if place.brick else None,
        "category": place.brick[1].display_name if place.brick else None,
        "layer": place.layer,
        "verdict": place.verdict or None,
        "renamed_from": place.renamed_from or None,
        "kernels": place.kernels,
        "below_resolution": place.is_below_resolution,
        "typical_us": _change_fields(place.change),
        "call_us": _change_fields(place.call),
        "calls_a_step": calls_fields(place.calls),
        "decisive_us": _change_fields(place.decisive),
        "beside_others_us": _change_fields(place.change.own if place.change else None),
        "mean_us": _change_fields(place.mean),
        "p50_us": _change_fields(place.p50),
        "p99_us": _change_fields(place.p99),
        "delta_us": place.delta_us,
        "findable_percent": None if place.change is None else findable_percent(place.change),
    }


def _change_fields(one: Change | None) -> dict[str, Any] | None:
    if one is None:
        return None
    ratio = one.now / one.before if one.before > 0 else None
    half = one.half / one.before if one.before > 0 else None
    return {"before": one.before, "now": one.now, "half": one.half, "ratio": ratio, "ratio_half": half}


def named(run: Run) -> str:
    """Return the name of a run, followed by its model and machine."""
    at = run.surroundings
    words = [at.model or at.program, at.quantization or "", at.backend or "", *at.devices, f"on {at.host}"]
    return f"{run.name} ({' · '.join(word for word in words if word)})"


def _sums(part: PartDiff) -> list[str]:
    balance = part.balance
    named = (
        ("bricks", balance.bricks),
        ("between bricks", balance.between_bricks),
        ("steps not recorded inside", balance.not_recorded),
        ("between steps", balance.between_steps),
    )
    terms = [f"{name} {_signed(now - then)}" for name, (then, now) in named if name != named[2][0] or then or now]
    then_us, now_us = balance.wall
    change = f"{_signed(now_us - then_us)} µs = {', '.join(terms)}"
    # With one batch, the line with the rate already shows the change of the wall time.
    of_batch = f", {_percents(part.wall)}" if part.name != part.phase else ""
    return [
        f"wall clock of these steps {number(then_us)} → {number(now_us)} µs/{part.unit}{of_batch}",
        change,
        *(f"{name} p50 {_then_now(one)}" for name, one in part.training.items()),
    ]


def _then_now(one: Change) -> str:
    """Return the change of a part of a training step as text: `18.40 ms → 27.40 ms, 1.489× ± 0.012`."""
    ratio = f", {_ratio(one)}" if one.before > 0 else ""
    return f"{duration(one.before)} → {duration(one.now)}{ratio}"


def _rows(part: PartDiff, places: list[PlaceDiff], causes: Causes) -> Table:
    rows: Table = [tuple(cell.format(unit=part.unit) for cell in _HEAD)]
    for place in places:
        rows.append(
            (
                place.name,
                *_then_and_now(place, "p50"),
                _decisive(place),
                *_then_and_now(place, "p99"),
                _signed(place.delta_us),
                _remark(place, _of_kernels(part, place, causes)),
            )
        )
    return rows


def _then_and_now(place: PlaceDiff, what: str) -> tuple[str, str]:
    sides = (getattr(side, what) if side else None for side in (place.before, place.now))
    before, now = (duration(side.mean) if side else NOT_MEASURED for side in sides)
    return before, now


def _of_kernels(part: PartDiff, place: PlaceDiff, causes: Causes) -> list[str]:
    """Return the changes of a brick's kernels between two runs as text, over all layers or in one layer."""
    return causes.of_brick(part.phase, place.brick[0], place.layer) if place.brick else []


def _conditions(causes: Causes) -> list[str]:
    """Return the changed conditions of the runs as texts.

    The number of threads is left out, because a note reports it.
    """
    return [one.text for one in causes.conditions if one.name != THREADS]


def _graph(causes: Causes, found: RunDiff) -> list[str]:
    """Return lines about the differences between the two runs in the contents of their steps.

    The lines are as in the check `graph==base`. Renamed bricks are left out.
    """
    renamed = [one for part in found.parts for one in part.places if one.renamed_from and one.brick]
    names = {name for one in renamed if one.brick for name in (one.brick[0], one.renamed_from)}
    changes = [
        one for one in causes.graph if one.what not in ("new", "gone") or one.place.split(BESIDE)[-1] not in names
    ]
    lines = [f"graph: {one.text}" for one in changes[:LISTED_GRAPH]]
    more = len(changes) - LISTED_GRAPH
    return [*lines, f"graph: and {count(more)} more"] if more > 0 else lines


def _remark(place: PlaceDiff, causes: Sequence[str] = ()) -> str:
    words = [place.verdict + _beside(place)]
    if place.calls and place.calls.text and place.before and place.now:
        words.append(place.calls.text)
    if place.renamed_from:
        words.append(f"was {place.renamed_from}")
    if place.kernels:
        words.append(
            f"runs {' + '.join(place.kernels[1]) or 'no kernel'}, was {' + '.join(place.kernels[0]) or 'none'}"
        )
    if place.is_below_resolution:
        words.append("below the clock's resolution")
    words += causes
    return ", ".join(word for word in words if word)


def _listed_cells(part: PartDiff) -> list[PlaceDiff]:
    """Return the cells (a brick in one layer) with the largest increases and decreases, and all with a verdict."""
    last = len(part.cells) - LISTED_CELLS
    return [
        cell
        for at, cell in enumerate(part.cells)
        if at < LISTED_CELLS or at >= last or cell.verdict in ("slower", "faster")
    ]


def _verdicts(found: RunDiff, part: PartDiff, causes: Causes) -> list[str]:
    lines = []
    for word, place in _moved(part):
        why = ", ".join([*_of_kernels(part, place, causes), *causes.of_process])
        lines.append(f"{word}: {sentence(part, place)}" + (f"; {why}" if why else ""))
    if part.is_slower:
        lines.append(f"slower: {part.name}: a {part.unit} takes {_percents(part.wall)} by the wall clock")
    lines += other_changes(part, [*part.bricks, *part.layers, *_listed_cells(part)])
    has_other_calls = any(one.calls and one.calls.text for one in [*part.bricks, *part.cells])
    # If only the name of a brick has changed, this does not count as a change.
    is_renamed = any(one.renamed_from for one in part.places)
    if has_other_calls or (not is_renamed and any(one.phase == part.phase for one in causes.graph)):
        return lines or ["no time has changed beyond noise, but what a step contains has"]
    return lines or [_quiet_text(found)]


def _moved(part: PartDiff) -> list[tuple[str, PlaceDiff]]:
    """Return each brick or layer with the verdict `slower` or `faster`, with this word.

    A change is left out if another change explains it. A brick explains the same brick in a layer, and a brick in a
    layer explains the layer.
    """
    moved = [("slower", place) for place in part.slower]
    moved += [("faster", _most_of(part, place)) for place in part.bricks if place.verdict == "faster"]
    for place in (*part.bricks, *sorted(part.cells, key=lambda one: -abs(one.delta_us)), *part.layers):
        word = place.verdict
        if word in ("slower", "faster") and not any(
            word == said and _explains(other, place) for said, other in moved
        ):
            moved.append((word, place))
    return moved


def _most_of(part: PartDiff, brick: PlaceDiff) -> PlaceDiff:
    """Return `brick` in the layer that has most of its saved time, or `brick` itself if no layer has.

    `PartDiff.slower` does the same for bricks that became slower.
    """
    cells = [one for one in part.cells if one.brick == brick.brick and one.change]
    saved = min(cells, key=lambda one: one.change.delta if one.change else 0.0, default=brick)
    if len(cells) < MIN_PEERS or saved.verdict != "faster" or not saved.change or not brick.change:
        return brick
    return saved if saved.change.delta < brick.change.delta / 2 else brick


def _explains(other: PlaceDiff, place: PlaceDiff) -> bool:
    return other.brick == place.brick if place.brick else other.layer in (None, place.layer)


def power(part: PartDiff) -> str:
    """Return a line with the smallest change that this comparison would have detected."""
    said = []
    for what, places in (("a brick", part.bricks), ("a brick in one layer", part.cells)):
        if (found := part.findable(places)) is not None:
            said.append(f"{percent(found)} of {what}")
    if not said:
        return "how small a change could be found is not known"
    return f"found {FOUND:.0%} of the time: a change of {' and of '.join(said)} (median of these)"


def _tree(part: PartDiff) -> Iterator[tuple[str, ...]]:
    """Yield one row of the table for the wall-clock time per unit, and one row for each part of this time."""
    balance = part.balance
    yield _branch(0, f"a {part.unit}", balance.wall)
    for layer in part.layers:
        yield _branch(1, layer.name, _means(layer), layer)
        for cell in part.cells:
            if cell.layer == layer.layer and cell.brick:
                yield _branch(2, cell.brick[0], _means(cell), cell)
    for brick, times in _outside_layers(part):
        is_all = not any(cell.brick == brick.brick for cell in part.cells)
        yield _branch(1, brick.name if is_all else f"{brick.name} outside layers", times, brick if is_all else None)
    if any(balance.not_recorded):
        yield _branch(1, "steps not recorded inside", balance.not_recorded)
    yield _branch(1, "between steps", balance.between_steps)


def _branch(depth: int, name: str, times: tuple[float, float], place: PlaceDiff | None = None) -> tuple[str, ...]:
    before, now = times
    judged = (_decisive(place), _remark(place)) if place else ("", "")
    return f"{'  ' * depth}{name}", number(before), number(now), _signed(now - before), *judged


def _stacks(found: RunDiff) -> list[DiffStack]:
    """Return the self time of each brick and layer per unit of work. The times are from recorded steps."""
    return [stack for part in found.parts for stack in _stacks_of(part)]


def _stacks_of(part: PartDiff) -> Iterator[DiffStack]:
    for place in part.cells:
        yield _stack(part.name, place.layer, place, _means(place))
    for place, times in _outside_layers(part):
        yield _stack(part.name, None, place, times)


def _outside_layers(part: PartDiff) -> Iterator[tuple[PlaceDiff, tuple[float, float]]]:
    """Yield each brick with its time outside of layers, as (before, now) in µs per unit."""
    inside: dict[object, tuple[float, float]] = {}
    for place in part.cells:
        (before, now), (one, other) = inside.get(place.brick, (0.0, 0.0)), _means(place)
        inside[place.brick] = before + one, now + other
    for place in part.bricks:
        (before, now), (one, other) = inside.get(place.brick, (0.0, 0.0)), _means(place)
        if max(left := (one - before, other - now)) >= 0.001:
            yield place, left


def _means(place: PlaceDiff) -> tuple[float, float]:
    before, now = (side.time.mean if side else 0.0 for side in (place.before, place.now))
    return before, now


def _stack(phase: str, layer: str | None, place: PlaceDiff, times: tuple[float, float]) -> DiffStack:
    names = tuple(name for name in (phase, layer, place.brick[0] if place.brick else None) if name)
    before_ns, now_ns = (max(0, round(1e3 * time)) for time in times)
    return DiffStack(names, before_ns, now_ns)


def _decisive(place: PlaceDiff) -> str:
    """Return the ratio (new time / old time) that decides the verdict, with its interval, as text."""
    return _ratio(place.decisive) if place.decisive else NOT_MEASURED


def _beside(place: PlaceDiff) -> str:
    """Return " relative to all others" if the ratio to all other bricks decides the verdict, else ""."""
    return " relative to all others" if place.verdict and place.decisive is not place.change else ""


def _ratio(one: Change) -> str:
    if one.before <= 0:
        return NOT_MEASURED
    half = one.half / one.before
    return f"{one.now / one.before:.3f}× ± {half:.3f}" if half < 1 else f"{one.now / one.before:.2f}× ± {half:.0f}"


def _percents(one: Change) -> str:
    if one.percent is None or one.half_percent is None:
        return NOT_MEASURED
    return f"{one.percent:+.1f} % ± {one.half_percent:.1f}"


def _signed(us: float) -> str:
    return f"+{number(us)}" if us > 0 else f"-{number(-us)}" if us < 0 else "0"


FORMATS: dict[str, Callable[[RunDiff], str]] = {
    "text": diff_text,
    "tree": diff_tree,
    "markdown": diff_markdown,
    "json": diff_json,
    "folded": diff_folded,
    "speedscope": diff_speedscope,
}


def _quiet_text(found: RunDiff) -> str:
    """Return a text that reports no change. If too little time was compared, the text reports `not known`."""
    if found.alone_percent <= BLIND_PERCENT:
        return "nothing has changed beyond noise"
    share = percent(found.alone_percent)
    return f"not known: {share} of the new run's time is not compared, and in the rest no change is beyond noise"
