"""Tests of the cache of code that NVRTC has compiled. A folder is not read if another user can write to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cbtop.compute.cuda.compiler import CompiledModule, _keep, _read

MADE = CompiledModule(b".entry f()", b"\x7fELF", "0 bytes spill stores")


@pytest.mark.parametrize(("mode", "expected"), [(0o700, MADE), (0o702, None)])
def test_machine_code_that_others_may_write_to_is_not_loaded(
    tmp_path: Path, mode: int, expected: CompiledModule | None
) -> None:
    path = tmp_path / "cuda" / "one.module"
    _keep(path, MADE)
    path.parent.chmod(mode)
    assert _read(path) == expected


def test_machine_code_that_is_cut_short_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "cuda" / "one.module"
    _keep(path, MADE)
    path.write_bytes(path.read_bytes()[:-1])
    assert _read(path) is None
    assert _read(tmp_path / "none" / "one.module") is None
