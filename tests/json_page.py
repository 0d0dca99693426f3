"""Write the parts of the pages on JSON that follow from `cbtop/text/statistics.py` and `cbtop/reports/json.py`.

    python -m tests.json_page   write the pages; tests/test_json_page.py compares them

A part is between `<!-- NAME -->` and `<!-- end of NAME -->`. Everything else on the pages is written by hand, and
tests/test_json_page.py checks that it names every key.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable

from cbtop.reports.json import OTHER_ORIGINS
from cbtop.text.statistics import STATISTICS, Of, Statistic
from tests.links import ROOT

PAGES = (ROOT / "docs" / "json.md", ROOT / "docs" / "json-parts.md")
WIDTH = 118
NAMES = {
    Of.BRICK: "brick",
    Of.CATEGORY: "category",
    Of.NODE: "node",
    Of.GPU: "GPU",
    Of.CPU: "CPU",
    Of.PROCESS: "process",
}


def generated(page: str) -> str:
    """Return the page with its generated parts written anew. Raises KeyError for an unknown part."""

    def made(part: re.Match[str]) -> str:
        name = part[1]
        return f"<!-- {name} -->\n{PARTS[name]()}\n<!-- end of {name} -->"

    return re.sub(r"<!-- (.+) -->\n.*?<!-- end of \1 -->", made, page, flags=re.DOTALL)


def _table(of: Iterable[Of]) -> str:
    wanted = set(of)
    rows = [_row(statistic) for statistic in STATISTICS if wanted.intersection(statistic.of)]
    return "\n".join(["", "| key | in | origin | content |", "|---|---|---|---|", *rows, ""])


def _row(statistic: Statistic) -> str:
    owners = ", ".join(NAMES[of] for of in statistic.of)
    return f"| `{statistic.key}` | {owners} | {statistic.origin.value} | {statistic.doc} |"


def _origins() -> str:
    """Return a list in Markdown of the keys that no table of statistics contains.

    The keys are grouped by the origin of their values.
    """
    items = [
        f"- {origin.value}: {', '.join(f'`{key}`' for key in keys)}" for origin, keys in OTHER_ORIGINS.items() if keys
    ]
    wrapped = [textwrap.fill(item, WIDTH, subsequent_indent="  ", break_on_hyphens=False) for item in items]
    return "\n".join(["", *wrapped, ""])


PARTS: dict[str, Callable[[], str]] = {
    "origins of other keys": _origins,
    "statistics of bricks, categories and nodes": lambda: _table([Of.BRICK, Of.CATEGORY, Of.NODE]),
    "statistics of devices and processes": lambda: _table([Of.GPU, Of.CPU, Of.PROCESS]),
}


def main() -> None:
    """Write the pages."""
    for page in PAGES:
        page.write_text(generated(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
