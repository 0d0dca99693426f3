"""Tests of the feed, which turns the data from its links to daemons into views."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cbtop.feeds.feed import Feed
from cbtop.protocol.messages import Heartbeat
from cbtop.viewmodels import verdicts as verdicts_module
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.verdicts import VERDICTS
from tests.cbtop.made_machines import HELLO, source


def test_verdicts_are_made_once_a_second_and_again_if_the_silenced_change(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def find(view: SourceView) -> None:
        made.append(view.key)

    monkeypatch.setattr(verdicts_module, "VERDICTS", (replace(VERDICTS[0], find=find),))
    with Feed((f"ipc://{runtime}/nobody.sock",)) as feed:
        store = next(iter(feed.links)).store
        store.apply(HELLO)
        store.apply(source())
        for number in (1, 2):
            store.apply(Heartbeat(number * 1_000_000_000, ()))
            feed.poll()
            for _ in range(3):
                view = feed.view()
                assert view is not None
                assert view.verdicts == ()
            assert len(made) == number
        feed.silenced = ("straggler",)
        assert (view := feed.view()) is not None
        assert view.verdicts == ()
        assert len(made) == 3
