"""Tests that numbers on the screen, in text and in JSON are equal.

The numbers are read from the output. Each shown number must equal the JSON's number to the last shown digit. The
JSON's number is found by the row and column of the shown number, or by the words before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import pytest

from cbtop.reports import REPORTS
from cbtop.text.statistics import (
    BRICK_COLUMNS,
    CALL_REPORT,
    CATEGORY_REPORT,
    DEVICE_COLUMNS,
    NODE_COLUMNS,
    NODE_SHARE_COLUMNS,
    OWN_REPORT,
    POINT_COLUMNS,
    POINT_REPORT,
    PROCESS_COLUMNS,
    SPREAD_REPORT,
    TREND_REPORT,
    WORK_REPORT,
)
from cbtop.tui.app import CbtopApp
from cbtop.tui.views import VIEWS
from tests.cbtop.conftest import screen_text
from tests.cbtop.seen_states import states
from tests.cbtop.tui.views.test_states import Seen

SIZE = (360, 110)  # This screen has room for every row and column of all tables.
# In the timeline, the key 0 shows all stored steps. In the graph, the key z folds all nodes, and a second z unfolds
# them.
KEYS = {"timeline": "0", "graph": "zz"}
SCALES = {
    "ns": 1e-3, "µs": 1.0, "ms": 1e3, "s": 1e6, "min": 60e6, "%": 1.0, "k": 1e3, "M": 1e6, "B": 1.0, "KB": 1e3,
    "MB": 1e6, "GB": 1e9, "TB": 1e12, "GB/s": 1.0, "GFLOP/s": 1.0, "": 1.0,
}  # fmt: skip
NUMBER = r"<?-?[\d,]+(?:\.\d+)?(?: ?(?:ns|µs|ms|s|min|KB|MB|GB|TB|B|%|k|M))?"
CELL = re.compile(rf"(?:^|\s)[?⚠!]* ?({NUMBER}|n/a|–)$")


@dataclass(frozen=True)
class Number:
    """A shown number: its position, its text, and the value in the JSON."""

    where: str
    shown: str
    value: float | None
    unit: float = 1.0  # the unit of the shown number, as a multiple of the unit in the JSON

    @property
    def is_the_same(self) -> bool:
        """Return whether the shown text equals the value to its last digit."""
        if self.shown in ("n/a", "–") or self.value is None:
            return self.value is None and self.shown in ("n/a", "–")
        found = re.fullmatch(r"(<?)(-?[\d,]+)(\.\d+)? ?(.*)", self.shown)
        assert found, f"{self.where}: {self.shown!r} is no number"
        scale = SCALES[found[4]] if found[4] else self.unit
        shown = float(found[2].replace(",", "") + (found[3] or ""))
        digit = 10.0 ** -max(0, len(found[3] or "") - 1)
        if found[1]:
            return 0 < self.value / scale < shown
        return abs(self.value / scale - shown) <= 0.5001 * digit


# --- tables -------------------------------------------------------------------------------------------------------


def on_screen(lines: Sequence[str], titles: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the rows below the heading with these titles.

    Each row is the text before its figures, and its figures by title.
    """
    at = next(index for index, line in enumerate(lines) if all(f" {title}" in line for title in titles))
    ends: dict[str, int] = {}
    for title in titles:
        found = re.search(rf"\s\s{re.escape(title)}[▼▲]?(?=\s|$)", lines[at])
        assert found, title
        ends[title] = found.end()
    for line in lines[at + 1 :]:
        if not line[: max(ends.values())].strip(" ┃│") or line.startswith("─"):
            return
        cells = {title: CELL.search(line[:end]) for title, end in ends.items()}
        yield line, {title: cell[1] for title, cell in cells.items() if cell}


