"""The memory of training steps, as viewers show it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from cbtop.protocol.memory_messages import TrainingMemory
from cbtop.protocol.vocabulary import TRAIN
from cbtop.reports import OVERVIEW, REPORTS
from cbtop.text import training_text
from cbtop.viewmodels.training_memory import TrainingMemoryView
from tests.cbtop.made_training import ROOMY, Training, memory, trained


def memory_of(directory: Path, *said: TrainingMemory) -> TrainingMemoryView | None:
    training = trained(directory, Training(steps=30, gradients=said)).one().training
    assert training is not None
    return training.memory


def test_the_peak_of_a_step_is_that_of_its_highest_part(tmp_path: Path) -> None:
    found = memory_of(tmp_path, memory(30, 42, 48, node=5))
    assert found is not None
    assert [(part.name, part.allocated_bytes) for part in found.parts] == [
        ("forward", 30_000_000_000),
        ("backward", 42_000_000_000),
    ]
    assert (found.allocated_bytes, found.reserved_bytes) == (42_000_000_000, 48_000_000_000)
    assert found.place == ("Layer 0", "QkvProjection")
    assert found.unused_percent == 12.5


def test_parts_stand_in_the_usual_order_and_unknown_ones_last(tmp_path: Path) -> None:
    first, second = ROOMY.parts
    found = memory_of(tmp_path, replace(ROOMY, parts=(replace(first, name="later"), second, first)))
    assert found is not None
    assert [part.name for part in found.parts] == ["forward", "backward", "later"]


def test_a_model_that_was_not_measured_has_no_memory_of_another_one(tmp_path: Path) -> None:
    other = replace(ROOMY, phase="train Adam 2")
    assert memory_of(tmp_path, other) is None


def test_the_report_has_a_table_of_the_peaks_and_the_overview_a_line(tmp_path: Path) -> None:
    view = trained(tmp_path, Training(steps=30, gradients=(memory(30, 42, 48, retries=1, node=5),))).one()
    text = REPORTS["text"]([view], ["training"])
    line = (
        "memory of a step ≥42.0 GB at its peak, in Layer 0 → QkvProjection; "
        "reserved 48.0 GB of 79.0 GB (most of 12 recorded steps)"
    )
    assert (
        "memory, at least  allocated  reserved\n"
        "forward             30.0 GB   48.0 GB\n"
        "backward            42.0 GB   48.0 GB\n"
        f"{line}\n"
        "at most 12.5 % of the reserved memory is unused at the peak; torch's own peak 42.0 GB; "
        "retries of the allocator: 1 in 240 steps\n"
    ) in text
    assert line in REPORTS["text"]([view], [OVERVIEW])
    said = json.loads(REPORTS["json"]([view], ["training"]))["sources"][0]["training"]["memory"]
    assert (said["allocated_bytes"], said["place"]) == (42_000_000_000, ["Layer 0", "QkvProjection"])


def test_unknown_memory_has_its_reason_in_the_report_and_no_line_elsewhere(tmp_path: Path) -> None:
    unknown = TrainingMemory(TRAIN, "", 0, why_unknown="torch counts the memory of GPUs only")
    view = trained(tmp_path, Training(steps=30, gradients=(unknown,))).one()
    assert "memory of a step n/a (torch counts the memory of GPUs only)" in REPORTS["text"]([view], ["training"])
    assert "memory of a step" not in REPORTS["text"]([view], [OVERVIEW])
    assert view.training is not None
    assert training_text.below(view, view.training) == []
