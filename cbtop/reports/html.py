"""The report as one HTML file: no script, no network, and every figure as in the text report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cbtop import units
from cbtop.profiler.analysis.layers import MIN_PEERS
from cbtop.profiler.analysis.markup import COLORS, GRAY, plain, share_bar
from cbtop.reports.html_drawings import roofline_drawing, step_drawing
from cbtop.reports.tables import Table
from cbtop.reports.text import (
    PROVENANCE_LINE,
    baseline_text,
    books_text,
    cells,
    foot_text,
    head_text,
    heads,
    replay_text,
    text_report,
)
from cbtop.text import breakdown_text, rate_text, recording_text, source_text
from cbtop.text.row_filter import AS_THEY_COME, RowChoice
from cbtop.text.statistics import OVERVIEW_REPORT
from cbtop.version import __version__
from cbtop.viewmodels.layers import ODD, LayersView
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.time_travel import ReplayView

MAX_LAYERS, MAX_LAYER_BRICKS = 200, 16  # of the heat map
ALL_SECTIONS = ("training", "bricks", "categories", "layers", "roofline", "tree", "trace")

SCOPE = "cbtop"  # class of the element that holds a report
# Every rule applies only inside SCOPE, because a notebook puts reports into its own page.
STYLE = """
.cbtop{color-scheme:light dark;--text:#1b1f24;--dim:#656d76;--line:#d0d7de;--page:#fff;--tile:#f6f8fa;
font:14px/1.5 system-ui,sans-serif;color:var(--text);background:var(--page);max-width:1100px;padding:0 1em}
@media(prefers-color-scheme:dark){
.cbtop{--text:#e6edf3;--dim:#8b949e;--line:#30363d;--page:#0d1117;--tile:#161b22}
}
.cbtop h1{font-size:1.5em;margin:0}
.cbtop h2{font-size:1.15em;border-bottom:1px solid var(--line);margin:2em 0 .6em}
.cbtop .dim,.cbtop p{color:var(--dim)}
.cbtop pre{overflow-x:auto;font:12px/1.45 ui-monospace,monospace;color:var(--text);background:var(--page)}
.cbtop .tiles{display:flex;flex-wrap:wrap;gap:.8em;margin:1em 0}
.cbtop .tile{background:var(--tile);border:1px solid var(--line);border-radius:8px;padding:.6em 1em;min-width:8em}
.cbtop .tile b{display:block;font-size:1.5em;color:var(--text)}
.cbtop table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
.cbtop th,.cbtop td{padding:.25em .6em;text-align:right;border-bottom:1px solid var(--line);color:var(--text);
background:var(--page)}
.cbtop th:first-child,.cbtop td:first-child{text-align:left}
.cbtop td .bar{display:inline-block;height:.7em;border-radius:2px}
.cbtop .verdict{border-left:4px solid var(--line);padding:.3em .8em;margin:.5em 0;background:var(--tile)}
.cbtop .error{border-color:#d1242f}.cbtop .warning{border-color:#bf8700}.cbtop .note{border-color:#4f7cff}
.cbtop .heat{overflow-x:auto}.cbtop .heat td{min-width:3.6em}.cbtop .heat td:first-child{white-space:nowrap}
.cbtop svg{width:100%;height:auto}.cbtop svg text{font:11px system-ui;fill:var(--text)}
.cbtop svg .axis{stroke:var(--dim)}.cbtop svg .leader{stroke:var(--line)}
.cbtop svg .roof{stroke:#d1242f;stroke-dasharray:4 3}
.cbtop svg.step text{fill:#fff}
"""
PAGE_STYLE = """
:root{color-scheme:light dark;background:#fff}
@media(prefers-color-scheme:dark){:root{background:#0d1117}}
body{max-width:1100px;margin:2em auto}
"""


def html_report(
    sources: Sequence[SourceView],
    replay: ReplayView | None = None,
    rows: RowChoice | None = None,
    damage: str = "",
) -> str:
    """Return the whole document. `rows` is the filter and the order of bricks in the table.

    `damage` says what the recording lost. It is shown first.
    """
    title = " · ".join(dict.fromkeys(view.program for view in sources if view.program)) or "cbtop"
    when = f"<p>{plain(replay_text(replay))}</p>" if replay is not None else ""
    lost = f'<div class="verdict error">{plain(damage)}</div>' if damage else ""
    body = _processes(sources, rows or AS_THEY_COME)
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{plain(title)} — cbtop</title><style>{PAGE_STYLE}{STYLE}</style></head>"
        f'<body class="{SCOPE}">'
        f"<h1>{plain(title)}</h1>{when}{lost}{body}"
        f'<p class="dim">cbtop {plain(__version__)}. {plain(PROVENANCE_LINE)}.</p></body></html>'
    )


def html_part(sources: Sequence[SourceView], lost: str = "") -> str:
    """Return the report as a part of another page, such as a notebook. `lost` says what is missing in it."""
    missing = f'<div class="verdict error">{plain(lost)}</div>' if lost else ""
    return in_scope(f"{missing}{_processes(sources, AS_THEY_COME)}")


def in_scope(content: str) -> str:
    """Return `content` with the style of reports, as a part of another page."""
    return f'<div class="{SCOPE}"><style>{STYLE}</style>{content}</div>'


def _processes(sources: Sequence[SourceView], rows: RowChoice) -> str:
    return "".join(_process(view, rows) for view in sources) or "<p>No process has data.</p>"


def _process(view: SourceView, rows: RowChoice) -> str:
    parts = [
        f"<h2>{plain(f'{view.program}, pid {view.pid} on {view.host}: {source_text.standing(view)}')}</h2>",
        _tiles(view),
        _section("Where the time goes", _step_bar(view)),
        _lines(head_text(view).splitlines()[1:]),
        _verdicts(view),
        _section("Baseline", _lines(baseline_text(view.baseline).splitlines())),
        _section("Bricks", _bricks(rows.of(view)) + _lines(books_text(view).splitlines())),
        _section("One step", step_drawing(view.timeline)),
        _section(f"Layers, µs: red is over {ODD}× the median of like layers", _layers(view.layer_times)),
        _section("Roofline", roofline_drawing(view.roofline)),
        _lines(foot_text(view).splitlines()),
        f"<details><summary>All figures as text</summary>{_lines(text_report([view], ALL_SECTIONS).splitlines())}"
        "</details>",
    ]
    return f"<section>{''.join(parts)}</section>"


def _section(title: str, content: str) -> str:
    return f"<h2>{plain(title)}</h2>{content}" if content else ""


def _lines(lines: Iterable[str]) -> str:
    text = "\n".join(lines)
    return f"<pre>{plain(text)}</pre>" if text else ""


def _tiles(view: SourceView) -> str:
    steps = view.steps
    if steps is None:
        return ""
    shown = [
        (steps.phase, rate_text.throughput(view, steps)),
        ("steps", units.count(steps.count)),
        ("step p50", units.duration(steps.p50_us)),
        ("step p99", units.duration(steps.p99_us)),
    ]
    tiles = "".join(f'<div class="tile dim">{plain(name)}<b>{plain(value)}</b></div>' for name, value in shown)
    return f'<div class="tiles">{tiles}</div>'


def _verdicts(view: SourceView) -> str:
    found = []
    for verdict in view.verdicts:
        gain = rate_text.gain(verdict)
        advice = f"{gain}. {verdict.advice}" if gain else verdict.advice
        who = f"<b>{plain(verdict.severity)} {plain(verdict.id)}</b>"
        why = f'{plain(verdict.sentence)}<br><span class="dim">{plain(advice)}</span>'
        found.append(f'<div class="verdict {plain(verdict.severity)}">{who}: {why}</div>')
    if withheld := source_text.withheld(view.withheld):
        found.append(f'<div class="verdict">{plain(withheld)}</div>')
    return _section("Verdicts", "".join(found))


def _step_bar(view: SourceView) -> str:
    """Return the parts of the mean step as one bar: the categories, the gaps, and the rest. Return "" if unknown."""
    books = view.books
    if view.training and view.training.parts:
        shares = [(part.name, part.percent) for part in view.training.parts]
    elif books is None or not books.close or not books.wall_us or view.shares_close is False:
        return ""
    else:
        shares = [(row.name, row.percent or 0.0) for row in view.categories]
        shares += [(gap.name, 100 * gap.us / books.wall_us) for gap in books.gaps]
        shares.append((breakdown_text.REST, 100 * books.unattributed_us / books.wall_us))
    return share_bar(shares)


def _bricks(view: SourceView) -> str:
    if not view.bricks:
        return f"<p>{plain(recording_text.no_bricks(view))}</p>"
    rows: Table = [("brick", "category", *heads(OVERVIEW_REPORT))]
    rows += [(row.name, row.category.display_name, *cells(OVERVIEW_REPORT, row)) for row in view.bricks]
    bars = [
        f'<span class="bar" style="width:{max(0.0, min(100.0, row.percent or 0.0)) * 1.5:.0f}px;'
        f'background:{COLORS.get(row.category.display_name, GRAY)}"></span>'
        for row in view.bricks
    ]
    head, *body = rows
    lines = [f"<tr>{''.join(f'<th>{plain(cell)}</th>' for cell in head)}<th></th></tr>"]
    lines += [
        f"<tr>{''.join(f'<td>{plain(cell)}</td>' for cell in row)}<td style='text-align:left'>{bar}</td></tr>"
        for row, bar in zip(body, bars, strict=True)
    ]
    return f"<table>{''.join(lines)}</table>"


def _layers(layers: LayersView | None) -> str:
    """Return a table of layers and bricks. Colors compare each time with the other layers."""
    if layers is None or not layers.rows:
        return ""
    bricks = layers.bricks[:MAX_LAYER_BRICKS]
    head = "".join(f"<th>{plain(name)}</th>" for name in ("layer", f"µs a {layers.unit}", *(b.name for b in bricks)))
    lines = [f"<tr>{head}</tr>"]
    for row in layers.rows[:MAX_LAYERS]:
        peers = layers.like(row)
        whole = _heat_cell(row.us, row.to_median)
        figures = "".join(
            _heat_cell(us, _ratio(us, [peer.p50_cells[at] for peer in peers]))
            for at, us in enumerate(row.p50_cells[:MAX_LAYER_BRICKS])
        )
        lines.append(f"<tr><td>{plain(row.name)}</td>{whole}{figures}</tr>")
    left_out = len(layers.rows) - MAX_LAYERS
    more = f"<p>{left_out} more layers are in the text below.</p>" if left_out > 0 else ""
    return f'<div class="heat"><table>{"".join(lines)}</table></div><p>Bricks: the median call.</p>{more}'


def _ratio(us: float | None, of_peers: Sequence[float | None]) -> float | None:
    """Return a time divided by the median of its peers' times. Return None if there are too few peers."""
    median = LayersView.median(of_peers)
    return us / median if us is not None and median and len(of_peers) >= MIN_PEERS else None


def _heat_cell(us: float | None, to_median: float | None) -> str:
    heat = 0.0 if to_median is None or to_median < ODD else min(1.0, (to_median - 1) / 1.5)
    color = f' style="background:rgb(209 36 47/{heat:.2f})"' if heat else ""
    return f"<td{color}>{'' if us is None else plain(units.number(us))}</td>"
