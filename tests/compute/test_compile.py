"""Tests of how kernels are compiled: with fewer passes, and with a cache for each set of Numba's variables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from numba.core import compiler_machinery

from cbtop.compute.jit import compile as compiling
from cbtop.compute.jit.compile import CODE_SETTINGS, jit, jit_as_written, jit_inlined
from cbtop.compute.jit.compilers import UNUSED
from tests.representatives import first_by_default


@jit_inlined
def inlined(x: Any) -> Any:
    return x + 1


@jit
def calling(x: Any) -> Any:
    return 2 * inlined(x)


def test_python_cannot_call_inlined_code_before_or_after_compiled_code_does() -> None:
    for _ in range(2):
        with pytest.raises(TypeError, match=r"^inlined is for compiled code alone"):
            inlined(3)
        assert calling(3) == 8


@pytest.mark.parametrize("decorator", [jit, jit_as_written, jit_inlined])
def test_a_kernel_goes_through_the_passes_it_has_a_use_for(decorator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass of Numba that we skip must still exist.

    If Numba renamed a pass, the pass would run again unnoticed.
    """
    passed: list[str] = []
    registry: Any = vars(compiler_machinery)["_pass_registry"]
    run: Any = vars(compiler_machinery.PassManager)["_runPass"]

    def record(self: Any, index: int, one: Any, state: Any) -> Any:
        passed.append(type(one).__name__)
        return run(self, index, one, state)

    monkeypatch.setattr(compiler_machinery.PassManager, "_runPass", record)
    monkeypatch.setattr(compiling, "NUMBA_CACHE", None)

    def twice(x: Any) -> Any:
        return 2 * x

    decorator(twice).compile("(int64,)")
    assert {"NopythonTypeInference", "NativeLowering"} <= set(passed)
    assert not set(passed) & set(UNUSED)
    assert set(UNUSED) <= {each.__name__ for each in registry._registry}


def test_code_that_variables_of_numba_change_is_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with NUMBA_OPT=0 must not leave slow code to later runs.

    Before, later runs measured peak rates (ceilings) that were 100 times too low.
    """
    monkeypatch.setattr(compiling.settings, "CACHE_DIR", str(tmp_path))
    found = {compiling.usable_numba_cache()}
    for name in CODE_SETTINGS:
        with monkeypatch.context() as patched:
            patched.setattr(compiling.settings, name, "another")
            found.add(compiling.usable_numba_cache())
    assert len(found) == 1 + len(CODE_SETTINGS)
    assert compiling.usable_numba_cache() in found


@pytest.mark.slow
def test_where_numba_is_told_to_compile_nothing_one_line_says_so() -> None:
    command = [sys.executable, "-m", "cbtop", "bench", "-p", "1", "-n", "0", "-r", "1"]
    done = subprocess.run(command, env=os.environ | {"NUMBA_DISABLE_JIT": "1"}, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("cbtop: NUMBA_DISABLE_JIT is set: ")


@first_by_default("command", [["demo", "--serve-only"], ["bench"], ["verify"]], ids=" ".join)
def test_where_numba_is_told_to_start_no_threads_one_line_says_so(command: list[str], tmp_path: Path) -> None:
    environment = os.environ | {"NUMBA_NUM_THREADS": "0", "CBTOP_RUNTIME_DIR": str(tmp_path)}
    tmp_path.chmod(0o700)
    done = subprocess.run([sys.executable, "-m", "cbtop", *command], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "cbtop: NUMBA_NUM_THREADS is 0: kernels run on 1 thread or more; unset it"
