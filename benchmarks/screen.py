"""What the screen costs: its share of a core at the default rate, and how soon it shows something."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time

import psutil

from benchmarks.base import Figure

WATCHED_S = 20.0
PATIENCE_S = 120.0  # the first run writes a model and compiles
DEMO = [sys.executable, "-m", "cbtop", "demo", "--threads", "1"]


def run() -> list[Figure]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 34, 120, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color"}
    begun = time.perf_counter()
    process = subprocess.Popen(DEMO, stdin=slave, stdout=slave, stderr=slave, env=environment)
    seen, first_frame_s, first_brick_s = b"", 0.0, 0.0
    while not first_brick_s:
        if time.perf_counter() - begun > PATIENCE_S:
            process.kill()
            raise RuntimeError(f"no brick on the screen within {PATIENCE_S:.0f} s")
        seen = seen[-100:] + _read(master)
        if not first_frame_s and b"cbtop" in seen:
            first_frame_s = time.perf_counter() - begun
        if b"DownProjection" in seen:
            first_brick_s = time.perf_counter() - begun
    viewer = psutil.Process(process.pid)
    used = viewer.cpu_times()
    begun, written = time.perf_counter(), 0
    while time.perf_counter() - begun < WATCHED_S:
        written += len(_read(master))
    elapsed, now = time.perf_counter() - begun, viewer.cpu_times()
    share = (now.user + now.system - used.user - used.system) / elapsed
    process.terminate()
    while process.poll() is None:
        _read(master)  # a terminal nobody reads would hold up the goodbye
    return [
        Figure("`cbtop demo` to its first frame", first_frame_s * 1e3, "ms"),
        Figure("`cbtop demo` to its first measured brick", first_brick_s, "s"),
        Figure("screen with daemon inside, default rate", 100 * share, "% of a core"),
        Figure("written to the terminal", written / elapsed / 1024, "KiB/s"),
    ]


def _read(master: int) -> bytes:
    """What the terminal was sent, waiting a moment for it."""
    ready, _, _ = select.select([master], [], [], 0.1)
    return os.read(master, 65536) if ready else b""
