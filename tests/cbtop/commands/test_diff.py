"""Tests of `cbtop diff`, which compares two runs in every format. The parts of a change add up to the whole."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cbtop.cli import main
from cbtop.exporters.differential import DiffStack, folded
from tests.cbtop.made_runs_on_disk import Recordings
from tests.representatives import first_by_default


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the paths of recordings. The keys name the difference of each recording from `base`."""
    at = tmp_path_factory.mktemp("runs")
    odd = {
        "base": {},
        "same": {"seed": 1},
        "slower": {"seed": 2, "slower": 1.1},
        "renamed": {"seed": 3, "rename": "FeedForward"},
        "other kernel": {"seed": 4, "kernel": "gemv_avx2"},
        "other host": {"host": "elsewhere"},
        "other model": {"model": "another 4L"},
        "other batch": {"tokens": 16},
        "other cache": {"cached_from": 100_000},
        "lossy": {"lose": True},
        "short": {"steps": 15},
    }
    return Recordings(at, odd)


def run(*arguments: object) -> int:
    return main(["diff", *map(str, arguments)])


def test_the_guilty_brick_and_layer_stand_in_a_line(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(runs["base"], runs["slower"]) == 0
    said = capsys.readouterr().out
    (line,) = [line for line in said.splitlines() if line.startswith("slower: ")]
    assert line.startswith("slower: decode: DownProjection in Layer 2 is 1.")
    assert "found 95% of the time: a change of" in said


def test_of_two_runs_of_the_same_nothing_has_changed(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(runs["base"], runs["same"]) == 0
    assert "nothing has changed beyond noise" in capsys.readouterr().out


def test_what_bricks_and_gaps_cost_more_is_what_a_token_takes_longer(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(runs["base"], runs["slower"], "--format", "json") == 0
    document = json.loads(capsys.readouterr().out)
    (part,) = document["parts"]
    balance = part["balance_us"]
    wall = balance["wall"][1] - balance["wall"][0]
    others = sum(balance[name][1] - balance[name][0] for name in balance if name not in ("wall", "off"))
    assert wall == pytest.approx(others, abs=1e-6)
    assert wall == pytest.approx(8, rel=0.3)  # DownProjection takes 80 µs per step, and 10 % longer in the new run
    bricks = [place["delta_us"] for place in part["places"] if place["brick"] and not place["layer"]]
    between = balance["between_bricks"][1] - balance["between_bricks"][0]
    assert sum(bricks) == pytest.approx(balance["bricks"][1] - balance["bricks"][0] + between, abs=1e-6)
    assert bricks == sorted(bricks, reverse=True)
    (rates,) = document["rates"]
    assert rates["tokens_per_sec"][1] == pytest.approx(1e6 / balance["wall"][1], rel=0.01)


@first_by_default(
    ("name", "said", "code"),
    [
        ("other host", "another host: elsewhere", 5),
        ("other model", "another model: another 4L", 5),
        ("other batch", "another batch or phase: decode (", 5),
        ("other cache", "other KV lengths", 5),
        ("lossy", "of the records were lost", 5),
        ("short", "too little in the new run: 15 decode steps of 20 needed", 3),
    ],
    2,
)
def test_what_does_not_compare_says_why(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str], name: str, said: str, code: int
) -> None:
    assert run(runs["base"], runs[name]) == code
    out, err = capsys.readouterr()
    assert said in out
    assert said in err


def test_another_machine_is_compared_where_somebody_asks_for_it(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(runs["base"], runs["other host"], "--anyway") == 0
    assert "host elsewhere, was" in capsys.readouterr().out


def test_a_brick_that_was_renamed_is_compared_with_what_it_was(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(runs["base"], runs["renamed"]) == 0
    said = capsys.readouterr().out
    assert "was DownProjection" in said
    assert "gone" not in said


def test_other_kernels_are_named(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(runs["base"], runs["other kernel"]) == 0
    assert "runs gemv_avx2, was gemv" in capsys.readouterr().out


def test_a_file_of_runs_says_what_its_recording_does(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "base.json"
    assert run(runs["base"], "--save", saved) == 0
    assert run(runs["base"], "--save", saved) == 2  # the file exists
    assert saved.stat().st_size < runs["base"].stat().st_size
    capsys.readouterr()
    said = []
    for base in (saved, runs["base"]):
        assert run(base, runs["slower"], "--format", "json") == 0
        said.append(json.loads(capsys.readouterr().out))
    assert said[0] == said[1]


def test_markdown_holds_tables_and_no_markup_of_names(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(runs["base"], runs["slower"], "--format", "markdown") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("### base.cbtop")
    (brick,) = [line for line in lines if line.startswith("| DownProjection |")]
    assert brick.count(" | ") == 7
    assert lines.count("</details>") == 2


def test_a_tree_has_the_extra_cost_of_each_layer_and_brick_and_adds_up(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(runs["base"], runs["slower"], "--format", "tree") == 0
    lines = capsys.readouterr().out.splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith("a token"))
    depth = [(len(line) - len(line.lstrip())) // 2 for line in lines[begin:]]
    rows = [re.split(r"  +", line.strip()) for line in lines[begin:]]
    names, added = [row[0] for row in rows], [float(row[3]) for row in rows]
    assert names[1:3] == ["Layer 2", "DownProjection"]  # the largest slowdown first
    assert rows[2][4:] == [rows[2][4], "slower"]
    below: dict[int, list[float]] = {}
    for at in reversed(range(len(rows))):
        below.setdefault(depth[at], []).append(added[at])
        if children := below.pop(depth[at] + 1, None):
            assert sum(children) == pytest.approx(added[at], abs=0.01 * len(children))
    assert depth[0] == 0
    # Below the step, the tree has four layers and one entry for the time between steps.
    assert depth.count(1) == 4 + 1
    assert run(runs["base"], runs["other model"], "--format", "tree") == 5
    assert "not comparable: another model" in capsys.readouterr().out


def test_folded_stacks_add_up_to_the_recorded_part_of_a_step(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(runs["base"], runs["slower"], "--format", "folded") == 0
    rows = [line.rsplit(" ", 2) for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows if int(row[2]) - int(row[1]) > 5_000] == ["decode;Layer 2;DownProjection"]
    assert sum(int(before) for _, before, _ in rows) == pytest.approx(4 * 130_000 + 4 * 500, rel=0.01)


def test_speedscope_has_both_runs_and_what_the_same_frames_added_and_saved(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(runs["base"], runs["slower"], "--format", "speedscope") == 0
    document = json.loads(capsys.readouterr().out)
    frames = [frame["name"] for frame in document["shared"]["frames"]]
    assert {"decode", "Layer 2", "DownProjection"} < set(frames)
    took = {}
    for profile in document["profiles"]:
        assert len(profile["samples"]) == len(profile["weights"])
        assert (profile["startValue"], profile["endValue"]) == (0, sum(profile["weights"]))
        named = {tuple(frames[at] for at in sample): ns for sample, ns in zip(*_columns(profile), strict=True)}
        took[profile["name"]] = named
    assert set(took) == {"before", "now", "longer than before", "shorter than before"}
    worst = max(took["longer than before"], key=lambda stack: took["longer than before"][stack])
    assert worst == ("decode", "Layer 2", "DownProjection")
    for stack, before_ns in took["before"].items():
        more, less = took["longer than before"][stack], took["shorter than before"][stack]
        assert (before_ns + more - less, min(more, less)) == (took["now"][stack], 0)


def _columns(profile: dict[str, Any]) -> tuple[list[list[int]], list[int]]:
    return profile["samples"], profile["weights"]


def test_a_name_with_a_semicolon_is_one_frame() -> None:
    assert folded([DiffStack(("decode", "a;b 5"), 1, 2)]) == "decode;a,b 5 1 2"


def test_what_is_no_run_says_what_is_wanted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("missing.cbtop", "missing.cbtop") == 2
    (tmp_path / "odd.json").write_text("{}")
    assert run(tmp_path / "odd.json", tmp_path / "odd.json") == 2
    assert "cbtop diff --save" in capsys.readouterr().err
    assert run("missing.cbtop") == 2
