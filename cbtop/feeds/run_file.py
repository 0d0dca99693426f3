"""Read and write runs in JSON files (`cbtop.runs/2`).

They have only the figures that are compared, so they are a thousand times smaller than a recording.
"""

# Rules
# - A file is not trusted. Each field's type and bounds are checked, texts are sanitised, and errors name the field.
# - A file is written under a temporary name, and gets its own when it is complete.

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from cbtop.comparison.baseline import Surroundings
from cbtop.comparison.contents import Break, Compiled, Contents, PhaseContents, Piece, PieceKind, Range, Total
from cbtop.comparison.drift import Thirds
from cbtop.comparison.items import BETWEEN_BRICKS, WHOLE_STEP, Brick, Place, PlaceTimes
from cbtop.comparison.memory_peaks import MemoryPeak, PhaseMemory
from cbtop.comparison.noise import Figure
from cbtop.comparison.phase_rates import RATE_UNITS, PhaseRates
from cbtop.comparison.runs import Pace, Run, StepGroup, TooShort
from cbtop.errors import CbtopError, UsageError
from cbtop.protocol.attributes import KernelAttributes
from cbtop.protocol.codec import sanitise
from cbtop.protocol.vocabulary import BrickCategory

SCHEMA = "cbtop.runs/2"
MAX_FILE_BYTES = 64 << 20
MAX_RUNS, MAX_PARTS, MAX_PLACES, MAX_LISTED, MAX_CHARS = 64, 256, 1 << 16, 1 << 12, 1 << 10
MAX_NUMBER = 1e18

FileT = TypeVar("FileT")
_PIECE_KINDS = frozenset(kind.value for kind in PieceKind)
_FIGURE = (
    "mean",
    "error",
    "blocks",
    "median_us",
    "slope",
    "slope_error",
    "scatter",
    "runs",
    "own_error",
    "own_scatter",
)


def is_run_file(path: Path) -> bool:
    """Whether the file at `path` begins with `{`, as JSON does."""
    try:
        with open(path, "rb") as file:
            return file.read(64).lstrip()[:1] == b"{"
    except OSError:
        return False


def write_runs(path: Path, runs: Sequence[Run], *, overwrite: bool = False) -> None:
    """Write `runs` to a file. Raises UsageError if it exists or cannot be written."""
    if path.exists() and not overwrite:
        raise UsageError(f"{path} exists; pass --force to overwrite it")
    text = json.dumps({"schema": SCHEMA, "runs": [_run(run) for run in runs]}, allow_nan=False)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text + "\n", encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise UsageError(f"{path}: {error.strerror}") from error


