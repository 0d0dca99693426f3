"""Tests with real programs, daemons and viewers. These start late, die and return.

Every lost record is reported.
"""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from cbtop.client import collector
from cbtop.feeds.feed import Feed
from cbtop.protocol.ring import RingWriter
from cbtop.viewmodels.on_demand import with_parts
from cbtop.viewmodels.source import SourceView
from tests.integration.hosts import (
    DEADLINE_S,
    PATIENTLY,
    SEEING,
    cbtop,
    daemon,
    eventually,
    host,
    nobody,
    once_answered,
    snapshot,
    wait_until_seen,
)

ONCE = f"{sys.executable} -m cbtop --headless --once --window=all {' '.join(PATIENTLY)}"


def see(feed: Feed, pid: int) -> SourceView | None:
    feed.poll(20)
    key = feed.links.key_of(pid)
    return feed.view(key) if key else None


def steps_of(feed: Feed, pid: int) -> int:
    view = see(feed, pid)
    return view.steps.count if view and view.steps else 0


def state_of(feed: Feed, pid: int) -> str:
    view = see(feed, pid)
    return view.state if view else ""


def test_once_prints_what_runs_and_the_books_and_the_losses_add_up() -> None:
    with host() as process:
        (source,) = snapshot()
    assert (source["pid"], source["state"]) == (process.pid, "live")
    assert source["steps"]["count"] >= 1
    assert {row["name"] for row in source["bricks"]} == {"RmsNorm", "DownProjection"}
    books, loss = source["books"], source["loss"]
    assert books["wall_us"] == pytest.approx(books["bricks_us"] + books["gaps_us"] + books["unattributed_us"])
    assert loss["produced"] == loss["received"] + loss["dropped"]
    assert sum(row["total_exclusive_us"] for row in source["bricks"]) == pytest.approx(
        books["bricks_us"] + books["open_us"]
    )


WRONG = """
import sys, time
from cbtop import BrickProfiler
from cbtop.protocol.messages import CheckResult
profiler = BrickProfiler()
for assertion, passed in ("finite", True), ("equals reference", False):
    profiler.announce(CheckResult("RmsNorm", assertion, passed, 0.5, 1e-5))
while True:
    with profiler.step("decode", tokens=1), profiler.brick("RmsNorm"): time.sleep(0.001)
"""


def test_a_failed_check_is_a_verdict_and_an_exit_code_of_its_own(tmp_path: Path) -> None:
    recording = tmp_path / "wrong.cbtop"
    with subprocess.Popen([sys.executable, "-c", WRONG]) as process:
        try:
            live = cbtop("--headless", "--once", "--window=all", *PATIENTLY)
            assert cbtop("record", "--duration", "1", "--output", str(recording)).returncode == 0
        finally:
            process.kill()
    replayed = cbtop("replay", str(recording), "--headless")
    for shown in live, replayed:
        assert shown.returncode == 4
        assert "RmsNorm fails its check `equals reference`" in shown.stdout
        assert f"RmsNorm of pid {process.pid} fails its check `equals reference`" in shown.stderr


BARE_STEPS = """
import time
from cbtop import BrickProfiler
profiler = BrickProfiler()
with profiler.step("prefill", tokens=8): time.sleep(0.002)
while True:
    with profiler.step("decode", tokens=2): time.sleep(0.001)
"""


def test_a_process_that_marks_steps_and_no_bricks_is_shown_by_its_steps() -> None:
    with subprocess.Popen([sys.executable, "-c", BARE_STEPS]) as process:
        try:
            (source,) = snapshot()
            done = cbtop("--headless", "--once", "--window=all", *PATIENTLY)
            listed = json.loads(cbtop("ls", *PATIENTLY, "--format", "json").stdout)["sources"]
            line = cbtop("ls", *PATIENTLY).stdout.splitlines()[1]
        finally:
            process.kill()
    assert (source["pid"], source["phase"], source["bricks"]) == (process.pid, "decode", [])
    assert [steps["phase"] for steps in source["phases"]] == ["prefill", "decode"]
    assert source["steps"]["tokens"] == 2 * source["steps"]["count"] > 0
    assert 0 < source["steps"]["tokens_per_sec"] < 2000
    assert source["steps"]["wall_us"]["p50"] > 1000
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(
        r"^\* decode: [\d,]+ steps, [\d,]+ tokens, [\d,.]+ tokens/s, step p50 ", done.stdout, re.MULTILINE
    )
    assert "bricks: n/a (no brick of this phase was recorded in this time)" in done.stdout
    assert "rest of step" in done.stdout
    assert [(one["phase"], one["steps"] > 0, one["tokens_per_sec"] > 0) for one in listed] == [("decode", True, True)]
    assert line.split()[0] == str(process.pid)
    assert "decode" in line


