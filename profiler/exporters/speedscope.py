"""Speedscope's own file format: one evented profile a track.

https://www.speedscope.app/file-format-schema.json: `O` opens a frame and `C` closes it, `at` never goes back, and
only what was opened last is closed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TextIO

from cbtop.profiler.exporters.base import TimedRecord, Trace, display_name
from cbtop.profiler.exporters.tracks import tracks_of

SCHEMA = "https://www.speedscope.app/file-format-schema.json"


def write_speedscope(trace: Trace, out: TextIO) -> None:
    """Every record as a frame of its name: the RmsNorm of every layer is one frame, in many places."""
    frames: dict[str, int] = {}
    frame_of = [frames.setdefault(display_name(node), len(frames)) for node in trace.nodes.nodes]
    shared = {"frames": [{"name": name} for name in frames]}
    out.write(f'{{"$schema": "{SCHEMA}", "exporter": "cbtop", "name": {json.dumps(trace.process)},\n')
    out.write(f'"shared": {json.dumps(shared)},\n"profiles": [')
    for number, track in enumerate(tracks_of(trace), start=1):
        head = {
            "type": "evented",
            "name": f"{trace.process}, track {number}",
            "unit": "nanoseconds",
            "startValue": track[0].start_ns if track else 0,
            "endValue": max((record.end_ns for record in track), default=0),
        }
        out.write(f'{"," if number > 1 else ""}\n{json.dumps(head)[:-1]}, "events": [')
        separator = "\n"
        for opens, record, at in _events(track):
            frame = frame_of[record.node - 1]
            out.write(f'{separator}{{"type": "{"O" if opens else "C"}", "frame": {frame}, "at": {at}}}')
            separator = ",\n"
        out.write("]}")
    out.write("\n]}\n")


def _events(track: Iterable[TimedRecord]) -> Iterator[tuple[bool, TimedRecord, int]]:
    """Whether a record opens or closes, the record, and when."""
    around: list[TimedRecord] = []
    for record in track:
        while around and around[-1].end_ns <= record.start_ns:
            yield False, around[-1], around.pop().end_ns
        around.append(record)
        yield True, record, record.start_ns
    while around:
        yield False, around[-1], around.pop().end_ns
