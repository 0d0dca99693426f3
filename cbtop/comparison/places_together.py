"""Combine the bricks and layers of several runs of one program: each figure's mean, and its scatter between runs."""

# Rule
# - If a brick or layer runs only in some steps, a run may have too few calls of it, or none. Its times are known if
#   enough runs have calls. A run without calls counts as zero calls.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cbtop.comparison.call_counts import learned_calls
from cbtop.comparison.items import BETWEEN_BRICKS, Place, PlaceTimes
from cbtop.comparison.noise import Figure, learned

Places = Mapping[Place, PlaceTimes]


def places_together(
    runs: Sequence[Places], paces: Sequence[float | None] | None, least: int
) -> dict[Place, PlaceTimes]:
    """Return the times of each brick and layer over all `runs`. None if fewer than `least` runs know a figure.

    `paces` is the common factor of all times in each run.
    """
    names = list(dict.fromkeys(place for run in runs for place in run))
    times = _learned(names, [[_time(run, name, runs) for run in runs] for name in names], paces, least)
    quantiles = {
        what: _learned(names, [[_figure(run, name, what) for run in runs] for name in names], paces, least)
        for what in ("call", "p50", "p99")
    }
    calls = learned_calls([[_calls(run, name, runs) for run in runs] for name in names])
    found = {}
    for at, name in enumerate(names):
        time = times[at]
        assert time is not None
        call, p50, p99 = (quantiles[what][at] for what in ("call", "p50", "p99"))
        found[name] = PlaceTimes(time, call, p50, p99, calls[at])
    return found


def _learned(
    names: Sequence[Place], rows: Sequence[Sequence[Figure | None]], paces: Sequence[float | None] | None, least: int
) -> list[Figure | None]:
    """Return each row's mean over the runs that have a value. A row is one figure in all runs.

    The scatter is learned by kind: bricks, bricks in layers, layers, and the time between bricks.
    """
    found: list[Figure | None] = [None] * len(rows)
    like: dict[tuple[bool, bool, bool, tuple[int, ...]], list[int]] = {}
    for at, ((brick, layer), row) in enumerate(zip(names, rows, strict=True)):
        known = tuple(run for run, figure in enumerate(row) if figure is not None)
        if len(known) >= least:
            like.setdefault((bool(brick), bool(layer), brick == BETWEEN_BRICKS, known), []).append(at)
    for (*_, known), places in like.items():
        kept = [[figure for figure in rows[at] if figure is not None] for at in places]
        of_runs = None if paces is None else [paces[run] for run in known]
        for at, figure in zip(places, learned(kept, of_runs), strict=True):
            found[at] = figure
    return found


def _figure(run: Places, name: Place, what: str) -> Figure | None:
    figure: Figure | None = getattr(run[name], what) if name in run else None
    return figure


def _time(run: Places, name: Place, runs: Sequence[Places]) -> Figure:
    """Return the time of a brick or layer in `run`, or 0 if only other runs have it."""
    if name in run:
        return run[name].time
    other = next(one[name].time for one in runs if name in one)
    return replace(other, mean=0.0, error=0.0, median_us=None, slope=0.0, slope_error=0.0, own_error=0.0)


def _calls(run: Places, name: Place, runs: Sequence[Places]) -> Figure:
    """Return the calls per step of a brick or layer in `run`, or 0 if only other runs have it."""
    figure = _figure(run, name, "calls")
    if figure is not None:
        return figure
    blocks = next((figure.blocks for one in runs if (figure := _figure(one, name, "calls"))), 2)
    return Figure(0.0, 0.0, blocks)
