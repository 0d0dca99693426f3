"""Tests of the measurement of crossovers (the size from which a faster method wins). Planted crossovers are found.

No crossover is reported if noise hides it, or if there is only one thread.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from cbtop.compute import crossovers as measuring
from cbtop.compute.crossovers import PairedTimes, Rung, crossover, measure_crossovers, timed
from cbtop.compute.jit.cpu import HAS_TILES
from cbtop.compute.settings import CROSSOVERS, STATIC_CROSSOVERS, crossovers
from cbtop.protocol.crossovers import NEVER, Crossover
from cbtop.protocol.vocabulary import Provenance

SIZES = tuple(1 << step for step in range(6, 14))
WAKING_NS, NS_A_UNIT, THREADS = 9_000, 10, 4
Noise = Callable[[], int]


@dataclass
class Clock:
    """A fake clock. Each reading and each call advances it."""

    now_ns: int = 0

    def __call__(self) -> int:
        self.now_ns += 40
        return self.now_ns

    def takes(self, ns: Callable[[], int]) -> Callable[[], None]:
        def run() -> None:
            self.now_ns += ns()

        return run


def ladder(noise: Noise = lambda: 0, waking_ns: int = WAKING_NS) -> list[PairedTimes]:
    """Return simulated times by size.

    One thread takes 10 ns per unit of work. Four threads take a quarter of this time, and additionally a fixed time
    to wake up.
    """
    clock = Clock()
    rungs = [
        Rung(
            size,
            clock.takes(lambda size=size: size * NS_A_UNIT + noise()),  # type: ignore[misc]
            clock.takes(lambda size=size: waking_ns + size * NS_A_UNIT // THREADS + noise()),  # type: ignore[misc]
        )
        for size in SIZES
    ]
    return timed(rungs, clock)


@pytest.mark.parametrize(("waking_ns", "first"), [(9_000, 2048), (1_000, 256), (20_000, 4096), (100, SIZES[0])])
def test_a_planted_crossover_is_found_at_the_first_size_that_wins(waking_ns: int, first: int) -> None:
    found = crossover("product_bytes", ladder(waking_ns=waking_ns))
    assert (found.value, found.provenance, found.note) == (first, Provenance.MEASURED, "")
    assert found.before_us == pytest.approx((first * NS_A_UNIT + 40) / 1e3)
    assert found.after_us == pytest.approx((waking_ns + first * NS_A_UNIT // THREADS + 40) / 1e3)
    assert found.spread_percent == 0


def test_noise_that_is_less_than_what_is_won_hides_nothing() -> None:
    draw = random.Random(5)
    found = crossover("product_bytes", ladder(lambda: draw.randrange(2_000)))
    assert (found.value, found.provenance) == (2048, Provenance.MEASURED)
    assert 0 < (found.spread_percent or 0) < 20


def is_unsure(found: Crossover, said: str = "unsure") -> bool:
    static = getattr(STATIC_CROSSOVERS, found.name)
    return (found.value, found.provenance, found.note) == (static, Provenance.STATIC, f"{said} at {SIZES[-1]:,}")


@pytest.mark.parametrize("seed", range(5))
def test_a_crossover_is_unsure_and_the_default_stays_if_noise_exceeds_gain(seed: int) -> None:
    draw = random.Random(seed)
    found = crossover("product_bytes", ladder(lambda: draw.randrange(10 * SIZES[-1] * NS_A_UNIT)))
    assert is_unsure(found)
    assert (found.spread_percent or 0) > 20


def test_threads_that_never_win_leave_the_default() -> None:
    assert is_unsure(crossover("attention_products", ladder(waking_ns=10**6)), "slower")


def test_a_layout_that_is_slower_at_every_size_is_measured_as_never_better() -> None:
    found = crossover("exact_bytes", ladder(waking_ns=10**6))
    assert (found.value, found.provenance, found.note) == (NEVER, Provenance.MEASURED, f"slower at {SIZES[-1]:,}")
    draw = random.Random(2)
    assert is_unsure(crossover("exact_bytes", ladder(lambda: draw.randrange(10 * SIZES[-1] * NS_A_UNIT))))


def test_an_equal_time_is_no_win() -> None:
    same = [PairedTimes(size, [100] * 9, [100] * 9) for size in SIZES]
    assert is_unsure(crossover("product_bytes", same))


@pytest.mark.parametrize(("wins", "first"), [("..ww.www", 5), ("wwwwwwww", 0), (".......w", 7), ("wwwwwww.", None)])
def test_a_size_counts_where_all_larger_ones_win_too(wins: str, first: int | None) -> None:
    def times(size: int, win: str) -> PairedTimes:
        return PairedTimes(size, [100] * 9, [50 if win == "w" else 100] * 9)

    found = crossover("product_bytes", list(map(times, SIZES, wins)))
    assert is_unsure(found) if first is None else found.value == SIZES[first]


def test_a_disturbance_meets_both_ways_at_all_sizes_of_a_round() -> None:
    clock, calls = Clock(), []  # type: ignore[var-annotated]
    rungs = [Rung(size, lambda s=size: calls.append((s, 1)), lambda s=size: calls.append((s, 4))) for size in (1, 2)]  # type: ignore[misc]
    timed(rungs, clock)
    assert calls == [(1, 1), (1, 4), (2, 1), (2, 4)] * (1 + measuring.ROUNDS)  # the first round compiles


def test_the_pause_before_a_call_is_not_in_its_time() -> None:
    clock = Clock()
    (found,) = timed([Rung(1, clock.takes(lambda: 500), clock.takes(lambda: 700))], clock, pause_ns=30_000)
    assert set(found.before_ns) == {540}
    assert set(found.after_ns) == {740}
    assert clock.now_ns > measuring.ROUNDS * 2 * 30_000


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "ROUNDS", 3)
    monkeypatch.setattr(measuring, "PRODUCT_ROWS", (16, 64))
    monkeypatch.setattr(measuring, "POSITIONS", (16, 64))
    monkeypatch.setattr(measuring, "TOKENS", (4, 16))
    monkeypatch.setattr(measuring, "LAYOUT_ROWS", (32, 128))


@pytest.mark.usefixtures("few")
def test_with_one_thread_the_defaults_stay_and_it_is_said_why() -> None:
    found = {one.name: one for one in measure_crossovers(1)}
    assert tuple(found) == CROSSOVERS
    for name in ("product_bytes", "attention_products"):
        static = getattr(STATIC_CROSSOVERS, name)
        assert found[name] == Crossover(name, static, Provenance.STATIC, "one thread")
    if not HAS_TILES:
        assert found["bf16_tokens"] == Crossover("bf16_tokens", 12, Provenance.STATIC, "no AMX")


@pytest.mark.parametrize("name", CROSSOVERS)
@pytest.mark.usefixtures("few")
def test_the_very_kernels_run_on_both_ways_and_at_every_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counted function belongs to the method for large sizes. The method for small sizes must never call it."""
    ran: list[str] = []

    def counted(way: str, function: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: object) -> None:
            ran.append(way)
            function(*arguments)

        return run

    module, place = {
        "product_bytes": (measuring.linear_int8.linear_int8.__globals__["multiply_one"].__globals__, "on_threads"),
        "attention_products": (
            vars(measuring.attention_bf16 if measuring.BF16_PAYS else measuring.attention),
            "_attend_parallel",
        ),
        "bf16_tokens": (measuring.linear_int8.linear_bf16.prepared.__globals__, "round_tokens"),
        "exact_bytes": (vars(measuring.linear), "linear"),
    }[name]
    monkeypatch.setitem(module, place, counted("after", module[place]))
    monkeypatch.setattr(measuring, "HAS_TILES", name == "bf16_tokens" or HAS_TILES)
    steps: list[Sequence[Rung]] = []

    def watched(rungs: Sequence[Rung]) -> list[PairedTimes]:
        steps.append(rungs)
        for rung in rungs:
            for way in ("before", "after"):
                ran.clear()
                getattr(rung, way)()
                seen[way, rung.size] = list(ran)
        return [PairedTimes(rung.size, [2, 2], [1, 1]) for rung in rungs]

    seen: dict[tuple[str, int], list[str]] = {}
    monkeypatch.setattr(measuring, "timed", watched)
    monkeypatch.setattr(measuring, "CROSSOVERS", CROSSOVERS)
    before = crossovers()
    found = {one.name: one for one in measure_crossovers(2)}
    sizes = {
        "product_bytes": (6912, 27648),
        "attention_products": (14336, 57344),
        "bf16_tokens": (4, 16),
        "exact_bytes": (13824, 55296),
    }[name]
    assert {key: seen[key] for key in seen if key[1] in sizes} == {
        (way, size): ["after"] * (way == "after") for way in ("before", "after") for size in sizes
    }
    assert (found[name].value, found[name].provenance) == (sizes[0], Provenance.MEASURED)
    assert crossovers() == before
