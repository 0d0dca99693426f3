"""Programs as `cbtop run` starts them, and a torch that costs nothing to import: what it runs is one step each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from cbtop.commands.run import HOOK
from tests.integration.hosts import DEADLINE_S

TORCH = """
from contextlib import nullcontext as step
from cbtop.profiler import instrument
def install(profiler):
    global step
    def step(): return profiler.step("decode", tokens=1)
instrument.install = install
def forward(do=lambda: None):
    with step(): do()
"""


def fake_torch(directory: Path, source: str = TORCH) -> Path:
    """A directory that holds a package `torch`."""
    (directory / "torch").mkdir(parents=True, exist_ok=True)
    (directory / "torch" / "__init__.py").write_text(source)
    return directory


def run_python(
    source: str, *paths: Path | str, hooked: bool = True, launched: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    """`python -c source`, with `paths` on PYTHONPATH and, where `hooked`, the import hook before them.

    `launched`: as the process that the command itself became.
    """
    nothing_yet = Path(os.environ["CBTOP_RUNTIME_DIR"]) / "run-1-1"
    nothing_yet.touch()
    hook = {"CBTOP_RUN": "1", "CBTOP_RUN_ID": f"1:{nothing_yet}"} if hooked else {}
    if launched:
        become = f"os.execv(sys.executable, [sys.executable, '-c', {source!r}])"
        source = f"import os, sys; os.environ['CBTOP_RUN_ID'] = f'{{os.getpid()}}:{nothing_yet}'; {become}"
    path = os.pathsep.join([str(HOOK)] * hooked + [str(path) for path in paths])
    return subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=DEADLINE_S, check=False,
        stdin=subprocess.DEVNULL, env=os.environ | hook | ({"PYTHONPATH": path} if path else {}) | variables,
    )  # fmt: skip