def test_with_nothing_running_it_exits_3_and_says_how_to_start_something(monkeypatch: pytest.MonkeyPatch) -> None:
    once_answered(monkeypatch)
    done = cbtop("--headless", "--once", "--window=all", "--timeout", "0.5")
    assert (done.returncode, done.stdout) == (3, "")
    assert "nothing is running" in done.stderr
    assert "cbtop demo" in done.stderr


IDLE = """
import time
from cbtop import BrickProfiler, Ceiling, Provenance
profiler = BrickProfiler()
profiler.announce(Ceiling("dram", "bandwidth", 1.0, "GB/s", Provenance.STATIC))
time.sleep(600)
"""


def test_a_process_of_which_nothing_has_come_yet_is_named_beside_the_report() -> None:
    with host(), subprocess.Popen([sys.executable, "-c", IDLE]) as idle:
        try:
            done = eventually(lambda: (found := cbtop("--once", "--window=all", *PATIENTLY)).stderr and found)
        finally:
            idle.kill()
    assert done.returncode == 0
    assert done.stderr == f"cbtop: not shown, for no step has come yet: pid {idle.pid}\n"


@pytest.mark.slow
def test_unread_messages_are_read_before_printing_or_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # With this limit, each poll of the viewer applies only one message.
    monkeypatch.setattr(collector, "MAX_DRAIN_S", -1.0)
    with daemon(), host() as one, host() as other:
        eventually(lambda: {source["pid"] for source in snapshot()} == {one.pid, other.pid})
        once_answered(monkeypatch)
        done = cbtop("--once", "--window=all", "--timeout", "1e-9")
    assert (done.returncode, done.stdout) == (3, "")
    assert "time is up, and there is more to read from ipc://" in done.stderr
    assert "raise --timeout" in done.stderr


@pytest.mark.slow
def test_without_a_terminal_it_prints_and_never_opens_the_screen() -> None:
    with host():
        done = cbtop("--window", "1", *PATIENTLY)
    assert done.returncode == 0
    assert done.stdout.startswith("python -c, pid ")
    assert "\x1b" not in done.stdout


@pytest.mark.slow
def test_a_process_left_behind_is_shown_as_ended_but_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    once_answered(monkeypatch)
    with host(steps=20) as process:
        process.wait()
    done = cbtop("--headless", "--once", "--window=all", "--timeout", "0.5")
    assert done.returncode == 3
    assert "ENDED" in done.stdout
    assert f"shown is pid {process.pid}, ended" in done.stderr


@pytest.mark.slow
def test_many_viewers_share_a_daemon_and_one_that_joins_late_sees_everything() -> None:
    with daemon(), host(steps=300) as process, Feed() as early:
        eventually(lambda: steps_of(early, process.pid) > 10)
        assert not early.is_daemon_inside
        process.wait()
        eventually(lambda: state_of(early, process.pid) == "ended")
        with Feed() as late:
            eventually(lambda: steps_of(late, process.pid) == 300)
            ours, theirs = see(early, process.pid), see(late, process.pid)
    assert ours is not None
    assert theirs is not None
    # The trends of the last 60 s are not compared. The late viewer has them from the daemon's history, where several
    # updates may be merged.
    of_seconds = dict.fromkeys(("trend_us", "trail", "by_cached", "by_batch"), ())
    without_trend = [[with_parts(row, **of_seconds) for row in view.bricks] for view in (ours, theirs)]
    assert without_trend[0] == without_trend[1]
    assert ours.loss == theirs.loss
    assert ours.loss.dropped == 0


