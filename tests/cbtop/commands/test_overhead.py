"""Tests of `cbtop overhead`.

It reports medians with intervals, whether a median is below noise, and what was measured.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.cli import main
from cbtop.commands import overhead
from cbtop.compute.decoder import decoder as decoders
from cbtop.compute.decoder.base import Model
from cbtop.compute.decoder.decoder import Decoder
from cbtop.compute.demo_model import TINY, write_model
from cbtop.compute.jit.cpu import TIER
from cbtop.compute.settings import STATIC_CROSSOVERS, with_crossovers

_step_us = overhead._step_us
SAID = "measured of the recorder in Python"


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "_brick_ns", lambda *_: {overhead.FLOOR: [50.0], overhead.OFF: [10.0]})
    monkeypatch.setattr(overhead, "_step_us", lambda *_: {overhead.OFF: [100.0]})


OFF = [100.0 + at for at in range(15)]


def test_a_ratio_is_below_noise_only_if_its_interval_includes_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = {
        overhead.OFF: OFF,
        # ratios to OFF from 0.93 to 1.07, with the median 1
        "host clock": [one * (1 + (at - 7) / 100) for at, one in enumerate(OFF)],
        "immediate": [one * (1.05 + at / 1000) for at, one in enumerate(OFF)],
    }
    bricks = {overhead.FLOOR: [50.0] * 15, **dict.fromkeys(turns, [55.0] * 15)}
    monkeypatch.setattr(overhead, "_brick_ns", lambda *_: bricks)
    monkeypatch.setattr(overhead, "_step_us", lambda *_: turns)
    assert main(["overhead"]) == 0
    rows = {line.split("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert rows["host clock"].endswith("1.000 (0.960–1.040) below noise")
    assert rows["immediate"].endswith("1.057 (1.053–1.061)")
    assert rows["immediate"].count("1.10 (1.10–1.10)") == 1
    assert rows[overhead.FLOOR].split()[-3:] == ["–", "–", "–"]
    assert main(["overhead", "--json"]) == 0
    costs = {cost["mode"]: cost for cost in json.loads(capsys.readouterr().out)["costs"]}
    assert costs["host clock"]["step_ratio_below_noise"] is True
    assert costs["immediate"]["step_ratio_below_noise"] is False
    assert costs["immediate"]["step_ratio"]["low"] == pytest.approx(1.053)
    assert costs[overhead.OFF]["step_ratio"] is costs[overhead.OFF]["step_ratio_below_noise"] is None


def test_a_step_is_one_of_a_model_as_the_demo_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, made = tmp_path / "tiny.gguf", list[Model]()
    write_model(path, TINY, lambda *_: None)

    def decoder(model: Model, *arguments: Any, **named: Any) -> Decoder:
        made.append(model)
        return Decoder(model, *arguments, **named)

    monkeypatch.setattr(decoders, "Decoder", decoder)
    monkeypatch.setattr(overhead, "_step_us", _step_us)
    monkeypatch.setattr(overhead, "TURNS", 1)
    monkeypatch.setattr("cbtop.protocol.roofs.cache_dir", lambda: tmp_path)  # this folder has no crossovers
    with with_crossovers(STATIC_CROSSOVERS):
        assert main(["overhead", "--model", str(path)]) == 0
    assert {model.lm_head.takes_int8 for model in made} == {TIER != "generic"}


def test_of_too_few_rounds_there_is_no_interval(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["overhead"]) == 0
    assert "10 (n/a)" in capsys.readouterr().out


@given(st.lists(st.floats(1, 1000), min_size=1, max_size=60))
def test_an_interval_holds_its_median(values: list[float]) -> None:
    found = overhead._measured(values)
    assert (found.low is None) == (found.high is None) == (len(values) < 6)
    if found.low is not None and found.high is not None:
        assert min(values) <= found.low <= found.median <= found.high <= max(values)


def test_without_the_compiled_part_it_says_so_once_with_the_way_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CBTOP_PURE_PYTHON", raising=False)
    monkeypatch.setitem(sys.modules, "cbtop.profiler._hot_path", None)
    monkeypatch.delattr("cbtop.profiler._hot_path", raising=False)
    assert main(["overhead"]) == 0
    said = capsys.readouterr().out
    assert said.count(SAID) == 1
    assert "install a C compiler" in said


def test_a_recorder_in_python_that_was_asked_for_says_that(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CBTOP_PURE_PYTHON", "1")
    assert main(["overhead"]) == 0
    assert "CBTOP_PURE_PYTHON is set" in capsys.readouterr().out
