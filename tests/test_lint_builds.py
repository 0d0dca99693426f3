"""Tests of the program that lints the PTX of all builds."""

from __future__ import annotations

import pytest

from cbtop.compute.cuda.compiler import compiled
from tests import lint_builds
from tests.compute.test_cuda_compiles import MODULES

SMALL = min(MODULES, key=lambda name: len(MODULES[name].source))


@pytest.mark.slow  # compiles a module
def test_the_ptx_of_a_virtual_architecture_is_that_of_the_real_one() -> None:
    module = MODULES[SMALL]
    for is_stamped in (False, True):
        real = compiled(module.source, "sm_90", stamped=is_stamped)
        assert lint_builds.ptx_of(module, "compute_90", is_stamped=is_stamped).encode() == real.ptx


@pytest.mark.slow  # compiles a module
def test_a_finding_ends_the_program_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lint_builds, "MODULES", {SMALL: MODULES[SMALL]})
    assert lint_builds.main() == 0
    assert capsys.readouterr().out.splitlines()[-1] == "6 builds, 0 findings"
    real = lint_builds.ptx_of
    monkeypatch.setattr(
        lint_builds, "ptx_of", lambda *given, **named: real(*given, **named).replace("ret;", "L: bra L;")
    )
    assert lint_builds.main() == 1
    assert "no-exit" in capsys.readouterr().out
