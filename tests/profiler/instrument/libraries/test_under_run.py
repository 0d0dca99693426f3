"""Tests of `cbtop run --libraries`: an unedited program becomes bricks, and behaves as without cbtop."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cbtop.commands.run import LIBRARIES
from cbtop.profiler.instrument.libraries.session import LIBRARIES as TABLES
from cbtop.protocol.catalog import CatalogReader
from cbtop.protocol.messages import Manifest, Node
from cbtop.protocol.vocabulary import NodeKind
from tests.profiler.instrument.under_run import fake_torch, run_python

JOB = """
import numpy as np
from numpy.fft import fft
for _ in range(3):
    fft(np.ones(1 << 17))
    np.linalg.cholesky(np.eye(300))
    np.einsum("ij,jk->ik", np.ones((90, 90)), np.ones((90, 90)))
"""


def announced() -> list[object]:
    directory = Path(os.environ["CBTOP_RUNTIME_DIR"])
    return [one for catalog in sorted(directory.glob("*.catalog")) for one in CatalogReader(catalog).read()]


def bricks() -> set[str]:
    return {one.name for one in announced() if isinstance(one, Node) and one.kind is NodeKind.BRICK}


def test_an_unedited_program_becomes_bricks() -> None:
    done = run_python(JOB + "print('end')", CBTOP_LIBRARIES="numpy,scipy", launched=True)
    assert (done.stdout, done.stderr, done.returncode) == ("end\n", "", 0)
    assert bricks() >= {"numpy.fft.fft", "numpy.linalg.cholesky", "numpy.einsum"}
    (manifest,) = [one for one in announced() if isinstance(one, Manifest)]
    assert (manifest.model, manifest.architecture) == ("numpy", "libraries")
    assert manifest.threads >= 1


def test_without_libraries_numpy_is_left_alone() -> None:
    done = run_python(JOB + "import sys; print([name for name in sys.modules if name.startswith('cbtop')])")
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_a_program_that_calls_no_library_is_told_so() -> None:
    never = run_python("pass", CBTOP_LIBRARIES="numpy", launched=True)
    assert never.stderr == "cbtop: nothing was instrumented: torch or numpy was never imported\n"
    small = run_python("import numpy", CBTOP_LIBRARIES="numpy", launched=True)
    assert small.stderr == "cbtop: nothing was instrumented: no call of a library took 10 us or more\n"


def test_a_library_that_is_imported_later_is_timed_too() -> None:
    pytest.importorskip("scipy.fft")
    done = run_python(
        "import numpy as np\nimport scipy.fft\nscipy.fft.fft(np.ones(1 << 17))", CBTOP_LIBRARIES="numpy,scipy"
    )
    assert (done.stderr, done.returncode) == ("", 0)
    assert "scipy.fft.fft" in bricks()


def test_a_model_and_a_library_share_one_recording(tmp_path: Path) -> None:
    fake_torch(tmp_path)
    done = run_python(
        JOB + "import torch; torch.forward(lambda: fft(np.ones(1 << 17)))", tmp_path, CBTOP_LIBRARIES="numpy"
    )
    assert (done.stderr, done.returncode) == ("", 0)
    steps = {one.name for one in announced() if isinstance(one, Node) and one.kind is NodeKind.STEP}
    assert steps == {"call", "decode"}
    assert len(list(Path(os.environ["CBTOP_RUNTIME_DIR"]).glob("*.ring"))) == 1


def test_an_error_of_ours_is_one_line_and_the_program_runs_on() -> None:
    broken = "import sys; sys.modules['msgpack'] = None\n"
    done = run_python(broken + JOB + "print('end')", CBTOP_LIBRARIES="numpy", CBTOP_RUN_MSGPACK="")
    assert (done.stdout, done.returncode) == ("end\n", 0)
    assert done.stderr.count("\n") == 1
    assert "runs uninstrumented: import of msgpack" in done.stderr


def test_children_are_timed_and_their_programs_end_as_usual() -> None:
    job = JOB.replace("\n", "\n    ")
    program = f"""
import multiprocessing, sys
def work(number):{job}
    return number
if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(pool.map(work, range(4)))
    sys.exit(3)
"""
    done = run_python(program, CBTOP_LIBRARIES="numpy")
    assert (done.stdout, done.stderr, done.returncode) == ("[0, 1, 2, 3]\n", "", 3)
    assert "numpy.fft.fft" in bricks()


def test_the_command_names_each_library_with_a_table() -> None:
    assert tuple(TABLES) == LIBRARIES
