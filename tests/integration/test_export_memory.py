"""A recording of 1 GiB is exported in at most 300 MiB of memory, whatever the format.

`make soak` runs it with the other slow tests. It takes an hour by itself: `.venv/bin/python -m pytest -m slow -n 0 -o
log_cli=true -o log_cli_level=INFO tests/integration/test_export_memory.py`.
"""

from __future__ import annotations

import logging
import os
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from cbtop.exporters import EXPORTERS
from cbtop.protocol import codec
from cbtop.protocol.messages import HostHello, Node, Packed, RecordBatch, SourceCatalog, StatsUpdate
from cbtop.protocol.record_batch import MAX_BATCH_RECORDS, pack
from cbtop.protocol.recording import FrameKind, RecordingOrigin, RecordingWriter, encode_frame
from cbtop.protocol.ring_reader import Batch
from cbtop.protocol.vocabulary import NodeKind
from tests.integration.hosts import CBTOP

log = logging.getLogger(__name__)

SIZE_BYTES = int(os.environ.get("CBTOP_EXPORTED_BYTES", 1 << 30))
BOUND_KIB = 300 << 10
BRICKS = 31  # number of bricks per step; each takes 1 µs to 1 ms
SAID = (
    HostHello(2, 0, 7, 1, "host", "boot", "made", "3.11", "made", 0, 0),
    Node(1, None, NodeKind.STEP, "decode"),
    *(Node(number, 1, NodeKind.BRICK, f"brick {number}") for number in range(2, BRICKS + 2)),
)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a recording of steps with bricks. In every second step, one brick overlaps another, as with two threads.

    Two fifths of the bytes are records, and the rest are messages to viewers. `cbtop record` writes such a mixture.
    """
    chance = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("export") / "run.cbtop"
    writer = RecordingWriter(path, RecordingOrigin("host", 0, 0), 2 * SIZE_BYTES)
    writer.append(encode_frame(FrameKind.KEYFRAME, 0, [codec.encode(SourceCatalog("a", True, SAID))]))
    steps = MAX_BATCH_RECORDS // (BRICKS + 1)
    produced = begin_ns = 0
    while writer.size_bytes < SIZE_BYTES:
        ends = begin_ns + chance.integers(1_000, 1_000_000, (steps, BRICKS), np.int64).cumsum().reshape(steps, BRICKS)
        starts = np.concatenate(([begin_ns], ends.ravel()[:-1])).reshape(steps, BRICKS)
        starts[::2, 3] -= 500
        node = np.tile(np.r_[2 : BRICKS + 2, 1], steps)
        start_ns = np.c_[starts, starts[:, 0]].ravel()
        end_ns = np.c_[ends, ends[:, -1]].ravel()
        elements = chance.integers(0, 1 << 62, len(node))
        count, begin_ns = len(node), int(end_ns[-1])
        packed = pack(Batch(node, node * 0, start_ns, end_ns, elements, overwritten=0))
        batch = RecordBatch("a", produced, produced + count, count, packed)
        frame = encode_frame(FrameKind.RECORDS, begin_ns, [codec.encode(batch)])
        writer.append(frame)
        columns = (chance.bytes(len(frame) * 6 // 4 // 72 * 8) for _ in range(9))
        update = StatsUpdate("a", produced, begin_ns, produced, *map(Packed, columns))
        writer.append(encode_frame(FrameKind.LIVE, begin_ns, [codec.encode(update)]))
        produced += count
    writer.close()
    log.info("%.0f MiB, %d records", path.stat().st_size / (1 << 20), produced)
    return path


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", EXPORTERS)
def test_a_gibibyte_is_exported_in_300_mib(recording: Path, name: str) -> None:
    begun_s = time.monotonic()
    command = [*CBTOP, "export", str(recording), "--format", name]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    log.info("%s: %.0f MiB at most, %.0f s", name, usage.ru_maxrss / 1024, time.monotonic() - begun_s)
    assert process.returncode == 0
    assert usage.ru_maxrss <= BOUND_KIB
