"""Tests of every exit code and format of `cbtop check` through the command line."""

from __future__ import annotations

import argparse
import io
import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from cbtop.cli import main
from cbtop.commands import check as check_command
from cbtop.commands.check import FORMATS, budgets
from cbtop.comparison.runs import Pace, Run
from cbtop.errors import CbtopError, NoDataError
from cbtop.feeds.run_reader import runs_in
from cbtop.protocol.messages import Quiet
from tests.cbtop.made_runs_on_disk import Recordings, record
from tests.representatives import first_by_default

GUILTY = "DownProjection in Layer 2"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the paths of recordings. The keys name the difference of each recording from `base`."""
    at = tmp_path_factory.mktemp("runs")
    odd = {
        "base": {},
        "second": {"seed": 5},
        "third": {"seed": 6},
        "same": {"seed": 1},
        "slower": {"seed": 2, "slower": 1.1},
        "lossy": {"lose": True},
        "short": {"steps": 15},
        "failed": {"seed": 7, "fails": "finite"},
        "given wrong": {"seed": 7, "fails": "precondition finite(x)"},
        "single": {"steps": 1},
        "stalled": {"seed": 8, "quiet": Quiet(10_000_000_000, in_flight=3, is_watched=True)},
        "gone": {"seed": 8, "quiet": Quiet(5_000_000_000, in_flight=3, is_watched=True), "gone_after_s": 5.0},
        "gone on": {"seed": 8, "quiet": Quiet(5_000_000_000, in_flight=3, is_watched=True), "gone_after_s": -1e-4},
        "suspended": {"seed": 9, "quiet": Quiet(10_000_000_000, is_suspended=True)},
        "idle": {"seed": 10, "quiet": Quiet(10_000_000_000, is_watched=True)},
        "over its budget": {"seed": 3, "budget_us": 39.0},
        "within its budget": {"seed": 4, "budget_us": 45.0},
        "rms_norm": {"kernel": "rms_norm"},
        "slower rms_norm": {"kernel": "rms_norm", "seed": 2, "slower": 3.0},
        "other model": {"model": "another 4L"},
        "other cache": {"cached_from": 4000},
    }
    return Recordings(at, odd)


def check(*arguments: object) -> int:
    return main(["check", *map(str, arguments)])


def three(runs: dict[str, Path]) -> list[object]:
    """Return the options for three baseline runs. Three runs are enough to show how much runs vary."""
    return [word for name in ("base", "second", "third") for word in ("--baseline", runs[name])]


@pytest.mark.parametrize(
    ("new", "thresholds", "code", "said"),
    [
        ("same", (), 0, ""),
        ("slower", (), 5, f"1 of 5 unknown: decode: no brick slower beyond noise: unknown [{GUILTY}]: "),
        ("slower", ("ffn.p50<=1.20x",), 0, ""),
        ("slower", ("ffn@2<=1.05x",), 4, f"broken [{GUILTY}]"),
        ("slower", ("DownProjection.p50<=1.01x",), 4, "[DownProjection, most in Layer 2]"),
        ("same", ("RmsNorm.p99<=12us", "step.p50<=1ms", "unattributed<=1%", "loss==0"), 0, ""),
        ("same", ("RmsNorm.p50<=9us",), 4, "broken [RmsNorm]"),
        ("same", ("decode.tokens_per_sec>=1000", "tokens_per_sec>=0.9x", "Attention.per_token<=1.1x"), 0, ""),
        ("same", ("tokens_per_sec>=5000",), 4, "tokens/s"),
        ("lossy", ("loss==0",), 4, "% were lost"),
        ("lossy", (), 5, "of the records were lost"),
        ("stalled", ("tokens_per_sec>=1000",), 5, "the process is stalled for 10 s in decode → Layer 0 → RmsNorm"),
        ("gone", (), 5, "the process was gone when it had been stalled for 5 s in decode → Layer 0 → RmsNorm"),
        ("gone on", ("tokens_per_sec>=1000",), 0, ""),
        ("suspended", (), 5, "the process is suspended for 10 s"),
        ("idle", ("tokens_per_sec>=1000",), 0, ""),
        ("short", (), 3, "15 decode steps of 20 needed"),
        (
            "failed",
            (),
            4,
            "checks of bricks: broken [RmsNorm]: RmsNorm: finite: the check failed: its result is wrong",
        ),
        ("given wrong", (), 4, "precondition finite(x): the check failed: its input breaks a precondition"),
        ("same", ("prefill.tokens_per_sec>=1",), 2, "there is no phase 'prefill'"),
        ("same", ("RmsNrom<=2x",), 2, "did you mean RmsNorm?"),
        ("same", ("RmsNorm@9<=2x",), 2, "there is no layer '9'"),
    ],
)
def test_the_exit_code_is_that_of_the_worst_and_stderr_names_it(
    runs: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    new: str,
    thresholds: tuple[str, ...],
    code: int,
    said: str,
) -> None:
    assert check(*thresholds, "--baseline", runs["base"], "--new", runs[new]) == code
    assert said in capsys.readouterr().err


def test_every_format_has_the_guilty_brick_and_layer_and_its_reader_takes_it(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    said = said_in_every_format(tmp_path, *three(runs), "--new", runs["slower"], code=4)
    assert [name for name, text in said.items() if GUILTY not in text] == []
    assert said["text"].count("1.097× ± 0.030 (p50") == said["text"].count("+1.4 %") == 1
    document = json.loads(said["json"])
    assert (document["schema"], document["passed"]) == ("cbtop.check/1", False)
    (suite,) = ET.fromstring(said["junit"])
    assert (suite.get("tests"), suite.get("failures")) == ("5", "3")
    results = json.loads(said["sarif"])["runs"][0]["results"]
    rules = [result["ruleId"] for result in results]
    wanted = ("no brick slower", "no longer step", "no fewer tokens/s")
    assert rules == [f"decode: {what} beyond noise" for what in wanted]
    places = {result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for result in results}
    # If there are several baselines, the results point to the file of the first baseline.
    assert places == {Path(str(runs["base"])).as_uri()}
    *errors, last = said["github"].splitlines()
    assert len(errors) == 3
    assert all(error.startswith("::error title=cbtop check%3A decode") for error in errors)
    assert last.startswith("::notice ")


def said_in_every_format(folder: Path, *arguments: object, code: int) -> dict[str, str]:
    """Return the outputs of one check, one for each format."""
    wanted = [word for name in FORMATS for word in ("--format", f"{name}={folder / name}")]
    assert check(*arguments, *wanted) == code
    return {name: (folder / name).read_text() for name in FORMATS}


def test_where_all_holds_every_format_says_so(runs: dict[str, Path], tmp_path: Path) -> None:
    said = said_in_every_format(tmp_path, "--baseline", runs["base"], "--new", runs["same"], code=0)
    assert json.loads(said["json"])["passed"] is True
    assert 'failures="0"' in said["junit"]
    assert json.loads(said["sarif"])["runs"][0]["results"] == []
    assert said["github"].startswith("::notice ")
    assert "all 5 hold" in said["text"]
    assert "all 5 hold" in said["markdown"]


def test_a_budget_on_one_batch_has_its_phase_in_quotes(tmp_path: Path) -> None:
    path = tmp_path / "budget.toml"
    path.write_text('[budgets]\n"decode[batch=6]".step.p50 = "<=9ms"\n"decode[batch=6]".in_steps = ">=61"\n')
    step, in_steps = budgets(path)
    assert (step.names, step.batch, step.figure, step.value) == (("decode", "step"), 6, "p50", 9000.0)
    assert (in_steps.names, in_steps.batch, in_steps.where) == (("decode", "in_steps"), 6, (str(path), 3))


@pytest.mark.parametrize("is_allowed", [False, True])
def test_an_unsure_threshold_passes_in_every_format_only_if_that_is_allowed(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], *, is_allowed: bool
) -> None:
    """The new step takes exactly as long as the baseline's, but the limit is only 0.1 % above.

    Noise leaves the result unsure.
    """
    allow = ["--allow-unsure"] if is_allowed else []
    unsure = ("step.p50<=1.001x", "--baseline", runs["base"], "--new", runs["same"], *allow)
    said = said_in_every_format(tmp_path, *unsure, code=0 if is_allowed else 5)
    document = json.loads(said["json"])
    (verdict,) = document["verdicts"]
    assert verdict["outcome"] == "unsure"
    assert verdict["passes"] is document["passed"] is is_allowed
    (suite,) = ET.fromstring(said["junit"])
    assert (suite.get("tests"), suite.get("failures")) == ("1", "0" if is_allowed else "1")
    assert len(json.loads(said["sarif"])["runs"][0]["results"]) == (0 if is_allowed else 1)
    assert said["github"].startswith("::warning " if is_allowed else "::error ")
    for text in (said["text"], said["markdown"]):
        assert "1 of 1 unsure" in text
        assert ("or --allow-unsure" in text.replace("\\", "")) is not is_allowed
    assert ("use more or longer runs, a wider limit, or --allow-unsure" in capsys.readouterr().err) is not is_allowed


def test_a_budget_of_a_definition_is_a_threshold_that_may_not_be_unsure(tmp_path: Path) -> None:
    """The budget of Attention is 40 µs.

    It takes exactly 40 µs a token in each of four layers, so the result is unsure.
    """
    exact = record(tmp_path / "exact.cbtop", tmp_path / "exact", seed=3, budget_us=40.0)
    for more, code in ((), 5), (("--allow-unsure",), 0):
        assert check("loss==0", "--new", exact, *more) == code


def test_one_run_is_written_in_several_formats(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    into = tmp_path / "check.xml"
    formats = ("--format", "github", "--format", f"junit={into}")
    assert check(*three(runs), "--new", runs["slower"], *formats) == 4
    assert capsys.readouterr().out.startswith("::error ")
    assert GUILTY in into.read_text()
    assert check("--baseline", runs["base"], "--new", runs["same"], "--format", f"junit={tmp_path}") == 2
    with pytest.raises(SystemExit):
        check("--baseline", runs["base"], "--new", runs["same"], "--format", "junti")


def test_a_file_that_cannot_be_written_costs_no_other_format_and_no_verdict(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    into = tmp_path / "check.xml"
    formats = ("--format", f"json={tmp_path}", "--format", "text", "--format", f"junit={into}")
    for new, code, said in (("same", 2, "all 5 hold"), ("slower", 4, GUILTY)):
        into.unlink(missing_ok=True)
        assert check(*three(runs), "--new", runs[new], *formats) == code
        written = capsys.readouterr()
        assert said in written.out
        assert f'failures="{3 * (new == "slower")}"' in into.read_text()
        assert f"cbtop: --format json={tmp_path}: Is a directory" in written.err


def test_formats_in_files_are_written_before_a_closed_pipe_ends_the_command(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ClosedPipe(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", ClosedPipe())
    into = tmp_path / "check.xml"
    parser = argparse.ArgumentParser()
    check_command.add_arguments(parser)
    words = ("--baseline", runs["base"], "--new", runs["same"], "--format", "text", "--format", f"junit={into}")
    options = parser.parse_args([*map(str, words)], argparse.Namespace(command=[]))
    with pytest.raises(BrokenPipeError):
        check_command.run(options)
    assert 'failures="0"' in into.read_text()


@first_by_default(
    ("second", "code", "said"),
    [
        (CbtopError("bench.py ended with exit code 3"), 1, "the second run failed: bench.py ended with exit code 3"),
        (NoDataError("the second run: no process"), 3, "the second run failed: the second run: no process"),
        (OSError(28, "No space left on device"), 1, "No space left on device"),
        (KeyboardInterrupt(), 130, "the second run failed: it was interrupted"),
        ("short", 3, "the second run failed: not judged: too little in the new run: 15 decode steps of 20 needed"),
        ("other model", 5, "the second run failed: not judged: another model"),
    ],
    3,
)
def test_what_the_first_run_showed_is_written_when_the_second_fails(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    second: BaseException | str, code: int, said: str,
) -> None:  # fmt: skip
    turns: list[BaseException | str] = ["slower", second]

    def run_of_command(*_: object) -> Run:
        turn = turns.pop(0)
        if isinstance(turn, BaseException):
            raise turn
        (run,) = runs_in(runs[turn])
        return run

    monkeypatch.setattr(check_command, "run_of_command", run_of_command)
    wanted = [word for name in FORMATS for word in ("--format", f"{name}={tmp_path / name}")]
    assert check(*three(runs), *wanted, "--", "bench") == code
    written = {name: (tmp_path / name).read_text() for name in FORMATS}
    assert [name for name, text in written.items() if GUILTY not in text or said not in text] == []
    document = json.loads(written["json"])
    outcomes = {one["rule"]: one["outcome"] for one in document["verdicts"]}
    assert outcomes["decode: no brick slower beyond noise"] == outcomes["confirmed by a second run"] == "unknown"
    assert (document["passed"], "broken" in outcomes.values()) == (False, False)


def test_budgets_stand_in_toml_and_what_breaks_them_at_their_line(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    budget = tmp_path / "pyproject.toml"
    budget.write_text('[tool.cbtop.budgets]\ndecode.tokens_per_sec = ">=100"\nRmsNorm.p50 = "<=9us"\n')
    assert check("--budget", budget, "--new", runs["same"], "--format", "sarif") == 4
    (result,) = json.loads(capsys.readouterr().out)["runs"][0]["results"]
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == budget.as_uri()
    assert place["region"]["startLine"] == 3
    for text, said in (
        ("tool = 1", "no table [budgets]"),
        ("[budgets]\na = 1", "write it as a text"),
        ("[", "not TOML"),
    ):
        budget.write_text(text)
        assert check("--budget", budget, "--new", runs["same"]) == 2
        assert said in capsys.readouterr().err


def test_of_two_new_runs_none_goes_unjudged(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the second of two new runs is slower. A gate that judges only the first run would pass."""
    kept = []
    for name in ("same", "slower"):
        assert main(["diff", str(runs[name]), "--save", str(tmp_path / f"{name}.json")]) == 0
        kept += json.loads((tmp_path / f"{name}.json").read_text())["runs"]
    both = tmp_path / "both.json"
    both.write_text(json.dumps({"schema": "cbtop.runs/2", "runs": kept}))
    assert check("ffn@2<=43us", "--new", both) == 2
    assert "contains 2 runs; pass 1 run, or at least 3" in capsys.readouterr().err
    assert main(["diff", str(runs["base"]), str(both)]) == 0
    assert f"{both}: of its two runs the first counts" in capsys.readouterr().err


