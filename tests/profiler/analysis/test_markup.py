"""Tables and bars are escaped, and a bar shows each share."""

from __future__ import annotations

from cbtop.profiler.analysis.markup import COLORS, plain, share_bar, table_html


def test_text_is_escaped_and_control_characters_are_replaced() -> None:
    assert plain("<b>\x1b&\n") == "&lt;b&gt;\N{REPLACEMENT CHARACTER}&amp;\n"


def test_a_table_has_its_head_and_its_numbers_to_the_right() -> None:
    table = table_html([("brick", "µs"), ("<a>", "7")])
    assert table.count("<tr>") == 2
    assert "<th style='text-align:left'>brick</th><th style='text-align:right'>µs</th>" in table
    assert "<td style='text-align:left'>&lt;a&gt;</td><td style='text-align:right'>7</td>" in table


def test_a_bar_has_a_block_for_each_share_above_zero() -> None:
    bar = share_bar([("FFN", 75.0), ("nothing", 0.0), ("gap", 25.0)])
    assert f'<rect x="0.0" y="0" width="750.0" height="26" fill="{COLORS["FFN"]}"/>' in bar
    assert 'x="750.0" y="0" width="250.0"' in bar
    assert "nothing" not in bar
    assert share_bar([("nothing", 0.0)]) == ""