def test_a_host_killed_with_9_keeps_its_last_data_and_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    once_answered(monkeypatch)
    with daemon(), Feed() as feed, host() as process:
        eventually(lambda: steps_of(feed, process.pid) > 20)
        process.send_signal(signal.SIGKILL)
        process.wait()
        eventually(lambda: state_of(feed, process.pid) == "gone")
        view = see(feed, process.pid)
        assert view is not None
        assert view.steps is not None
        assert view.steps.count > 20
        assert view.loss.produced == view.loss.received + view.loss.dropped
        done = cbtop("--headless", "--once", "--window=all", "--timeout", "0.5", "--format", "json")
        (printed,) = json.loads(done.stdout)["sources"]
        assert (done.returncode, printed["pid"], printed["state"]) == (3, process.pid, "gone")


@pytest.mark.slow
def test_a_host_that_starts_later_appears_by_itself() -> None:
    with Feed() as feed:
        assert feed.is_daemon_inside
        feed.poll(100)
        assert feed.sources() == ()
        with host() as process:
            eventually(lambda: steps_of(feed, process.pid) > 3)


@pytest.mark.slow
def test_a_daemon_that_is_killed_and_started_again_knows_everything_again() -> None:
    with host() as process:
        with daemon() as first, Feed() as feed:
            eventually(lambda: steps_of(feed, process.pid) > 20)
            first.kill()
            first.wait()
            before = steps_of(feed, process.pid)
            with daemon():
                eventually(lambda: steps_of(feed, process.pid) > before + 20)
                view = see(feed, process.pid)
                assert view is not None
                assert view.loss.dropped == 0
        assert process.poll() is None


def test_another_viewer_takes_over_at_once_if_the_serving_one_quits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The limit is so long that only the goodbye of the daemon can end the link.
    monkeypatch.setattr(collector, "SILENT_AFTER_S", 60.0)
    with host(), Feed() as first, Feed() as second:
        eventually(lambda: (first.poll(20), second.poll(20)) and second.sources())
        assert (first.is_daemon_inside, second.is_daemon_inside) == (True, False)
        first.close()
        eventually(lambda: second.poll(20) or second.is_daemon_inside)
        before = second.view()
        assert before is not None
        assert before.steps is not None
        count = before.steps.count
        eventually(lambda: second.poll(20) or ((view := second.view()) and view.steps and view.steps.count > count))


@pytest.mark.slow
def test_when_the_daemon_dies_a_viewer_takes_its_place() -> None:
    with host() as process, daemon() as other, Feed() as feed:
        eventually(lambda: steps_of(feed, process.pid) > 5)
        other.kill()
        other.wait()
        eventually(lambda: (feed.poll(20), feed.is_daemon_inside)[1])
        before = steps_of(feed, process.pid)
        eventually(lambda: steps_of(feed, process.pid) > before + 5)


def test_a_second_daemon_is_refused_in_one_line() -> None:
    with daemon():
        done = cbtop("daemon")
    assert done.returncode == 1
    assert "another cbtop daemon serves this address" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_daemon_stops_at_once_when_told_to() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        with daemon() as process:
            process.send_signal(number)
            assert process.wait(DEADLINE_S) == 128 + number


@pytest.mark.slow  # tests/protocol/test_sockets.py tests it without processes
def test_a_stopped_viewer_holds_nobody_up() -> None:
    script = (
        "import sys, time\nfrom cbtop.feeds.feed import Feed\n"
        "f = Feed()\nprint('up', flush=True)\nwhile True: f.poll(50)"
    )
    with (
        daemon(),
        host() as process,
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as viewer,
        Feed() as feed,
    ):
        assert viewer.stdout
        viewer.stdout.readline()
        viewer.send_signal(signal.SIGSTOP)
        before = steps_of(feed, process.pid)
        eventually(lambda: steps_of(feed, process.pid) > before + 300)
        viewer.send_signal(signal.SIGCONT)
        viewer.kill()


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_it_quietly() -> None:
    with host():
        done = subprocess.run(
            f"{ONCE} | head -1", shell=True, capture_output=True, text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"}, check=False,
        )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1


