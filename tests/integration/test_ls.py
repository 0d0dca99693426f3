"""Tests of `cbtop ls`: the command lists everything that can be watched, for people and for programs."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tests.integration.hosts import PATIENTLY, cbtop, daemon, eventually, host, once_answered
from tests.integration.test_many_daemons import elsewhere


def ls(*arguments: str) -> subprocess.CompletedProcess[str]:
    return cbtop("ls", *PATIENTLY, *arguments)


def sources(*arguments: str) -> list[dict[str, Any]]:
    """Return the processes that `cbtop ls --format json` lists, or none if it prints nothing."""
    listed = json.loads(ls("--format", "json", *arguments).stdout or '{"sources": []}')
    found: list[dict[str, Any]] = listed["sources"]
    return found


def test_it_lists_what_runs_and_text_and_json_agree() -> None:
    with daemon(), host() as first, host() as second:
        eventually(lambda: ls().stdout.count("LIVE") == 2)
        listed = ls()
        printed = ls("--format", "json")
    assert (listed.returncode, printed.returncode) == (0, 0)
    document = json.loads(printed.stdout)
    assert document["schema"] == "cbtop.sources/1"
    assert {source["pid"] for source in document["sources"]} == {first.pid, second.pid}
    head, *rows = listed.stdout.partition("\n\n")[0].splitlines()
    assert head.split()[:3] == ["pid", "host", "rank"]
    assert {int(row.split()[0]) for row in rows} == {first.pid, second.pid}
    for source in document["sources"]:
        assert (source["state"], source["phase"], source["rank"]) == ("live", "decode", None)
        assert source["tokens_per_sec"] > 0
        assert source["produced"] > 0
        assert (source["clock_offset_us"], source["clock_uncertainty_us"]) == (0, 0)


@pytest.mark.slow
def test_rates_are_of_the_last_seconds_or_of_all_if_there_is_no_history() -> None:
    def only(*arguments: str) -> dict[str, Any]:
        return next(iter(sources(*arguments)), {})

    with daemon(), host():
        source = eventually(lambda: (seen := only()).get("window_covers_s") and seen)
        assert 1 <= source["window_covers_s"] < 12
        assert source["tokens_per_sec"] * source["window_covers_s"] == pytest.approx(source["steps"])
        assert " last " in ls().stdout
    with daemon("--history", "0"), host():
        source = eventually(lambda: (seen := only()).get("tokens_per_sec") and seen)
        assert source["window_covers_s"] is None


@pytest.mark.slow
def test_a_source_can_be_selected_by_pid_rank_or_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with elsewhere(0) as (first, _, one), elsewhere(1) as (second, _, two):
        links = ["--connect", first, "--connect", second]
        # Wait until both processes are listed, because one may start before the other.
        everything = eventually(lambda: len(seen := sources(*links)) == 2 and seen)
        key = next(source["key"] for source in everything if source["pid"] == one.pid)
        for which, pid in ((str(two.pid), two.pid), ("rank=1", two.pid), (key, one.pid)):
            (source,) = sources("--source", which, *links)
            assert source["pid"] == pid
        once_answered(monkeypatch)
        done = cbtop("--headless", "--once", "--timeout", "0.5", "--source", "rank=7", *links)
    assert done.returncode == 3
    assert "no instrumented process is rank=7; `cbtop ls` lists" in done.stderr


def test_with_nothing_running_it_exits_3_as_a_report_does() -> None:
    done = ls()
    assert (done.returncode, done.stdout) == (3, "")
    assert "nothing is running" in done.stderr


@pytest.mark.parametrize("which", ["rank=", "rank=x", "me", "-3"])
def test_what_names_no_source_is_refused(which: str) -> None:
    assert cbtop("ls", f"--source={which}").returncode == 2
