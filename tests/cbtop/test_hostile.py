"""Tests of hostile text from a process or daemon.

cbtop stores and draws the text without a crash or a control byte.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.client.store import Store
from cbtop.daemon.liveness import Liveness
from cbtop.daemon.source import Source
from cbtop.protocol import codec
from cbtop.protocol.attributes import FunctionAttributes
from cbtop.protocol.catalog import CatalogWriter
from cbtop.protocol.device_messages import Device, DeviceProcess, DeviceSample, Unknown
from cbtop.protocol.errors import DecodeError, VersionError
from cbtop.protocol.messages import (
    Activity,
    CatalogMessage,
    CheckResult,
    Goodbye,
    HostHello,
    Manifest,
    Message,
    Node,
    TraceAnomaly,
    TraceNumber,
    TraceSummary,
    WireMessage,
)
from cbtop.protocol.ring import CURSOR_WORD, HEADER_BYTES, RECORD_BYTES, RingWriter
from cbtop.protocol.vocabulary import DeviceKind, NodeKind, SourceStatus
from cbtop.reports import VIEWS
from cbtop.reports.json import json_report
from cbtop.reports.text import SECTIONS, text_report
from cbtop.telemetry.snapshot import snapshot
from cbtop.tui.app import CbtopApp
from cbtop.tui.views.devices import machine_lines
from cbtop.tui.widgets.lines import plain
from cbtop.viewmodels.devices import machine_view
from cbtop.viewmodels.source import SourceView, source_view, summaries
from tests.cbtop.conftest import ScriptedFeed, screen_text
from tests.cbtop.recorded import apply
from tests.protocol.test_codec import instances

MOVES_THE_CURSOR = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\xad\u061c\u2028\u2029\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
NASTY = [
    "\x1b]0;owned\x07",
    "\x1b[2J\x1b[H",
    "\x9b31m",
    "\u202egnp.exe",
    "[@click=app.quit]go[/]",
    "[/x]",
    "[bold red",
    "\r\x08\x7f\n",
    "a\u200b\ufeffb",
    "x" * 10_000,
    "\ud800",
    "👩\u200d💻" * 20,
    "a\u061c\u00ad\ufff9b\U000e0041\ufe0f",
]
I64 = st.integers(-(1 << 63), (1 << 63) - 1)
names = st.sampled_from(NASTY) | st.text(max_size=30)
HELLO = HostHello(2, 0, 7, 1, "here", "", "forged", "3", "python", 1, 1)


def source_saying(said: Sequence[CatalogMessage], records: int = 3) -> Source:
    """Return a process that has announced `said` in its catalog and recorded a few calls of the first nodes."""
    path = Path(os.environ["CBTOP_RUNTIME_DIR"]) / "7-1-0.ring"
    path.unlink(missing_ok=True)
    path.with_suffix(".catalog").unlink(missing_ok=True)
    catalog = CatalogWriter(path.with_suffix(".catalog"))
    for message in said:
        catalog.write(message)
    catalog.close()
    writer = RingWriter(path, 64 * RECORD_BYTES)
    for number in range(records):
        writer.record(number + 1, number, number + 1000, 1)
    source = Source(path)
    source.poll()
    return source


def view_of(source: Source) -> SourceView:
    store = Store()
    apply(store, source.snapshot())
    return source_view(store.sources[source.key])


def called(name: str) -> list[CatalogMessage]:
    """Return the messages of a process that gives the name `name` to everything."""
    return [
        HostHello(2, 0, 7, 1, name, name, name, name, name, 1, 1),
        Manifest(name, name, name, name, 1, 1, 1, 1, 1, 1),
        Node(1, None, NodeKind.STEP, "decode"),
        Node(2, 1, NodeKind.LAYER, name, label=name),
        Node(3, 2, NodeKind.BRICK, name, label=name, backend=name),
        Node(4, 3, NodeKind.KERNEL, name, backend=name, function=FunctionAttributes(file=name)),
        CheckResult(name, name, False, 1.0, 0.5),
        TraceSummary(name, name, name, 1, (TraceNumber(name, name, 1.0),), (TraceAnomaly(name),)),
        Activity(name, 0.5),
        Goodbye(name),
    ]


@given(names)
def test_no_control_byte_of_a_name_reaches_a_report(name: str) -> None:
    source = source_saying(called(name))
    view = view_of(source)
    assert view.bricks
    assert not MOVES_THE_CURSOR.search(text_report([view], list(SECTIONS)))
    printed = json_report([view])
    assert not MOVES_THE_CURSOR.search("".join(strings_of(json.loads(printed))))


async def test_no_control_byte_of_a_name_reaches_the_screen_and_none_is_markup() -> None:
    views = {name: replace(view_of(source_saying(called(name))), key="one") for name in NASTY}
    feed = ScriptedFeed(views[NASTY[0]])
    app = CbtopApp(feed, interval_s=60)
    async with app.run_test(size=(120, 34)) as pilot:
        for key in ("1", "2", "enter", "escape", "3", "4", "5", "6"):
            await pilot.press(key)
            for name, view in views.items():
                feed.seen = [view]
                app.tick()
                await pilot.pause()
                shown = screen_text(app)
                assert not MOVES_THE_CURSOR.search(shown), (ascii(name), key)
                if name.startswith("[") and key in ("2", "6"):
                    # The name is shown as it is. Textual has not read its brackets as markup.
                    assert name[:8] in shown, (ascii(name), key)


@given(said=st.lists(st.one_of([instances(kind) for kind in get_args(CatalogMessage)]), max_size=8))
def test_whatever_a_catalog_says_its_source_says_how_it_is_and_can_be_shown(said: list[CatalogMessage]) -> None:
    source = source_saying([HELLO, *said])
    state = source.state_message()
    assert state.produced == state.received + state.overwritten + state.rejected
    assert state.reason or state.state is not SourceStatus.FAULTY
    view = view_of(source)
    text_report([view], list(SECTIONS))
    json.loads(json_report([view]))


@given(
    slots=st.lists(st.tuples(st.integers(0, 63), st.lists(I64, min_size=4, max_size=4))),
    cursors=st.lists(I64 | st.integers(0, 200), max_size=3),
)
def test_whatever_a_ring_holds_its_source_keeps_its_books(
    slots: list[tuple[int, list[int]]], cursors: list[int]
) -> None:
    nodes = [Node(1, None, NodeKind.STEP, "decode"), Node(2, 1, NodeKind.BRICK, "a")]
    source = source_saying([HELLO, *nodes], records=2)
    # This process does not exist. The test pretends that the process runs.
    source.state, source.ended_at_s = SourceStatus.LIVE, None
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Liveness, "is_alive", lambda liveness, hello: True)
        keeps_its_books(source, slots, cursors)


def keeps_its_books(source: Source, slots: list[tuple[int, list[int]]], cursors: list[int]) -> None:
    for cursor in cursors:
        with source.ring_path.open("r+b") as file:
            file.seek(8 * CURSOR_WORD)
            file.write(struct.pack("<q", cursor))
            for slot, words in slots:
                file.seek(HEADER_BYTES + RECORD_BYTES * slot)
                file.write(struct.pack("<4q", *words))
        source.poll()
        state = source.state_message()
        assert state.produced == state.received + state.overwritten + state.rejected
        view = view_of(source)
        assert view.loss.produced == view.loss.received + view.loss.dropped
        text_report([view], list(SECTIONS))


@given(said=st.lists(st.one_of([instances(kind) for kind in get_args(WireMessage)]), max_size=6))
def test_whatever_a_daemon_says_a_viewer_keeps_on_showing(said: list[Message]) -> None:
    store = Store()
    for message in said:
        frame = codec.encode(message)
        with contextlib.suppress(DecodeError, VersionError):
            decoded = codec.decode(frame)
            assert decoded is not None
            store.apply(decoded)
    machine = machine_view(store, 1.0)
    for summary in summaries(store.sources.values()):
        view = replace(source_view(store.sources[summary.key]), machines=(machine,))
        text_report([view], list(VIEWS))
        json.loads(json_report([view]))
    machine_lines(machine, 60)
    snapshot(store, 1)


@given(names)
def test_no_control_byte_of_a_device_reaches_a_report_or_the_screen(name: str) -> None:
    sample = DeviceSample(
        name, 1, trouble=name,
        devices=(
            Device(name, DeviceKind.GPU, 0, name, slowed_by=name, processes=(DeviceProcess(7, 1, name),),
                   unknown=(Unknown(name, name),)),
            Device(name, DeviceKind.MIG, 1, name, part_of=name, trouble=name),
        ),
    )  # fmt: skip
    store = Store()
    apply(store, [sample])
    machine = machine_view(store, 99.0)
    view = replace(view_of(source_saying([HELLO])), machines=(machine,))
    assert not MOVES_THE_CURSOR.search(text_report([view], list(VIEWS)))
    printed = json_report([view])
    assert not MOVES_THE_CURSOR.search("".join(strings_of(json.loads(printed))))
    for width in (1, 40, 200):
        assert not MOVES_THE_CURSOR.search("".join(map(plain, machine_lines(machine, width))))


def strings_of(value: Any) -> list[str]:
    """Return every string in a JSON document, including keys."""
    match value:
        case str():
            return [value]
        case dict():
            return [text for pair in value.items() for item in pair for text in strings_of(item)]
        case list():
            return [text for item in value for text in strings_of(item)]
        case _:
            return []
