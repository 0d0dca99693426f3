"""`cbtop verify`: text, JSON and JUnit hold the same, and what fails has an exit code of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from cbtop.cli import main
from cbtop.compute import verification
from cbtop.compute.demo_model import TINY, write_model
from cbtop.compute.kernels.sampling import GREEDY
from cbtop.compute.verification import Variant


def test_what_one_brick_runs_is_said_in_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "Activation"]) == 0
    text = capsys.readouterr().out
    assert "✓  swiglu" in text
    assert "1 of 1 pass; 15 faults were planted" in text
    assert main(["verify", "Activation", "--format", "json"]) == 0
    (kernel,) = json.loads(capsys.readouterr().out)["kernels"]
    assert (kernel["kernel"], kernel["bricks"], kernel["passed"]) == ("swiglu", ["Activation"], True)
    assert (kernel["planted"], kernel["missed"]) == (15, [])
    assert main(["verify", "Activation", "--format", "junit"]) == 0
    (suite,) = ET.fromstring(capsys.readouterr().out)
    assert (suite.get("tests"), suite.get("failures"), len(suite)) == ("1", "0", 1)


def test_a_kernel_that_is_wrong_is_named_with_exit_code_4(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(logits: Any, choice: Any) -> None:
        GREEDY.implementation(logits, choice)
        choice += 1

    def planted() -> Iterator[Variant]:
        yield Variant(replace(GREEDY, implementation=wrong))

    monkeypatch.setattr(verification, "variants", planted)
    assert main(["verify"]) == 4
    said = capsys.readouterr()
    assert "✗  greedy" in said.out
    assert "fails equals reference at size 1, equals reference at size 7" in said.out
    assert said.err.endswith("cbtop: greedy (as it is) failed\n")
    assert main(["verify", "--format", "junit"]) == 4
    (suite,) = ET.fromstring(capsys.readouterr().out)
    assert suite.get("failures") == "1"
    assert "equals reference at size 32" in (suite[0][0].get("message") or "")


def test_a_brick_that_is_not_there_is_told_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "DownProj"]) == 2
    assert "'DownProj' is no brick; did you mean DownProjection? there are" in capsys.readouterr().err


def test_the_bricks_of_a_model_are_checked_in_both_kinds_of_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tiny.gguf"
    write_model(path, TINY, lambda *_: None)
    assert main(["verify", "Sampling", "--model", str(path)]) == 0
    assert "brick of the model" in capsys.readouterr().out
    assert main(["verify", "Sampling", "--model", str(tmp_path / "none.gguf")]) == 2
    assert "none.gguf does not exist" in capsys.readouterr().err
