"""docs/json.md has what the table of statistics says."""

from __future__ import annotations

import os
import re

from tests.json_page import PAGE, PARTS, generated, main


def test_the_page_on_json_is_what_its_generator_writes() -> None:
    if os.environ.get("CBTOP_UPDATE_GOLDENS") == "1":
        main()
    page = PAGE.read_text(encoding="utf-8")
    assert generated(page) == page, "run: python -m tests.json_page"


def test_the_page_has_every_generated_part_once() -> None:
    assert re.findall(r"<!-- (?!end of )(.+) -->", PAGE.read_text(encoding="utf-8")) == list(PARTS)


def test_a_changed_part_is_written_anew_and_the_rest_is_left_alone() -> None:
    name = next(iter(PARTS))
    text = f"before\n<!-- {name} -->\nold\n<!-- end of {name} -->\nafter"
    assert generated(text) == f"before\n<!-- {name} -->\n{PARTS[name]()}\n<!-- end of {name} -->\nafter"
