"""Tests of reported waste in kernels: its size is stated in numbers, and unknown values are not reported as waste."""

from __future__ import annotations

from pathlib import Path

from cbtop.profiler.analysis.machine_code.lanes import Access, LaneAddresses
from cbtop.profiler.analysis.machine_code.occupancy import (
    REGISTERS,
    SHARED,
    BlockShape,
    OccupancyChange,
    occupancy_of,
)
from cbtop.profiler.analysis.machine_code.resources import advisories_of
from cbtop.profiler.analysis.machine_code.waste import WASTES, change_text, limiter_text, waste_of

DATA = Path(__file__).parent / "data"
NO_LANES = LaneAddresses((), 0, 0)


def test_nothing_known_gives_no_waste() -> None:
    assert [*waste_of(None, None, [], None, None, NO_LANES)] == []


def test_serialized_wgmma_is_waste_and_an_added_wait_is_not() -> None:
    advisories = [*advisories_of((DATA / "serialized.log").read_text())]
    (one,) = waste_of(None, None, advisories, None, None, NO_LANES)
    assert one.id == "serialized-wgmma"
    assert "(PTX line 953)" in one.what
    assert one.line == 953


def test_uncoalesced_accesses_name_the_worst_with_its_line() -> None:
    lanes = LaneAddresses(
        (Access("global", False, 7, 4, 4), Access("global", False, 8, 8, 4), Access("global", True, 9, 32, 4)), 3, 0
    )
    (one,) = waste_of(None, None, [], None, None, lanes)
    assert (one.id, one.is_possible) == ("uncoalesced", False)
    assert one.what.startswith("2 loads and stores")
    assert one.impact == "up to 8.0x the traffic: 32 sectors instead of 4 (PTX line 9)"
    assert one.line == 9


def test_accesses_of_unknown_addresses_make_it_only_possible() -> None:
    (one,) = waste_of(None, None, [], None, None, LaneAddresses((Access("global", False, 8, 32, 4),), 2, 0))
    assert one.is_possible


def test_bank_conflicts_are_waste_from_twice_the_passes_on() -> None:
    few = LaneAddresses((Access("shared", False, 8, 5, 4),), 0, 1)
    assert [*waste_of(None, None, [], None, None, few)] == []
    (one,) = waste_of(None, None, [], None, None, LaneAddresses((Access("shared", False, 8, 32, 1),), 0, 1))
    assert (one.id, one.impact) == ("bank-conflicts", "up to 32.0x the time: 32 passes instead of 1 (PTX line 8)")
    assert one.line == 8


def test_low_occupancy_names_its_limiter_and_the_next_step() -> None:
    occupancy = occupancy_of("sm_90", BlockShape(128, 217, 0))
    assert occupancy is not None
    assert limiter_text(occupancy) == "registers"
    (one,) = waste_of(None, None, [], occupancy, None, NO_LANES)
    assert one.what == "8 of 64 warps an SM, limited by registers; 49 registers fewer give 3 blocks"
    assert one.is_possible


def test_changes_are_written_in_words() -> None:
    assert change_text(OccupancyChange(REGISTERS, -8, 3)) == "8 registers fewer give 3 blocks"
    assert change_text(OccupancyChange(REGISTERS, 1, 1)) == "1 register more gives 1 block"
    assert change_text(OccupancyChange(SHARED, -32, 8)) == "32 bytes of shared memory less give 8 blocks"


def test_the_page_lists_every_waste() -> None:
    page = (Path(__file__).parents[4] / "docs" / "kernels.md").read_text()
    rows = page.partition("| waste | found if | fix |\n|---|---|---|\n")[2].partition("\n\n")[0].split("\n")
    assert [tuple(row.split(" | ")[:2]) for row in rows] == [
        (f"| `{one}`" + " (possible)" * (one in ("not-vectorized", "low-occupancy")), what)
        for one, what in WASTES.items()
    ]
