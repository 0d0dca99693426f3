"""Tests of the formats of `cbtop check`: every format reports the result that the exit code has."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from cbtop.cli import main
from cbtop.commands.check import FORMATS
from cbtop.protocol.messages import Quiet
from tests.cbtop.made_runs_on_disk import Recordings
from tests.representatives import first_by_default

STALLED = Quiet(10_000_000_000, in_flight=3, is_watched=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the paths of recordings. The keys name the difference of each recording from `base`."""
    odd = {
        "base": {},
        "same": {"seed": 1},
        "stalled": {"seed": 8, "quiet": STALLED},
        "short": {"steps": 15},
        "single": {"steps": 1},
        "other model": {"model": "another 4L"},
        "failed": {"seed": 7, "fails": "finite"},
    }
    return Recordings(tmp_path_factory.mktemp("runs"), odd)


@first_by_default(
    ("base", "new", "thresholds", "code"),
    [
        ("base", "same", (), 0),
        ("base", "same", ("step.p50<=50ms", "graph==base"), 0),
        ("base", "same", ("step.p50<=1.001x", "--allow-unsure"), 0),
        ("base", "same", ("step.p50<=1us", "step.p50<=50ms"), 4),
        ("base", "failed", (), 4),
        ("base", "same", ("step.p50<=1.001x",), 5),
        ("base", "same", ("bricks==1", "step.p50<=50ms"), 4),
        ("base", "other model", (), 5),
        ("base", "stalled", ("step.p50<=50ms",), 5),
        ("base", "stalled", ("step.p50<=1us",), 5),
        ("base", "stalled", ("bricks==1",), 5),
        ("stalled", "same", ("step.p50<=9x",), 5),
        ("base", "short", (), 3),
        ("base", "single", (), 3),
    ],
    6,
)
def test_every_format_agrees_with_the_exit_code(
    runs: dict[str, Path], tmp_path: Path, base: str, new: str, thresholds: tuple[str, ...], code: int
) -> None:
    wanted = [word for name in FORMATS for word in ("--format", f"{name}={tmp_path / name}")]
    for name in FORMATS:
        (tmp_path / name).write_text("of an earlier check")
    words = ["check", *thresholds, "--baseline", runs[base], "--new", runs[new], *wanted]
    assert main([str(word) for word in words]) == code
    text = {name: (tmp_path / name).read_text() for name in FORMATS}
    document = json.loads(text["json"])
    outcomes = {one["outcome"] for one in document["verdicts"]}
    failures = sum(int(suite.get("failures", "")) for suite in ET.fromstring(text["junit"]))
    has_failed = [
        not document["passed"],
        not all(one["passes"] for one in document["verdicts"]),
        failures > 0,
        bool(json.loads(text["sarif"])["runs"][0]["results"]),
        "::error " in text["github"],
    ]
    assert has_failed == [code != 0] * len(has_failed)
    assert ("broken" in outcomes) is (code == 4)
    worst = "broken" if code == 4 else "un" if code else ""
    for name in ("text", "markdown"):
        assert f" {worst}" in text[name]
        assert not code or "hold\n" not in text[name].replace("*", "")


@pytest.mark.parametrize("is_allowed", [True, False])
def test_an_unsure_threshold_is_never_a_silent_pass(
    runs: dict[str, Path], tmp_path: Path, *, is_allowed: bool
) -> None:
    wanted = [word for name in ("text", "junit") for word in ("--format", f"{name}={tmp_path / name}")]
    allow = ["--allow-unsure"] if is_allowed else []
    words = ["check", "step.p50<=1.001x", "--baseline", runs["base"], "--new", runs["same"], *wanted, *allow]
    assert main([str(word) for word in words]) == (0 if is_allowed else 5)
    ((case,),) = ET.fromstring((tmp_path / "junit").read_text())
    (result,) = case
    assert result.tag == ("system-out" if is_allowed else "failure")
    assert "step.p50<=1.001x: unsure: " in (result.text or result.get("message", ""))
    assert f"unsure, {'passes' if is_allowed else 'fails'}  step.p50" in (tmp_path / "text").read_text()
