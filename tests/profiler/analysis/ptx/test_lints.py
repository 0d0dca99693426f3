"""Tests of lints for PTX. Each lint finds its error on the right line of a bad kernel.

The lint finds nothing in the repaired version of the kernel.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cbtop.profiler.analysis.ptx.analysis import MAX_SHARED_ACCESSES, FunctionAnalysis
from cbtop.profiler.analysis.ptx.lints import LINTS, findings
from cbtop.profiler.analysis.ptx.lints.base import LintSeverity
from cbtop.profiler.analysis.ptx.parser import parse
from tests.representatives import first_by_default

CORPUS = Path(__file__).parent / "corpus"
CLEAN = sorted((Path(__file__).parent / "clean").glob("*.ptx"))
NAMES = sorted(path.name.removesuffix("_bad.ptx") for path in CORPUS.glob("*_bad.ptx"))
LAUNCHES = {"launch_shape": {"kernel": (256, 1, 1)}}
MARK = "// finding"
REFUSED = {  # by ptxas
    "shared_size_bad",
    "maybe_divergent_barrier_reduced_bad",  # the instruction redux needs sm_80, but the barriers are those of sm_60
    "maybe_divergent_barrier_reduced_good",
}
PTXAS = shutil.which("ptxas")


def found(path: Path) -> list[tuple[str, int]]:
    launches = LAUNCHES.get(path.stem.rpartition("_")[0])
    return [(one.lint.id, one.line) for one in findings(parse(path.read_text()), launches=launches)]


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


@first_by_default("path", CLEAN, 2, ids=[path.stem for path in CLEAN])
def test_kernels_that_compilers_made_have_no_error(path: Path) -> None:
    severities = (LintSeverity.CORRECTNESS, LintSeverity.LIKELY)
    assert [(one.lint.id, one.line) for one in findings(parse(path.read_text()), severities)] == []


def test_a_removed_barrier_is_found_in_a_compiled_kernel() -> None:
    """This kernel has several barriers.

    If one barrier is removed, the kernel's reduction reads what other warps have not written yet.
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


@pytest.mark.parametrize(("name", "count"), [("partial_fragment_bad", 1), ("partial_fragment_of_warps_bad", 0)])
def test_a_fragment_without_a_block_size_is_judged_by_whole_warps(name: str, count: int) -> None:
    """In each block, threads 32 to 47 are a part of a warp.

    A block can also have the four warps that a wgmma needs.
    """
    text = re.sub(r"\.reqntid .*\n", "", (CORPUS / f"{name}.ptx").read_text())
    assert [one.lint.id for one in findings(parse(text))] == ["partial-fragment"] * count


def test_the_threads_of_a_long_block_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block with thousands of accesses took minutes: each lint computed the same threads again for each access."""
    stores = "\n".join(f"st.shared.f32 [%r4+{4 * (at % 8)}], %f1;\nld.shared.f32 %f2, [%r4+32];" for at in range(600))
    text = (CORPUS / "idle_threads_good.ptx").read_text()
    text = text.replace(
        "ret;", f"mov.f32 %f1, 0f00000000;\nmov.u32 %r3, tile;\nadd.s32 %r4, %r3, %r1;\n{stores}\nret;"
    )
    module = parse(text.replace(".reg .pred", ".shared .align 4 .b8 tile[512];\n.reg .pred"))
    computed = []
    real = FunctionAnalysis._threads_at
    monkeypatch.setattr(FunctionAnalysis, "_threads_at", lambda self, at: (computed.append(at), real(self, at))[1])
    analysis = FunctionAnalysis(module, module.entries[0])
    for lint in LINTS:
        list(lint.find(analysis))
    assert len(computed) == 1
    assert len(analysis.shared_accesses) == MAX_SHARED_ACCESSES


@pytest.mark.slow
@pytest.mark.skipif(PTXAS is None, reason="ptxas is not installed")
@pytest.mark.parametrize("path", [*sorted(CORPUS.glob("*.ptx"))], ids=lambda path: path.stem)
def test_the_corpus_assembles(path: Path, tmp_path: Path) -> None:
    assert PTXAS
    target = parse(path.read_text()).target
    architecture = target if target.endswith("a") else "sm_90"
    command = [PTXAS, f"-arch={architecture}", str(path), "-o", str(tmp_path / "out.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode == 0) is (path.stem not in REFUSED), done.stderr
