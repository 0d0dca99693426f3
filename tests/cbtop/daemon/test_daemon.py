"""What is wrong with one source costs the others nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cbtop.client.feed import Feed
from cbtop.daemon.daemon import DaemonInside
from cbtop.daemon.source import Source
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol.endpoint import default_endpoint
from cbtop.protocol.vocabulary import SourceStatus
from tests.integration.hosts import eventually


@pytest.mark.parametrize("says", ["delta", "snapshot", "records"])
def test_a_source_that_cannot_say_what_it_has_is_faulty_and_the_others_go_on(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    bad, good = (BrickProfiler(recorder=RingRecorder(runtime, 1 << 20)) for _ in range(2))
    broken: set[str] = set()
    real = getattr(Source, says)

    def say(source: Source) -> Any:
        if source.key in broken:
            raise ZeroDivisionError("found")
        return real(source)

    monkeypatch.setattr(Source, says, say)

    def counts(feed: Feed) -> dict[str, int]:
        for profiler in (bad, good):
            with profiler.step("decode", tokens=1):
                pass
        feed.poll(20)
        views = [view for source in feed.sources() if (view := feed.view(source.key))]
        return {view.key: view.steps.count for view in views if view.steps}

    def states(feed: Feed) -> dict[str, SourceStatus]:
        return {source.key: source.state for source in feed.sources()}

    with DaemonInside(default_endpoint()), Feed() as feed:
        before = eventually(lambda: len(seen := counts(feed)) == 2 and seen)
        first, second = sorted(before, key=lambda key: key.rsplit(":", 1))
        broken.add(first)
        eventually(lambda: counts(feed)[second] > before[second] + 10)
        eventually(lambda: counts(feed) and states(feed)[first] is SourceStatus.FAULTY)
        assert states(feed)[second] is SourceStatus.LIVE
        with Feed() as late:  # who comes now is told of both
            eventually(lambda: len(counts(late)) > (says != "snapshot"))
    bad.close()
    good.close()
