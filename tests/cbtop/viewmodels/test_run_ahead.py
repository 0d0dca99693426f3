"""Tests of steps whose host runs ahead of the GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cbtop.protocol.vocabulary import BY_KERNELS, IDLE_BEFORE
from cbtop.reports import REPORTS
from cbtop.viewmodels.run_ahead import kernels_us_if_ahead, may_run_ahead
from tests.cbtop.viewmodels.verdicts.streams import Decoding, run

TWO_KINDS = Decoding(step_factor=lambda step: 1.5 if step * 7_919 % 100 < 30 else 1.0)
NOTE = "the host runs ahead of the GPU: step times are the host's, kernels take "


@pytest.mark.parametrize(
    ("measured", "expected"),
    [("torch", ["bimodal-latency"]), (BY_KERNELS + IDLE_BEFORE, ["bimodal-latency"]), (BY_KERNELS, [])],
)
def test_steps_of_a_host_that_may_run_ahead_are_not_called_bimodal(
    tmp_path: Path, measured: str, expected: list[str]
) -> None:
    view = run(tmp_path, replace(TWO_KINDS, measured=measured)).one()
    assert [verdict.id for verdict in view.verdicts] == expected


def test_kernels_that_take_longer_than_a_step_are_told(tmp_path: Path) -> None:
    view = run(tmp_path, Decoding(measured=BY_KERNELS + IDLE_BEFORE)).one()
    assert view.books is not None
    assert view.steps is not None
    assert not may_run_ahead(view)
    kernels_us = view.books.bricks_us / view.steps.recorded
    ahead = replace(view, steps=replace(view.steps, mean_us=kernels_us / 1.4))
    assert may_run_ahead(ahead)
    assert kernels_us_if_ahead(ahead) == pytest.approx(kernels_us)
    assert NOTE in REPORTS["text"]([ahead], ["overview"])
    assert NOTE not in REPORTS["text"]([view], ["overview"])
    assert kernels_us_if_ahead(replace(ahead, backend="torch on cuda")) is None