def read_runs(path: Path) -> list[Run]:
    """Return the runs in the file at `path`. Raises UsageError with the line of an error in the file."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UsageError(f"{path}: more than {MAX_FILE_BYTES >> 20} MiB, which no file of runs has")
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON: {error}") from error
    try:
        said = _mapping(document, "the file")
        if said.get("schema") != SCHEMA:
            raise _WrongError(
                f"schema {said.get('schema')!r}, {SCHEMA!r} is wanted: write it with `cbtop diff --save`"
            )
        if not (runs := _list(said.get("runs"), "runs", MAX_RUNS)):
            raise _WrongError("runs: there is none in it")
        return [_decoded(one) for one in runs]
    except _WrongError as error:
        raise UsageError(f"{path}: {error}") from error


class _WrongError(CbtopError):
    """A field of a file of runs is invalid."""


def _run(run: Run) -> dict[str, Any]:
    at = run.surroundings
    return {
        "name": run.name,
        "key": run.key,
        "surroundings": {name: getattr(at, name) for name in _SURROUNDINGS} | {"devices": list(at.devices)},
        "clock_resolution_us": run.clock_resolution_us,
        "covers_s": run.covers_s,
        "lost": run.lost,
        "seen": run.seen,
        "untrusted": run.untrusted,
        "is_cut": run.is_cut,
        "is_gone": run.is_gone,
        "gpu_clock_mhz": run.gpu_clock_mhz,
        "host_busy_percent": run.host_busy_percent,
        "paces": [[pace.cache_us, pace.memory_us] for pace in run.paces],
        "failed_checks": list(run.failed_checks),
        "too_short": [
            [one.phase, one.steps, one.needed, one.time_us, one.work and list(one.work)] for one in run.too_short
        ],
        "rates": [_rates_out(rates) for rates in run.rates],
        "memory": [
            [one.phase, name, peak.most_bytes, peak.lowest_bytes, peak.bound_bytes]
            for one in run.memory
            for name, peak in one.peaks.items()
        ],
        "kernels": [[*_brick_out(brick), list(names)] for brick, names in run.kernels.items()],
        "parts": [_part(part) for part in run.parts],
        "contents": _contents_out(run.contents),
    }


def _part(part: StepGroup) -> dict[str, Any]:
    return {name: getattr(part, name) for name in _PART} | {
        "work": list(part.work),
        "wall_us": _figure_out(part.wall_us),
        "inside_us": _figure_out(part.inside_us),
        "typical_us": _figure_out(part.typical_us),
        "tokens_a_step": _figure_out(part.tokens_a_step),
        "sequences_a_step": _figure_out(part.sequences_a_step),
        "budgets": [[*_brick_out(brick), budget_us] for brick, budget_us in part.budgets.items()],
        "thirds": [
            [_figure_out(one.first), _figure_out(one.last), one.cached and list(one.cached)] for one in part.thirds
        ],
        "training": [[name, _figure_out(figure)] for name, figure in part.training.items()],
        "places": [
            {
                "brick": None if brick is None else _brick_out(brick),
                "layer": layer,
                **{name: _figure_out(getattr(one, name)) for name in ("time", "call", "p50", "p99", "calls")},
            }
            for (brick, layer), one in part.places.items()
        ],
    }


def _rates_out(rates: PhaseRates) -> dict[str, Any]:
    return {
        "phase": rates.phase,
        "steps": rates.steps,
        "cached": rates.cached,
        "is_headline": rates.is_headline,
        "times_us": {name: _figure_out(figure) for name, figure in rates.times_us.items()},
    }


def _brick_out(brick: Brick) -> list[Any]:
    return [brick[0], brick[1].name]


def _figure_out(figure: Figure | None) -> list[float | None] | None:
    return None if figure is None else [getattr(figure, name) for name in _FIGURE]


def _decoded(document: object) -> Run:
    said = _mapping(document, "a run")
    at = _mapping(said.get("surroundings"), "surroundings")
    plain = {name: check(at.get(name), name) for name, check in _SURROUNDINGS.items()}
    devices = tuple(_text(one, "devices") for one in _list(at.get("devices"), "devices", MAX_LISTED))
    kernels = {}
    for one in _list(said.get("kernels"), "kernels", MAX_LISTED):
        name, category, names = _row(one, "kernels", 3)
        kernels[_brick([name, category])] = tuple(
            _text(each, "kernels") for each in _list(names, "kernels", MAX_LISTED)
        )
    too_short = []
    for one in _list(said.get("too_short"), "too_short", MAX_LISTED):
        too_short.append(_too_short(_list(one, "too_short", 5)))
    return Run(
        name=_text(said.get("name"), "name"),
        key=_text(said.get("key"), "key"),
        surroundings=Surroundings(devices=devices, **plain),
        clock_resolution_us=_or_none(_positive)(said.get("clock_resolution_us"), "clock_resolution_us"),
        covers_s=_positive(said.get("covers_s"), "covers_s"),
        parts=tuple(_part_in(one) for one in _list(said.get("parts"), "parts", MAX_PARTS)),
        too_short=tuple(too_short),
        kernels=kernels,
        lost=_whole(said.get("lost"), "lost"),
        seen=_whole(said.get("seen"), "seen"),
        untrusted=_text(said.get("untrusted"), "untrusted"),
        is_cut=said.get("is_cut") is True,
        is_gone=said.get("is_gone") is True,
        gpu_clock_mhz=_or_none(_positive)(said.get("gpu_clock_mhz"), "gpu_clock_mhz"),
        host_busy_percent=_or_none(_positive)(said.get("host_busy_percent"), "host_busy_percent"),
        # Files of older versions contain no paces of the machine.
        paces=tuple(_pace(one) for one in _list(said.get("paces", []), "paces", MAX_LISTED)),
        # Files of older versions contain no rates.
        rates=tuple(_rates_in(one) for one in _list(said.get("rates", []), "rates", MAX_LISTED)),
        # Files of older versions contain no memory.
        memory=_memory_in(_list(said.get("memory", []), "memory", MAX_LISTED)),
        failed_checks=tuple(
            _text(one, "failed_checks") for one in _list(said.get("failed_checks"), "failed_checks", MAX_LISTED)
        ),
        contents=_contents_in(said.get("contents", {})),  # Files of older versions lack the contents of steps.
    )


def _too_short(row: list[Any]) -> TooShort:
    # In files of older versions, an entry lacks `time_us` or `work`.
    phase, steps, needed, time_us, work = _row([*row, *[0.0, None][len(row) - 3 :]], "too_short", 5)
    counts = _whole(steps, "steps"), _whole(needed, "needed")
    return TooShort(
        _text(phase, "phase"), *counts, _positive(time_us, "time_us"), None if work is None else _work(work)
    )


def _work(value: object) -> tuple[int | None, int | None]:
    tokens, sequences = (_or_none(_whole)(amount, "work") for amount in _row(value, "work", 2))
    return tokens, sequences


def _thirds(value: object) -> Thirds:
    first, last, cached = _row(value, "thirds", 3)
    figures = _figure(first, "thirds"), _figure(last, "thirds")
    if not min(figure.mean for figure in figures) > 0:
        raise _WrongError("thirds: no step takes no time")
    if cached is None:
        return Thirds(*figures, None)
    of_first, of_last = (_positive(one, "thirds") for one in _row(cached, "thirds", 2))
    return Thirds(*figures, (of_first, of_last))


def _contents_out(contents: Contents) -> dict[str, Any]:
    compiled = contents.compiled
    return {
        "conditions": dict(contents.conditions),
        "compiled": None
        if compiled is None
        else {
            "compilations": compiled.compilations,
            "recompilations": compiled.recompilations,
            "breaks": [[one.place, one.reason, one.count] for one in compiled.breaks],
        },
        "phases": [_phase_out(phase) for phase in contents.phases],
    }


def _phase_out(phase: PhaseContents) -> dict[str, Any]:
    """Return a phase's contents as JSON fields. A piece that several layers have is one row."""
    rows: dict[tuple[Piece, Range], list[str]] = {}
    for piece, number in phase.pieces.items():
        rows.setdefault((replace(piece, layer=""), number), []).append(piece.layer)
    return {
        "phase": phase.phase,
        "steps": phase.steps,
        "plain": phase.plain,
        "totals": {total.value: list(number) for total, number in phase.totals.items()},
        "pieces": [
            [one.kind.value, one.brick, one.label, one.name, one.dtype, _kernel_out(one.kernel), list(number), layers]
            for (one, number), layers in rows.items()
        ],
    }


