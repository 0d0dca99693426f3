"""Tests of which processes are compared.

A process is compared only with an equal baseline. For all other processes, a reason is given.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cbtop.comparison.baseline import BrickWork, PhaseTimes, Snapshot
from cbtop.comparison.call_counts import CallsChange
from cbtop.comparison.comparison import Comparison, PlaceChange, baselines_of, compare, slower
from cbtop.comparison.items import WHOLE_STEP, Brick
from cbtop.comparison.noise import Change, change
from cbtop.comparison.place_changes import place_change, shared_ratio
from cbtop.protocol.vocabulary import BrickCategory
from cbtop.viewmodels.merge_mode import MergeMode
from cbtop.viewmodels.verdict import About
from tests.cbtop.viewmodels.made_snapshots import AT, DOWN, made, with_phase
from tests.cbtop.viewmodels.verdicts.cases import DOWN_WORK
from tests.cbtop.viewmodels.verdicts.streams import IN_LAYERS, Decoding, run

BASE = made(1)
NOW = made(2, slower=1.2)


def test_a_slower_brick_changes_its_cell_its_layer_and_itself() -> None:
    found = compare(BASE, NOW, "decode")
    by_name = {one.name: one.change for one in found.changes}
    cell = by_name["DownProjection in Layer 5"]
    assert cell.percent == pytest.approx(20, abs=2)
    assert cell.before == pytest.approx(1_200, rel=0.02)
    assert 0 < cell.half < 0.1 * cell.before
    assert by_name["Layer 5"].delta == pytest.approx(240, abs=40)
    assert found.bricks[DOWN].delta == pytest.approx(240, abs=150)
    assert [one.name for one in found.slower] == ["DownProjection in Layer 5"]
    assert found.worst_layer is not None
    assert (found.worst_layer.layer, found.slower_layers) == ("Layer 5", 1)
    assert (found.why_not, found.notes, found.unit) == ("", (), "token")


def test_what_is_faster_is_no_verdict() -> None:
    found = compare(NOW, BASE, "decode")
    assert found.slower == []
    assert found.worst_layer is None
    changed = [one for one in found.changes if one.change.is_beyond_noise]
    assert "DownProjection in Layer 5" in [one.name for one in changed]
    assert all(one.change.delta < 0 for one in changed)


def test_a_brick_with_the_same_work_in_more_time_does_less_of_it_a_second(tmp_path: Path) -> None:
    plans = Decoding(work=DOWN_WORK), Decoding(work=DOWN_WORK, down_factor=1.25)
    found = []
    for at, plan in enumerate(plans):
        (directory := tmp_path / str(at)).mkdir()
        found += run(directory, plan).snapshots()
    fast, slow = found
    changed = compare(fast, slow, "decode")
    assert changed.work.keys() == {DOWN}
    before, change, time = changed.work[DOWN].gflops, changed.work[DOWN].change, changed.bricks[DOWN]
    assert change is not None
    assert change.is_beyond_noise
    assert (change.percent, change.before) == (pytest.approx(-20, abs=1), pytest.approx(before, rel=0.02))
    assert change.now / change.before == pytest.approx(time.before / time.now)
    assert change.half / change.now == pytest.approx(time.half / time.now)
    assert compare(fast, replace(slow, lost_percent=5.0), "decode").work == {}


def test_the_list_has_the_rate_change_of_each_process_or_why_it_is_unknown(tmp_path: Path) -> None:
    found = []
    for at, plan in enumerate((Decoding(), Decoding(down_factor=2.0))):
        (directory := tmp_path / str(at)).mkdir()
        found.append(run(directory, plan))
    base, made = found
    key = next(iter(made.seen()))
    assert not made.listed("decode").is_compared
    assert made.listed("decode").row(key).rate_change is None
    made.baselines = base.snapshots()
    row, view = made.listed("decode", window=True).row(key), made.view(key, "decode", window=True)
    assert view is not None
    assert view.baseline is not None
    assert view.baseline.tokens_per_sec is not None
    assert row.rate_change is not None
    assert row.rate_change.is_beyond_noise
    assert row.rate_change.delta < 0
    same = view.baseline.tokens_per_sec
    assert (row.rate_change.before, row.rate_change.now) == (same.before, same.now)
    made.baselines = made.snapshots()
    row = made.listed("decode", window=True).row(key)
    assert row.rate_change is None
    assert [one.why for one in row.unknown if one.figure == "rate_change"] == ["these seconds are the baseline's own"]


REASONS = [
    (replace(BASE, surroundings=replace(AT, model="other")), "another model: made 8L, the baseline has other"),
    (
        replace(BASE, surroundings=replace(AT, quantization="F16")),
        "another type of weights: Q4_K, the baseline has F16",
    ),
    (replace(BASE, surroundings=replace(AT, model=None)), "another model: made 8L, the baseline has made.py"),
    (with_phase(BASE, tokens=4.0), "another batch: 1.00 tokens a step, the baseline has 4.00"),
    (with_phase(BASE, sequences=8.0), "another batch: 1.00 sequences a step, the baseline has 8.00"),
    (with_phase(BASE, sequences=None), "another batch: 1.00 sequences a step, the baseline has n/a"),
    (
        with_phase(BASE, share=0.8),
        "another mix of phases: 100.0 % of the steps are decode, of the baseline 80.0 %",
    ),
    (with_phase(BASE, phase="prefill"), "the baseline has no decode steps"),
    (with_phase(BASE, blocks=3, times=None), "the baseline is too short: decode steps in 3 seconds, 5 are needed"),
    (replace(BASE, lost_percent=2.0), "2.0 % of the records of the baseline were lost"),
]


def test_a_mix_of_phases_is_said_in_percent_of_the_steps() -> None:
    found = compare(with_phase(BASE, share=0.25), with_phase(NOW, share=0.75), "decode")
    assert found.why_not == "another mix of phases: 75.0 % of the steps are decode, of the baseline 25.0 %"


@pytest.mark.parametrize(("base", "why"), REASONS, ids=[why for _, why in REASONS])
def test_unlike_things_are_not_compared_and_it_is_said_why(base: Snapshot, why: str) -> None:
    found = compare(base, NOW, "decode")
    assert found == Comparison(base, NOW, "decode", why)
    assert found.slower == []


def test_what_has_run_too_little_yet_says_so() -> None:
    for blocks, now in ((2, with_phase(NOW, blocks=2, times=None)), (0, replace(NOW, phases=()))):
        why = compare(BASE, now, "decode").why_not
        assert why == f"too little yet: decode steps in {blocks} of the last seconds, 5 are needed"


def test_what_is_about_the_same_is_compared() -> None:
    assert compare(with_phase(BASE, share=0.97, tokens=1.01), NOW, "decode").why_not == ""


def test_another_machine_is_said_and_compared_all_the_same() -> None:
    there = replace(AT, host="there", devices=("H100",), backend="numba", threads=8, rank=2)
    found = compare(replace(BASE, surroundings=there), NOW, "decode")
    assert found.why_not == ""
    assert found.notes == (
        "rank n/a, was 2",
        "host here, was there",
        "GPU n/a, was H100",
        "backend made, was numba",
        "threads 4, was 8",
    )


def test_a_brick_that_one_of_the_two_alone_has_is_said() -> None:
    (phase,) = BASE.phases
    assert phase.times is not None
    others = {place: times for place, times in phase.times.places.items() if place[0] != DOWN}
    fused = with_phase(BASE, times=replace(phase.times, places=others))
    assert compare(fused, NOW, "decode").notes == ("new: DownProjection",)
    assert compare(NOW, fused, "decode").notes == ("no longer there: DownProjection",)


def test_a_change_on_the_screen_is_judged_as_in_a_diff_by_typical_times(tmp_path: Path) -> None:
    for name in ("base", "now"):
        (tmp_path / name).mkdir()
    later = run(tmp_path / "now", Decoding(noise=0.05, cell_factor={(5, "DownProjection"): 1.3}))
    later.baselines = run(tmp_path / "base", Decoding(noise=0.05, seed=1)).snapshots()
    found = later.one().baseline
    assert found is not None
    before, now = (each.of("decode") for each in (found.base, found.now))
    assert before is not None
    assert now is not None
    assert before.times is not None
    assert now.times is not None
    shared = shared_ratio(before.times.places, now.times.places)
    for one in found.changes:
        sides = before.times.places, now.times.places
        place = one.brick, one.layer
        assert one.change == place_change(*sides, place, len(found.changes), shared, 1.0).judged
    typical = before.times.places[DOWN, "Layer 5"].call
    assert typical is not None
    (cell,) = [one for one in found.changes if (one.brick, one.layer) == (DOWN, "Layer 5")]
    assert cell.change.before == typical.mean
    assert cell.change.percent == pytest.approx(30, abs=4)


def _attention_in(record: Path, cached: int | None) -> Comparison:
    """Compare two runs. AttentionScore takes 1.5 times as long in every layer of the second one.

    `cached` is the number of cached positions.
    """
    for name in ("base", "now"):
        (record / name).mkdir()
    cells = dict.fromkeys([(layer, "AttentionScore") for layer in range(8)], 1.5)
    said = None if cached is None else (lambda _step: cached)
    later = run(record / "now", Decoding(cell_factor=cells, cached=said))
    said = None if cached is None else (lambda _step: 100)
    later.baselines = run(record / "base", Decoding(cached=said)).snapshots()
    found = later.one().baseline
    assert found is not None
    return found


def test_slower_attention_for_a_longer_cache_is_shown_and_is_no_regression(tmp_path: Path) -> None:
    found = _attention_in(tmp_path, cached=400)
    assert found.notes == ("400 positions cached, were 100: attention takes its time by that",)
    attention = next(change for (name, _), change in found.bricks.items() if name == "AttentionScore")
    assert attention.percent == pytest.approx(50, abs=3)
    assert attention.is_beyond_noise
    assert found.slower == []
    assert (found.worst_layer, found.slower_layers) == (None, 8)


def test_with_the_same_cache_it_is_one(tmp_path: Path) -> None:
    found = _attention_in(tmp_path, cached=100)
    assert [one.name for one in found.slower] == ["AttentionScore"]


def test_where_nobody_says_how_long_the_cache_is_it_may_be_longer(tmp_path: Path) -> None:
    assert _attention_in(tmp_path, cached=None).slower == []


def test_attention_of_one_layer_alone_is_slower_whatever_the_cache(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "now").mkdir()
    now = run(tmp_path / "now", Decoding(cell_factor={(2, "AttentionScore"): 1.5}))
    now.baselines = run(tmp_path / "base", Decoding(seed=1)).snapshots()
    (verdict,) = now.one().verdicts
    assert verdict.id == "slower-than-baseline"
    assert verdict.sentence.startswith("AttentionScore in Layer 2 is 2")
    assert (verdict.about.kind, verdict.about.name) == (About.LAYER, "Layer 2")
    rows = now.one().layer_times
    assert rows is not None
    assert verdict.about.node == next(row.id for row in rows.rows if row.name == "Layer 2")
    more = next(one for one in verdict.evidence if one.name == "more than the baseline")
    assert (more.value, more.unit) == (pytest.approx(IN_LAYERS["AttentionScore"] / 2, rel=0.05), "µs/token")


def test_a_brick_slower_everywhere_is_named_with_the_layer_with_most_of_it(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "now").mkdir()
    now = run(tmp_path / "now", Decoding(down_factor=1.1, cell_factor={(6, "DownProjection"): 1.2}))
    now.baselines = run(tmp_path / "base", Decoding(seed=1)).snapshots()
    (verdict,) = now.one().verdicts
    assert verdict.sentence.startswith("DownProjection is 1,2")
    assert ", the most in Layer 6 (+3" in verdict.sentence
    assert (verdict.about.kind, verdict.about.name) == (About.BRICK, "DownProjection")
    assert verdict.gain_tokens_per_sec is not None
    assert verdict.gain_tokens_per_sec == pytest.approx(40.9 * 1_250 / 25_400, rel=0.1)


@pytest.mark.slow
def test_a_slower_brick_costs_no_larger_part_of_steps_if_a_few_take_long(tmp_path: Path) -> None:
    """A brick becomes 960 µs slower per token.

    A token takes 25,000 µs typically. Its mean is 57,000 µs because 1 step in 15 is 20 times longer.
    """
    (tmp_path / "base").mkdir()
    (tmp_path / "now").mkdir()
    plan = Decoding(seconds=30.0, step_factor=lambda step: 20.0 if step % 15 == 14 else 1.0)
    now = run(tmp_path / "now", replace(plan, down_factor=1.1))
    now.baselines = run(tmp_path / "base", replace(plan, seed=1)).snapshots()
    view = now.one()
    verdict = next(one for one in view.verdicts if one.id == "slower-than-baseline")
    more = next(one for one in verdict.evidence if one.name == "more than the baseline")
    assert view.steps is not None
    assert view.steps.mean_us is not None
    assert view.steps.tokens_per_sec is not None
    assert verdict.gain_tokens_per_sec == pytest.approx(
        view.steps.tokens_per_sec * more.value / view.steps.mean_us, rel=0.1
    )


def test_a_process_is_compared_with_its_own_baseline_else_with_its_rank() -> None:
    ranks = [replace(made(at), key=f"r{at}", surroundings=replace(AT, rank=at)) for at in range(3)]
    assert baselines_of(ranks, ranks[1]) == [ranks[1]]
    assert baselines_of(ranks, replace(ranks[2], key="a new process")) == [ranks[2]]
    twins = [replace(ranks[0], key=key) for key in ("one", "two")]
    assert baselines_of(twins, replace(NOW, key="two")) == [twins[1]]
    other_model = replace(ranks[0], key="o", surroundings=replace(AT, rank=0, model="other"))
    assert baselines_of([other_model, *ranks], replace(ranks[0], key="a new process")) == [ranks[0]]
    assert baselines_of([], NOW) == []


def test_several_alike_baseline_processes_give_a_note_that_one_was_chosen() -> None:
    twins = [replace(BASE, key=key) for key in ("one", "two")]
    assert baselines_of(twins, NOW) == twins
    assert compare(twins[0], NOW, "decode", 2).notes == ("2 processes of the baseline are alike, the first is taken",)


def test_of_several_processes_merged_there_is_a_reason_and_no_change(tmp_path: Path) -> None:
    made = run(tmp_path, Decoding(), Decoding(seed=1))
    key = next(iter(made.seen()))
    assert made.mark_baseline(key)
    assert len(made.baselines) == 2
    merged = made.merged(MergeMode.SUM)
    assert merged is not None
    assert merged.baseline is not None
    assert merged.baseline.why_not == "these are several processes, and each has its own"


def test_batches_are_alike_up_to_a_fiftieth_and_caches_up_to_a_tenth() -> None:
    for name, reason in (("tokens", "another batch"), ("sequences", "another batch")):
        assert compare(with_phase(BASE, **{name: 1.02}), NOW, "decode").why_not == ""
        assert compare(with_phase(BASE, **{name: 1.03}), NOW, "decode").why_not.startswith(reason)
    now = with_phase(NOW, cached=100.0)
    assert compare(with_phase(BASE, cached=111.0), now, "decode").notes == ()
    assert "100 positions cached, were 112" in compare(with_phase(BASE, cached=112.0), now, "decode").notes[0]


def placed(brick: Brick, layer: str | None, delta: float) -> PlaceChange:
    return PlaceChange(brick, layer, Change(100.0, 100.0 + delta, 1.0))


@pytest.mark.parametrize(
    ("layers", "part", "name"),
    [(3, 0.6, "DownProjection in Layer 0"), (3, 0.4, "DownProjection"), (2, 0.6, "DownProjection")],
)
def test_a_brick_is_named_in_the_layer_with_over_half_of_it_of_three_or_more(
    layers: int, part: float, name: str
) -> None:
    cells = [placed(DOWN, f"Layer {at}", 0.0 if at else 40 * part) for at in range(layers)]
    assert [one.name for one in slower([placed(DOWN, None, 40.0), *cells])] == [name]


def times_of(snapshot: Snapshot) -> PhaseTimes:
    (phase,) = snapshot.phases
    assert phase.times is not None
    return phase.times


def test_a_brick_below_a_microsecond_becomes_slower_and_does_less_as_others() -> None:
    longer = Change(0.5, 0.8, 0.01)
    whole = PlaceChange(DOWN, None, longer)
    assert slower([whole]) == [whole]
    assert slower([replace(whole, change=Change(0.5, 0.5, 0.01))]) == []
    base, now = (
        with_phase(each, times=replace(times_of(each), work={DOWN: BrickWork(1_000.0, 4.0, 2.0)}))
        for each in (BASE, NOW)
    )
    found = replace(compare(base, now, "decode"), changes=(whole,))
    change = found.work[DOWN].change
    assert change is not None
    assert (change.before, change.now) == (pytest.approx(2.0), pytest.approx(1.25))  # GFLOP/s
    assert change.half == pytest.approx(1.25 * 0.01 / 0.8)
    # The calls and their work grow by 25 %. The shown rate depends on whether this growth is beyond noise.
    more = with_phase(NOW, times=replace(times_of(NOW), work={DOWN: BrickWork(1_250.0, 4.0, 2.0)}))
    for calls, half, gflops in ((1.25, 0.5, 1.25), (1.25, 0.1, 1.25 / 0.8), (0.0, 2.0, 1.25 / 0.8)):
        place = replace(whole, calls=CallsChange(1.0, calls, half))
        work = replace(found, now=more, changes=(place,)).work[DOWN].change
        assert work is not None
        assert work.now == pytest.approx(gflops)
    # If the typical time is unknown or zero, no change of the rate is reported.
    for untold in (replace(longer, medians_us=(0.4, 0.6)), replace(longer, before=0.0), replace(longer, now=0.0)):
        assert replace(found, changes=(replace(whole, change=untold),)).work[DOWN].change is None


def test_attention_slower_in_all_layers_is_named_if_its_cache_is_as_long() -> None:
    attention = ("Attention", BrickCategory.ATTENTION)
    assert [one.name for one in slower([placed(attention, None, 9.0)])] == ["Attention"]
    assert slower([placed(attention, None, 9.0)], is_same_cache=False) == []


def test_a_change_relative_to_others_names_its_layer_if_a_clock_moves_all() -> None:
    """Every brick takes 6 % longer in every layer, because of the clock.

    One brick of one layer takes another 10 % longer, so most of its change comes from the clock.
    """

    def beside(delta: float, own: float) -> Change:
        return Change(100.0, 100.0 + delta, 20.0, own=Change(100.0, 100.0 + own, 1.0))

    cells = [PlaceChange(DOWN, f"Layer {at}", beside(6.0, 0.0) if at else beside(16.6, 10.0)) for at in range(6)]
    whole = PlaceChange(DOWN, None, beside(46.6, 10.0))
    assert [one.name for one in slower([whole, *cells])] == ["DownProjection in Layer 0"]


def test_step_and_rate_are_two_figures_and_the_median_call_is_of_this_phase() -> None:
    found = compare(BASE, NOW, "decode")
    before, now = times_of(BASE), times_of(NOW)
    assert found.step_us == change(before.step_us, now.step_us, 2)
    place = (DOWN, "Layer 5")
    times = before.places[place]
    places = {**before.places, place: replace(times, time=replace(times.time, median_us=7.0))}
    known = replace(before, places=places, step_us=replace(before.step_us, median_us=50.0))
    found = compare(with_phase(BASE, times=known), NOW, "decode")
    assert (found.median_us("decode", place), found.median_us("decode", WHOLE_STEP)) == (7.0, 50.0)
    assert found.median_us("decode", (DOWN, "Layer 99")) is None
    assert found.median_us("prefill", place) is None
    assert replace(found, why_not="another model").median_us("decode", place) is None


def test_places_are_layers_bricks_in_layers_and_the_bricks_of_no_layer() -> None:
    found = compare(BASE, NOW, "decode")
    names = {f"Layer {layer}" for layer in range(8)}
    assert found.layers == {one.layer: one.change for one in found.changes if one.brick is None}
    assert set(found.layers) == names
    assert {layer for brick, layer in found.places if brick is None} == names
    inside = {one.brick for one in found.changes if one.brick and one.layer}
    assert {brick for brick, layer in found.places if layer is None} == set(found.bricks) - inside
    assert (DOWN, "Layer 5") in found.places
