"""Test of `cbtop calibrate` on a real GPU: the command measures and stores peak rates.

Models on this GPU announce them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from cbtop.cli import main
from cbtop.profiler.instrument import attach
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.messages import Ceiling, Manifest
from cbtop.protocol.roofs import known_roofs
from tests.profiler.instrument.tiny import model_of, torch
from tests.profiler.memory import Memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
ROOFS = {
    "memory_read",
    "memory_copy",
    "matmul_bfloat16",
    "matmul_float16",
    "matmul_tf32",
    "matmul_float32",
}


def test_its_roofs_are_measured_kept_and_announced_for_a_model_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["calibrate"]) == 0
    print(capsys.readouterr().out)  # noqa: T201 - for the person who runs the test
    gpu = next(roofs for roofs in known_roofs() if roofs.uuid)
    names = {ceiling.name for ceiling in gpu.ceilings}
    assert names == ROOFS
    memory = Memory()
    attach(model_of("llama").to("cuda", torch.bfloat16), BrickProfiler(recorder=memory))
    announced = {said.name for said in memory.said if isinstance(said, Ceiling)}
    assert announced == ROOFS
    assert next(said for said in memory.said if isinstance(said, Manifest)).roofs == ""
