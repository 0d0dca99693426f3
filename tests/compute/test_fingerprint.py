"""Tests of when a function is compiled again: only if code or a constant that the function depends on has changed."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import cbtop
from cbtop.compute.jit import compile as compiling
from cbtop.compute.jit import compilers, fingerprint, kernel_cache
from cbtop.compute.jit.kernel_cache import UNUSED_S
from cbtop.compute.jit.philox import uniform

FINGERPRINTS = """
import json
from cbtop.compute.jit.fingerprint import fingerprint
from cbtop.compute.kernels import attention, kv_write, linear, linear_int8, products
functions = {
    "q4_k": linear.ROWS_OF[12].function, "q8_0": linear.ROWS_OF[8].function, "iq4_nl": linear.ROWS_OF[20].function,
    "int8 q4_k": linear_int8.ROWS_OF[12].function, "attention": attention._attend, "products": products._three,
    "kv_write": kv_write.kv_write,
}
print(json.dumps({name: fingerprint(one.py_func, one.targetoptions) for name, one in functions.items()}))
"""
COMMENT = "# as always\n\n"


def fingerprints_in(folder: Path) -> dict[str, str]:
    command = [sys.executable, "-c", FINGERPRINTS]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Copy the source files of cbtop, so that a test can edit them."""
    ours = Path(cbtop.__file__).parent
    for room in ("compute", "profiler", "protocol"):
        shutil.copytree(ours / room, tmp_path / "cbtop" / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("__init__.py", "version.py"):
        shutil.copy(ours / name, tmp_path / "cbtop" / name)
    return tmp_path


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1, (file, old)
    file.write_text(text.replace(old, new))


@pytest.mark.slow  # The default run skips this test, because a faster test below edits one kernel and adds a comment.
def test_an_edit_changes_what_it_is_inlined_into_and_a_comment_nothing(sources: Path) -> None:
    before = fingerprints_in(sources)
    assert len(set(before.values())) == len(before)
    compute = sources / "cbtop" / "compute"
    for file in compute.rglob("*.py"):
        text = file.read_text()
        file.write_text(
            text.replace("from __future__", f"{COMMENT}from __future__", 1).replace("\n\n\n", "\n\n\n# so\n")
        )
    assert fingerprints_in(sources) == before

    # Edit four things. These are a helper of Q4_K in its own file, an overload in a function that writes to a cache,
    # a constant of IQ4_NL, and files that no kernel depends on.
    edit(
        compute / "quantization" / "six_bits.py",
        "def byte_of(",
        "def byte_of_all():\n    pass\n\n\n@jit\ndef byte_of(",
    )
    edit(
        compute / "jit" / "halves.py",
        "        return float_to_half(value)",
        "        return float_to_half(value + 0)",
    )
    edit(compute / "quantization" / "iq4_nl.py", "BLOCK_BYTES = 18", "BLOCK_BYTES = 20")
    edit(compute / "kernels" / "sampling.py", "from typing import Any\n", "from typing import Any\n\nUNUSED = 1\n")
    edit(compute / "backends.py", "GOMP_SPIN_COUNT = 4_000", "GOMP_SPIN_COUNT = 4_001")
    after = fingerprints_in(sources)
    assert {name for name in before if before[name] != after[name]} == {"q4_k", "kv_write", "iq4_nl"}


HELPER = "from cbtop.compute.jit.compile import jit\n\n@jit\ndef helper(x):\n    return x + 1\n"
KERNEL = """
from cbtop.compute.jit.compile import copy_of, jit
from helper_of_a_test import helper
NUMBER = 10
def _plain(x):
    return later(x) + NUMBER
kernel = jit(_plain)
@jit
def later(x):
    return 100 * helper(x)
tens = jit(copy_of(_plain, "tens", NUMBER=20))
"""


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], ModuleType]:
    """Return a function that imports a kernel and its helper as a new process would.

    The compiled code is cached in a folder of the test.
    """
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(compiling, "NUMBA_CACHE", tmp_path / "cache")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(tmp_path))
    edits = iter(range(1, 100))

    def imported(helper: str, kernel: str) -> ModuleType:
        edited = next(edits)
        for name, text in (("helper_of_a_test", helper), ("kernel_of_a_test", kernel)):
            file = tmp_path / f"{name}.py"
            file.write_text(text)
            os.utime(file, (edited, edited))
            monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        return importlib.import_module("kernel_of_a_test")

    return imported


def called(module: ModuleType) -> tuple[int, int, int]:
    """Return the result of each of two kernels, and how many of the two came from the cache."""
    return (
        module.kernel(1),
        module.tens(1),
        sum(sum(one.stats.cache_hits.values()) for one in (module.kernel, module.tens)),
    )


def test_the_cache_never_runs_old_code_and_is_found_again_after_a_comment(
    imported: Callable[[str, str], ModuleType],
) -> None:
    assert called(imported(HELPER, KERNEL)) == (210, 220, 0)
    assert called(imported(HELPER, KERNEL)) == (210, 220, 2)
    assert called(imported(f"# a comment\n{HELPER}", f"# a comment\n{KERNEL}")) == (210, 220, 2)
    described = HELPER.replace("(x):\n", '(x):\n    """As always."""\n')
    assert called(imported(f'"""A helper."""\n{described}', KERNEL))[:2] == (210, 220)
    assert called(imported(f'"""The helper."""\n{HELPER}', KERNEL)) == (210, 220, 2)
    assert called(imported(HELPER.replace("x + 1", "x + 2"), KERNEL)) == (310, 320, 0)
    assert called(imported(HELPER, KERNEL.replace("NUMBER=20", "NUMBER=30")))[:2] == (210, 230)
    assert called(imported(HELPER.replace("@jit", "def jit_(f): return jit(f)\n@jit_"), KERNEL))[:2] == (210, 220)
    assert called(imported(HELPER, KERNEL)) == (210, 220, 2)


