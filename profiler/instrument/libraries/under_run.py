"""Times the calls of libraries in a process under `cbtop run --libraries`."""

from __future__ import annotations

import os
from collections.abc import Iterable

from cbtop.profiler.instrument.libraries.session import instrumented
from cbtop.profiler.instrument.run_profiler import profiler_of_run


def time_libraries(libraries: Iterable[str], overhead_percent: float, nothing_yet: str) -> None:
    """Time the calls of `libraries`, and record them with the profiler of this process.

    `overhead_percent` and `nothing_yet` are as in `profiler_of_run`.
    """
    residuals = os.environ.get("CBTOP_RESIDUALS") == "1"
    instrumented(libraries, lambda: profiler_of_run(overhead_percent, nothing_yet), residuals=residuals)
