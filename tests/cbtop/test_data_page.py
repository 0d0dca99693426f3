"""The code in docs/data.md runs as printed. Its queries give the same answers in polars and in DuckDB."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import cbtop
from tests.integration.hosts import cbtop as command
from tests.integration.hosts import cbtop_apart

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/data.md").read_text(encoding="utf-8")
# In this recording no two calls take the same time, so the order of sorted rows is unambiguous.
RECORDING = ROOT / "tests/cbtop/imperfect.cbtop"
INSTALL = "pip install pyarrow polars duckdb"


def snippets(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def rounded(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [tuple(pytest.approx(one, rel=1e-6) if isinstance(one, float) else one for one in row) for row in rows]


def test_the_page_has_ten_questions_with_two_answers_each() -> None:
    sections = re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]
    assert [section.split(".")[0] for section in sections] == [str(number) for number in range(1, 11)]
    assert [len(snippets(section.split("\n## ")[0])) for section in sections] == [2] * 10


def test_the_page_describes_every_table_and_column() -> None:
    cells = re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE)
    described = {name for cell in cells for name in re.findall(r"`(.*?)`", cell)}
    with cbtop.read(RECORDING) as run:
        tables = ("steps", "layers", "bricks", "kernels", "calls", "requests", "verdicts")
        columns = {column for table in tables for column in getattr(run, table)().columns}
    assert described == {f"{table}()" for table in tables} | columns


def test_polars_and_duckdb_give_the_same_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("pyarrow", "polars", "duckdb"):
        pytest.importorskip(package, reason=f"{package} is not installed: {INSTALL}")
    (tmp_path / "run.cbtop").symlink_to(RECORDING)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    before, questions = PAGE.split("## Ten questions")
    first, *sections = re.split(r"^### ", questions, flags=re.MULTILINE)
    for snippet in snippets(before) + snippets(first):
        exec(snippet, names)
    for section in sections:
        polars, sql = snippets(section.split("\n## ")[0])
        exec(polars, names)
        rows = names["answer"].rows()
        exec(sql, names)
        assert names["answer"].fetchall() == rounded(rows), section.split("\n")[0]
        assert rows, section


NESTED = """
from cbtop import BrickId, BrickProfiler

profiler = BrickProfiler()
for _ in range(60):
    with profiler.step("decode", tokens=1), profiler.layer(0), profiler.brick("Outer"):
        sum(range(20_000))
        with profiler.brick("Inner"):
            sum(range(50_000))
"""


def test_the_shares_of_bricks_are_those_of_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("pyarrow", "polars", "duckdb"):
        pytest.importorskip(package, reason=f"{package} is not installed: {INSTALL}")
    monkeypatch.chdir(tmp_path)
    cbtop_apart("run", "--quiet", "--record", "run.cbtop", "--", sys.executable, "-c", NESTED)
    report = json.loads(command("replay", "run.cbtop", "--headless", "--window", "all", "--format", "json").stdout)
    names: dict[str, Any] = {}
    before, questions = PAGE.split("## Ten questions")
    fourth = questions.split("### 4.")[1].split("### 5.")[0]
    for snippet in [*snippets(before), *snippets(questions)[:1], snippets(fourth)[0]]:
        exec(snippet, names)
    expected = [(brick["name"], brick["percent"] / 100) for brick in report["sources"][0]["bricks"]]
    assert names["answer"].rows() == rounded(expected)
    assert [name for name, _ in expected] == ["Inner", "Outer"]
