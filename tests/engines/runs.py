"""Runs programs with a real vLLM under `cbtop run`, and records them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "scripts"
MAX_S = 900.0  # a run takes about a minute on two quiet cores, most of it the start of vLLM


@dataclass(frozen=True)
class Recorded:
    """A run that has ended: its recording, the file that the program wrote, and stderr."""

    recording: Path
    written: Path
    stderr: str

    def lines(self) -> list[str]:
        """Return the lines that cbtop wrote to stderr."""
        return [line for line in self.stderr.splitlines() if "cbtop: " in line]


def record(folder: Path, script: str, *arguments: str, **environment: str) -> Recorded:
    """Run `script` of SCRIPTS with `arguments` and the name of a file, which the script writes."""
    assert importlib.util.find_spec("vllm") is not None, "vLLM is not installed here: make engines"
    run = Recorded(folder / "run.cbtop", folder / "written.json", "")
    command = [sys.executable, "-m", "cbtop", "run", "--record", str(run.recording), "--"]
    settings: dict[str, Any] = {"VLLM_CPU_KVCACHE_SPACE": "1", "XDG_RUNTIME_DIR": str(folder)}
    ended = subprocess.run(
        [*command, sys.executable, str(SCRIPTS / script), *arguments, str(run.written)],
        env=os.environ | settings | environment,
        capture_output=True,
        text=True,
        timeout=MAX_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return Recorded(run.recording, run.written, ended.stderr)
