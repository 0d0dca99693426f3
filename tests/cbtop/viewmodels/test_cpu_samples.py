"""Tests of the shares of sampled functions, and of what is said if there are too few samples."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from cbtop.protocol.sample_messages import BETWEEN_STEPS, IN_NO_BRICK, CpuSamples, SampledFunction, SampledPlace
from cbtop.reports import OVERVIEW, REPORTS
from cbtop.reports.overview import bricks_and_verdicts
from cbtop.reports.summary import summary
from cbtop.viewmodels.cpu_samples import LEAST_SAMPLES, interval_percent, mostly, sampled_time
from cbtop.viewmodels.source import SourceView
from tests.cbtop.viewmodels.verdicts.streams import Decoding, run

ENCODE = SampledFunction("Tokenizer.encode", "tok/fast.py", 88, 60, 0, "serve.py:12 main")
SLEEP = SampledFunction("Queue.get", "queue.py", 171, 36, 35)
BETWEEN = SampledPlace("", "", BETWEEN_STEPS, 100, 2, 2, (ENCODE, SLEEP))
INSIDE = SampledPlace("decode", "", IN_NO_BRICK, 7, 0, 0, (replace(ENCODE, samples=7),))
SAMPLES = CpuSamples(0, 41_000_000_000, 400, 9, (BETWEEN, INSIDE))


def sampled(directory: Path, samples: CpuSamples | None = SAMPLES) -> SourceView:
    directory.mkdir(exist_ok=True)
    made = run(directory, Decoding(between_us=20_000))
    for record in made.store.sources.values():
        record.cpu_samples = samples
    return made.one()


@pytest.mark.parametrize(("count", "samples"), [(10, 100), (0, 20), (20, 20), (60, 100), (1, 5_000)])
def test_the_ends_of_an_interval_are_where_the_score_test_rejects(count: int, samples: int) -> None:
    """Wilson's interval has each share that the score test does not reject: |p - x| = z sqrt(x (1 - x) / n)."""
    for end in interval_percent(count, samples):
        distance, deviation = abs(count / samples - end / 100), math.sqrt(end / 100 * (1 - end / 100) / samples)
        assert distance == pytest.approx(1.96 * deviation, abs=1e-9)


def test_a_report_names_the_functions_between_steps_as_sampled(tmp_path: Path) -> None:
    view = sampled(tmp_path)
    text = REPORTS["text"]([view], ["bricks"])
    wanted = (
        "between steps (sampled, n = 100 in 41 s, 2.0 % cbtop's own, 2.0 % not read)\n"
        "  60 % (50 to 69)  Tokenizer.encode tok/fast.py:88, from serve.py:12 main\n"
        "  36 % (27 to 46)  Queue.get queue.py:171 (waits 97.2 %)\n"
        "not instrumented (sampled, n = 7 in 41 s): fewer than 20 samples, so no shares\n"
    )
    assert wanted in text
    assert wanted in REPORTS["text"]([view], [OVERVIEW]) + "\n"
    assert wanted.splitlines()[1] in bricks_and_verdicts(view, 5)
    (line,) = [line for line in summary(view, "cbtop") if "sampled" in line]
    assert line.startswith("between steps (sampled, n = 100 in 41 s")
    assert "60 % (50 to 69) in Tokenizer.encode" in line


def test_the_verdict_on_idle_time_names_the_function_that_ran_most(tmp_path: Path) -> None:
    (verdict,) = sampled(tmp_path).verdicts
    assert verdict.sentence.endswith("; mostly in Tokenizer.encode tok/fast.py:88 (60 % of 100 samples)")
    (bare,) = sampled(tmp_path / "bare", None).verdicts
    assert verdict.sentence.startswith(bare.sentence)


def test_a_function_with_a_small_share_is_not_called_the_most(tmp_path: Path) -> None:
    few = replace(ENCODE, samples=29), replace(SLEEP, samples=28, asleep=0)
    view = sampled(tmp_path, replace(SAMPLES, places=(replace(BETWEEN, functions=few),)))
    assert mostly(view.sampled, BETWEEN_STEPS) == ""


def test_json_has_every_count_and_null_for_an_unknown_share(tmp_path: Path) -> None:
    (source,) = json.loads(REPORTS["json"]([sampled(tmp_path)], ["bricks"]))["sources"]
    between, inside = source["sampled"]
    assert (between["place"], between["samples"], between["over_s"]) == (BETWEEN_STEPS, 100, 41.0)
    assert between["functions"][0]["percent"] == 60.0
    assert inside["functions"][0]["samples"] == 7
    assert inside["functions"][0]["percent"] is inside["functions"][0]["low_percent"] is None


def test_functions_in_steps_of_another_phase_are_left_out(tmp_path: Path) -> None:
    view = sampled(tmp_path, replace(SAMPLES, places=(BETWEEN, replace(INSIDE, phase="prefill"))))
    assert [place.place for place in view.sampled] == [BETWEEN_STEPS]


def test_a_process_without_samples_shows_none(tmp_path: Path) -> None:
    view = sampled(tmp_path, None)
    assert view.sampled == ()
    assert "sampled, n" not in REPORTS["text"]([view], ["bricks"])


def test_at_least_twenty_samples_are_needed_for_a_share(tmp_path: Path) -> None:
    made = run(tmp_path, Decoding())
    (record,) = made.store.sources.values()
    for samples, is_known in ((LEAST_SAMPLES - 1, False), (LEAST_SAMPLES, True)):
        place = replace(BETWEEN, samples=samples, unread=0, own=0, functions=(replace(ENCODE, samples=samples),))
        (found,) = sampled_time(replace(SAMPLES, places=(place,)), record.nodes, None)
        assert (found.functions[0].percent is not None) is is_known
