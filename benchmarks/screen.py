"""What the screen costs: its share of a core at the default rate, and how soon it shows something."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time

import psutil

from benchmarks.base import Figure

WATCHED_S = 20.0
DEMO = [sys.executable, "-m", "cbtop", "demo", "--threads", "1"]


def run() -> list[Figure]:
    master, slave = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "34"}
    begun = time.perf_counter()
    process = subprocess.Popen(DEMO, stdin=slave, stdout=slave, stderr=slave, env=environment)
    seen, first_frame_s, first_brick_s = b"", 0.0, 0.0
    while not first_brick_s:
        seen += os.read(master, 65536)
        if not first_frame_s and b"cbtop" in seen:
            first_frame_s = time.perf_counter() - begun
        if b"DownProjection" in seen:
            first_brick_s = time.perf_counter() - begun
    viewer = psutil.Process(process.pid)
    used = viewer.cpu_times()
    begun, written = time.perf_counter(), 0
    while time.perf_counter() - begun < WATCHED_S:
        written += len(os.read(master, 65536))
    elapsed, now = time.perf_counter() - begun, viewer.cpu_times()
    share = (now.user + now.system - used.user - used.system) / elapsed
    process.terminate()
    process.wait()
    return [
        Figure("`cbtop demo` to its first frame", first_frame_s * 1e3, "ms"),
        Figure("`cbtop demo` to its first measured brick", first_brick_s, "s"),
        Figure("screen with daemon inside, default rate", 100 * share, "% of a core", "one core", share),
        Figure("written to the terminal", written / elapsed / 1024, "KiB/s"),
    ]
