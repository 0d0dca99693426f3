"""Tests of exported counters: none decreases between two scrapes, whatever happens to the processes."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.client.store import Store
from cbtop.protocol.messages import (
    DaemonHello,
    Heartbeat,
    SourceCatalog,
    SourceGone,
    SourceState,
    StatsUpdate,
    WireMessage,
)
from cbtop.protocol.publisher import JOIN_PREFIX, LIVE, Publisher
from cbtop.protocol.vocabulary import SourceStatus
from cbtop.telemetry import metrics, serving
from cbtop.telemetry import subscription as subscription_module
from cbtop.telemetry.counters import Counters
from cbtop.telemetry.metrics import DurationHistogram, Metric, Point
from tests.cbtop.recorded import Clock, profiler_in, source_of
from tests.integration.hosts import DEADLINE_S, eventually
from tests.representatives import first_by_default

HELLO = DaemonHello(2, 0, 77, "here", "boot", "0.1.0", 0, 0)
BEACON = "beacon"  # name of a source that only serves to know which messages of the daemon have arrived
ASK = {"Accept": "application/openmetrics-text; version=1.0.0"}
GROWING = ("counter", "histogram")

Series = dict[str, float]


class Life:
    """A process from its start to its end.

    The daemon publishes one process after another under the same name `key`.
    """

    def __init__(self, directory: Path, key: str, number: int) -> None:
        directory.mkdir()
        self.clock = Clock()
        self.profiler = profiler_in(directory, self.clock)
        self.step(1, late=False)
        self.source = source_of(directory)
        self.key = key
        self.number = number

    def close(self) -> None:
        self.profiler.close()
        self.source.close()

    def step(self, inner_us: int, *, late: bool) -> None:
        """Run a step with a brick inside another brick.

        The inner brick is recorded when it ends or, with `late`, only after the step has ended.
        """
        with self.profiler.step("decode", tokens=2), self.profiler.brick("Outer", 8):
            begin_ns = self.profiler.elapsed_ns()
            self.clock.sleep_us(inner_us)
            if late:
                self.profiler.record_deferred("Inner", begin_ns, 8)
            else:
                self.profiler.record_elapsed("Inner", inner_us * 1000, 8)
            self.clock.sleep_us(5)
        self.clock.sleep_us(1)

    def say(self, messages: Sequence[WireMessage]) -> list[WireMessage]:
        return [self._mine(message) for message in messages]

    def _mine(self, message: Any) -> WireMessage:
        said: WireMessage = replace(message, source=self.key)
        if isinstance(said, SourceCatalog) and said.messages and said.complete:
            hello, *rest = said.messages
            assert hello.realtime_ns  # type: ignore[union-attr]
            begun = replace(hello, realtime_ns=1_700_000_000_000_000_000 + self.number)
            return replace(said, messages=(begun, *rest))
        return said


class Told:
    """A publisher under the control of the test, and an exporter that subscribes to it."""

    def __init__(self, directory: Path, publisher: Publisher, url: str) -> None:
        self._directory = directory
        self._publisher = publisher
        self._url = url
        self._said = 0
        self.lives: dict[str, Life] = {}
        self.numbers = 0
        self.seen: Series = {}

    def say(self, *messages: WireMessage) -> None:
        if messages:
            self._publisher.send(LIVE, messages)

    def begin(self, key: str) -> None:
        self.numbers += 1
        if key in self.lives:
            self.lives[key].close()
        self.lives[key] = Life(self._directory / str(self.numbers), key, self.numbers)

    def scrape(self) -> None:
        """Wait until all messages have arrived, then scrape. Check that no counter has decreased."""
        self._said += 1
        self.say(SourceState(BEACON, SourceStatus.LIVE, "", self._said, self._said, 0, 0, 0, 0))
        found = eventually(lambda: (now := self._get()) and now.get("beacon", 0) >= self._said and now)
        fallen = {at: (value, found[at]) for at, value in self.seen.items() if found.get(at, value) < value}
        assert not fallen
        self.seen |= found

    def _get(self) -> Series:
        with urllib.request.urlopen(urllib.request.Request(self._url, headers=ASK), timeout=DEADLINE_S) as answer:
            text = answer.read().decode()
        found: Series = {}
        grows = False
        # This parser is simple because the official parser is slow. test_openmetrics.py uses the official parser.
        for line in text.splitlines():
            if line.startswith("# TYPE "):
                grows = line.rpartition(" ")[2] in GROWING
            elif grows and not line.startswith("#"):
                series, _, value = line.partition(" # ")[0].rpartition(" ")
                found[series] = float(value)
                if series.startswith("cbtop_records_produced_total{") and f'source="{BEACON}"' in series:
                    found["beacon"] = float(value)
        return found


@contextmanager
def told() -> Iterator[Told]:
    with TemporaryDirectory(prefix="cbtop-told-") as directory, pytest.MonkeyPatch.context() as patch:
        for name in ("ANSWER_S", "SILENT_AFTER_S"):
            patch.setattr(subscription_module, name, DEADLINE_S)
        # The subscription answers a scrape only between two polls, so polls must be short.
        patch.setattr(subscription_module, "POLL_MS", 5)
        endpoint = f"ipc://{directory}/wire"
        publisher = Publisher(endpoint)
        with serving(endpoint, None, {"metrics": "127.0.0.1:0"}) as (line,):
            (asked,) = eventually(lambda: publisher.hear(20) or publisher.questions(JOIN_PREFIX))
            beacon = SourceCatalog(BEACON, complete=True, messages=())
            publisher.answer([asked], [HELLO, beacon, Heartbeat(0, ())])
            found = Told(Path(directory), publisher, line.removeprefix("metrics at "))
            try:
                yield found
            finally:
                for life in found.lives.values():
                    life.close()
                publisher.close()


def act(wire: Told, action: str, key: str, us: int) -> None:
    """Let one of the possible events happen to the process `key` or to its messages."""
    life = wire.lives.get(key)
    if life is None or action == "restart":
        wire.begin(key)
        act(wire, "keyframe", key, us)
        return
    if action in ("step", "late"):
        life.step(us, late=action == "late")
    elif action == "finalize":
        life.profiler.finalize()
    elif action == "reset":
        life.profiler.reset()
    elif action == "end":
        life.profiler.close()
    elif action == "gone":
        wire.say(SourceGone(key))
    life.source.poll()
    if action == "delta":
        wire.say(*life.say(life.source.delta()))
    elif action == "lost":
        life.source.delta()
    elif action == "keyframe":
        wire.say(*life.say(life.source.snapshot()))
    elif action == "torn":  # Only the catalog of this keyframe can be decoded. Its statistics are lost.
        wire.say(*(m for m in life.say(life.source.snapshot()) if not isinstance(m, StatsUpdate)))


ACTIONS = ("step", "late", "finalize", "reset", "delta", "lost", "keyframe", "torn", "gone", "end", "restart")
histories = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.sampled_from(("one", "two")), st.integers(1, 1 << 20)), max_size=24
)


@given(histories)
def test_no_counter_goes_down_from_scrape_to_scrape(history: list[tuple[str, str, int]]) -> None:
    with told() as wire:
        for action, key, us in history:
            act(wire, action, key, us)
            if action not in ("step", "late", "finalize", "lost"):  # these actions publish nothing
                wire.scrape()


@first_by_default(
    "history",
    [
        pytest.param(["late", "keyframe", "finalize", "delta"], id="what ran inside a brick is told late"),
        pytest.param(["step", "step", "keyframe", "gone", "restart"], id="another process under the same labels"),
        pytest.param(["step", "step", "keyframe", "torn", "step", "delta"], id="a keyframe is lost in part"),
        pytest.param(["step", "keyframe", "reset", "step", "delta", "keyframe"], id="the profiler is reset"),
        pytest.param(["step", "keyframe", "gone", "step", "keyframe", "end", "delta"], id="it leaves and comes back"),
    ],
    2,
)
def test_no_counter_goes_down_when(history: list[str]) -> None:
    with told() as wire:
        for action in ("keyframe", *history):
            act(wire, action, "one", 100)
            wire.scrape()


def test_a_process_that_begins_anew_counts_on_from_the_one_before() -> None:
    with told() as wire:
        for _ in range(2):
            wire.begin("one")
            for _ in range(3):
                act(wire, "step", "one", 100)
            act(wire, "keyframe", "one", 0)
            wire.scrape()
    labels = '{phase="decode",source="one"}'
    # Two processes ran four steps each: one at their start, then three in the loop above. Each step has two tokens.
    assert wire.seen[f"cbtop_tokens_total{labels}"] == 16
    assert wire.seen[f"cbtop_step_duration_seconds_count{labels}"] == 8
    assert wire.seen[f"cbtop_step_duration_seconds_sum{labels}"] == pytest.approx(6 * 105e-6 + 2 * 6e-6)


def test_what_was_not_exported_for_long_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cbtop.telemetry.counters.MAX_KEPT", 2)
    store, counters = Store(), Counters()
    store.apply(HELLO)
    for key in "abc":
        store.apply(SourceCatalog(key, complete=True, messages=()))

    def export(key: str, value: float) -> float | DurationHistogram:
        found: dict[Metric, list[Point]] = {metrics.TOKENS: [Point((key, "decode"), value, 0)]}
        return counters.held(found, store)[metrics.TOKENS][0].value

    assert [export(key, 5) for key in "abc"] == [5, 5, 5]
    assert [export(key, 1) for key in "bca"] == [5, 5, 1]
