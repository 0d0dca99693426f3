"""Tests of `cbtop bench --paired`, which runs two settings, revisions or commands in turns and compares them."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cbtop.cli import main
from cbtop.compute.decoder.decoder import Decoder
from cbtop.compute.demo_model import TINY, write_model
from cbtop.compute.kernels.kv_caches import CACHE_TYPES
from tests.representatives import first_by_default

# A program that prints JSON as `cbtop bench -o json` does. Its arguments are the times in ns.
PRINTS = """\
import json, sys
print(json.dumps([{"n_prompt": 8, "n_gen": 0, "samples_ns": [int(one) for one in sys.argv[1:]]}]))
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_model(path, TINY, lambda *_: None)
    return str(path)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list that gets (bytes of a number in the KV cache, number of tokens) for each forward pass."""
    found: list[tuple[int, int]] = []
    forward = Decoder._forward

    def counted(self: Decoder, tokens: Any, *arguments: Any) -> int:
        found.append((self._layers[0].k_cache.itemsize, len(tokens)))
        return forward(self, tokens, *arguments)

    monkeypatch.setattr(Decoder, "_forward", counted)
    return found


def test_settings_take_turns_in_one_process_after_each_was_warmed_up(
    tiny: str, passes: list[tuple[int, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["bench", tiny, "-p", "8", "-n", "2", "-r", "2", "-t", "1", "-o", "json"]
    assert main([*asked, "--paired", "set:", "--kv-cache f32"]) == 0
    a, b = (CACHE_TYPES[each]().itemsize for each in ("f16", "f32"))
    warm = [(a, 8), (b, 8), *[(a, 1)] * 2, *[(b, 1)] * 2]
    back = [(b, 8), (a, 8), *[(b, 1)] * 2, *[(a, 1)] * 2]
    assert passes == [*warm, *warm, *back]
    found = json.loads(capsys.readouterr().out)
    assert [one["test"] for one in found] == ["pp8", "tg2"]
    for one in found:
        assert (one["kind"], one["a_is"], one["b_is"]) == ("set", "--threads 1", "--threads 1 --kv-cache f32")
        assert (one["rounds"], one["rounds_asked"], one["model_filename"]) == (2, 2, tiny)
        assert one["ratio"] == pytest.approx(sum(one["a_samples_ns"]) / sum(one["b_samples_ns"]))
        # Two rounds are too few to compute an interval.
        assert one["ratio_low"] is one["ratio_high"] is one["is_beyond_noise"] is None
        assert one["a_avg_ts"] == pytest.approx(sum(1e9 * one["n_tokens"] / each for each in one["a_samples_ns"]) / 2)


def test_the_table_has_both_sides_the_ratio_its_interval_and_whether_noise(
    tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["bench", tiny, "-p", "8", "-n", "2", "-r", "5", "--paired", "set:-t 1", "set:--exact -t 2"]
    assert main(asked) == 0
    a, b, _, head, _, *rows, _, foot = capsys.readouterr().out.splitlines()
    assert (a, b) == ("A: --threads 1  ", "B: --threads 2 --exact")
    titles = ["test", "A", "B", "", "B/A", "99 % interval", ""]
    assert [cell.strip() for cell in head.split("|")[1:-1]] == titles
    for row, name in zip(rows, ("pp8", "tg2"), strict=True):
        cells = [cell.strip() for cell in row.split("|")[1:-1]]
        assert cells[0] == name
        low, high = (float(each) for each in cells[5].split(" to "))
        assert low <= float(cells[4]) <= high
        assert cells[6] == ("noise" if low <= 1 <= high else "B is faster" if low > 1 else "B is slower")
    assert foot.startswith("5 rounds, in turns A B, B A")
    assert main([*asked, "-o", "csv"]) == 0
    read = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["test"], row["b_is"]) for row in read] == [
        ("pp8", "--threads 2 --exact"), ("tg2", "--threads 2 --exact"),
    ]  # fmt: skip


@pytest.mark.slow
def test_commands_that_print_bench_json_are_compared_by_their_own_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prints.py").write_text(PRINTS)
    run = f"run:python3 {tmp_path}/prints.py"
    assert main(["bench", "--paired", f"{run} 100 300", f"{run} 100", "-r", "6", "-o", "json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["test"], found["n_tokens"], found["ratio"]) == ("pp8", 8, 2.0)
    assert found["a_samples_ns"] == [200] * 6
    assert found["is_beyond_noise"] is True


def test_other_commands_are_timed_as_a_whole_and_count_no_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["bench", "--paired", "run:echo 7", "run:sleep 0.1", "-r", "2"]
    assert main([*asked, "-o", "json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["test"], found["n_tokens"], found["a_avg_ts"], found["model_filename"]) == (
        "whole",
        None,
        None,
        None,
    )
    assert min(found["b_samples_ns"]) > 1e8
    assert main(asked) == 0
    row = capsys.readouterr().out.splitlines()[5]
    assert [cell.strip() for cell in row.split("|")[4:5]] == ["s"]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a git repository and return its folder.

    Its last two commits print the JSON of `cbtop bench`. Its oldest commit cannot print this JSON.
    """
    root = tmp_path / "checkout"
    (root / "cbtop" / "commands").mkdir(parents=True)
    monkeypatch.chdir(root)
    for name, value in (("AUTHOR", "a"), ("COMMITTER", "a")):
        monkeypatch.setenv(f"GIT_{name}_NAME", value)
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "a@example.com")

    def git(*arguments: str) -> None:
        subprocess.run(("git", *arguments), check=True, capture_output=True)

    git("init", "--initial-branch=main")
    (root / "cbtop" / "__init__.py").touch()
    git("add", "-A")
    git("commit", "-m", "without bench")
    git("tag", "old")
    (root / "cbtop" / "commands" / "bench.py").touch()
    for took_ns in (300, 200):
        answer = PRINTS.replace("sys.argv[1:]", f"[{took_ns}]")
        keep = f"open({str(tmp_path / 'calls')!r}, 'a').write(' '.join([__file__, *sys.argv[1:]]) + chr(10))\n"
        (root / "cbtop" / "__main__.py").write_text(answer + keep)
        git("add", "-A")
        git("commit", "-m", str(took_ns))
    return root


