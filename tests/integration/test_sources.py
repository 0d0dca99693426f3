"""Tests of the list of processes with real processes: `--view sources`, and the cost of cbtop itself."""

from __future__ import annotations

import json

import pytest

from cbtop.feeds.feed import Feed
from cbtop.viewmodels.sources import ProcessCost
from tests.integration.hosts import PATIENTLY, cbtop, daemon, eventually, host


def costs(feed: Feed) -> dict[str, ProcessCost]:
    """Return the costs of cbtop's own processes by name.

    Return an empty dict until all of these costs are known.
    """
    feed.poll(20)
    found = feed.listed().costs
    known = found and all(cost.cpu_percent is not None for cost in found)
    return {cost.name: cost for cost in found} if known else {}


@pytest.mark.slow
def test_text_and_json_list_processes_with_their_devices_and_our_lag() -> None:
    arguments = ("--headless", "--once", "--window=1", *PATIENTLY, "--view", "sources")
    with daemon() as serving, host() as first, host() as second:
        text, printed = cbtop(*arguments), cbtop(*arguments, "--format", "json")
    assert (text.returncode, printed.returncode) == (0, 0)
    document = json.loads(printed.stdout)
    assert {row["pid"] for row in document["listed"]} == {first.pid, second.pid}
    for row in document["listed"]:
        assert row["devices"] is not None
        assert row["lag_s"] >= 0
        assert row["steps_per_sec"] > 0
        assert row["lost_percent"] == 100 * row["lost"] / (row["produced"] - row["dropped_before_attach"])
        assert (row["clock_offset_us"], row["clock_uncertainty_us"]) == (0, 0)
        assert list(row["unknown"]) == ["model", "overhead_percent"]
    runs, known = text.stdout.split("\n\n")[:2]
    for table in (runs, known):
        assert {line.split()[0] for line in table.splitlines()[1:3]} == {str(first.pid), str(second.pid)}
    assert "before attach" in known.splitlines()[0]
    assert "cbtop: this viewer " in text.stdout
    assert f"cbtop: daemon {serving.pid}@" in text.stdout


def test_the_viewer_and_the_daemon_say_each_what_it_costs() -> None:
    with daemon() as serving, host(), Feed() as feed:
        # Linux counts processor time in steps of 10 ms, so it may be zero at first.
        found = eventually(lambda: (seen := costs(feed)) and all(cost.cpu_percent for cost in seen.values()) and seen)
        viewer, other = found.values()
    assert viewer.name == "this viewer"
    assert other.name.startswith(f"daemon {serving.pid}@")
    for cost in (viewer, other):
        assert cost.resident_bytes > 1 << 20


def test_a_daemon_inside_is_part_of_what_the_viewer_costs() -> None:
    with host(), Feed() as feed:
        (only,) = eventually(lambda: costs(feed)).values()
    assert only.name == "this viewer, the daemon in it"