@pytest.mark.slow
def test_ctrl_c_while_watching_prints_what_was_seen() -> None:
    command = [sys.executable, "-c", SEEING, "--headless", *PATIENTLY, "--view", "bricks"]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with host(), subprocess.Popen(command, **pipes) as viewer:
        wait_until_seen(viewer)
        viewer.send_signal(signal.SIGINT)
        out, _ = viewer.communicate(timeout=DEADLINE_S)
    assert b"DownProjection" in out


@pytest.mark.parametrize(
    "bad", [["--connect", "tcp://10.0.0.1:5"], ["--view", "nonsense"], ["--interval", "0"], ["x"]]
)
def test_what_cannot_be_meant_is_refused_before_anything_starts(bad: list[str]) -> None:
    done = cbtop("--headless", "--once", "--window=all", *bad)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_phase_that_has_not_run_is_waited_for_and_then_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with host() as process:
        snapshot()  # Wait until the daemon has found the process.
        once_answered(monkeypatch)
        done = cbtop("--headless", "--once", "--window=all", "--phase", "prefill", "--timeout", "1")
    assert (done.returncode, done.stdout) == (3, "")
    assert f"pid {process.pid} is there, but no prefill step has come yet" in done.stderr


def test_an_untrustworthy_source_is_named_with_the_reason_and_exit_code_5(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    once_answered(monkeypatch)
    script = (
        "import time; from cbtop import BrickProfiler; from cbtop.protocol.messages import Node\n"
        "from cbtop.protocol.vocabulary import NodeKind\n"
        "p = BrickProfiler()\n"
        "with p.brick('a'): pass\n"
        "p.announce(Node(77, 3, NodeKind.BRICK, 'adrift'))\n"
        "print('said', flush=True)\n"
        "time.sleep(3600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout
            process.stdout.readline()
            done = cbtop("--headless", "--once", "--window=all", "--timeout", "0.5")
        finally:
            process.kill()
    assert done.returncode == 5
    assert f"pid {process.pid} is not to be trusted: node 77" in done.stderr


def test_an_address_where_nobody_answers_is_named() -> None:
    with nobody() as address:
        done = cbtop("--headless", "--once", "--window=all", "--timeout", "0.5", "--connect", address)
    assert done.returncode == 3
    assert f"no answer from {address}" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "ls --timeout 1",
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in ("daemon", "--headless --once --timeout 1", "record -o x")
        ),
    ],
)
def test_a_suspended_viewer_that_serves_others_is_named_with_the_way_out(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with host(), subprocess.Popen([sys.executable, "-c", SEEING, "--headless"], stderr=subprocess.PIPE) as viewer:
        wait_until_seen(viewer)
        viewer.send_signal(signal.SIGSTOP)
        try:
            os.waitid(os.P_PID, viewer.pid, os.WSTOPPED | os.WNOWAIT)
            done = cbtop(*command.split())
        finally:
            viewer.kill()
    assert done.returncode in (1, 3)
    *_, line = done.stderr.splitlines()
    assert line.endswith(f"pid {viewer.pid} serves it and is stopped: fg or kill -CONT {viewer.pid} resumes it")


@pytest.mark.parametrize("where", ["> /dev/full", pytest.param(">&-", marks=pytest.mark.slow)])
def test_output_that_cannot_be_written_is_one_line(where: str) -> None:
    with host():
        command = f"{ONCE} {where}"
        done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("cbtop: ")


@pytest.mark.slow  # tests/cbtop/daemon/test_daemon.py tests it without processes
def test_hostile_files_harm_nobody_but_themselves(runtime: Path) -> None:
    os.mkfifo(runtime / "13-13-0.ring")
    with RingWriter(runtime / "14-14-0.ring").path.open("r+b") as sparse:
        sparse.seek(24)
        sparse.write(struct.pack("<q", 1 << 36))
        sparse.truncate(4096 + 32 * (1 << 36))
    with daemon() as serving, host() as process, Feed() as feed:
        eventually(lambda: steps_of(feed, process.pid) > 20)
        assert serving.poll() is None
