"""Tests of the cache of compiled functions.

If a cache file is damaged or missing, a function is compiled again, and nothing else happens.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import pytest

from cbtop.compute.jit.function_cache import HASH_BYTES, FunctionCache
from tests.representatives import first_by_default

ONE = (numba.types.int64,)


def plain(x: int) -> int:
    return x + 1


def hashed(text: str) -> int:
    return hash(text)


def new(folder: Path, function: Callable[..., Any] = plain) -> Any:
    """Return the function as a new process has it: not compiled yet, with the cache in `folder`."""
    dispatcher: Any = numba.njit(function)
    dispatcher._cache = FunctionCache(folder, function, dispatcher.targetoptions)
    return dispatcher


def hits(dispatcher: Any) -> int:
    return sum(dispatcher.stats.cache_hits.values())


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Return the cache file of the function `plain`, compiled for one int64 argument."""
    new(tmp_path).compile(ONE)
    (file,) = tmp_path.iterdir()
    again = new(tmp_path)
    assert (again(1), hits(again)) == (2, 1)
    return file


@pytest.mark.slow
def test_it_is_said_whether_a_function_is_kept_for_any_types(tmp_path: Path) -> None:
    def one_is_kept() -> bool:
        return bool(new(tmp_path)._cache.is_kept())

    assert not one_is_kept()
    new(tmp_path, hashed).compile((numba.types.unicode_type,))
    assert not one_is_kept()
    new(tmp_path).compile(ONE)
    assert one_is_kept()
    shutil.rmtree(tmp_path)
    assert not one_is_kept()


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "less than its hash": lambda data: data[:7],
    "its hash alone": lambda data: data[:HASH_BYTES],
    "its half": lambda data: data[: len(data) // 2],
    "all but a byte": lambda data: data[:-1],
    "zeros, as after a power cut": lambda data: bytes(len(data)),
    "a bit of its hash": lambda data: flipped(data, 3),
    "a bit of its code": lambda data: flipped(data, len(data) // 2),
    "another program's": lambda data: b"#!/bin/sh\n",
}


@first_by_default("damage", DAMAGE.values(), 2, ids=DAMAGE)
def test_a_damaged_file_is_compiled_again_and_written_anew(kept: Path, damage: Callable[[bytes], bytes]) -> None:
    whole = kept.read_bytes()
    kept.write_bytes(damage(whole))
    again = new(kept.parent)
    assert (again(1), hits(again)) == (2, 0)
    after = new(kept.parent)
    assert (after(1), hits(after)) == (2, 1)
    assert list(kept.parent.iterdir()) == [kept]


def test_what_is_no_file_is_left_and_the_function_runs(kept: Path) -> None:
    kept.unlink()
    kept.mkdir()
    again = new(kept.parent)
    assert (again(1), hits(again)) == (2, 0)
    assert list(kept.parent.iterdir()) == [kept]


def test_a_file_under_the_name_of_another_signature_is_not_taken_for_it(kept: Path) -> None:
    new(kept.parent).compile((numba.types.float64,))
    (other,) = set(kept.parent.iterdir()) - {kept}
    other.write_bytes(kept.read_bytes())
    again = new(kept.parent)
    assert (again(1.5), hits(again)) == (2.5, 0)


def test_a_directory_that_is_gone_costs_the_cache_alone(kept: Path) -> None:
    kept.unlink()
    kept.parent.rmdir()
    assert new(kept.parent)(1) == 2


NO_ROOM = """
import resource, sys
from pathlib import Path
from tests.compute.test_function_cache import new
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
print(new(Path(sys.argv[1]))(1))
"""


@pytest.mark.slow
def test_a_function_runs_if_the_disk_is_full_and_leaves_no_partial_file(tmp_path: Path) -> None:
    command = [sys.executable, "-c", NO_ROOM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")
    assert not list(tmp_path.iterdir())


ONE_OF_TWO = """
import sys
from pathlib import Path
from tests.compute.test_function_cache import new
function = new(Path(sys.argv[1]))
sys.stdin.readline()
print(function(float(sys.argv[2])), function(int(sys.argv[2])))
"""


@pytest.mark.slow
def test_processes_that_compile_at_once_leave_each_signature_its_own_code(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ONE_OF_TWO, str(tmp_path)]
    processes = [
        subprocess.Popen([*command, number], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for number in ("1", "5")
    ]
    for process in processes:
        assert process.stdin is not None
        print(file=process.stdin, flush=True)
    assert [process.communicate()[0] for process in processes] == ["2.0 2\n", "6.0 6\n"]
    after = new(tmp_path)
    assert (after(1), after(1.5), hits(after)) == (2, 2.5, 2)
    assert len(list(tmp_path.iterdir())) == 2


HASHED = """
import sys
from pathlib import Path
from tests.compute.test_function_cache import hashed, hits, new
function = new(Path(sys.argv[1]), hashed)
print(function("text") == hash("text"), hits(function))
"""


@pytest.mark.slow
def test_loaded_code_meets_all_that_numba_names_for_it(tmp_path: Path) -> None:
    for found in ("True 0\n", "True 1\n"):
        command = [sys.executable, "-c", HASHED, str(tmp_path)]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == found
