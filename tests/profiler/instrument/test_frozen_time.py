"""Test of a program that freezes time while a model generates.

The program gets no message, and its steps are recorded.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.instrument.attachment import attach
from cbtop.profiler.profiler import BrickProfiler
from tests.profiler.instrument.tiny import model_of, words


@pytest.mark.slow
def test_a_model_that_generates_in_frozen_time_is_timed_and_says_nothing(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], runtime: object
) -> None:
    freezegun = pytest.importorskip("freezegun", reason="freezegun is not installed: make torch")
    model, profiler = model_of("llama"), BrickProfiler()
    attachment = attach(model, profiler)
    for day in ("2020-01-01", "2050-01-01"):
        with freezegun.freeze_time(day):
            model.generate(words(1, 4), max_new_tokens=4, do_sample=False)
    attachment.detach()
    profiler.finalize()
    report = profiler.report()
    assert report.steps == 8
    assert 8 * 10_000 < report.wall_ns < 600 * 10**9
    assert (caplog.records, capfd.readouterr().err) == ([], "")
