"""Tests of the gradients and the loss scale that a training process reports, and of their text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cbtop.protocol.training_messages import GradientMessage
from cbtop.protocol.vocabulary import TRAIN, WARM_UP
from cbtop.reports import OVERVIEW, REPORTS
from cbtop.text import training_text
from cbtop.viewmodels.gradients import GradientsView
from cbtop.viewmodels.on_demand import with_parts
from cbtop.viewmodels.source import SourceView
from tests.cbtop.made_training import NAN, NORM, STEADY_SCALE, Training, trained

SHORT = Training(steps=30)


def view_with(directory: Path, *said: GradientMessage) -> SourceView:
    return trained(directory, replace(SHORT, gradients=said)).one()


def gradients_of(view: SourceView) -> GradientsView | None:
    assert view.training is not None
    return view.training.gradients


def lines_of(view: SourceView) -> list[str]:
    assert view.training is not None
    return training_text.gradients(view, view.training)


def test_a_process_that_reports_no_gradients_has_none(tmp_path: Path) -> None:
    view = view_with(tmp_path)
    assert gradients_of(view) is None
    assert lines_of(view) == []


def test_each_is_known_without_the_others(tmp_path: Path) -> None:
    for name, message in {"norm": NORM, "fault": NAN, "loss_scale": STEADY_SCALE}.items():
        (tmp_path / name).mkdir()
        found = gradients_of(view_with(tmp_path / name, message))
        assert found is not None
        known = {"norm": found.norm, "fault": found.fault, "loss_scale": found.loss_scale}
        assert [key for key, value in known.items() if value is not None] == [name]


@pytest.mark.parametrize("said", [replace(NORM, phase="train SGD 2"), replace(NORM, phase="decode")])
def test_gradients_of_other_steps_are_not_shown(tmp_path: Path, said: GradientMessage) -> None:
    assert gradients_of(view_with(tmp_path, said)) is None


def test_of_several_models_none_is_guessed(tmp_path: Path) -> None:
    one, other = replace(NORM, model="GPT"), replace(NORM, model="GPT 2")
    assert gradients_of(view_with(tmp_path, one, other)) is None
    (tmp_path / "one").mkdir()
    assert gradients_of(view_with(tmp_path / "one", one)) is not None


def test_the_gradients_of_a_warm_up_are_those_of_its_steps(tmp_path: Path) -> None:
    plan = replace(SHORT, warm_up=30, gradients=(NORM,))
    assert gradients_of(trained(tmp_path, plan).one(TRAIN + WARM_UP)) is not None


def test_a_fault_is_certain_if_the_step_before_was_finite_and_over_if_a_later_one_is(tmp_path: Path) -> None:
    for number, (finite, last, expected) in enumerate(
        [(117, 300, (True, False)), (116, 300, (False, False)), (0, 299, (False, True))]
    ):
        directory = tmp_path / str(number)
        directory.mkdir()
        found = gradients_of(view_with(directory, replace(NAN, finite_step=finite, last_step=last)))
        assert found is not None
        assert found.fault is not None
        assert (found.fault.is_certain, found.fault.is_over) == expected
        assert found.fault.finite_step == (finite or None)


def test_the_lines_have_the_norm_and_the_scale(tmp_path: Path) -> None:
    small = replace(NORM, norm=8.5e-6, p50=0.02, clipping="", measured=1)
    assert lines_of(view_with(tmp_path, small, STEADY_SCALE)) == [
        "gradient norm 8.50e-06 in step 298 (p50 0.02, max 1.50 of the latest norm)",
        "loss scale 65,536; 3 of 300 steps were skipped",
    ]


def test_a_norm_of_one_rank_says_so(tmp_path: Path) -> None:
    view = view_with(tmp_path, NORM)
    (line,) = lines_of(with_parts(view, world_size=2))
    assert line.startswith("gradient norm 0.75 in step 298, before clipping, of this rank (p50")
    (tmp_path / "shard").mkdir()
    (line,) = lines_of(view_with(tmp_path / "shard", replace(NORM, is_shard=True)))
    assert "of this rank's shards" in line


@pytest.mark.parametrize("section", ["training", OVERVIEW])
def test_reports_have_the_lines(tmp_path: Path, section: str) -> None:
    view = view_with(tmp_path, NORM, STEADY_SCALE)
    text = REPORTS["text"]([view], [section])
    assert all(line in text for line in lines_of(view))
