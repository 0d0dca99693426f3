"""Tests of merged reports from the command line: text and JSON agree, and the times in a sum of ranks add up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.integration.hosts import HOST, PATIENTLY, cbtop, daemon, eventually, host
from tests.integration.test_stragglers import ranks

COUNT = 3


@pytest.fixture(scope="module")
def directory_of_three_ranks() -> Iterator[str]:
    """Run three ranks with a daemon and yield their runtime directory.

    All tests share these processes, because this fixture starts five Python processes.
    """
    with TemporaryDirectory(prefix="cbtop-ranks-") as directory, pytest.MonkeyPatch.context() as patch:
        patch.setenv("CBTOP_RUNTIME_DIR", directory)
        with daemon(), ranks(HOST.replace("sys.argv[1]", "-1"), COUNT):
            eventually(all_have_steps)
            yield directory


@pytest.fixture
def three_ranks(directory_of_three_ranks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CBTOP_RUNTIME_DIR", directory_of_three_ranks)


def all_have_steps() -> bool:
    sources = json.loads(cbtop("ls", *PATIENTLY, "--format", "json").stdout or '{"sources": []}')["sources"]
    return len(sources) >= COUNT and all(source["steps"] for source in sources)


def merged(mode: str, *arguments: str) -> dict[str, Any]:
    done = cbtop("--headless", "--once", "--window=all", *PATIENTLY, "--format", "json", "--merge", mode, *arguments)
    assert done.returncode == 0, done.stderr
    (source,) = json.loads(done.stdout)["sources"]
    assert isinstance(source, dict)
    return source


@pytest.mark.slow  # tests/cbtop/viewmodels/test_merge.py tests it without processes
@pytest.mark.usefixtures("three_ranks")
def test_the_sum_of_three_ranks_closes_its_books() -> None:
    source = merged("sum")
    assert (source["merged"]["mode"], source["merged"]["members"]) == ("sum", ["rank 0", "rank 1", "rank 2"])
    assert source["pid"] is None
    books, loss = source["books"], source["loss"]
    assert books["wall_us"] == pytest.approx(books["bricks_us"] + books["gaps_us"] + books["unattributed_us"])
    assert sum(row["total_exclusive_us"] for row in source["bricks"]) == pytest.approx(
        books["bricks_us"] + books["open_us"]
    )
    assert loss["produced"] == loss["received"] + loss["dropped"]
    assert "sum of 3: rank 0–2" in cbtop("--headless", "--once", "--window=all", *PATIENTLY, "--merge", "sum").stdout


@pytest.mark.slow  # tests/cbtop/viewmodels/test_merge.py tests it without processes
@pytest.mark.usefixtures("three_ranks")
def test_side_by_side_and_slowest_name_the_rank_of_every_figure() -> None:
    side_by_side, slowest = merged("ranks"), merged("max")
    assert [column["rank"] for column in side_by_side["ranks"]["ranks"]] == [0, 1, 2]
    for row in side_by_side["ranks"]["rows"]:
        assert row["us"][row["slowest"]] == max(row["us"])
    assert {row["of"] for row in slowest["bricks"]} <= {"rank 0", "rank 1", "rank 2"}
    assert slowest["books"] is None
    text = cbtop("--headless", "--once", "--window=all", *PATIENTLY, "--merge", "ranks", "--view", "bricks").stdout
    head = next(line for line in text.splitlines() if line.startswith("µs a step"))
    assert head.split()[3:9] == ["rank", "0", "rank", "1", "rank", "2"]


def test_records_of_ranks_that_ended_earlier_are_read_before_the_merge(runtime: Path) -> None:
    script = HOST.replace("int(sys.argv[1])", "30 if int(__import__('os').environ['RANK']) else -1")
    with ranks(script.replace('"decode"', '"prefill" if steps > 0 else "decode"'), COUNT) as processes:
        for process in processes[1:]:
            process.wait()
        with daemon():
            source = merged("sum")
    assert source["merged"]["members"] == ["rank 0", "rank 1", "rank 2"]
    assert [phase["count"] for phase in source["phases"] if phase["phase"] == "prefill"] == [60]


@pytest.mark.slow  # The default run skips this test, because test_stalls.py merges two processes.
def test_a_merge_with_a_killed_rank_is_not_live_and_keeps_what_it_did() -> None:
    with daemon(), ranks(HOST.replace("sys.argv[1]", "-1"), COUNT) as processes:
        eventually(all_have_steps)
        assert merged("sum")["state"] == "live"
        processes[1].kill()
        source = eventually(lambda: (seen := merged("sum"))["state"] == "gone" and seen)
        assert source["merged"]["members"] == ["rank 0", "rank 1", "rank 2"]
        assert source["state_reason"].startswith("rank 1: no goodbye")


@pytest.mark.slow
@pytest.mark.usefixtures("three_ranks")
def test_a_recording_of_three_ranks_is_selected_from_and_merged_the_same_way(tmp_path: Path) -> None:
    path = tmp_path / "run.cbtop"
    assert cbtop("record", "-o", str(path), "--duration", "1").returncode == 0
    one = cbtop("replay", str(path), "--format", "json", "--source", "rank=1")
    assert [source["rank"] for source in json.loads(one.stdout)["sources"]] == [1]
    whole = cbtop("replay", str(path), "--format", "json")
    rows = [row for source in json.loads(whole.stdout)["sources"] for row in source["bricks"]]
    together = cbtop("--headless", "--replay", str(path), "--format", "json", "--merge", "sum")
    (source,) = json.loads(together.stdout)["sources"]
    assert source["merged"]["members"] == ["rank 0", "rank 1", "rank 2"]
    for row in source["bricks"]:
        assert row["count"] == sum(other["count"] for other in rows if other["name"] == row["name"])
    assert "--source rank=9" in cbtop("replay", str(path), "--source", "rank=9").stderr


# The default run skips this test, because test_ls.py tests the selection, and test_merge.py of the viewmodels tests
# the merge.
@pytest.mark.slow
@pytest.mark.usefixtures("three_ranks")
def test_only_the_selected_are_merged_and_other_programs_are_not() -> None:
    assert merged("sum", "--source", "rank=0", "--source", "rank=2")["merged"]["members"] == ["rank 0", "rank 2"]
    with host() as other:  # This process is not one of the ranks, but the ranks' daemon knows it, too.
        assert merged("sum", "--source", str(other.pid))["merged"]["members"] == [f"pid {other.pid}"]
