"""Speedscope's own file format: one evented profile a track.

https://www.speedscope.app/file-format-schema.json: `O` opens a frame and `C` closes it, `at` never goes back, and
only what was opened last is closed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TextIO

from cbtop.exporters.base import Trace
from cbtop.exporters.tracks import events_of, tracks_of
from cbtop.profiler.graph.nodes import display_name

SCHEMA = "https://www.speedscope.app/file-format-schema.json"


def write_speedscope(traces: Sequence[Trace], out: TextIO) -> None:
    """Every record as a frame of its name: the RmsNorm of every layer is one frame, in many places."""
    frames: dict[str, int] = {}
    for node in (node for trace in traces for node in trace.nodes.nodes):
        frames.setdefault(display_name(node), len(frames))
    shared = {"frames": [{"name": name} for name in frames]}
    title = ", ".join(trace.process for trace in traces)
    out.write(f'{{"$schema": "{SCHEMA}", "exporter": "cbtop", "name": {json.dumps(title)},\n')
    out.write(f'"shared": {json.dumps(shared)},\n"profiles": [')
    profiles = ((trace, number, track) for trace in traces for number, track in enumerate(tracks_of(trace), start=1))
    for at, (trace, number, track) in enumerate(profiles):
        frame_of = [frames[display_name(node)] for node in trace.nodes.nodes]
        head = {
            "type": "evented",
            "name": f"{trace.process}, track {number}",
            "unit": "nanoseconds",
            "startValue": track[0].start_ns if track else 0,
            "endValue": max((record.end_ns for record in track), default=0),
        }
        out.write(f'{"," if at else ""}\n{json.dumps(head)[:-1]}, "events": [')
        separator = "\n"
        for opens, record, moment in events_of(track):
            frame = frame_of[record.node - 1]
            out.write(f'{separator}{{"type": "{"O" if opens else "C"}", "frame": {frame}, "at": {moment}}}')
            separator = ",\n"
        out.write("]}")
    out.write("\n]}\n")
