"""Lint the PTX of all builds of cbtop's own kernels: `python -m tests.lint_builds [PART OF]`, for example `0 2`.

NVRTC writes the PTX for virtual architectures, without the assembly that takes most of the time in
tests/compute/test_cuda_compiles.py. 1,674 builds took 18 minutes of one core. With PART and OF, every OF-th module is
linted, beginning with number PART. The exit code is 1 if there is a finding.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product

from cbtop.compute.cuda import compiler
from cbtop.compute.cuda.launches import CudaModule
from cbtop.compute.cuda.prelude import PRELUDE
from cbtop.profiler.analysis.ptx.lints import findings
from cbtop.profiler.analysis.ptx.lints.base import LintSeverity
from cbtop.profiler.analysis.ptx.parser import parse
from tests.compute.test_cuda_compiles import MODULES

SEVERITIES = (LintSeverity.CORRECTNESS, LintSeverity.LIKELY)


def ptx_of(module: CudaModule, architecture: str, *, is_stamped: bool) -> str:
    """Return a module's PTX for a virtual architecture such as compute_90. Raises ComputeError if NVRTC fails."""
    nvrtc = compiler._nvrtc()
    options = ["--std=c++17", "--extra-device-vectorization", f"--gpu-architecture={architecture}"]
    options += ["--define-macro=STAMPED"] if is_stamped else []
    (program,) = compiler._checked(
        nvrtc.nvrtcCreateProgram((PRELUDE + module.source).encode(), b"kernel.cu", 0, [], [])
    )
    try:
        compiler._checked(nvrtc.nvrtcCompileProgram(program, len(options), [one.encode() for one in options]))
        return compiler._bytes(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program).rstrip(b"\0").decode()
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def builds(part: int, of: int) -> Iterator[tuple[str, str]]:
    """Yield the name and the PTX of each build of every `of`-th module, from number `part` on."""
    newest = compiler.architectures()[-1].replace("sm_", "compute_")
    for name, module in [*MODULES.items()][part::of]:
        for is_stamped, architecture in product((False, True), ("compute_80", "compute_90", newest)):
            label = f"{name} {architecture} {'stamped' if is_stamped else 'plain'}"
            yield label, ptx_of(module, architecture, is_stamped=is_stamped)


def main(part: int = 0, of: int = 1) -> int:
    count = 0
    problems = []
    for label, text in builds(part, of):
        count += 1
        for one in findings(parse(text), SEVERITIES):
            problems.append(f"{label}: {one.lint.id} in {one.function} at line {one.line}: {one.message}")
    print(*problems, f"{count} builds, {len(problems)} findings", sep="\n")  # noqa: T201
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
