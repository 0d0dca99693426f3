"""Tests of lints for PTX: each finds its error on the right line of a bad kernel.

It finds nothing in the repaired version of the kernel.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cbtop.profiler.analysis.ptx.lints import LINTS, findings
from cbtop.profiler.analysis.ptx.lints.base import LintSeverity
from cbtop.profiler.analysis.ptx.parser import parse

CORPUS = Path(__file__).parent / "corpus"
CLEAN = sorted((Path(__file__).parent / "clean").glob("*.ptx"))
NAMES = sorted(path.name.removesuffix("_bad.ptx") for path in CORPUS.glob("*_bad.ptx"))
LAUNCH = {"launch_shape": (256, 1, 1)}
MARK = "// finding"
PTXAS = shutil.which("ptxas")


def found(path: Path) -> list[tuple[str, int]]:
    launch = LAUNCH.get(path.stem.rpartition("_")[0])
    return [(one.lint.id, one.line) for one in findings(parse(path.read_text()), launch=launch)]


def lint_of(name: str) -> str:
    """Return the id of the lint that a corpus file belongs to. The file name begins with this id."""
    return max((one.id for one in LINTS if name.replace("_", "-").startswith(one.id)), key=len)


def test_each_lint_has_a_bad_and_a_good_kernel() -> None:
    assert {lint_of(name) for name in NAMES} == {one.id for one in LINTS}
    assert {path.stem.rpartition("_")[0] for path in CORPUS.glob("*_good.ptx")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_bad_kernel_has_one_finding_on_the_marked_line(name: str) -> None:
    path = CORPUS / f"{name}_bad.ptx"
    (line,) = [at for at, text in enumerate(path.read_text().split("\n"), 1) if MARK in text]
    assert found(path) == [(lint_of(name), line)]


@pytest.mark.parametrize("name", NAMES)
def test_its_repaired_twin_has_none(name: str) -> None:
    assert found(CORPUS / f"{name}_good.ptx") == []


@pytest.mark.parametrize("path", CLEAN, ids=[path.stem for path in CLEAN])
def test_kernels_that_compilers_made_have_no_error(path: Path) -> None:
    severities = (LintSeverity.CORRECTNESS, LintSeverity.LIKELY)
    assert [(one.lint.id, one.line) for one in findings(parse(path.read_text()), severities)] == []


def test_a_removed_barrier_is_found_in_a_compiled_kernel() -> None:
    """This kernel has several barriers.

    If any is removed, its reduction reads what other warps have not written yet.
    """
    text = (Path(__file__).parent / "clean" / "triton_layer_norm.ptx").read_text()
    barriers = [*re.finditer(r"bar\.sync\s+0;", text)]
    assert len(barriers) == 3
    for one in barriers:
        without = text[: one.start()] + text[one.end() :]
        assert {finding.lint.id for finding in findings(parse(without), [LintSeverity.CORRECTNESS])} == {
            "missing-barrier"
        }


def test_the_page_lists_every_lint() -> None:
    page = (Path(__file__).parents[4] / "docs" / "kernels.md").read_text()
    rows = [f"| `{one.id}` | {one.severity} | {one.what} | {one.fix} |" for one in LINTS]
    severities = [f" | {severity} | " for severity in LintSeverity]
    assert [line for line in page.split("\n") if any(one in line for one in severities)] == rows


def test_severities_limit_the_findings() -> None:
    module = parse((CORPUS / "shared_64_bit_bad.ptx").read_text())
    assert findings(module, [LintSeverity.CORRECTNESS, LintSeverity.ADVICE]) == []
    assert len(findings(module, [LintSeverity.LIKELY])) == 1


@pytest.mark.slow
@pytest.mark.skipif(PTXAS is None, reason="ptxas is not installed")
@pytest.mark.parametrize("path", [*sorted(CORPUS.glob("*.ptx"))], ids=lambda path: path.stem)
def test_the_corpus_assembles(path: Path, tmp_path: Path) -> None:
    assert PTXAS
    command = [PTXAS, "-arch=sm_90", str(path), "-o", str(tmp_path / "out.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