def _kernel_out(kernel: KernelAttributes) -> dict[str, Any]:
    return {name: value for name, value in asdict(kernel).items() if value is not None}


def _contents_in(document: object) -> Contents:
    said = _mapping(document, "contents")
    conditions = _mapping(said.get("conditions", {}), "conditions")
    compiled = said.get("compiled")
    phases = tuple(_phase_in(one) for one in _list(said.get("phases", []), "phases", MAX_PARTS))
    return Contents(
        phases,
        None if compiled is None else _compiled_in(_mapping(compiled, "compiled")),
        {_text(name, "conditions"): _text(value, "conditions") for name, value in conditions.items()},
    )


def _compiled_in(said: Mapping[str, Any]) -> Compiled:
    breaks = [_row(one, "breaks", 3) for one in _list(said.get("breaks"), "breaks", MAX_LISTED)]
    return Compiled(
        _whole(said.get("compilations"), "compilations"),
        _whole(said.get("recompilations"), "recompilations"),
        tuple(Break(_text(at, "breaks"), _text(why, "breaks"), _whole(times, "breaks")) for at, why, times in breaks),
    )


def _phase_in(document: object) -> PhaseContents:
    said = _mapping(document, "a phase")
    totals = _mapping(said.get("totals"), "totals")
    pieces: dict[Piece, Range] = {}
    for one in _list(said.get("pieces"), "pieces", MAX_PLACES):
        kind, brick, label, name, dtype, kernel, number, layers = _row(one, "pieces", 8)
        if _text(kind, "pieces") not in _PIECE_KINDS:
            raise _WrongError(f"pieces: {kind!r} is no kind of piece")
        alike = Piece(
            PieceKind(kind),
            brick=_text(brick, "pieces"),
            label=_text(label, "pieces"),
            name=_text(name, "pieces"),
            dtype=_text(dtype, "pieces"),
            kernel=_kernel_in(kernel),
        )
        for layer in _list(layers, "layers", MAX_PLACES):
            pieces[replace(alike, layer=_text(layer, "layers"))] = _range(number)
            if len(pieces) > MAX_PLACES:
                raise _WrongError(f"pieces: at most {MAX_PLACES} are wanted")
    return PhaseContents(
        _text(said.get("phase"), "phase"),
        _whole(said.get("steps"), "steps"),
        pieces,
        {Total(name): _range(number) for name, number in totals.items() if name in {one.value for one in Total}},
        # Files of older versions lack the number of steps with unknown contents.
        _whole(said.get("plain", 0), "plain"),
    )


