"""Tests of samples/s of a recorded training. Every output has the same rate, which evaluations do not lower.

This rate equals the rate from the program's own clock and counts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from cbtop.commands.shared.ring_view import view_of
from cbtop.comparison.judged import Outcome
from cbtop.comparison.run_diff import diff_of
from cbtop.comparison.threshold_grammar import parse
from cbtop.comparison.thresholds import judge
from cbtop.daemon.source import Source
from cbtop.feeds.replay import ReplayFeed
from cbtop.feeds.run_reader import runs_in
from cbtop.protocol.recording import FrameKind, RecordingOrigin, RecordingWriter
from cbtop.reports.sources import sources_json
from cbtop.reports.summary import summary
from cbtop.tui.views.header import _tiles
from cbtop.viewmodels.sources import source_row
from tests.cbtop.made_recordings import BEGIN_NS, HELLO, frame
from tests.cbtop.made_server import Server
from tests.cbtop.recorded import source_of
from tests.cbtop.test_one_rate import found_in, line_text, printed

BATCH, STEPS, STEP_US, EVALUATION_US, PAUSE_US = 8, 400, 20_000, 900_000, 250_000


@dataclass(frozen=True)
class Trained:
    """A training process, measured by its own clock. Its steps with `second`, if any, are of a second optimizer."""

    path: Path
    runtime: Path
    samples_per_sec: float
    wall_samples_per_sec: float
    tokens_per_sec: float


def record_training(path: Path, runtime: Path, *, tokens: int = 0, second: str = "") -> Trained:
    """Record a training with an evaluation and a pause after every twentieth step."""
    server = Server(runtime, 1)
    source = source_of(runtime)
    writer = RecordingWriter(path, RecordingOrigin("here", BEGIN_NS, HELLO.realtime_ns), 1 << 30)
    began_ns, trained_us = server.clock.now_ns, 0.0
    for number in range(STEPS):
        for phase in filter(None, ("train", second)):
            before_ns = server.clock.now_ns
            server.step(phase, BATCH, tokens, STEP_US)
            trained_us += (server.clock.now_ns - before_ns) / 1e3
        ended_ns = server.clock.now_ns
        if number % 20 == 19 and number < STEPS - 1:
            server.step("forward", 4 * BATCH, 0, EVALUATION_US)
            server.clock.sleep_us(PAUSE_US)
        if number % 20 == 0:
            _say(source, writer, number)
    server.profiler.close("done")
    _say(source, writer, STEPS)
    writer.close()
    samples = BATCH * STEPS
    return Trained(
        path, runtime, 1e6 * samples / trained_us, 1e9 * samples / (ended_ns - began_ns),
        1e6 * tokens * STEPS / trained_us,
    )  # fmt: skip


def _say(source: Source, writer: RecordingWriter, at: int) -> None:
    source.poll()
    records = list(source.records())
    source.delta()
    writer.append(frame(FrameKind.RECORDS, at / 10, *records))
    writer.append(frame(FrameKind.KEYFRAME, at / 10, HELLO, *source.snapshot()))


@pytest.mark.parametrize("second", ["", "train Adam 2"], ids=["one optimizer", "two"])
def test_every_output_has_the_samples_a_second_of_training_steps(
    tmp_path: Path, second: str, capsys: pytest.CaptureFixture[str]
) -> None:
    new = record_training(tmp_path / "new.cbtop", tmp_path / "new", second=second)
    base = record_training(tmp_path / "base.cbtop", tmp_path / "base", second=second)
    rate = new.samples_per_sec
    assert rate > 1.5 * new.wall_samples_per_sec  # a mix-up would be noticed
    gate = printed(capsys, "check", "train.samples_per_sec>=1e6", "--new", new.path)
    diff = json.loads(printed(capsys, "diff", base.path, new.path, "--format", "json"))
    report = printed(capsys, "replay", new.path, "--headless", "--phase", "train")
    said = printed(capsys, "replay", new.path, "--headless", "--phase", "train", "--format", "json")
    with ReplayFeed(new.path) as feed:
        feed.seek(feed.duration_s)
        view = feed.view(phase="train")
        rows = [source_row(record, "train") for record in feed.store.sources.values()]
        (listed,) = json.loads(sources_json(rows))["sources"]
    assert view is not None
    ring = Source(next(new.runtime.glob("*.ring")))
    ended = view_of(ring)
    ring.close()
    assert ended is not None
    (steps,) = [one for one in ended.phases if one.phase == "train"]
    shown = {
        "check": found_in(gate, r"broken +train.samples_per_sec>=1e6 +train +NUMBER samples/s \("),
        "JSON of diff": next(one for one in diff["rates"] if one["phase"] == "train")["samples_per_sec"][1],
        "report": found_in(report, r"\* train: .* NUMBER samples/s"),
        "JSON": json.loads(said)["sources"][0]["steps"]["samples_per_sec"],
        "screen": found_in(line_text(_tiles(view, 200)[1]), r"^ *[\d.,]+.*? NUMBER"),
        "ls": listed["samples_per_sec"],
        "summary": found_in("\n".join(summary(view, "cbtop")), r"train: .* NUMBER samples/s"),
        "post-mortem": steps.samples_per_sec,
    }
    for where, value in shown.items():
        assert value == pytest.approx(rate, rel=5e-4), where


def test_tokens_per_second_of_training_leave_evaluations_out(tmp_path: Path) -> None:
    new = record_training(tmp_path / "new.cbtop", tmp_path / "new", tokens=64)
    runs = runs_in(new.path)
    found = diff_of(runs, runs)
    between = (new.samples_per_sec * new.wall_samples_per_sec) ** 0.5
    for threshold, outcome in (
        (f"train.samples_per_sec>={between}", Outcome.HOLDS),
        (f"train.samples_per_sec>={1.1 * new.samples_per_sec}", Outcome.BROKEN),
        (f"train.tokens_per_sec>={new.tokens_per_sec * 0.9}", Outcome.HOLDS),
        (f"train.tokens_per_sec>={new.tokens_per_sec * 1.1}", Outcome.BROKEN),
        (f"train[batch=8].tokens_per_sec>={new.tokens_per_sec * 0.9}", Outcome.HOLDS),
        (f"train.in_steps<={new.tokens_per_sec * 1.1}", Outcome.HOLDS),
        # An evaluation has the rate by wall clock, as any other phase.
        (f"forward.samples_per_sec>={4 * new.wall_samples_per_sec}", Outcome.BROKEN),
    ):
        (judged,) = judge(parse(threshold), found)
        assert judged.outcome is outcome, judged
