"""What is compiled for compiled code alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cbtop.compute.jit import compile as compiling
from cbtop.compute.jit.compile import CODE_SETTINGS, jit, jit_inlined


@jit_inlined
def inlined(x: Any) -> Any:
    return x + 1


@jit
def calling(x: Any) -> Any:
    return 2 * inlined(x)


def test_python_that_calls_what_is_inlined_is_told_before_and_after_compiled_code_has() -> None:
    for _ in range(2):
        with pytest.raises(TypeError, match=r"^inlined is for compiled code alone"):
            inlined(3)
        assert calling(3) == 8


def test_code_that_variables_of_numba_change_is_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a run with NUMBA_OPT=0 left ceilings a hundredth as high to all that came after it."""
    monkeypatch.setattr(compiling.settings, "CACHE_DIR", str(tmp_path))
    found = {compiling._usable_numba_cache()}
    for name in CODE_SETTINGS:
        with monkeypatch.context() as patched:
            patched.setattr(compiling.settings, name, "another")
            found.add(compiling._usable_numba_cache())
    assert len(found) == 1 + len(CODE_SETTINGS)
    assert compiling._usable_numba_cache() in found


def test_where_numba_is_told_to_compile_nothing_one_line_says_so() -> None:
    command = [sys.executable, "-m", "cbtop", "bench", "-p", "1", "-n", "0", "-r", "1"]
    done = subprocess.run(command, env=os.environ | {"NUMBA_DISABLE_JIT": "1"}, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("cbtop: NUMBA_DISABLE_JIT is set: ")