def _kernel_in(value: object) -> KernelAttributes:
    said = _mapping(value, "kernel")
    found: dict[str, Any] = {}
    for name in (one.name for one in fields(KernelAttributes) if one.name in said):
        is_size = name in ("grid", "block")
        found[name] = tuple(_row(said[name], name, 3)) if is_size else _whole(said[name], name)
    try:
        return KernelAttributes(**found)
    except (TypeError, ValueError) as error:
        raise _WrongError(f"kernel: {error}") from error


def _range(value: object) -> Range:
    fewest, most = (_whole(one, "a range") for one in _row(value, "a range", 2))
    if fewest > most:
        raise _WrongError(f"a range: {fewest} to {most}; the least comes first")
    return fewest, most


def _pace(value: object) -> Pace:
    cache_us, memory_us = (_positive(one, "paces") for one in _row(value, "paces", 2))
    return Pace(cache_us, memory_us)


def _rates_in(document: object) -> PhaseRates:
    said = _mapping(document, "rates")
    times_us = _mapping(said.get("times_us"), "times_us")
    found = {name: _figure(times_us[name], name) for name in RATE_UNITS if name in times_us}
    if any(not figure.mean > 0 for figure in found.values()):
        raise _WrongError("times_us: no token, step or sample takes no time")
    return PhaseRates(
        phase=_text(said.get("phase"), "phase"),
        steps=_whole(said.get("steps"), "steps"),
        times_us=found,
        cached=_or_none(_positive)(said.get("cached"), "cached"),
        is_headline=said.get("is_headline") is True,
    )


def _memory_in(rows: list[Any]) -> tuple[PhaseMemory, ...]:
    found: dict[str, dict[str, MemoryPeak]] = {}
    for row in rows:
        phase, name, most, lowest, bound = _row(row, "memory", 5)
        peak = MemoryPeak(_whole(most, "memory"), _whole(lowest, "memory"), _or_none(_whole)(bound, "memory"))
        if not 0 < peak.lowest_bytes <= peak.most_bytes:
            raise _WrongError(f"memory: {peak.lowest_bytes} to {peak.most_bytes} bytes; the least comes first")
        found.setdefault(_text(phase, "memory"), {})[_text(name, "memory")] = peak
    return tuple(PhaseMemory(phase, peaks) for phase, peaks in found.items())