@pytest.mark.slow
def test_revisions_run_from_a_directory_of_their_own_which_is_removed(
    checkout: Path, tmp_path: Path, tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["bench", tiny, "-p", "8", "-n", "0", "-t", "1", "-r", "5", "-o", "json"]
    assert main([*asked, "--paired", "git:HEAD~1", "git:main"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["a_is"], found["b_is"], found["ratio"]) == ("git", "HEAD~1", "main", 1.5)
    calls = [line.split(" ", 1) for line in (tmp_path / "calls").read_text().splitlines()]
    assert len(calls) == 2 * (1 + 5)
    assert {arguments for _, arguments in calls} == {f"bench {tiny} -r 1 -o json -p 8 -n 0 -t 1"}
    folders = {Path(file).parents[2] for file, _ in calls}
    assert len(folders) == 2
    assert not any(folder.exists() for folder in folders)
    assert not (checkout / ".git" / "worktrees").exists()


def test_ctrl_c_leaves_the_rounds_that_are_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    count = tmp_path / "count"
    # The command counts its calls. Call 1 is the warm-up. Call 4 is in round 3: it sends Ctrl-C and never ends.
    counts = f"echo >> {count}; [ $(wc -l < {count}) -lt 4 ] || {{ kill -INT {os.getpid()}; sleep 1000; }}"
    assert main(["bench", "--paired", f"run:{counts}", "run:true", "-r", "7"]) == 130
    said = capsys.readouterr()
    assert "2 rounds of 7: it was interrupted" in said.out
    assert "| whole |" in said.out


def test_ctrl_c_before_the_first_round_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    pressed = f"run:kill -INT {os.getpid()}; sleep 1000"
    assert main(["bench", "--paired", pressed, "run:true"]) == 130
    assert capsys.readouterr().out == ""


def test_ctrl_c_between_two_tokens_ends_a_turn_in_this_process(
    tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decode: Callable[..., int] = Decoder.decode
    calls = 0

    def counted(self: Decoder, token: int) -> int:
        nonlocal calls
        calls += 1
        # Send Ctrl-C at the first token of round 4. A round generates two tokens with each of two settings. One
        # warm-up round and three other rounds come before round 4.
        if calls == 4 * 2 * 2 + 1:
            os.kill(os.getpid(), signal.SIGINT)
        return decode(self, token)

    monkeypatch.setattr(Decoder, "decode", counted)
    assert main(["bench", tiny, "-p", "0", "-n", "2", "-t", "1", "--paired", "set:", "set:"]) == 130
    assert "3 rounds of 10: it was interrupted" in capsys.readouterr().out
    assert calls == 4 * 2 * 2 + 1


@first_by_default(
    ("sides", "complaint"),
    [
        (("set:-t 1", "run:true"), "--paired: A is set:, B is run:; both are to be of one kind"),
        (("set:-t 0", "set:"), "--paired: argument -t/--threads: '0' is not a number from 1 on; settings are -t N,"),
        (("set:-r 3", "set:"), "--paired: unrecognized arguments: -r 3; settings are"),
        (("set:-t '1", "set:"), "No closing quotation"),
        (("run:true", "run:echo why >&2; exit 3"), "B, 'echo why >&2; exit 3', ended with exit code 3: why"),
        (("git:no-such", "git:HEAD"), "git: 'no-such' is no revision here"),
        (("git:--all", "git:HEAD"), "git: '--all' is no revision here"),
        (("git:old", "git:HEAD"), "has no `cbtop bench`"),
    ], 3,
)  # fmt: skip
def test_sides_that_cannot_be_compared_are_one_line(
    checkout: Path, sides: tuple[str, str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--paired", *sides, "-r", "1"]) in (1, 2)
    said = capsys.readouterr()
    assert said.out == ""
    assert complaint in said.err.splitlines()[-1]


@pytest.mark.parametrize("asked", ["HEAD", "ls -l", "run:", "git: ", "head:x", ""])
def test_a_side_that_does_not_say_its_kind_is_refused(asked: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "--paired", asked, "set:"])
    assert "set:OPTIONS, git:REVISION nor run:COMMAND" in capsys.readouterr().err or asked.startswith(
        ("run:", "git:")
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["-t", "1,2"], "--paired compares two sides: give -t one number, or 'set:-t 1' 'set:-t 2'"),
        (["-p", "0", "-n", "0"], "-p 0 -n 0 leaves nothing to measure"),
        (["-p", "100"], "a test of 128 tokens does not fit the model's context of 64 tokens"),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_is(
    tiny: str, arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", tiny, *arguments, "--paired", "set:", "set:"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert complaint in said.err


def test_sides_that_measure_different_things_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prints.py").write_text(PRINTS)
    assert main(["bench", "--paired", f"run:python3 {tmp_path}/prints.py 100", "run:true"]) == 1
    assert "A measures pp8, B whole; they are to be the same" in capsys.readouterr().err