def test_what_was_edited_after_it_was_imported_is_compiled_and_not_kept(
    imported: Callable[[str, str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fingerprint.STAMPS, str(tmp_path / "helper_of_a_test.py"), (0, 0, 0))
    assert called(imported(HELPER, KERNEL)) == (210, 220, 0)
    assert not list(tmp_path.glob("cache/kernel_of_a_test._plain*"))
    module = imported(HELPER, KERNEL)
    with pytest.raises(fingerprint.ChangedError):
        fingerprint.fingerprint(module.kernel.py_func, {})


DOCUMENTED = '''"""A module."""
NUMBERS = "a", 1, None
class Kind:
    """A class."""
    text = "a text"
    def method(self):
        """A method."""
        return "a text", None
def function(x):
    """A function."""
    assert x, "a function"
    return None if x == "A text." else (1, "a", frozenset({2}))
'''
TEXTS = ("A module.", "A class.", "A method.", "A function.")


def hashes(folder: Path, *texts: str) -> set[str]:
    found = set()
    for text in texts:
        # Forget the cached hashes, because they are cached by file name.
        file = folder / f"file_{zlib.crc32(text.encode())}.py"
        file.write_text(text)
        found.add(fingerprint.hash_of_file(str(file), (0, 0, 0)))
    return found


def test_docstrings_and_comments_do_not_count(tmp_path: Path) -> None:
    changed = [DOCUMENTED.replace(text, "Another text.") for text in TEXTS]
    removed = [
        DOCUMENTED.replace(f'        """{text}"""\n', "").replace(f'    """{text}"""\n', "") for text in TEXTS[2:]
    ]
    assert DOCUMENTED not in (*changed, *removed)
    assert len(hashes(tmp_path, DOCUMENTED, f"# A comment\n{DOCUMENTED}", *changed, *removed)) == 1


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ('"a text"', '"b"'),
        ('"a", 1', '"a", 2'),
        ('"A text."', '"B"'),
        ("return None", "return 0"),
        ("{2}", "{3}"),
        ("==", "!="),
        ('"a function"', '"b"'),
    ],
)
def test_any_other_constant_or_operation_counts(tmp_path: Path, text: str, other: str) -> None:
    assert text in DOCUMENTED
    assert len(hashes(tmp_path, DOCUMENTED, DOCUMENTED.replace(text, other, 1))) == 2


def test_a_constant_beyond_the_256th_counts(tmp_path: Path) -> None:
    many = "def function(x):\n" + "".join(f"    x += {1000 + number}\n" for number in range(300)) + "    return x\n"
    documented = many.replace("(x):\n", '(x):\n    """A text."""\n')
    assert len(hashes(tmp_path, documented, documented.replace("A text", "Another"))) == 1
    assert len(hashes(tmp_path, many, many.replace("1299", "1399"))) == 2


def test_what_compiles_a_function_is_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fingerprint of a function includes the compiler passes.

    In an earlier version, code that other passes had compiled was reused, because the fingerprint of most kernels
    covered only their own file.
    """
    hashed: list[str] = []
    monkeypatch.setattr(fingerprint, "hash_of_file", lambda path, stamp: hashed.append(path) or "")
    fingerprint.fingerprint(uniform.py_func, uniform.targetoptions)
    assert compilers.__file__ in hashed


def test_what_is_not_known_is_made_of_all_our_files(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []
    monkeypatch.setattr(fingerprint, "hash_of_file", lambda path, stamp: hashed.append(path) or "")
    thing = object()

    def function() -> Any:
        return thing

    fingerprint.fingerprint(function, {})
    assert set(hashed) > fingerprint.STAMPS.keys()


def test_loaded_cache_files_stay_and_unused_ones_are_removed_once_a_process(
    imported: Callable[[str, str], ModuleType], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    called(imported(HELPER, KERNEL))
    gone = ("gone-0.py311.0.nbc", ".gone.nbc.0", "of-numba-itself.nbi")
    for file in (*cache.iterdir(), *(cache / name for name in gone)):
        file.touch()
        os.utime(file, (0, time.time() - UNUSED_S - 1))
    loaded = {file.name for name in ("_plain", "tens") for file in cache.glob(f"kernel_of_a_test.{name}*")}
    # Only the code of the two kernels is loaded from the cache. The functions that they call are not loaded
    # separately.
    called(imported(HELPER, KERNEL))
    kernel_cache.remove_unused_files(tmp_path / "none", time.time())
    kernel_cache._LOOKED_AFTER.discard(cache)
    kernel_cache.remove_unused_files(cache, time.time())
    assert {file.name for file in cache.iterdir()} == loaded
    old = cache / "old.nbc"
    old.touch()
    os.utime(old, (0, 0))
    kernel_cache.remove_unused_files(cache, time.time())  # A second call in the same process does nothing.
    assert old.exists()
