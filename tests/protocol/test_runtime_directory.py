"""Tests of the directory in which processes, daemons and viewers find each other. Some directories are rejected."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from cbtop.protocol import runtime_directory as runtime_module
from cbtop.protocol.errors import EndpointError
from cbtop.protocol.runtime_directory import runtime_directory


def test_the_runtime_directory_is_made_for_the_user_alone(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CBTOP_RUNTIME_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert runtime_directory() == str(runtime / "cbtop")
    assert stat.S_IMODE((runtime / "cbtop").stat().st_mode) == 0o700


def test_without_xdg_it_lies_in_the_temporary_directory(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CBTOP_RUNTIME_DIR")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(runtime))
    assert runtime_directory() == str(runtime / f"cbtop-{os.getuid()}")


def test_a_directory_that_others_may_enter_is_refused_with_the_way_out(runtime: Path) -> None:
    runtime.chmod(0o755)
    with pytest.raises(EndpointError, match="mode 0755, 0700 is wanted: chmod 700"):
        runtime_directory()
    runtime.chmod(0o700)


def test_a_link_is_no_directory(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (runtime / "real").mkdir(mode=0o700)
    (runtime / "link").symlink_to(runtime / "real")
    monkeypatch.setenv("CBTOP_RUNTIME_DIR", str(runtime / "link"))
    with pytest.raises(EndpointError, match="not a directory"):
        runtime_directory()


@pytest.fixture
def nowhere_named(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Unset all variables that name a directory.

    Use the given directory for temporary files and for shared memory.
    """
    monkeypatch.delenv("CBTOP_RUNTIME_DIR")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(runtime_module, "SHARED_MEMORY", str(runtime / "shm"))
    monkeypatch.setattr(runtime_module, "TEMPORARY", (str(runtime / "gone"), str(runtime)))
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.delenv(name, raising=False)
    return runtime


def test_shared_memory_is_used_if_files_are_copied_on_write(
    nowhere_named: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_module, "copies_on_write", lambda _descriptor: True)
    name = f"cbtop-{os.getuid()}"
    # Without shared memory, this directory is returned, although no ring can be created in it.
    assert runtime_directory() == str(nowhere_named / name)
    (nowhere_named / "shm").mkdir()
    assert runtime_directory() == str(nowhere_named / "shm" / name)
    assert (nowhere_named / "shm" / name).stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(nowhere_named))
    assert runtime_directory() == str(nowhere_named / "shm" / name)
    monkeypatch.setenv("CBTOP_RUNTIME_DIR", str(nowhere_named / "named"))
    assert runtime_directory() == str(nowhere_named / "named")


def test_shared_memory_is_used_if_no_temporary_directory_is_writable(
    nowhere_named: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_module, "TEMPORARY", ())
    monkeypatch.setenv("TMPDIR", str(nowhere_named / "gone"))
    with pytest.raises(EndpointError, match="no temporary directory can be written; set CBTOP_RUNTIME_DIR"):
        runtime_directory()
    (nowhere_named / "shm").mkdir()
    assert runtime_directory() == str(nowhere_named / "shm" / f"cbtop-{os.getuid()}")


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_directory_that_is_none_is_named_with_the_way_out(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (runtime / "file").touch()
    monkeypatch.setenv("CBTOP_RUNTIME_DIR", str(runtime / name))
    with pytest.raises(EndpointError, match=rf"{runtime / name} .*ot a directory; set CBTOP_RUNTIME_DIR to"):
        runtime_directory()
