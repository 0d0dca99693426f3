"""Tests of the tuner: the bricks that it reports, the settings that it tries and stores, and unclear results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cbtop.compute import backends
from cbtop.compute.demo_model import TINY, write_model
from cbtop.compute.jit.cpu import TIER
from cbtop.compute.settings import Crossovers, with_crossovers
from cbtop.tuning import tuner as tuner_module
from cbtop.tuning.measuring import Bench, InterruptedTurnError, Setting, TuningRequest
from cbtop.tuning.tuner import BrickTuner, Share, Tuned, changed, named
from tests.representatives import first_by_default

IN_USE = Setting(threads=1)
PRODUCTS = Share("DownProjection", 0.80, 8e4, True, frozenset({"linear_int8", "linear_bf16"}))
ATTENTION = Share("Attention (fused)", 0.10, 1e4, True, frozenset({"attention"}))
NORM = Share("RmsNorm", 0.05, 5e3, False, frozenset({"rms_norm"}))
SHARES = (PRODUCTS, ATTENTION, NORM)


class MadeBench(Bench):
    """Simulated requests to a model. The time of a request depends on the setting and on seeded noise.

    Only requests advance the clock.
    """

    def __init__(self, speed: Callable[[Setting], float], noise: float = 0.01) -> None:
        super().__init__(Path("made.gguf"), 160)
        self._speed = speed
        self._rng = np.random.default_rng(11)
        self._noise = noise
        self.now_s = 0.0
        self.ran: list[Setting] = []

    def request_ns(
        self, setting: Setting, request: TuningRequest, should_stop: Callable[[], bool] = lambda: False
    ) -> tuple[int, int]:
        if should_stop():
            raise InterruptedTurnError
        took_ns = int(1e9 / self._speed(setting) * np.exp(self._rng.normal(0, self._noise)))
        self.now_s += took_ns / 1e9
        self.ran.append(setting)
        return took_ns // 4, took_ns - took_ns // 4


class MadeTuner(BrickTuner):
    def shares(self) -> tuple[Share, ...]:
        return SHARES

    def has_int8(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _two_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "available_threads", lambda: 2)


def tuned(bench: MadeBench, budget_s: float = 300.0, setting: Setting = IN_USE) -> Tuned:
    tuner = MadeTuner(bench, setting, TuningRequest(128, 32), clock_s=lambda: bench.now_s)
    return tuner.tune(budget_s)


def speed(setting: Setting) -> float:
    """Return how fast a setting is, relative to the default.

    Two threads are 1.6 times as fast, exact products half as fast. A cache in f32 does not change the speed.
    """
    return (1.6 if setting.threads == 2 else 1.0) * (0.5 if setting.is_exact else 1.0)


def test_settings_are_named_by_bricks_they_change_and_bound_by_amdahls_law() -> None:
    candidates, untried = named(IN_USE, SHARES, 2, has_int8=True)
    assert [one.setting for one in candidates] == [
        Setting(2), Setting(1, is_exact=True), Setting(1, cache_type="f32"),
    ]  # fmt: skip
    threads, exact, cache = candidates
    assert threads.limit == pytest.approx(1 / (0.1 + 0.9 / 2))
    assert threads.why == "90.0 % of a request is in bricks that spread over threads"
    assert (exact.limit, exact.why) == (pytest.approx(1 / 0.2), "DownProjection takes 80.0 % of a request")
    assert (cache.limit, cache.why) == (pytest.approx(1 / 0.9), "Attention (fused) takes 10.0 % of a request")
    assert (threads.numbers, exact.numbers, cache.numbers) == ("", "its products are exact", "its KV cache holds f32")
    assert {one.what for one in untried} == {"batch", "backend", "layout", "tier"}
    assert "interleaved: --exact is both" in {one.what: one.why for one in untried}["layout"]  # see model_to_run


def test_a_gain_below_three_percent_is_not_tried_and_its_bound_is_reported() -> None:
    few = (PRODUCTS, replace(ATTENTION, part=0.02))
    candidates, untried = named(IN_USE, few, 2, has_int8=True)
    assert all(one.setting.cache_type == "f16" for one in candidates)
    said = {one.what: one.why for one in untried}
    expected = "Attention (fused) takes 2.0 % of a request: it could gain 2.0 % at most"
    assert said["--threads 1 --kv-cache f32"] == expected
    alone = tuple(replace(share, is_parallel=False) for share in SHARES)
    candidates, untried = named(IN_USE, alone, 2, has_int8=True)
    assert all(one.setting.threads == 1 for one in candidates)
    assert "0.0 % of a request is in bricks that spread" in {one.what: one.why for one in untried}["--threads 2"]


def test_fewer_threads_are_tried_without_limit_and_not_above_processors() -> None:
    candidates, untried = named(Setting(4), SHARES, 4, has_int8=True)
    fewer = [one for one in candidates if one.setting.threads < 4]
    assert [(one.setting.threads, one.limit) for one in fewer] == [(2, None), (1, None)]
    assert [one.why for one in untried if one.what == "more threads"] == ["this process may run on 4 processors"]


def test_where_there_are_no_int8_products_they_are_not_named() -> None:
    candidates, untried = named(IN_USE, SHARES, 2, has_int8=False)
    assert not any(one.setting.is_exact for one in candidates)
    assert "int8 products" in {one.what for one in untried}


@pytest.mark.parametrize("setting", [IN_USE, replace(IN_USE, is_exact=True)], ids=["in use", "exact in use"])
def test_of_a_model_whose_weights_are_read_as_they_lie_no_product_is_of_int8(
    setting: Setting, tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    write_model(path, TINY, lambda *_: None)
    for exact_bytes, has_int8 in ((Crossovers().exact_bytes, TIER != "generic"), (1, False)):
        with with_crossovers(Crossovers(exact_bytes=exact_bytes)):
            assert BrickTuner(Bench(path, 20), setting, TuningRequest(16, 4)).has_int8() == has_int8


@first_by_default("cache_type", ["f16", "f32"], 2)
@first_by_default("is_exact", [True, False], 2)
@first_by_default("pays", [True, False], 2)
def test_attention_counts_with_products_where_it_is_rounded_with_them(
    pays: bool, is_exact: bool, cache_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbtop.compute.jit.cpu.BF16_PAYS", pays)
    monkeypatch.setattr("cbtop.compute.decoder.bricks.BF16_PAYS", pays)
    path = tmp_path / "tiny.gguf"
    write_model(path, TINY, lambda *_: None)
    tuner = BrickTuner(Bench(path, 20), Setting(1, is_exact, cache_type), TuningRequest(8, 2))
    (share,) = (one for one in tuner.shares() if one.brick == ATTENTION.brick)
    rounded = pays and cache_type == "f16" and TIER != "generic"
    assert bool(share.contracts & tuner_module.PRODUCTS) == rounded
    assert share.contracts & tuner_module.CACHES


def test_a_setting_measured_better_is_kept_with_its_interval_and_no_other() -> None:
    bench = MadeBench(speed)
    found = tuned(bench)
    assert found.best == Setting(2)
    assert [(one.candidate.setting, one.beside, one.is_kept) for one in found.tries] == [
        (Setting(2), IN_USE, True),
        # This setting is compared with the best setting that was found before it.
        (Setting(2, is_exact=True), Setting(2), False),
        (Setting(2, cache_type="f32"), Setting(2), False),
    ]
    gain = found.gain
    assert gain is not None
    assert gain.interval is not None
    assert gain.interval[0] < 1.6 < gain.interval[1]
    # Number of comparisons: the whole request, prefill and decode, for each of three settings.
    assert gain.compared == 3 * 3
    assert found.tries[1].request.verdict == "B is slower"
    assert found.tries[2].request.verdict == "noise"
    assert found.has_told


def test_of_two_that_were_kept_both_together_are_measured_beside_the_first() -> None:
    def better(setting: Setting) -> float:
        return speed(setting) * (1.3 if setting.cache_type == "f32" else 1.0)

    found = tuned(MadeBench(better))
    assert found.best == Setting(2, cache_type="f32")
    assert found.together is found.gain
    assert found.gain is not None
    assert found.gain.ratio == pytest.approx(1.6 * 1.3, rel=0.03)


def test_chance_keeps_nothing_and_the_rounds_that_would_tell_are_reported() -> None:
    found = tuned(MadeBench(lambda setting: 1.0, noise=0.1))
    assert (found.best, found.gain, found.has_told) == (IN_USE, None, False)
    for one in found.tries:
        rounds = one.rounds_to_tell
        assert rounds is not None
        assert one.request.change is not None
        # Convert the half width to that of the planned number of rounds. The half width shrinks with the square root
        # of the number of rounds.
        half = one.request.change.half * (len(one.request.a_ns) / rounds) ** 0.5
        assert half == pytest.approx(0.03, rel=0.02)


@pytest.mark.parametrize("budget_s", [40.0, 90.0, 300.0])
def test_measuring_ends_with_the_budget(budget_s: float) -> None:
    bench = MadeBench(lambda setting: 1.0)
    tuned(bench, budget_s)
    # The search may exceed its limit by the following: two warm-ups for each of four settings, one warm-up for each
    # of three comparisons, and the rest of the last round.
    assert bench.now_s <= budget_s + 2 * 4 + 3 + 2


def test_what_there_is_no_time_for_is_said_with_the_time_that_it_takes() -> None:
    bench = MadeBench(lambda setting: 1.0 if setting == IN_USE else 0.1)
    found = tuned(bench, budget_s=20.0)
    assert found.tries == ()
    said = {one.what: one.why for one in found.untried}
    assert said["--threads 2"].startswith("5 rounds take 6")
    assert said["--threads 2"].endswith("s, and 7 s are left for it: give a larger --budget")


def test_what_there_is_no_time_for_however_fast_it_is_runs_not_once() -> None:
    bench = MadeBench(speed, noise=0.0)
    found = tuned(bench, budget_s=4.0)
    assert set(bench.ran) == {IN_USE}
    (why,) = (one.why for one in found.untried if one.what == "--threads 2")
    assert why.startswith("5 rounds take 6 s or more, and 1 s are left for it")


def test_an_interrupt_leaves_what_was_measured_and_says_what_was_not() -> None:
    bench = MadeBench(speed)
    tuner = MadeTuner(
        bench, IN_USE, TuningRequest(128, 32), clock_s=lambda: bench.now_s, should_stop=lambda: len(bench.ran) == 60
    )
    found = tuner.tune(300.0)
    assert found.was_interrupted
    assert [one.candidate.setting for one in found.tries] == [Setting(2), Setting(2, is_exact=True)]
    assert [one.why for one in found.untried if one.what == "--threads 2 --kv-cache f32"] == ["it was interrupted"]
    assert len(bench.ran) == 60


def test_an_interrupt_before_anything_was_measured_leaves_nothing() -> None:
    bench = MadeBench(speed)
    found = MadeTuner(bench, IN_USE, TuningRequest(8, 2), should_stop=lambda: True).tune(300.0)
    assert (found.was_interrupted, found.tries, found.shares, found.best) == (True, (), (), IN_USE)


def test_a_try_changes_its_own_part_of_the_best_so_far() -> None:
    best = Setting(2, is_exact=True)
    assert changed(best, IN_USE, Setting(1, cache_type="f32")) == Setting(2, True, "f32")
    assert changed(best, IN_USE, Setting(4)) == Setting(4, True)


@pytest.mark.slow
def test_the_bricks_of_a_real_model_are_recorded_and_a_setting_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without this replacement, other processes on the machine would decide whether tuning is worthwhile.
    monkeypatch.setattr(tuner_module, "_is_worth", lambda _: True)
    path = tmp_path / "tiny.gguf"
    write_model(path, TINY, lambda *_: None)
    request = TuningRequest(16, 4)
    said: list[str] = []
    tuner = BrickTuner(Bench(path, request.tokens), IN_USE, request, progress=lambda what, done: said.append(what))
    found = tuner.tune(3600.0)  # A limit in seconds that is long enough for a busy machine.
    names = {share.brick for share in found.shares}
    assert names >= {"QkvProjection", "Attention (fused)", "DownProjection", "LmHead", "RmsNorm"}
    # The share of the measured bricks in the request depends on the machine.
    assert 0 < sum(share.part for share in found.shares) <= 1.0
    assert [share.part for share in found.shares] == sorted([share.part for share in found.shares], reverse=True)
    parallel = {share.brick: share.is_parallel for share in found.shares}
    assert parallel["LmHead"]
    assert not parallel["RmsNorm"]
    assert Setting(2) in [one.candidate.setting for one in found.tries]
    assert any(what.startswith("trying: --threads 2 beside --threads 1") for what in said)
