"""Tests of the check of links: the check finds broken links. The pages of this repository have no broken links."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.links import PAGES, broken_links


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    assert list(broken_links(page)) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A `b`, c\n# d\n# d\n")
    page = tmp_path / "page.md"
    page.write_text("[a](other.md#a-b-c) [b](other.md#d-1) [c](none.md) [d](other.md#none) `[e](code.md)`\n")
    assert list(broken_links(page)) == ["none.md: no such file", "other.md#none: no such heading"]
