"""Tests of `cbtop check` on contents of steps (bricks, kernels, copies).

The machine, the length of the runs and their noise do not matter.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from cbtop.cli import main
from cbtop.comparison.contents import Contents
from cbtop.comparison.runs import Run
from cbtop.feeds.run_file import write_runs
from tests.cbtop.comparison.made_contents import ONE, contents, kernel, layers, phase
from tests.cbtop.comparison.made_runs import made_run

COPIED = contents(phase(layers() | {kernel("Layer 1", "elementwise_kernel"): ONE}))
SAID = "Layer 1 › DownProjection: one more kernel elementwise_kernel"


def written(path: Path, made: Contents, **changed: object) -> str:
    """Write a recording of a short run whose steps have the contents `made`. Returns the path of the recording."""
    write_runs(path, [replace(made_run(1, steps=60), parts=(), contents=made, **changed)])  # type: ignore[arg-type]
    return str(path)


@pytest.fixture
def base(tmp_path: Path) -> str:
    return written(tmp_path / "base.json", contents())


def test_short_runs_of_other_machines_are_judged(
    base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = replace(made_run(1, steps=60).surroundings, host="elsewhere", model="renamed", sample_every=4)
    equal = written(tmp_path / "equal.json", contents(), surroundings=elsewhere)
    assert main(["check", "--baseline", base, "graph==base", "decode.launches==6", "--new", equal]) == 0
    assert "all 2 hold" in capsys.readouterr().out
    copied = written(tmp_path / "copied.json", COPIED, surroundings=elsewhere)
    assert main(["check", "--baseline", base, "graph==base", "--new", copied]) == 4
    told = capsys.readouterr()
    assert SAID in told.out
    assert told.err.strip() == f"cbtop: 1 of 1 broken: graph==base: broken [Layer 1 › DownProjection]: decode: {SAID}"


def test_every_format_names_the_brick(base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copied = written(tmp_path / "copied.json", COPIED)
    files = {name: tmp_path / name for name in ("json", "junit", "sarif", "markdown")}
    words = [word for name, file in files.items() for word in ("--format", f"{name}={file}")]
    words += ["--format", "github"]
    assert main(["check", "--baseline", base, "graph==base", "--new", copied, *words]) == 4
    (verdict,) = json.loads(files["json"].read_text())["verdicts"]
    assert (verdict["guilty"], verdict["said"]) == ("Layer 1 › DownProjection", SAID)
    assert ET.parse(files["junit"]).getroot()[0].get("failures") == "1"
    assert capsys.readouterr().out.startswith("::error title=cbtop check%3A graph==base::graph==base: broken")
    for name in ("sarif", "markdown"):
        assert "one more kernel" in files[name].read_text()


def test_a_threshold_may_be_in_toml_with_its_line(
    base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    budgets = tmp_path / "budgets.toml"
    budgets.write_text('[budgets]\ndecode.launches = "==7"\ngraph = "==base"\n')
    words = ["check", "--baseline", base, "--budget", str(budgets), "--new", base, "--format", "github"]
    assert main(words) == 4
    assert f"file={budgets},line=2" in capsys.readouterr().out


def test_what_differs_exactly_counts_even_if_times_cannot_be_compared(
    base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["check", "--baseline", base, "graph==base", "attn.p50<=1.05x", "--new"]
    assert main([*words, written(tmp_path / "copied.json", COPIED)]) == 4
    assert SAID in capsys.readouterr().out
    assert main([*words, written(tmp_path / "equal.json", contents(), key="here:2:1:0")]) == 3  # too few steps


@pytest.mark.slow
def test_beside_thresholds_on_times_all_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bases = tmp_path / "bases.json"
    write_runs(bases, [replace(made_run(seed), contents=contents()) for seed in (1, 2, 3)])
    new = tmp_path / "new.json"
    write_runs(new, [replace(made_run(4), contents=COPIED)])
    assert main(["check", "--baseline", str(bases), "launches==base", "loss==0", "--new", str(new)]) == 4
    out = capsys.readouterr().out
    assert "1 of 2 broken" in out
    assert SAID in out


def test_unknown_numbers_and_lost_records_are_exit_code_5(base: str, tmp_path: Path) -> None:
    assert main(["check", "transfers.h2d==0", "--new", base]) == 5
    assert main(["check", "launches==6", "--new", base]) == 0
    assert main(["check", "launches==6", "--new", written(tmp_path / "lost.json", contents(), lost=1)]) == 5


def test_base_without_a_baseline_is_wrong_usage(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "graph==base", "--new", base]) == 2
    assert "pass --baseline BASE" in capsys.readouterr().err


def test_base_runs_that_differ_among_themselves_prove_nothing(tmp_path: Path) -> None:
    bases = tmp_path / "bases.json"
    run: Run = made_run(1, steps=60)
    write_runs(bases, [replace(run, key=f"here:{n}", contents=one) for n, one in enumerate((contents(), COPIED))])
    new = written(tmp_path / "new.json", contents())
    assert main(["check", "--baseline", str(bases), "graph==base", "--new", new]) == 5
