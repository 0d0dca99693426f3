"""Tests of the peak memory of training steps in a run: its thresholds, its comparison, and its labels as bounds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cbtop.comparison.judged import Outcome
from cbtop.comparison.memory_peaks import (
    ALLOCATED,
    RESERVED,
    MemoryPeak,
    PeakChange,
    PhaseMemory,
    memory_together,
    peaks_of,
    peaks_together,
)
from cbtop.comparison.run_diff import RunDiff, diff
from cbtop.comparison.run_sets import together
from cbtop.comparison.runs import Run
from cbtop.comparison.threshold_grammar import parse
from cbtop.comparison.thresholds import judge
from cbtop.errors import UsageError
from cbtop.feeds.run_file import read_runs, write_runs
from cbtop.feeds.run_reader import runs_in
from cbtop.protocol.memory_messages import PartMemory, TrainingMemory
from cbtop.protocol.vocabulary import TRAIN
from cbtop.reports.run_diff import diff_fields, diff_markdown, diff_text
from tests.cbtop.comparison.made_runs import made_run
from tests.cbtop.made_training import ROOMY, Training, memory, record

GB = 1_000_000_000


def trains(seed: int, *said: TrainingMemory) -> Run:
    """Return a run whose steps are training steps with the memory of the given reports."""
    run = made_run(seed)
    peaks = peaks_together([peaks_of(one) for one in said])
    known = (PhaseMemory(TRAIN, peaks),) if peaks else ()
    return replace(run, parts=tuple(replace(part, phase=TRAIN) for part in run.parts), memory=known)


def compared(before: TrainingMemory, now: TrainingMemory) -> RunDiff:
    return diff(trains(1, before), trains(2, now))


def outcome(text: str, found: RunDiff) -> Outcome:
    (judged,) = judge(parse(text), found)
    return judged.outcome


def steps_from(lowest_gb: float, most_gb: float) -> TrainingMemory:
    """Return the memory of steps of different sizes."""
    said = memory(10, most_gb, 60)
    return replace(said, lowest_allocated_bytes=round(lowest_gb * GB), lowest_reserved_bytes=60 * GB)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train.memory.allocated<=1.05x", Outcome.BROKEN),
        ("train.memory.allocated<=1.3x", Outcome.HOLDS),
        ("memory.allocated<=1.3x", Outcome.HOLDS),
        ("train.memory.reserved<=1.05x", Outcome.HOLDS),
        ("train.memory.allocated<=51GB", Outcome.HOLDS),
        ("train.memory.allocated<=51000MB", Outcome.HOLDS),
        ("train.memory.allocated<=47GiB", Outcome.HOLDS),
        ("train.memory.allocated<=46GiB", Outcome.BROKEN),
        ("train.memory.allocated<=49GB", Outcome.BROKEN),
        ("train.memory.reserved<60GB", Outcome.BROKEN),
    ],
)
def test_more_memory_than_a_threshold_allows_breaks_it(text: str, expected: Outcome) -> None:
    assert outcome(text, compared(memory(30, 42, 60), memory(30, 50, 60))) is expected


def test_equal_memory_holds_any_ratio_and_is_not_a_change() -> None:
    found = compared(ROOMY, ROOMY)
    assert outcome("train.memory.allocated<=1x", found) is Outcome.HOLDS
    assert outcome("train.memory.reserved<=1x", found) is Outcome.HOLDS
    assert [one["verdict"] for one in diff_fields(found)["memory"]] == [None, None]
    assert "train: memory.allocated ≥42.0 GB → ≥42.0 GB, 1.00×\n" in diff_text(found)


def test_a_limit_between_the_seen_peak_and_torchs_own_is_unsure() -> None:
    said = replace(memory(30, 42, 60), torch_peak_bytes=46 * GB)
    found = compared(said, said)
    limits = ("train.memory.allocated<=41GB", "train.memory.allocated<=44GB", "train.memory.allocated<=46GB")
    assert [outcome(text, found) for text in limits] == [Outcome.BROKEN, Outcome.UNSURE, Outcome.HOLDS]
    (judged,) = judge(parse(limits[1], ("gate.txt", 2)), found)
    assert (judged.about, judged.said) == ("train: memory.allocated", "≥42.0 GB, torch's own peak 46.0 GB")
    assert judged.where == ("gate.txt", 2)


def test_a_peak_that_the_program_has_reset_is_no_upper_bound() -> None:
    said = replace(memory(30, 42, 60), torch_peak_bytes=GB)
    assert outcome("train.memory.allocated<=41GB", compared(said, said)) is Outcome.BROKEN
    assert outcome("train.memory.allocated<=42GB", compared(said, said)) is Outcome.HOLDS


def test_steps_of_different_sizes_change_by_chance() -> None:
    found = compared(steps_from(30, 42), steps_from(31, 44))
    assert outcome("train.memory.allocated<=1.02x", found) is Outcome.UNSURE
    assert "1.05×\n" in diff_text(found)
    apart = compared(steps_from(30, 42), steps_from(43, 60))
    assert "memory.allocated ≥42.0 GB → ≥60.0 GB, 1.43×: more\n" in diff_text(apart)
    assert outcome("train.memory.allocated<=1.02x", apart) is Outcome.BROKEN


@pytest.mark.parametrize(
    ("before", "now", "verdict"),
    [
        ((42, 42), (45, 45), "more"),
        ((45, 45), (42, 42), "less"),
        ((42, 42), (42.1, 42.1), ""),
        ((30, 42), (42, 45), ""),
        ((43, 60), (30, 42), "less"),
    ],
)
def test_a_change_beyond_every_step_is_more_or_less(
    before: tuple[float, float], now: tuple[float, float], verdict: str
) -> None:
    one, other = (MemoryPeak(round(most * GB), round(lowest * GB)) for lowest, most in (before, now))
    assert PeakChange(TRAIN, ALLOCATED, one, other).verdict == verdict


def test_a_report_of_an_older_process_counts_with_its_peak() -> None:
    assert peaks_of(ROOMY)[RESERVED] == MemoryPeak(48 * GB, 48 * GB)
    assert peaks_of(TrainingMemory(TRAIN, "", 0, why_unknown="no GPU")) == {}
    assert peaks_of(replace(ROOMY, parts=(PartMemory("forward", 0, 9),))) == {}


def test_reports_are_taken_together_by_their_highest_and_lowest_steps() -> None:
    found = peaks_together([{}, peaks_of(steps_from(30, 42)), peaks_of(steps_from(20, 35))])
    assert found[ALLOCATED] == MemoryPeak(42 * GB, 20 * GB, 42 * GB)
    unknown = peaks_of(replace(ROOMY, torch_peak_bytes=0))
    assert peaks_together([peaks_of(ROOMY), unknown])[ALLOCATED].bound_bytes is None


def test_runs_taken_together_have_the_memory_of_all() -> None:
    runs = [trains(seed, memory(30, 40 + seed, 60)) for seed in (1, 2, 3)]
    (found,) = together(runs).memory
    assert found.peaks[ALLOCATED] == MemoryPeak(43 * GB, 41 * GB, 43 * GB)
    assert memory_together([(), ()]) == ()


def test_memory_that_is_not_known_says_why() -> None:
    cpu = trains(1)
    (judged,) = judge(parse("train.memory.allocated<=1GB"), diff(cpu, trains(2)))
    assert (judged.outcome, "recorded steps on a GPU" in judged.said) == (Outcome.UNKNOWN, True)
    (judged,) = judge(parse("train.memory.allocated<=1x"), diff(cpu, trains(2, ROOMY)))
    assert (judged.outcome, "in the baseline" in judged.said) == (Outcome.UNKNOWN, True)
    assert "memory" not in diff_text(diff(cpu, trains(2, ROOMY)))
    with pytest.raises(UsageError, match=r"no phase with training steps 'decode'; .*there are train"):
        judge(parse("decode.memory.allocated<=1GB"), diff(cpu, trains(2)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("train.memory.allocated<=4ms", "write memory.allocated<=40GB or memory.allocated<=1.05x"),
        ("train.memory.allocated<=4", "write memory.allocated<=40GB"),
        ("train.memory.reserved.p99<=4GB", "write memory.reserved<=40GB"),
        ("train.memory.reserved@3<=4GB", "omit @3"),
        ("train.memory.reserved==4GB", "cannot be compared with =="),
        ("train.memory.alocated<=4GB", "there are memory.allocated and memory.reserved"),
        ("train.step.p50<=4GB", "expected a time"),
    ],
)
def test_a_threshold_on_memory_that_cannot_be_says_why(text: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        parse(text)
    assert said in str(error.value)


def test_a_diff_labels_the_memory_as_bounds() -> None:
    found = compared(ROOMY, memory(30, 45, 48))
    assert "train: memory.allocated ≥42.0 GB → ≥45.0 GB, 1.07×: more" in diff_text(found)
    assert "memory.allocated ≥42.0 GB" in diff_markdown(found)
    allocated, reserved = diff_fields(found)["memory"]
    assert (allocated["phase"], allocated["name"], allocated["verdict"]) == (TRAIN, ALLOCATED, "more")
    assert allocated["now"] == {
        "at_least_bytes": 45 * GB,
        "lowest_step_bytes": 45 * GB,
        "at_most_bytes": 45 * GB,
    }
    assert (reserved["now"]["at_most_bytes"], reserved["ratio"]) == (None, 1.0)


def test_a_file_of_runs_keeps_the_memory(tmp_path: Path) -> None:
    run, path = trains(1, steps_from(30, 42)), tmp_path / "runs.json"
    write_runs(path, [run])
    assert read_runs(path)[0].memory == run.memory
    document = json.loads(path.read_text())
    for row in document["runs"][0]["memory"]:
        row[3] = row[2] + 1
    path.write_text(json.dumps(document))
    with pytest.raises(UsageError, match=r"memory: .* bytes; the least comes first"):
        read_runs(path)
    del document["runs"][0]["memory"]  # Files of older versions do not have this key.
    path.write_text(json.dumps(document))
    assert read_runs(path)[0].memory == ()


def test_a_recording_has_the_memory_of_its_steps(tmp_path: Path) -> None:
    path = tmp_path / "train.cbtop"
    (tmp_path / "host").mkdir()
    record(tmp_path / "host", path, Training(steps=60, gradients=(ROOMY,)))
    (run,) = runs_in(path)
    assert run.memory == (PhaseMemory(TRAIN, peaks_of(ROOMY)),)