def test_of_a_file_with_both_tables_every_budget_is_judged(runs: dict[str, Path], tmp_path: Path) -> None:
    budget = tmp_path / "pyproject.toml"
    budget.write_text('[budgets]\nRmsNorm.p50 = "<=1s"\n[tool.cbtop.budgets]\nRmsNorm.p50 = "<=9us"\n')
    assert check("--budget", budget, "--new", runs["same"]) == 4


@pytest.mark.slow
def test_what_definitions_say_a_brick_may_cost_is_judged_beside_the_rest(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Attention takes 160 µs a token: 40 µs in each of four layers.

    Its budget is 156 µs in one recording and 180 µs in the other.
    """
    kept = tmp_path / "over.json"
    assert main(["diff", str(runs["over its budget"]), "--save", str(kept)]) == 0
    for new in (runs["over its budget"], kept):
        for thresholds in ((), ("loss==0",)):
            assert check("--baseline", runs["base"], "--new", new, *thresholds) == 4
            assert "Attention.per_token<=156us, its budget: broken [Attention]" in capsys.readouterr().err
    assert check("--baseline", runs["base"], "--new", runs["within its budget"]) == 0
    assert "holds    Attention.per_token<=180us, its budget" in capsys.readouterr().out


@pytest.mark.slow
def test_contracts_of_kernels_say_how_many_times_as_long_a_call_may_take(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    by_contract = ("--budget", "contracts", "--baseline", runs["rms_norm"], "--new", runs["slower rms_norm"])
    assert check(*by_contract, "--format", "json") == 4
    verdicts = json.loads(capsys.readouterr().out)["verdicts"]
    assert {one["rule"]: one["outcome"] for one in verdicts} == {
        "RmsNorm<=1.3x, by contract": "holds",
        "Attention<=1.3x, by contract": "holds",
        "DownProjection<=1.3x, by contract": "broken",
    }
    assert all(one["where"].endswith("contracts/rms_norm.yaml") for one in verdicts)
    assert check("--budget", "contracts", "--new", runs["rms_norm"]) == 2
    assert "there is no baseline" in capsys.readouterr().err
    assert check("--budget", "contracts", "--baseline", runs["base"], "--new", runs["same"]) == 2
    assert (
        "no brick of same.cbtop runs a kernel with a bound in its contract; pass --budget FILE or --threshold"
        in capsys.readouterr().err
    )


def test_three_base_runs_tell_how_runs_scatter_and_one_or_two_break_no_gate(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    bases = three(runs)
    assert check(*bases, "--new", runs["same"], "--format", "json") == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["diff"]["base"]["runs"] == 3
    never = "a slowdown is reported with exit code 5, never 4"
    assert never not in said.err
    # With few baseline runs, exit code 4 is impossible. A warning says so even if nothing is slower.
    for few in (bases[:2], bases[:4]):
        assert check(*few, "--new", runs["same"]) == 0
        err = capsys.readouterr().err
        assert never in err
        assert ("so only the first is used" in err) == (len(few) > 2)
    for absolute in ([], bases[:2]):
        assert check("RmsNorm.p50<=1s", *absolute, "--new", runs["same"]) == 0
        assert never not in capsys.readouterr().err
    assert check(*bases, "--new", runs["slower"]) == 4
    err = capsys.readouterr().err
    assert GUILTY in err
    assert "does not show how runs vary" not in err
    for few in (bases[:2], bases[:4]):
        assert check(*few, "--new", runs["slower"]) == 5
        err = capsys.readouterr().err
        assert GUILTY in err
        assert err.count("fewer than 3 runs of the baseline do not show how runs vary") == 1
        assert never not in err
        # A threshold that the user gives can fail even with few baseline runs.
        assert check(*few, "--new", runs["slower"], "ffn@2<=1.05x") == 4


def test_a_run_that_is_compared_with_itself_passes_no_gate(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "base.json"
    assert main(["diff", str(runs["base"]), "--save", str(kept)]) == 0
    for base in (runs["base"], kept):
        assert check("--baseline", base, "--new", runs["base"]) == 5
        assert "both are the same run, base.cbtop" in capsys.readouterr().err
    assert check("--baseline", kept, "--new", runs["base"], "--anyway") == 0


@pytest.mark.parametrize(
    ("bases", "said"),
    [
        (("base", "second", "base"), "base.cbtop is there twice"),
        (("base", "second", "other model"), "other model.cbtop: another model: another 4L, base.cbtop has made 4L"),
    ],
)
def test_runs_of_other_things_tell_nothing_of_how_runs_scatter(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str], bases: tuple[str, ...], said: str
) -> None:
    given = [word for name in bases for word in ("--baseline", runs[name])]
    assert check(*given, "--new", runs["same"]) == 5
    assert f"runs that are taken together do not compare: {said}" in capsys.readouterr().err


def test_a_base_run_with_another_cache_is_named_and_takes_nothing_from_others(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = "other cache.cbtop has other KV lengths, 4,002 to 4,118 positions cached"
    assert check(*three(runs), "--baseline", runs["other cache"], "--new", runs["slower"]) == 4
    said = capsys.readouterr()
    assert f"in 3 of 4 runs of the baseline: {lengths}\n" in said.out
    assert GUILTY in said.err
    assert check(*three(runs)[:4], "--baseline", runs["other cache"], "--new", runs["slower"]) == 5
    said = capsys.readouterr()
    few = f"in 2 of 3 runs of the baseline: {lengths}; fewer than 3 do not show how runs vary, so"
    # The run that was recorded first counts. Tests that ran before may have made the second recording first.
    assert any(f"{few} {name}.cbtop counts alone" in said.out for name in ("base", "second"))
    assert GUILTY in said.err


def test_a_recording_that_was_cut_off_is_said_also_where_all_holds(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut\n::error::x.cbtop"
    whole = runs["same"].read_bytes()
    cut.write_bytes(whole[: len(whole) // 2])
    assert check("--baseline", runs["base"], "--new", cut) == 0
    out = capsys.readouterr().out
    assert "all 4 hold\n" in out
    assert "error::x.cbtop was never closed" in out
    assert "\n::error::" not in out  # GitHub reads a line with this beginning as an annotation.


@pytest.mark.parametrize(
    ("new", "threshold", "code", "said"),
    [
        ("same", "loss==0", 0, "all 1 hold"),
        ("same", "RmsNorm.p50<=9us", 4, "DownProjection"),  # The report in text also lists the figures of the run.
        ("lossy", "loss==0", 4, "% were lost"),
        ("short", "loss==0", 3, "15 decode steps of 20 needed"),
    ],
)
def test_without_a_baseline_no_line_is_about_one(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str], new: str, threshold: str, code: int, said: str
) -> None:
    for format_ in ("text", "markdown"):
        assert check(threshold, "--new", runs[new], "--format", format_) == code
        written = capsys.readouterr()
        assert written.out.count(said) == 1
        assert re.findall("baseline|before|compar|→|new run", written.out + written.err) == []


def runs_in_one_file(runs: dict[str, Path], tmp_path: Path, *names: str) -> Path:
    kept = []
    for name in names:
        assert main(["diff", str(runs[name]), "--save", str(tmp_path / f"{name}.json")]) == 0
        kept += json.loads((tmp_path / f"{name}.json").read_text())["runs"]
    together = tmp_path / "together.json"
    together.write_text(json.dumps({"schema": "cbtop.runs/2", "runs": kept}))
    return together


@first_by_default(
    ("third", "code", "said"),
    [
        ("third", 4, ""),
        ("short", 4, "in 2 of 3 runs: short.cbtop has 15 of 20 steps needed"),
        ("other cache", 4, "in 2 of 3 runs: other cache.cbtop has other KV lengths, 4,002 to 4,118 positions cached"),
        ("other model", 5, "another model: another 4L, base.cbtop has made 4L"),
        ("lossy", 5, "of the records were lost"),
    ],
)
@first_by_default("format_", FORMATS)
def test_several_runs_without_a_baseline_are_told_of_none(
    runs: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    format_: str,
    third: str,
    code: int,
    said: str,
) -> None:
    new = runs_in_one_file(runs, tmp_path, "base", "second", third)
    capsys.readouterr()
    assert check("RmsNorm.p50<=9us", "--new", new, "--format", format_) == code
    written = capsys.readouterr()
    assert "baseline" not in written.out + written.err
    if format_ in ("text", "json"):
        assert said in written.out
    if format_ == "json":
        assert json.loads(written.out)["diff"]["base"] is None


def test_three_new_runs_need_no_baseline(runs: dict[str, Path], tmp_path: Path) -> None:
    """One file with three different runs is enough, because a fixed threshold needs no baseline."""
    assert check("step<=1s", "--new", runs_in_one_file(runs, tmp_path, "base", "second", "third")) == 0


def test_a_run_of_a_step_is_too_short(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert check("--baseline", runs["base"], "--new", runs["single"]) == 3
    assert "single.cbtop: no process has recorded two steps in it" in capsys.readouterr().err


def test_what_a_check_lacks_is_said(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        ((), "pass either --new"),
        (("--new", runs["same"]), "there is no baseline"),
        (("ffn<=1.1x", "--new", runs["same"]), "there is no baseline"),
        (("--learn", 2, "--baseline", "x.json"), "--learn"),
        (("step<=1x", "--learn", 2, "--baseline", "x.json", "--", "true"), "it takes no thresholds"),
        (("--baseline", "no.json", "--", "true"), "check --baseline no.json --learn 6 -- COMMAND"),
        (("--baseline", runs["base"], "--new", runs["same"], "--", "true"), "pass either --new"),
    ):
        assert check(*arguments) == 2
        assert said in capsys.readouterr().err


COMMAND = """
import time
from cbtop import BrickId, BrickProfiler
profiler = BrickProfiler()
for step in range(60):
    with profiler.step("decode", tokens=1), profiler.layer(0), profiler.brick(BrickId.RMS_NORM, elements=8):
        time.sleep(0.001)
profiler.close("done")
"""


def test_a_command_is_run_to_learn_from_and_run_again_to_be_judged(
    runtime: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    baseline = tmp_path / "learned.json"
    command = ("--", sys.executable, "-c", COMMAND)
    assert check("--baseline", baseline, "--learn", 1, *command) == 0
    assert capfd.readouterr().err == f"recording run 1 …\ncbtop: wrote 1 run into {baseline}\n"
    # The baseline file exists, and --learn does not overwrite it.
    assert check("--baseline", baseline, "--learn", 1, *command) == 2
    assert check("RmsNorm.p50<=50x", "loss==0", "--baseline", baseline, *command) == 0
    assert "all 2 hold" in capfd.readouterr().out
    assert check("tokens_per_sec>=1e9", *command) == 4
    assert "nothing was instrumented" not in capfd.readouterr().err
    for program, code, said in (
        ("raise SystemExit(3)", 1, "-c 'raise SystemExit(3)'\" ended with exit code 3"),
        ("pass", 3, "the new run: no process has recorded"),
    ):
        assert check("--baseline", baseline, "--", sys.executable, "-c", program) == code
        assert said in capfd.readouterr().err


@pytest.mark.slow
def test_a_machine_that_became_slower_between_runs_is_judged_only_if_wanted(
    runtime: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], steady_pace: list[Pace]
) -> None:
    baseline, command = tmp_path / "learned.json", ("--", sys.executable, "-c", COMMAND)
    assert check("--baseline", baseline, "--learn", 1, *command) == 0
    steady_pace[:] = [Pace(1_000.0, 8_000.0)]
    never = "tokens_per_sec>=100x"  # This limit is so far away that the variation of runs cannot explain a failure.
    assert check(never, "--baseline", baseline, *command) == 5
    assert "another pace of the machine itself: the same work in its memory took 8,000 to" in capfd.readouterr().err
    assert check(never, "--anyway", "--baseline", baseline, *command) == 4


@pytest.mark.slow  # The test starts seven processes. test_gate_power.py tests the detectable change itself.
def test_the_smallest_detectable_change_is_shown_if_enough_runs_are_learned(
    runtime: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for runs, is_said in ((3, False), (4, True)):
        baseline = tmp_path / f"{runs}.json"
        assert check("--baseline", baseline, "--learn", runs, "--", sys.executable, "-c", COMMAND) == 0
        said = f"cbtop: decode, run {runs} compared with those before: found 95% of the time: a change of "
        assert (said in capfd.readouterr().err) is is_said


@pytest.mark.slow
def test_a_process_killed_within_the_command_is_reported_next_to_what_holds(
    runtime: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    baseline, command = tmp_path / "learned.json", ("--", sys.executable, "-c", COMMAND)
    killed = COMMAND.replace('profiler.close("done")', "import os; os.kill(os.getpid(), 9)")
    within = ("--", "sh", "-c", f"{shlex.join([sys.executable, '-c', killed])}; true")
    assert check("--baseline", baseline, "--learn", 1, *command) == 0
    for run, is_said in ((command, False), (within, True)):
        assert check("tokens_per_sec>=0.001x", "--baseline", baseline, *run) == 0
        assert ("said no goodbye: it was killed, or left by os._exit or exec" in capfd.readouterr().out) is is_said


@pytest.mark.slow
def test_a_process_that_runs_is_recorded_and_compared(
    runtime: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    endless = COMMAND.replace("range(60)", "range(100_000)")
    with subprocess.Popen([sys.executable, "-c", endless]) as process:
        try:
            until_s = time.monotonic() + 30
            while not list(runtime.glob(f"{process.pid}-*.catalog")) and time.monotonic() < until_s:
                time.sleep(0.05)
            saved = tmp_path / "live.json"
            assert main(["diff", str(process.pid), "--duration", "1", "--save", str(saved)]) == 0
            assert main(["diff", str(saved), str(process.pid), "--duration", "1", "--format", "json"]) == 0
            (part,) = json.loads(capfd.readouterr().out)["parts"]
            assert part["phase"] == "decode"
            assert part["steps"][0] > 20
            assert main(["check", "step.p50<=10s", "--new", str(process.pid), "--duration", "1"]) == 0
            assert main(["check", "step.p50>=1000s", "--new", str(process.pid), "--duration", "1"]) == 4
            assert main(["diff", str(saved), "1", "--duration", "0.5"]) == 3  # pid 1 records nothing
        finally:
            process.kill()