def in_text(text: str, first: str, *titles: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the rows of the report table with these headings.

    Each row is its first cell, and the other cells by title.
    """
    lines = text.splitlines()
    for at, line in enumerate(lines):
        head = re.split(r"\s{2,}", line.strip())
        if head[0] == first and set(titles) <= set(head):
            for row in lines[at + 1 :]:
                cells = re.split(r"\s{2,}", row.strip())
                if len(cells) < 2 or row.startswith(" "):
                    break
                yield cells[0], dict(zip(head[1:], cells[1:], strict=False))
            return
    raise AssertionError(f"no table of {titles}")


def of_rows(
    where: str, rows: Iterator[tuple[str, dict[str, str]]], json_rows: Sequence[Mapping[str, Any]],
    keys: Mapping[str, str], name: str = "name",
) -> Iterator[Number]:  # fmt: skip
    """Yield the figures of all rows, each with its value in the JSON.

    The name in a row must match exactly one row of the JSON.
    """
    seen = set()
    for line, cells in rows:
        ours = [row for row in json_rows if re.search(rf"(?<!\w){re.escape(str(row[name]))}(?!\w)", line)]
        assert len(ours) == 1, line
        seen.add(ours[0][name])
        for title, cell in cells.items():
            value = ours[0][keys[title]] if title in keys else None
            if title in keys and not isinstance(value, str):
                yield Number(f"{where}, {ours[0][name]}, {title}", cell.lstrip("!?"), value)
    assert seen == {row[name] for row in json_rows}, f"{where}: not every row is there"


def titles_of(places: Sequence[Any]) -> dict[str, str]:
    return {place.statistic.title: place.statistic.key for place in places if place.statistic.unit != "word"}


def heads_of(statistics: Sequence[Any]) -> dict[str, str]:
    return {
        one.report_title or one.title: one.key for one in statistics if one.unit not in ("word", "yes or no")
        and one.key != "checks_failed"
    }  # fmt: skip


def found_in(where: str, pattern: str, text: str, *values: tuple[float | None, float]) -> Iterator[Number]:
    """Yield the numbers that the regular expression `pattern` captures, each with its value and unit."""
    found = re.search(pattern, text)
    assert found, f"{where}: nothing like {pattern}"
    for index, (shown, (value, unit)) in enumerate(zip(found.groups(), values, strict=True)):
        yield Number(f"{where}, {index}", shown, value, unit)


# --- the views: the numbers on the screen and in the text, with their values in the JSON --------------------------


def header(screen: str, source: dict[str, Any]) -> Iterator[Number]:
    lines = screen.splitlines()
    head = next(index for index, line in enumerate(lines) if "ms/token p50" in line)
    steps, loss = source["steps"], source["loss"]
    values = {
        "ms/token p50": (steps["us_per_token"]["p50"], 1e3),
        "p99": (steps["us_per_token"]["p99"], 1e3),
        "max": (steps["us_per_token"]["max"], 1e3),
        "steps": (steps["count"], 1.0),
        "tok/s no pauses": (steps["tokens_per_sec_in_steps"], 1.0),
        "tokens ": (steps["tokens"], 1.0),
        "lost": (loss["dropped"] - loss["dropped_before_attach"], 1.0),
    }
    for title, (value, unit) in values.items():
        begin = lines[head].index(f"  {title}") + 2
        cell = re.match(rf"(?:! )?({NUMBER}|n/a)", lines[head + 1][begin:])
        assert cell, title
        yield Number(f"header, {title}", cell[1], value, unit)
    yield from found_in("header, tokens/s", rf"^\s+({NUMBER})\s", lines[head + 1], (steps["tokens_per_sec"], 1.0))


def overview(screen: str, text: str, source: dict[str, Any], _: dict[str, Any]) -> Iterator[Number]:
    phases = source["phases"]
    flat = [
        {
            **one,
            "p50 ms": one["us_per_token"]["p50"],
            "p99 ms": one["us_per_token"]["p99"],
            "max": one["wall_us"]["max"],
        }
        for one in phases
    ]
    keys = {"tokens/s": "tokens_per_sec", "no pauses": "tokens_per_sec_in_steps", "max step": "max", "steps": "count",
            "tokens": "tokens", "p50 ms/tok": "p50 ms", "p99": "p99 ms"}  # fmt: skip
    lines = [line[: SIZE[0] * 3 // 5] for line in screen.splitlines()]
    at = next(index for index, line in enumerate(lines) if line.strip().startswith("phase "))
    rows = on_screen(lines[at:], [*keys])
    for number in of_rows("phases on the screen", rows, flat, keys, "phase"):
        yield Number(
            number.where,
            number.shown,
            number.value,
            1e3 if "p50 ms" in number.where or ", p99" in number.where else 1.0,
        )
    for one in phases:
        a_token = one["us_per_token"]
        wall = [(one["wall_us"][key], 1.0) for key in ("p50", "p95", "p99", "min", "max")]
        ran_us = {phase["name"]: phase["us"] for phase in source["stretch"]["in_steps_by_phase"]}[one["phase"]]
        yield from found_in(
            f"phases in the text, {one['phase']}",
            rf"{one['phase']}: ({NUMBER}) steps?, ({NUMBER}) tokens, ({NUMBER}) tokens/s, step p50 ({NUMBER}), "
            rf"p95 ({NUMBER}), p99 ({NUMBER}), min ({NUMBER}), max ({NUMBER})\n"
            rf"\s+({NUMBER}) tok/s without pauses: steps ran ({NUMBER}) of ({NUMBER})[^\n]*; ms/token p50 "
            rf"({NUMBER}), p99 ({NUMBER}), max ({NUMBER})",
            text, (one["count"], 1), (one["tokens"], 1), (one["tokens_per_sec"], 1), *wall,
            (one["tokens_per_sec_in_steps"], 1), (ran_us, 1), (source["stretch"]["wall_us"], 1),
            *((a_token[key], 1e3) for key in ("p50", "p99", "max")),
        )  # fmt: skip
    books, count = source["books"], source["steps"]["recorded"]
    of_a_step = [books[key] / count for key in ("wall_us", "bricks_us")]
    yield from found_in(
        "one step", rf"wall ({NUMBER}) = bricks ({NUMBER})", screen, (of_a_step[0], 1), (of_a_step[1], 1e3)
    )
    yield from found_in(
        "books", rf"step time: wall ({NUMBER})[^=]* = bricks ({NUMBER}).* \+ rest of step ({NUMBER})", text,
        (books["wall_us"], 1), (books["bricks_us"], 1), (books["unattributed_us"], 1),
    )  # fmt: skip
    time_range = source["stretch"]
    between = time_range["between_steps_percent"], time_range["between_steps_us"], time_range["wall_us"]
    for where, shown in (("the screen", screen), ("the text", text)):
        yield from found_in(
            f"between steps, {where}", rf"▲? ?({NUMBER}) of the time is between steps: ({NUMBER}) of ({NUMBER})",
            shown, *((value, 1) for value in between),
        )  # fmt: skip
    for row in source["bricks"]:
        yield from found_in(
            f"overview, {row['name']}", rf"{row['name']} .* ({NUMBER})\s{{2,}}({NUMBER})\s", screen,
            (row["percent"], 1), (_exclusive(row), 1),
        )  # fmt: skip
    loss = source["loss"]
    lost = loss["dropped"] - loss["dropped_before_attach"]
    yield from found_in(
        "overview, records", rf"({NUMBER}) records, ({NUMBER}) lost", screen, (loss["received"], 1), (lost, 1)
    )
    yield from found_in(
        "records in the text", rf"records: ({NUMBER}) produced = ({NUMBER}) received \+ ({NUMBER}) dropped", text,
        (loss["produced"], 1), (loss["received"], 1), (loss["dropped"], 1),
    )  # fmt: skip
    said = [verdict["sentence"] for verdict in source["verdicts"]]
    assert said
    assert all(sentence in text and sentence[:80] in screen for sentence in said)


def _exclusive(row: dict[str, Any]) -> float | None:
    """Return the time per token without nested bricks, in µs."""
    a_token, whole_us = row["us_per_token"], row["total_inclusive_us"]
    return None if a_token is None or not whole_us else a_token * row["total_exclusive_us"] / whole_us


def bricks(screen: str, text: str, source: dict[str, Any], _: dict[str, Any]) -> Iterator[Number]:
    keys = titles_of(BRICK_COLUMNS)
    yield from of_rows("bricks on the screen", on_screen(screen.splitlines(), [*keys]), source["bricks"], keys)
    for report in (OWN_REPORT, CALL_REPORT, SPREAD_REPORT, TREND_REPORT, WORK_REPORT):
        heads = heads_of(report)
        yield from of_rows("bricks in the text", in_text(text, "brick", *heads), source["bricks"], heads)
    heads = heads_of(CATEGORY_REPORT)
    yield from of_rows("categories", in_text(text, "category", *heads), source["categories"], heads)


def layers(screen: str, text: str, source: dict[str, Any], _: dict[str, Any]) -> Iterator[Number]:
    rows = source["layer_times"]["layers"]
    us: dict[str, dict[str, float]] = {}  # microseconds by brick and layer
    for row in rows:
        of_bricks = {brick["name"]: brick["us"] for brick in row["bricks"]}
        for name, value in {"whole layer": row["us"], "between bricks": row["between_us"], **of_bricks}.items():
            us.setdefault(name, {})[row["name"]] = value
    line = re.compile(rf"^.? ([A-Za-z][\w ]*?)\s+┤?[▁-█ ]+ +({NUMBER}) +({NUMBER})  L(\d+)$", re.MULTILINE)
    # Read only the map, which has the left three fifths of the screen. One layer is shown on the right.
    the_map = "\n".join(row[: SIZE[0] * 3 // 5].rstrip() for row in screen.splitlines())
    seen = {name: figures for name, *figures in line.findall(the_map)}
    assert seen.keys() == us.keys()
    for name, (middle, slowest, layer) in seen.items():
        yield Number(f"layers on the screen, {name}, median", middle, median(us[name].values()))
        yield Number(f"layers on the screen, {name}, slowest", slowest, us[name][f"Layer {layer}"])
        assert us[name][f"Layer {layer}"] == max(us[name].values())
    keys = {"µs a step": "us", "p50 µs a call": "p50_us", "median of peers": "median_us",
            "× median": "to_median", "between bricks": "between_us"}  # fmt: skip
    yield from of_rows("layers in the text", in_text(text, "layer", *keys), rows, keys)


def timeline(screen: str, text: str, source: dict[str, Any], _: dict[str, Any]) -> Iterator[Number]:
    found = source["timeline"]
    for lane in found["lanes"]:
        parts = {name: ns for name, ns in lane["parts_ns"].items() if ns or len(lane["parts_ns"]) == 1}
        sums = [(found["length_ns"] / 1e3, 1.0), *((ns / 1e3, 1.0) for ns in parts.values())]
        pattern = rf"({NUMBER}) = " + r" \+ ".join(rf"{re.escape(name)} ({NUMBER})" for name in parts)
        yield from found_in(f"timeline on the screen, {lane['name']}", rf"{lane['name']} +{pattern}", screen, *sums)
        yield from found_in(
            f"timeline in the text, {lane['name']}", rf"lane {lane['name']}: .*\n +{pattern}", text, *sums
        )
    zero_ns = found["newest"]["start_ns"]
    spans = {
        (part["name"], part["start_ns"] - zero_ns): part["duration_ns"]
        for lane in found["lanes"] for row in lane["rows"] for part in [*row["spans"], *lane["gaps"]]
    }  # fmt: skip

    def exact(where: str, name: str, start: str, lasts: str) -> Iterator[Number]:
        start_ns = round(float(start.replace(",", "")) * 1e3)
        # The JSON lists only the newest spans, so older spans on the screen are not compared.
        if (ns := spans.get((name, start_ns))) is not None:
            yield Number(f"{where}, {name} at {start}", lasts, ns / 1e3)

    times = r"(-?[\d,]+\.\d{3})(?: µs)?\s+([\d,]+\.\d{3})"
    for found_row in re.finditer(rf"^  \S (\S.*?)\s+{times} µs", screen, re.MULTILINE):
        yield from exact("the longest on the screen", *found_row.groups())
    for found_row in re.finditer(rf"^(\S.*?)\s\s+{times}\s", text, re.MULTILINE):
        yield from exact("the newest step in the text", *found_row.groups())


def roofline(screen: str, text: str, source: dict[str, Any], _: dict[str, Any]) -> Iterator[Number]:
    keys = titles_of(POINT_COLUMNS)
    shares = {row["name"]: row["percent"] for row in source["bricks"]}
    points = [{**point, "percent": shares[point["brick"]]} for point in source["roofline"]["points"]]
    # Read only the table. The details of one brick are shown below the table.
    table = screen[: screen.index("under each roof")].splitlines()[:-1]
    yield from of_rows("points on the screen", on_screen(table, [*keys]), points, keys, "brick")
    yield from of_rows(
        "points in the text",
        in_text(text, "brick", *heads_of(POINT_REPORT), "GB/s"),
        points,
        heads_of(POINT_REPORT),
        "brick",
    )
    for roof in source["roofline"]["ceilings"]:
        for where, shown in (("the screen", screen), ("the text", text)):
            yield from found_in(
                f"{roof['name']} on {where}", rf"{roof['name']} ({NUMBER}) {roof['unit']}", shown, (roof["value"], 1)
            )
    ridge = source["roofline"]["ridges"][0]["flop_per_byte"]
    yield from found_in("ridge on the screen", rf"ridge ({NUMBER})", screen, (ridge, 1))
    yield from found_in("ridge in the text", rf"ridge point: ({NUMBER})", text, (ridge, 1))


def graph(screen: str, text: str, source: dict[str, Any], _: dict[str, Any]) -> Iterator[Number]:
    keys = titles_of((*NODE_COLUMNS, *NODE_SHARE_COLUMNS))
    rows = [row for row in source["graph"] if row["kind"] != "step"]
    shown = list(on_screen(screen.splitlines(), [*keys]))
    assert len(shown) == len(rows)
    for node, (line, cells) in zip(rows, shown, strict=True):  # Both lists of rows are in the order of the tree.
        assert f" {node['name']}" in line
        for title, cell in cells.items():
            yield Number(f"graph on the screen, {node['id']} {node['name']}, {title}", cell, node[keys[title]])
    labels = re.findall(r"(\w+)  ([\d.]+)µs \((\d+) elem\)", text)
    timed = [row for row in rows if row["kind"] == "brick"]
    for node, (name, us, elements) in zip(timed, labels, strict=True):
        assert name == node["name"]
        yield Number(f"tree in the text, {node['id']} {name}", us, node["avg_inclusive_us"])
        yield Number(f"tree in the text, {node['id']} {name}, elements", elements, node["elements"])


def sources(screen: str, text: str, source: dict[str, Any], whole: dict[str, Any]) -> Iterator[Number]:
    listed = [row for row in whole["listed"] if row["state"] == "live"]
    keys = {"tokens/s": "tokens_per_sec", "steps/s": "steps_per_sec", "lost %": "lost_percent", "unread": "unread",
            "before attach": "dropped_before_attach", "lag": "lag s"}  # fmt: skip
    flat = [{**row, "lag s": row["lag_s"] and row["lag_s"] * 1e6} for row in listed]
    rows = [(line, cells) for line, cells in on_screen(screen.splitlines(), [*keys]) if "ended" not in line]
    yield from of_rows("sources on the screen", iter(rows), flat, keys, "pid")
    listed = [{**row, "lag s": row["lag_s"] and row["lag_s"] * 1e6} for row in whole["listed"]]
    keys = {"tokens/s": "tokens_per_sec", "steps/s": "steps_per_sec", "step p50": "step_p50_us"}
    yield from of_rows("rates in the text", in_text(text, "pid", *keys), listed, keys, "pid")
    keys = {"lost": "lost", "lost %": "lost_percent", "before attach": "dropped_before_attach", "unread": "unread",
            "lag": "lag s"}  # fmt: skip
    yield from of_rows("losses in the text", in_text(text, "pid", *keys), listed, keys, "pid")
    yield from found_in(
        "records in words", rf"({NUMBER}) produced, ({NUMBER}) lost.*, ({NUMBER}) before\s+attach, ({NUMBER}) unread",
        screen, *((flat[0][key], 1) for key in ("produced", "lost", "dropped_before_attach", "unread")),
    )  # fmt: skip


def devices(screen: str, text: str, source: dict[str, Any], whole: dict[str, Any]) -> Iterator[Number]:
    (machine,) = whole["machines"]
    used = {
        place.statistic.title: place.statistic.key
        for place in DEVICE_COLUMNS
        if place.statistic.key in machine["devices"][0]
    }
    keys = {title: key for title, key in used.items() if title not in ("memory", "MHz", "slowed by")}
    yield from of_rows(
        "devices on the screen", on_screen(screen.splitlines(), [*keys]), machine["devices"], keys, "label"
    )
    yield from of_rows("devices in the text", in_text(text, "of", *keys), machine["devices"], keys, "label")
    for where, shown in (("the screen", screen), ("the text", text)):
        for device in machine["devices"]:
            values = (device["memory_used_bytes"], device["memory_total_bytes"])
            yield from found_in(
                f"memory on {where}", rf"({NUMBER})/({NUMBER})", shown, *((value, 1) for value in values)
            )
    keys = titles_of(PROCESS_COLUMNS)
    on_gpu = any(process["device"] for process in machine["processes"])
    shown_keys = {title: key for title, key in keys.items() if on_gpu or not title.startswith("GPU")}
    yield from of_rows(
        "processes on the screen", on_screen(screen.splitlines(), [*shown_keys]), machine["processes"], shown_keys,
        "pid",
    )  # fmt: skip
    yield from of_rows("processes in the text", in_text(text, "pid", *keys), machine["processes"], keys, "pid")


Read = Callable[[str, str, dict[str, Any], dict[str, Any]], Iterator[Number]]
# For each view: the function that reads its numbers, its sections of a report, and how many numbers it has at least.
READ: dict[str, tuple[Read, list[str], int]] = {
    "overview": (overview, ["bricks"], 60),
    "bricks": (bricks, ["bricks", "categories"], 250),
    "layers": (layers, ["layers"], 60),
    "timeline": (timeline, ["timeline"], 100),
    "roofline": (roofline, ["roofline"], 40),
    "graph": (graph, ["tree"], 500),
    "sources": (sources, ["sources"], 10),
    "devices": (devices, ["devices"], 8),
}


# Other states of a process. Each state has the numbers of these views, too.
OTHERS = [
    pytest.param(view, state, marks=pytest.mark.slow)
    for state, views in {
        "stalled": ("overview", "bricks", "layers", "timeline", "roofline", "graph", "devices"),
        "ended": ("overview", "layers", "roofline", "graph", "sources", "devices"),
        "drops": ("bricks", "layers", "timeline", "roofline", "graph", "sources", "devices"),
        "merged": ("overview", "layers", "graph", "sources", "devices"),
    }.items()
    for view in views
]


DRAWN: dict[tuple[str, str], str] = {}


async def drawn(view: str, state: str) -> str:
    """Return the text of a view on a large terminal. Each view is drawn only once, and then cached."""
    if (view, state) not in DRAWN:
        DRAWN[view, state] = await _drawn(view, state)
    return DRAWN[view, state]


async def _drawn(view: str, state: str) -> str:
    source = states()[state]
    assert source is not None
    app = CbtopApp(Seen(source), interval_s=60)
    number = next(str(at) for at, one in enumerate(VIEWS, 1) if one.title.lower() == view)
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press(number, *KEYS.get(view, ""))
        await pilot.pause()
        return screen_text(app)


def numbers(view: str, state: str, screen: str, whole: dict[str, Any]) -> list[Number]:
    """Return every number on the screen and in the text, with its value in the JSON `whole`."""
    read, sections, _ = READ[view]
    source = states()[state]
    assert source is not None
    text = REPORTS["text"]([source], sections)
    return [*header(screen, whole["sources"][0]), *read(screen, text, whole["sources"][0], whole)]


def of_json(state: str) -> dict[str, Any]:
    source = states()[state]
    assert source is not None
    found: dict[str, Any] = json.loads(REPORTS["json"]([source], []))
    return found


@pytest.mark.parametrize(("view", "state"), [(view, "live") for view in READ] + OTHERS)
async def test_every_number_on_the_screen_and_in_the_text_is_that_of_the_json(view: str, state: str) -> None:
    found = numbers(view, state, await drawn(view, state), of_json(state))
    assert [one for one in found if not one.is_the_same] == []
    assert len(found) >= READ[view][2]


def test_there_is_a_reader_of_every_view() -> None:
    assert [*READ] == [view.title.lower() for view in VIEWS]


# For each view: the path in the JSON of one value that both the screen and the text show.
SEEN_TWICE: dict[str, list[Any]] = {
    "overview": ["sources", 0, "phases", 1, "tokens_per_sec"],
    "bricks": ["sources", 0, "bricks", 0, "us_per_token"],
    "layers": ["sources", 0, "layer_times", "layers", 8, "us"],
    "timeline": ["sources", 0, "timeline", "lanes", 0, "parts_ns", "bricks"],
    "roofline": ["sources", 0, "roofline", "points", 0, "gb_per_sec"],
    "graph": ["sources", 0, "graph", 0, "avg_inclusive_us"],
    "sources": ["listed", 0, "tokens_per_sec"],
    "devices": ["machines", 0, "processes", 0, "cpu_percent"],
}


@pytest.mark.parametrize("view", READ)
async def test_one_number_that_differs_is_found_on_the_screen_and_in_the_text(view: str) -> None:
    whole = of_json("live")
    *way, key = SEEN_TWICE[view]
    place = whole
    for step in way:
        place = place[step]
    place[key] *= 1.1
    wrong = [one.where for one in numbers(view, "live", await drawn(view, "live"), whole) if not one.is_the_same]
    assert any("on the screen" in where for where in wrong)
    assert any("in the text" in where for where in wrong)
    assert len(wrong) < 6
