"""Tests of the parts of training steps in a run: which reports count, their thresholds, and their comparison."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from math import exp, hypot, sqrt
from pathlib import Path

import numpy as np
import pytest

from cbtop import units
from cbtop.comparison.judged import Outcome
from cbtop.comparison.noise import Figure, change, figures, half_of
from cbtop.comparison.rate_measures import phase_measure
from cbtop.comparison.run_diff import RunDiff, diff
from cbtop.comparison.run_sets import together
from cbtop.comparison.runs import Run
from cbtop.comparison.threshold_grammar import parse
from cbtop.comparison.thresholds import judge
from cbtop.comparison.training_measures import part_p50, training_part
from cbtop.comparison.training_parts import TrainingParts
from cbtop.errors import UsageError
from cbtop.feeds.replay import ReplayFeed
from cbtop.feeds.run_file import read_runs, write_runs
from cbtop.feeds.run_reader import runs_in
from cbtop.protocol.training_messages import PartTime, TrainingTimes
from cbtop.protocol.vocabulary import TRAIN
from cbtop.reports.run_diff import diff_fields, diff_markdown, diff_text
from tests.cbtop.comparison.made_runs import made_run
from tests.cbtop.made_training import Training, record

STEPS_A_REPORT = 10


def times(forward_ns: int, backward_ns: int, *, steps: int = STEPS_A_REPORT, model: str = "") -> TrainingTimes:
    parts = tuple(
        PartTime(name, steps * ns, ns) for name, ns in (("forward", forward_ns), ("backward", backward_ns)) if ns
    )
    return TrainingTimes(TRAIN, model, steps, sum(part.sum_ns for part in parts), parts)


def medians(reports: int, slower: float = 1.0, seed: int = 0) -> Mapping[str, Figure]:
    """Return median times with 1 % noise: 10 ms for forward, and 20 ms times `slower` for backward."""
    noise, found = np.random.default_rng(seed), TrainingParts()
    for number in range(reports):
        forward, backward = (round(us * noise.normal(1, 0.01) * 1e3) for us in (10_000, 20_000 * slower))
        found.take(times(forward, backward), number * STEPS_A_REPORT)
    return found.medians(TRAIN, "")


def trains(run: Run, figures: Mapping[str, Figure]) -> Run:
    """Return the run with all of its steps turned into training steps. Their parts have the given figures."""
    parts = tuple(replace(part, phase=TRAIN, training=figures, sequences=8.0) for part in run.parts)
    (rates,) = run.rates
    token_us = rates.times_us["tokens_per_sec"]
    # Each step has one token and eight sequences.
    sample_us = replace(token_us, mean=token_us.mean / 8, error=token_us.error / 8)
    rates = replace(rates, phase=TRAIN, times_us={**rates.times_us, "samples_per_sec": sample_us})
    return replace(run, parts=parts, rates=(rates,))


def compared(slower: float = 1.0) -> RunDiff:
    return diff(trains(made_run(1), medians(30)), trains(made_run(2), medians(30, slower, seed=1)))


def outcome(text: str, found: RunDiff) -> Outcome:
    (judged,) = judge(parse(text), found)
    return judged.outcome


def test_the_time_of_a_part_is_the_mean_of_its_medians() -> None:
    found = medians(40)
    assert found["forward"].mean == pytest.approx(10_000, rel=0.01)
    assert found["backward"].mean == pytest.approx(20_000, rel=0.01)
    assert 0 < found["backward"].error < 200


def test_fewer_than_five_reports_say_nothing() -> None:
    assert medians(4) == {}
    assert set(medians(5)) == {"forward", "backward"}


def test_a_report_that_is_mostly_of_counted_steps_is_left_out() -> None:
    found = TrainingParts()
    for step in range(21):
        found.take(times(1_000 if step % 5 == 0 else 9_000, 1), step)
    assert found.medians(TRAIN, "")["forward"].mean == 1.0


def test_a_part_that_a_report_lacks_took_no_time_in_it() -> None:
    found = TrainingParts()
    for number in range(10):
        found.take(times(1_000, 2_000 * (number % 2)), number * STEPS_A_REPORT)
    assert found.medians(TRAIN, "")["backward"].mean == pytest.approx(1.0)


def test_reports_of_two_models_are_kept_apart() -> None:
    found = TrainingParts()
    for number in range(6):
        for model, ns in (("G", 1_000), ("D", 5_000)):
            found.take(times(ns, 1, model=model), number * STEPS_A_REPORT)
    assert found.medians(TRAIN, "G")["forward"].mean == 1.0
    assert found.medians(TRAIN, "D")["forward"].mean == 5.0
    assert found.medians(TRAIN, "") == {}
    assert found.medians("train SGD", "") == {}


def test_the_only_model_of_a_phase_need_not_be_named() -> None:
    found = TrainingParts()
    for number in range(6):
        found.take(times(1_000, 1, model="Llama"), number * STEPS_A_REPORT)
    assert found.medians(TRAIN, "")["forward"].mean == 1.0
    assert found.medians(TRAIN, "Critic") == {}
    assert found.medians("train SGD", "") == {}


def test_steps_that_reports_share_widen_the_interval() -> None:
    noise, found, us = np.random.default_rng(3), TrainingParts(), []
    for number in range(30):
        us.append(round(10_000 * noise.normal(1, 0.01) * 1e3) / 1e3)
        found.take(times(round(us[-1] * 1e3), 0), number * STEPS_A_REPORT)
    (alone,) = figures(np.array(us)[:, None] * STEPS_A_REPORT, np.full(30, float(STEPS_A_REPORT)))
    widened = found.medians(TRAIN, "")["forward"]
    assert widened.mean == pytest.approx(alone.mean)
    assert widened.error == pytest.approx(2**0.5 * alone.error)


def test_the_newest_512_reports_of_64_models_are_kept() -> None:
    found = TrainingParts()
    for number in range(522):
        found.take(times(1_000 if number < 10 else 3_000, 1), number * STEPS_A_REPORT)
    assert found.medians(TRAIN, "")["forward"].mean == 3.0
    found.take(times(3_000 + 512_000, 1), 5220)
    assert found.medians(TRAIN, "")["forward"].mean == pytest.approx(3.0 + 1.0)
    for number in range(1, 70):
        for at in range(5):
            found.take(times(1, 1, model=str(number)), at * STEPS_A_REPORT)
    assert [bool(found.medians(TRAIN, str(number))) for number in (1, 63, 64, 69)] == [True, True, False, False]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train.backward.p50<=1.05x", Outcome.BROKEN),
        ("train.backward.p50<=1.4x", Outcome.HOLDS),
        ("train.backward<=25ms", Outcome.HOLDS),
        ("train.backward.p50<=22ms", Outcome.BROKEN),
        ("train.forward.p50<=1.05x", Outcome.HOLDS),
        ("train.zero_grad.p50<=1ms", Outcome.UNKNOWN),
        ("train.loss.p50<=1ms", Outcome.UNKNOWN),
        ("train.backward.p99<=1s", Outcome.UNKNOWN),
        ("train.backward@1.p50<=1s", Outcome.UNKNOWN),
        ("train.step.p50<=1s", Outcome.HOLDS),
        ("backward.p50<=1.05x", Outcome.BROKEN),
    ],
)
def test_a_part_of_a_training_step_has_thresholds(text: str, expected: Outcome) -> None:
    assert outcome(text, compared(slower=1.2)) is expected


def test_a_threshold_on_a_part_says_what_was_measured_and_names_it() -> None:
    (judged,) = judge(parse("train.backward.p50<=1.05x", ("gate.txt", 3)), compared(slower=1.2))
    assert (judged.about, judged.guilty, judged.where) == ("train: backward", "backward", ("gate.txt", 3))
    assert "(p50 20." in judged.said
    (judged,) = judge(parse("train.clip.p50<=1ms", ("gate.txt", 3)), compared())
    assert judged.said == "its steps have no such part"
    assert judged.where == ("gate.txt", 3)


def test_a_part_that_took_no_time_before_has_no_ratio() -> None:
    none = {**medians(30), "backward": Figure(0.0, 0.0, 30)}
    found = diff(trains(made_run(1), none), trains(made_run(2), medians(30, seed=1)))
    (judged,) = judge(parse("train.backward<=1.05x"), found)
    assert (judged.outcome, judged.said) == (Outcome.UNKNOWN, "it took no time in the baseline")
    assert "backward p50 0.00 µs → 19." in diff_text(found)


def test_samples_per_second_follow_the_steps() -> None:
    found = compared()
    (rates,) = found.now.rates
    rate = 8 * (rates.per_sec("tokens_per_sec") or 0.0)
    assert outcome(f"train.samples_per_sec>={rate * 0.5:.1f}", found) is Outcome.HOLDS
    assert outcome(f"samples_per_sec>={rate * 2:.1f}", found) is Outcome.BROKEN
    assert outcome("train.samples_per_sec>=0.5x", found) is Outcome.HOLDS
    assert outcome("train.samples_per_sec>=2x", found) is Outcome.BROKEN


def test_the_interval_of_samples_per_second_is_that_of_the_time_of_a_sample() -> None:
    found = compared()
    (now,) = (rates.times_us["samples_per_sec"] for rates in found.now.rates)
    (before,) = (rates.times_us["samples_per_sec"] for rates in found.base.rates)
    measure = phase_measure(found, "samples_per_sec", TRAIN, is_relative=False)
    assert measure.value == pytest.approx(1e6 / now.mean)
    factor = exp(half_of(now) / now.mean)
    assert (measure.least * factor, measure.most / factor) == pytest.approx((measure.value, measure.value))
    measure = phase_measure(found, "samples_per_sec", TRAIN, is_relative=True)
    assert measure.value == pytest.approx(before.mean / now.mean)
    factor = exp(sqrt(2) * change(before, now, 1).half / hypot(before.mean, now.mean))
    assert (measure.least * factor, measure.most / factor) == pytest.approx((measure.value, measure.value))
    assert measure.said.endswith(f", {units.number(1e6 / before.mean)} → {units.number(1e6 / now.mean)} samples/s")


def test_the_interval_of_a_part_is_that_of_its_change() -> None:
    (part,) = compared(slower=1.2).parts
    change = part.training["backward"]
    found = part_p50(part, "backward", is_relative=True)
    ratio, half = change.now / change.before, change.half / change.before
    assert (found.value, found.least, found.most) == pytest.approx((ratio, ratio - half, ratio + half))
    found = part_p50(part, "backward", is_relative=False)
    figure = part.now.training["backward"]
    least, most = figure.mean - half_of(figure), figure.mean + half_of(figure)
    assert (found.value, found.least, found.most) == pytest.approx((figure.mean, least, most))
    missing = replace(part, before=replace(part.before, training={}))
    assert part_p50(missing, "backward", is_relative=True).why_not
    assert not part_p50(missing, "backward", is_relative=False).why_not
    assert training_part(missing, "Back-Ward") == "backward"


def test_steps_that_do_not_report_their_sequences_have_no_samples() -> None:
    (judged,) = judge(parse("samples_per_sec>=1"), diff(made_run(1), made_run(2)))
    assert (judged.outcome, judged.said) == (Outcome.UNKNOWN, "not every step reports its sequences")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("samples_per_sec>=4ms", "write samples_per_sec>=40"),
        ("samples_per_sec.p50>=4", "write samples_per_sec>=40"),
        ("samples_per_sec@2>=4", "samples_per_sec covers all layers"),
        ("train.loss<=5", "write loss==0"),
        ("train.loss==1ms", "measured values cannot be compared"),
    ],
)
def test_a_threshold_on_training_that_cannot_be_says_why(text: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        parse(text)
    assert said in str(error.value)


def test_parts_are_no_places_of_other_steps() -> None:
    with pytest.raises(UsageError, match="there is no brick 'backward'"):
        judge(parse("decode.backward<=1ms"), diff(made_run(1), made_run(2)))
    with pytest.raises(UsageError, match="there is no brick 'loss'"):
        judge(parse("decode.loss<=1ms"), diff(made_run(1), made_run(2)))


def test_a_training_step_without_reports_has_parts_that_are_not_known() -> None:
    (judged,) = judge(parse("train.backward<=1ms"), diff(trains(made_run(1), {}), trains(made_run(2), {})))
    assert (judged.outcome, judged.said) == (Outcome.UNKNOWN, "too few reports of the parts of its steps")
    own_name = [
        replace(run, parts=tuple(replace(part, phase="fit") for part in trains(run, medians(30)).parts))
        for run in (made_run(1), made_run(2))
    ]
    assert outcome("fit.backward<=1s", diff(*own_name)) is Outcome.HOLDS


def test_a_diff_has_the_parts_of_training_steps() -> None:
    found = compared(slower=1.2)
    assert "  backward p50 20." in diff_text(found)
    assert "backward p50 20." in diff_markdown(found)
    (part,) = diff_fields(found)["parts"]
    assert part["training"]["backward"]["ratio"] == pytest.approx(1.2, rel=0.02)
    (plain,) = diff_fields(diff(made_run(1), made_run(2)))["parts"]
    assert plain["training"] == {}


def test_runs_taken_together_know_how_their_parts_scatter() -> None:
    runs = [trains(made_run(seed), medians(30, 1 + seed / 10, seed)) for seed in (1, 2, 3)]
    (part,) = together(runs).parts
    assert part.training["backward"].mean == pytest.approx(24_000, rel=0.01)
    assert part.training["backward"].scatter > 1_000


def test_a_file_of_runs_keeps_the_parts(tmp_path: Path) -> None:
    run, path = trains(made_run(1), medians(30)), tmp_path / "runs.json"
    write_runs(path, [run])
    assert read_runs(path)[0].parts == run.parts
    document = json.loads(path.read_text())
    for part in document["runs"][0]["parts"]:
        del part["training"]  # Files of older versions do not have this key.
    path.write_text(json.dumps(document))
    assert read_runs(path)[0].parts[0].training == {}


def test_a_recording_has_the_parts_and_its_replay_shows_them(tmp_path: Path) -> None:
    path = tmp_path / "train.cbtop"
    (tmp_path / "host").mkdir()
    record(tmp_path / "host", path, Training(steps=300, noise=0.01))
    (run,) = runs_in(path)
    (part,) = run.parts
    assert part.phase == TRAIN
    assert {name: figure.mean for name, figure in part.training.items()} == pytest.approx(
        {
            "data wait": 600, "forward": 9_000, "loss": 400, "backward": 18_400, "clip": 300,
            "optimizer": 4_000, "zero grad": 100, "other": 200,
        },
        rel=0.01,
    )  # fmt: skip
    with ReplayFeed(path) as feed:
        feed.is_playing = False
        feed.seek(feed.duration_s)
        view = feed.view(None, TRAIN)
        assert view is not None
        assert view.training is not None
        assert (view.training.steps, view.training.mean_us) == (64, pytest.approx(33_000, rel=0.01))
        feed.seek(1.0)
        view = feed.view(None, TRAIN)
        assert view is not None
        assert view.training is not None
        assert 0 < view.training.steps < 64
