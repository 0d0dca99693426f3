"""Tests of the count of phrases that are hard to read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import words

HARD = "Of each record, in which node it lies, for how long one ran there. Where nobody asks, that is all."
PLAIN = "Return the node of each record. If no viewer asks, do nothing."


@pytest.mark.parametrize(("text", "count"), [(HARD, 5), (PLAIN, 0)])
def test_hard_phrases_are_counted_in_docstrings_and_comments(tmp_path: Path, text: str, count: int) -> None:
    (tmp_path / "a.py").write_text(f'"""{text}"""\nx = "{text}"  # {PLAIN}\n')
    assert sum(map(words.phrases_of, words.texts_of(tmp_path / "a.py"))) == count


def test_a_page_is_read_without_its_examples(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(f"{PLAIN}\n\n```\n{HARD}\n```\n")
    assert words.rate_of([str(tmp_path / "a.md")]) == 0


def test_more_than_the_limit_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.md").write_text(HARD)
    for limit, code in ((1000.0, 0), (1.0, 1)):
        monkeypatch.setattr(words, "LIMITS", {(str(tmp_path / "a.md"),): limit})
        assert words.main([]) == code
