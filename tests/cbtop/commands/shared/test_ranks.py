"""Tests of ranks as processes: all get the same settings, and no process remains if one of them dies."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from cbtop.commands.shared import ranks
from cbtop.commands.shared.ranks import FirstRank, job_of, run_ranks
from cbtop.errors import CbtopError
from tests.representatives import first_by_default

# A program whose ranks write their numbers and settings into files. The inserted code `end` decides how the ranks
# exit.
RANK = """
import os, signal, sys, time
from pathlib import Path
from cbtop.commands.shared.ranks import FirstRank
from cbtop.protocol.ranks import ranks_of
first, found = FirstRank.of(os.environ), ranks_of(os.environ)
id = first.said(lambda: os.urandom(128) * 8)
folder, number, job = Path(sys.argv[1]), found.rank, found.job
(folder / f"new-{number}").write_text(f"{os.getpid()} {number}/{found.world_size} {job} {id.hex()}")
os.rename(folder / f"new-{number}", folder / f"rank-{number}")
def all_began():
    while len(list(folder.glob("rank-*"))) < found.world_size: time.sleep(0.01)
"""
ENDS = "print(f'of rank {number}', flush=True)\n"
STEPS = """
stopped = []
signal.signal(signal.SIGTERM, (lambda *_: stopped.append(1)) if not number else signal.SIG_DFL)
steps = 0
while first.said(lambda: b"%d" % bool(stopped)) == b"0": steps += 1
(folder / f"steps-{number}").write_text(str(steps))
"""
DIES = "all_began()\nif number == 1: os.kill(os.getpid(), signal.SIGKILL)\n" + STEPS
FAILS = "all_began()\nif number == 1: sys.exit('cbtop: no GPU 1: there are 1, from 0 on')\n" + STEPS
BOTH_FAIL = "sys.stderr.write('something else\\n'); sys.stderr.write('cbtop: no CuPy\\n'); sys.exit(2)\n"
HANGS = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nall_began()\nwhile number: time.sleep(1)\n"


def command(rest: str, folder: Path) -> list[str]:
    return [sys.executable, "-c", RANK + rest, str(folder)]


def said(folder: Path, count: int) -> list[list[str]]:
    return [(folder / f"rank-{number}").read_text().split() for number in range(count)]


def have_ended(folder: Path, count: int) -> bool:
    return not any(Path("/proc", pid).exists() for pid, *_ in said(folder, count))


def never() -> bool:
    return False


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_know_their_number_share_one_job_and_id_and_the_first_prints(
    count: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_ranks(count, command(ENDS, tmp_path), never)
    found = said(tmp_path, count)
    assert [which for _, which, _, _ in found] == [f"{number}/{count}" for number in range(count)]
    assert {job for _, _, job, _ in found} == {job_of(os.getpid())}
    (one_id,) = {text for *_, text in found}
    assert len(bytes.fromhex(one_id)) == 1024
    assert capfd.readouterr().out == "of rank 0\n"


def test_all_stop_at_the_same_step_when_the_first_is_told_to(tmp_path: Path) -> None:
    run_ranks(3, command(STEPS, tmp_path), lambda: len(list(tmp_path.glob("rank-*"))) == 3)
    assert len({(tmp_path / f"steps-{number}").read_text() for number in range(3)}) == 1
    assert have_ended(tmp_path, 3)


@first_by_default(
    ("rest", "words", "code"),
    [
        (DIES, r"^rank 1 was killed by signal 9 \(Killed\); the others are ended$", 1),
        (FAILS, r"^rank 1: no GPU 1: there are 1, from 0 on$", 1),
        (BOTH_FAIL, r"^rank [01]: no CuPy$", 2),
    ],
    ids=["is killed", "fails", "both fail alike"],
)
def test_a_rank_that_dies_ends_the_others_and_one_line_says_why(
    rest: str,
    words: str,
    code: int,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks, "STOP_S", 0.2)
    with pytest.raises(CbtopError, match=words) as raised:
        run_ranks(2, command(rest, tmp_path), never)
    assert raised.value.exit_code == code
    assert capfd.readouterr() == ("", "")
    assert rest is BOTH_FAIL or have_ended(tmp_path, 2)


def test_a_rank_that_hears_nothing_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STOP_S", "ENDING_S"):
        monkeypatch.setattr(ranks, name, 0.2)
    with pytest.raises(CbtopError, match=r"^rank 1 had not ended 0.2 s after another one; it was killed$"):
        run_ranks(2, command(HANGS, tmp_path), never)
    assert have_ended(tmp_path, 2)


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_waits_to_be_ended_if_the_other_has_ended_and_then_says_so(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    source, to = os.pipe()
    os.close(source if number == 0 else to)
    try:
        with pytest.raises(Exception, match="another rank has ended"):
            FirstRank(number, 2, [to if number == 0 else source]).said(lambda: b"0")
    finally:
        os.close(to if number == 0 else source)
    assert waited[0] > ranks.STOP_S


def test_a_process_that_run_ranks_did_not_start_is_no_rank() -> None:
    assert FirstRank.of({"RANK": "0", "WORLD_SIZE": "2"}) is None
