"""Tests of the cleaning of the cache: compiled kernels are removed if their source no longer exists.

Files in use and files of other users are never removed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cbtop.compute.jit.kernel_cache import UNUSED_S, remove_unused, use_directory

NOW_S = time.time()
OURS, OTHER, THIRD = "0123456789abcdef", "fedcba9876543210", "00112233aabbccdd"
HOLDER = (
    "import sys; from pathlib import Path; from cbtop.compute.jit.kernel_cache import use_directory\n"
    "print(use_directory(Path(sys.argv[1]), sys.argv[2]), flush=True); sys.stdin.read()"
)


def old(path: Path) -> Path:
    path.mkdir()
    (path / "kernel.nbc").write_bytes(b"code")
    os.utime(path, (0, NOW_S - UNUSED_S - 1))
    return path


def test_a_new_directory_ends_those_that_nobody_has_used_lately(tmp_path: Path) -> None:
    unused = old(tmp_path / f"numba-{OTHER}")
    recent = tmp_path / f"numba-{THIRD}"
    recent.mkdir()
    assert use_directory(tmp_path, OURS) == tmp_path / f"numba-{OURS}"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([f"numba-{OURS}", recent.name])
    assert not unused.exists()


def test_a_directory_that_is_there_is_touched_and_nothing_else_is_looked_at(tmp_path: Path) -> None:
    ours = old(tmp_path / f"numba-{OURS}")
    unused = old(tmp_path / f"numba-{OTHER}")
    assert use_directory(tmp_path, OURS) == ours
    assert ours.stat().st_mtime > NOW_S - UNUSED_S
    assert unused.exists()


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    elsewhere = old(tmp_path / "elsewhere")
    for name in ("numba", "numba-", f"numba-{OTHER}.bak", f"numba-{OTHER.upper()}", "demo-model"):
        old(tmp_path / name)
    (tmp_path / f"numba-{OTHER}").symlink_to(elsewhere)
    file = tmp_path / f"numba-{THIRD}"
    file.write_text("mine")
    os.utime(file, (0, 0))
    before = sorted(tmp_path.rglob("*"))
    remove_unused(tmp_path, NOW_S)
    assert sorted(tmp_path.rglob("*")) == before


def test_what_another_process_uses_stays_however_old_until_it_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path), OTHER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        used = Path(process.stdout.readline().strip())
        remove_unused(tmp_path, NOW_S + 2 * UNUSED_S)
        assert used.is_dir()
        process.communicate()
    remove_unused(tmp_path, NOW_S + 2 * UNUSED_S)
    assert not used.exists()


@pytest.mark.parametrize("path", ["/proc/none", "/dev/null/none"])
def test_where_nothing_can_be_written_there_is_none_and_no_error(path: str) -> None:
    assert use_directory(Path(path), OURS) is None
    remove_unused(Path(path), NOW_S)


READ_ONLY = """
import os, sys
from pathlib import Path
from cbtop.compute.jit import kernel_cache
root = Path(sys.argv[1])
may = os.access
os.access = lambda path, mode: may(path, mode) and not (mode & os.W_OK and Path(path).is_relative_to(root))
print(kernel_cache.use_directory(root, sys.argv[2]))
(Path(kernel_cache.use_directory(root, sys.argv[2])) / "new.nbc").write_bytes(b"more")
if not os.fork():
    sys.exit()
os.wait()
print(*(path.relative_to(root.parent) for path in sorted(root.parent.glob("cbtop-kernels-*/**/*.nbc"))))
"""


def test_a_full_read_only_cache_is_used_in_a_copy_that_ends_with_the_process(tmp_path: Path) -> None:
    kernels = tmp_path / "cache" / f"numba-{OURS}" / "kernels_1"
    kernels.mkdir(parents=True)
    (kernels / "kernel.nbc").write_bytes(b"code")
    before = [(path, path.stat().st_mtime_ns) for path in sorted(tmp_path.rglob("*"))]
    command = [sys.executable, "-c", READ_ONLY, str(tmp_path / "cache"), OURS]
    variables = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=variables)
    used, found = done.stdout.splitlines()[0], done.stdout.splitlines()[-1]
    assert Path(used).parent == tmp_path
    assert sorted(Path(name).name for name in found.split()) == ["kernel.nbc", "kernel.nbc", "new.nbc"]
    assert [(path, path.stat().st_mtime_ns) for path in sorted(tmp_path.rglob("*"))] == before


@pytest.mark.parametrize(
    ("mode", "mode_of_root", "is_used"),
    [
        (0o700, 0o755, True),
        (0o755, 0o1777, True),
        (0o777, 0o700, False),
        (0o702, 0o700, False),
        (0o700, 0o777, False),
    ],
)
def test_what_others_may_write_to_is_not_run(tmp_path: Path, mode: int, mode_of_root: int, is_used: bool) -> None:
    directory = tmp_path / f"numba-{OURS}"
    directory.mkdir()
    directory.chmod(mode)
    tmp_path.chmod(mode_of_root)
    assert use_directory(tmp_path, OURS) == (directory if is_used else None)


def test_a_group_of_others_may_not_write_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / f"numba-{OURS}"
    directory.mkdir()
    directory.chmod(0o770)
    group = directory.stat().st_gid
    is_own = group == os.getegid() == os.geteuid()
    assert use_directory(tmp_path, OURS) == (directory if is_own else None)
    # If the id of the group differs from the id of the user, the group may have other members.
    for name in ("getegid", "geteuid"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, lambda: group + 1)
            assert use_directory(tmp_path, OURS) is None


@pytest.mark.parametrize("can_write", [True, False])
def test_what_another_user_owns_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_write: bool) -> None:
    directory = tmp_path / f"numba-{OURS}"
    directory.mkdir()
    found = os.stat

    def owned_by_another(path: object, **options: bool) -> os.stat_result:
        status = found(path, **options)  # type: ignore[arg-type]
        if Path(str(path)) != directory:
            return status
        return os.stat_result((*status[:4], 12_345, *status[5:]), {"st_mtime_ns": status.st_mtime_ns})

    monkeypatch.setattr(os, "stat", owned_by_another)
    monkeypatch.setattr(os, "access", lambda path, mode: can_write)
    assert use_directory(tmp_path, OURS) is None
