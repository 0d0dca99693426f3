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


def answers(recording: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[int, Any], dict[str, Any]]:
    """Return the rows that each question has in polars, and all names after the block in pandas."""
    for package in ("pandas", "pyarrow", "polars", "duckdb"):
        pytest.importorskip(package, reason=f"{package} is not installed: {INSTALL} pandas")
    if recording != folder / "run.cbtop":
        (folder / "run.cbtop").symlink_to(recording)
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    before, questions = PAGE.split("## Ten questions")
    questions, pandas = questions.split("## In pandas")
    first, *sections = re.split(r"^### ", questions, flags=re.MULTILINE)
    for snippet in snippets(before) + snippets(first):
        exec(snippet, names)
    found = {}
    for number, section in enumerate(sections, 1):
        exec(snippets(section)[0].replace(".head(5)", ""), names)
        found[number] = names["answer"].rows()
    for snippet in snippets(pandas.split("\n## ")[0]):
        exec(snippet, names)
    return found, names


NESTED = """
import threading

from cbtop import BrickId, BrickProfiler

profiler = BrickProfiler()


def expert(place):
    with profiler.adopt(place), profiler.brick("Expert"):
        sum(range(20_000))


for number in range(60):
    phase, tokens = ("prefill", 5) if number % 20 == 0 else ("decode", 1)
    with profiler.step(phase, tokens=tokens):
        sum(range(10_000))
        for layer in range(3):
            with profiler.layer(layer), profiler.brick("Outer"):
                sum(range(20_000))
                with profiler.brick("Inner"):
                    sum(range(50_000))
        work = threading.Thread(target=expert, args=(profiler.place(),))
        work.start()
        work.join()
    if number > 55:  # an evaluation whose tokens are not known
        with profiler.step("encode"), profiler.brick("Inner"):
            sum(range(1_000))
"""


def test_the_answers_are_the_numbers_of_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run.cbtop"
    cbtop_apart("run", "--quiet", "--record", str(run), "--", sys.executable, "-c", NESTED)
    text = command("replay", str(run), "--headless", "--phase", "decode", "--format", "json").stdout
    (source,) = json.loads(text)["sources"]
    found, _ = answers(run, tmp_path, monkeypatch)
    phases = sorted(source["phases"], key=lambda one: one["phase"])
    percentiles = [(one["wall_us"]["p50"], one["wall_us"]["p99"]) for one in phases]
    assert [row[:2] for row in found[1]] == [(one["phase"], one["count"]) for one in phases]
    assert [row[2:] for row in found[1]] == [pytest.approx(pair, rel=0.01) for pair in percentiles]
    rates = ("phase", "tokens_per_sec", "tokens_per_sec_in_steps")
    assert found[2] == rounded([tuple(one[key] for key in rates) for one in phases if one["tokens"]])
    assert [row[0] for row in found[2]] == ["decode", "prefill"]
    shares = dict(found[4])
    assert sum(shares.values()) == pytest.approx(1)
    books, whole = source["books"], source["books"]["wall_us"]
    for brick in source["bricks"]:
        if brick["name"] == "Expert":  # its time is not part of the steps
            assert not brick["percent"]
            continue
        assert shares.pop(brick["name"]) == pytest.approx(brick["percent"] / 100, rel=1e-6)
    gaps = sum(gap["us"] for gap in books["gaps"])
    assert shares.pop("layers, no brick") == pytest.approx(gaps / whole, rel=1e-6)
    assert shares == {"steps, no layer": pytest.approx(books["unattributed_us"] / whole, rel=1e-6)}
    by_layer = {f"Layer {row[1]}": row[2] for row in found[5]}
    for layer in source["layer_times"]["layers"]:
        assert by_layer[layer["name"]] == pytest.approx(layer["p50_us"], rel=0.01)


def test_pandas_gives_the_same_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, names = answers(RECORDING, tmp_path, monkeypatch)
    assert {phase: tuple(names["times"][phase]) for phase in names["times"].index} == {
        phase: pytest.approx((p50, p99)) for phase, _, p50, p99 in found[1]
    }
    for phase, _, in_steps in found[2]:
        assert names["in_steps"][phase] == pytest.approx(in_steps)
    assert [tuple(row) for row in names["slowest_df"].itertuples(index=False)] == rounded(found[3][:5])
    shares = {name: share for name, share in found[4] if "no " not in name}
    assert dict(names["shares"]) == pytest.approx(shares)
    assert sorted(names["to_median"])[-3:] == pytest.approx(sorted(row[3] for row in found[5]))
    assert names["pauses_s"].sum() == pytest.approx(found[9][0][0])
    assert list(names["verdicts_df"].sentence) == [row[2] for row in found[10]]
    assert len(names["of_step"]) == len(names["outer"])
    by_layer, outer_us = names["brick_by_layer"], names["outer"].duration_us.sum()
    assert by_layer.sum().sum() == pytest.approx(outer_us)
    assert names["each_second"]["count"].sum() == len(names["decode_df"])
    assert names["growth"].between(-1, 1).any()
