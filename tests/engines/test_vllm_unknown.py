"""A vLLM with other internals than those that cbtop knows: one line says what is shown, and vLLM runs on."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from pathlib import Path

import pytest

import cbtop
from tests.engines.runs import record

pytestmark = pytest.mark.engines


def _copy_of_vllm(folder: Path, old: str, new: str) -> None:
    """Write a vLLM 99.0 to `folder` in which the method `old` is called `new`. Unchanged files are links."""
    found = importlib.util.find_spec("vllm")
    assert found is not None, "vLLM is not installed here: make engines"
    assert found.origin is not None
    shutil.copytree(Path(found.origin).parent, folder / "vllm", copy_function=os.symlink)
    renamed = 0
    for file in (folder / "vllm" / "v1").rglob("*.py"):
        text = file.read_text()
        changed, count = re.subn(rf"\b{old}\b", new, text)
        if count:
            renamed += count
            file.unlink()
            file.write_text(changed)
    assert renamed
    version = folder / "vllm" / "_version.py"
    version.unlink()
    version.write_text('__version__, __version_tuple__ = "99.0", (99, 0)\n')


def test_a_renamed_method_of_vllm_is_one_line_and_steps_are_shown(tmp_path: Path) -> None:
    _copy_of_vllm(tmp_path / "copy", "update_from_output", "apply_outputs")
    run = record(tmp_path, "vllm_requests.py", PYTHONPATH=str(tmp_path / "copy"))
    said = [line for line in run.lines() if "vLLM" in line]
    assert [line[line.index("cbtop: ") :] for line in said] == [
        "cbtop: vLLM 99.0 has no Scheduler.update_from_output as in 0.22.0 and 0.32.0. Shown: steps, bricks, "
        "sampling, input preparation, bricks in graphs, names of compiled code, detokenising. "
        "Not shown: requests, latencies and load, parts of an engine step."
    ]
    with cbtop.read(run.recording) as recording:
        assert {"PrepareInputs", "Sampling", "Detokenize"} <= set(recording.bricks().column("brick"))
        assert "decode" in recording.steps().column("phase")
        assert len(recording.requests()) == 0
