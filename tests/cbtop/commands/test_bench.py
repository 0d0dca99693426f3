"""Tests of `cbtop bench`, which takes the arguments of llama-bench and prints its table. They run a tiny model."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbtop.cli import main
from cbtop.compute.decoder.decoder import Decoder
from cbtop.compute.demo_model import TINY, write_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_model(path, TINY, lambda *_: None)
    return str(path)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that records each forward pass of the decoder: its position and its number of tokens."""
    found: list[int] = []
    forward = Decoder._forward

    def counted(self: Decoder, tokens: Any, *arguments: Any) -> int:
        found.append(self.position * 1000 + len(tokens))
        return forward(self, tokens, *arguments)

    monkeypatch.setattr(Decoder, "_forward", counted)
    return found


def test_each_test_runs_from_an_empty_cache_once_more_than_it_is_measured(
    tiny: str, passes: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", tiny, "-p", "8,20", "-n", "3", "-r", "2", "-t", "1", "-o", "json"]) == 0
    assert passes == [8] * 3 + [20] * 3 + [1, 1001, 2001] * 3
    found = json.loads(capsys.readouterr().out)
    assert [(one["n_prompt"], one["n_gen"], len(one["samples_ns"])) for one in found] == [
        (8, 0, 2),
        (20, 0, 2),
        (0, 3, 2),
    ]
    for one in found:
        tokens = one["n_prompt"] or one["n_gen"]
        assert one["samples_ts"] == pytest.approx([1e9 * tokens / ns for ns in one["samples_ns"]])
        assert one["avg_ts"] == pytest.approx(sum(one["samples_ts"]) / 2)
        assert (one["n_threads"], one["type_k"], one["model_n_params"]) == (1, "f16", found[0]["model_n_params"])


def test_what_computes_no_numbers_is_no_result(
    tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = Decoder._forward

    def spoiled(self: Decoder, *arguments: Any) -> int:
        token = forward(self, *arguments)
        self.logits[7] = np.nan
        return token

    monkeypatch.setattr(Decoder, "_forward", spoiled)
    assert main(["bench", tiny, "-p", "8", "-n", "0", "-r", "1", "-t", "1"]) == 2
    said = capsys.readouterr()
    assert "pp8" not in said.out
    assert "a logit is NaN or infinite; " in said.err


def test_the_table_has_a_row_for_each_test_and_so_has_csv(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["bench", tiny, "-p", "8", "-n", "2", "-r", "1", "-t", "2,1"]
    assert main(asked) == 0
    head, dashes, *rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()]
    assert [cell.strip() for cell in head] == ["model", "size", "params", "backend", "threads", "test", "t/s"]
    assert {len(cell) for cell in head} >= {len(cell) for cell in dashes}
    assert [(row[4].strip(), row[5].strip()) for row in rows] == [
        ("2", "pp8"),
        ("2", "tg2"),
        ("1", "pp8"),
        ("1", "tg2"),
    ]
    assert all(row[6].endswith("± n/a ") for row in rows)  # one repetition has no deviation
    assert main([*asked, "-o", "csv"]) == 0
    read = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["n_threads"], row["n_prompt"], row["n_gen"]) for row in read] == [
        ("2", "8", "0"), ("2", "0", "2"), ("1", "8", "0"), ("1", "0", "2"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["-p", "100"], "pp100 does not fit the model's context of 64 tokens"),
        (["-p", "0", "-n", "0"], "-p 0 -n 0 leaves nothing to measure"),
        (["-p", "8", "-t", "4000"], "4000 threads: this process may use"),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_is(
    tiny: str, arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", tiny, "-n", "1", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert complaint in said.err


@pytest.mark.parametrize("arguments", [["-p", "x"], ["-p", "-1"], ["-t", "0"], ["-t", ""]])
def test_a_list_that_is_none_is_a_usage_error(tiny: str, arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", tiny, *arguments])


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(tmp_path / "none.gguf")]) == 2
    assert "none.gguf does not exist" in capsys.readouterr().err


def test_threads_of_a_gpu_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--backend", "cuda", "-t", "2"]) == 2
    assert "-t is of a CPU: leave it away, or take --backend cpu" in capsys.readouterr().err


def test_without_cupy_a_gpu_is_refused_in_one_line_that_says_what_to_install(
    tiny: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert main(["bench", tiny, "--backend", "cuda"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("pip install 'cbtop[cuda]'")
