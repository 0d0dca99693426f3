"""Time in which an engine has no request is not the fault of the process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cbtop.viewmodels.serving import EnginePartRow, ServingView
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.verdicts.idle_between_steps import IDLE_BETWEEN_STEPS
from tests.cbtop.viewmodels.verdicts.streams import Decoding, run

ENGINE = ServingView("vLLM", 9, 2_000.0, (), 3, None, None, None, (), (), 0)


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> SourceView:
    """Return a view whose steps take about half of the time."""
    path: Path = tmp_path_factory.mktemp("idle")
    return run(path, Decoding(between_us=20_000)).one().held()


def _with(view: SourceView, **percent: float) -> SourceView:
    names = {"waiting": "waiting for requests", "scheduler": "scheduler"}
    parts = tuple(EnginePartRow(names[name], share, share, share) for name, share in percent.items())
    return replace(view, serving=replace(ENGINE, parts=parts))


def test_an_engine_that_waits_for_requests_is_not_idle_between_steps(idle: SourceView) -> None:
    (before,) = IDLE_BETWEEN_STEPS.find(idle).evidence[:1]
    assert IDLE_BETWEEN_STEPS.find(_with(idle, waiting=before.value - 19.0)) is None


def test_an_engine_that_schedules_between_its_steps_is_idle_there(idle: SourceView) -> None:
    found = IDLE_BETWEEN_STEPS.find(_with(idle, waiting=5.0, scheduler=45.0))
    assert found is not None
    assert found.evidence[0].value == pytest.approx(IDLE_BETWEEN_STEPS.find(idle).evidence[0].value - 5.0)
    assert "in which there was no request (derived)" in found.sentence
    assert found.sentence.endswith("; the engine's thread: scheduler 45.0 %")