def _part_in(document: object) -> StepGroup:
    said = _mapping(document, "a part")
    said = {"failed": 0, **said}  # Files of older versions lack the number of failed steps.
    plain = {name: check(said.get(name), name) for name, check in _PART.items()}
    places: dict[Place, PlaceTimes] = {}
    for one in _list(said.get("places"), "places", MAX_PLACES):
        place = _mapping(one, "a place")
        brick = None if place.get("brick") is None else _brick(place["brick"])
        layer = _or_none(_text)(place.get("layer"), "layer")
        figures = (_or_none(_figure)(place.get(name), name) for name in ("call", "p50", "p99", "calls"))
        places[brick, layer] = PlaceTimes(_figure(place.get("time"), "time"), *figures)
    for needed in (WHOLE_STEP, (BETWEEN_BRICKS, None)):
        if needed not in places:
            raise _WrongError("places: the whole step and what lies between bricks are wanted")
    if plain["unit"] not in ("token", "step") or plain["steps"] < 1:
        raise _WrongError("a part: a unit `token` or `step`, and one step or more are wanted")
    budgets = {}
    for one in _list(said.get("budgets", []), "budgets", MAX_LISTED):
        name, category, budget_us = _row(one, "budgets", 3)
        budgets[_brick([name, category])] = _positive(budget_us, "budgets")
    training = {}
    # Files of older versions have no times of the parts of training steps.
    for one in _list(said.get("training", []), "training", MAX_LISTED):
        name, figure = _row(one, "training", 2)
        training[_text(name, "training")] = _figure(figure, "training")
    wall_us, inside_us = (_figure(said.get(name), name) for name in ("wall_us", "inside_us"))
    typical_us = _or_none(_figure)(said.get("typical_us"), "typical_us")
    if not (wall_us.mean > 0 and inside_us.mean > 0) or (typical_us and not typical_us.mean > 0):
        raise _WrongError("wall_us, inside_us and typical_us: no step takes no time")
    return StepGroup(
        work=_work(said.get("work")),
        wall_us=wall_us,
        inside_us=inside_us,
        typical_us=typical_us,
        places=places,
        budgets=budgets,
        training=training,
        # Files of older versions lack the mean tokens and sequences per step.
        tokens_a_step=_or_none(_figure)(said.get("tokens_a_step"), "tokens_a_step"),
        sequences_a_step=_or_none(_figure)(said.get("sequences_a_step"), "sequences_a_step"),
        # Files of older versions lack the thirds of runs.
        thirds=tuple(_thirds(one) for one in _list(said.get("thirds", []), "thirds", MAX_RUNS)),
        **plain,
    )


def _figure(value: object, what: str) -> Figure:
    mean, error, blocks, median, slope, slope_error, scatter, runs, own, own_scatter = _row(value, what, len(_FIGURE))
    found = Figure(
        _number(mean, what),
        _positive(error, what),
        _whole(blocks, what),
        _or_none(_number)(median, what),
        _number(slope, what),
        _positive(slope_error, what),
        _positive(scatter, what),
        _whole(runs, what),
        _or_none(_positive)(own, what),
        _positive(own_scatter, what),
    )
    if found.blocks < 2 or found.runs < 1:
        raise _WrongError(f"{what}: of {found.blocks} blocks and {found.runs} runs; two and one are the least")
    return found


def _brick(value: object) -> Brick:
    name, category = _row(value, "brick", 2)
    if _text(category, "brick") not in BrickCategory.__members__:
        raise _WrongError(f"brick: {category!r} is no category")
    return _text(name, "brick"), BrickCategory[category]


def _mapping(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _WrongError(f"{what}: an object is wanted")
    return value


def _list(value: object, what: str, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise _WrongError(f"{what}: a list of at most {most} is wanted")
    return value


def _row(value: object, what: str, length: int) -> list[Any]:
    if len(found := _list(value, what, length)) != length:
        raise _WrongError(f"{what}: a list of {length} is wanted")
    return found


def _text(value: object, what: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_CHARS:
        raise _WrongError(f"{what}: a text of at most {MAX_CHARS} characters is wanted")
    return sanitise(value)


def _number(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_NUMBER:
        raise _WrongError(f"{what}: a number is wanted")
    return float(value)


def _positive(value: object, what: str) -> float:
    if not (found := _number(value, what)) >= 0:
        raise _WrongError(f"{what}: a number from 0 on is wanted")
    return found


def _whole(value: object, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_NUMBER:
        raise _WrongError(f"{what}: a whole number from 0 on is wanted")
    return value


def _or_none(check: Callable[[object, str], FileT]) -> Callable[[object, str], FileT | None]:
    return lambda value, what: None if value is None else check(value, what)


_SURROUNDINGS: dict[str, Callable[[object, str], Any]] = {
    "program": _text,
    "pid": _whole,
    "rank": _or_none(_whole),
    "model": _or_none(_text),
    "architecture": _or_none(_text),
    "quantization": _or_none(_text),
    "layers": _or_none(_whole),
    "backend": _or_none(_text),
    "threads": _or_none(_whole),
    "host": _text,
    "sample_every": _whole,
}
_PART: dict[str, Callable[[object, str], Any]] = {
    "phase": _text,
    "unit": _text,
    "steps": _whole,
    "warm_up": _whole,
    "failed": _whole,
    "tokens": _or_none(_positive),
    "sequences": _or_none(_positive),
    "cached": _or_none(_positive),
    "cached_least": _or_none(_positive),
    "cached_most": _or_none(_positive),
}
