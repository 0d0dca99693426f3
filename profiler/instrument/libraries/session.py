"""Times the calls of libraries in this process."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import ModuleType, TracebackType
from typing import Any

from cbtop.profiler.instrument.awaited import once_imported
from cbtop.profiler.instrument.libraries.calls import SMALL_NS, LibraryCalls
from cbtop.profiler.instrument.libraries.cupy_functions import CUPY
from cbtop.profiler.instrument.libraries.functions import LibraryFunction
from cbtop.profiler.instrument.libraries.numpy_functions import NUMPY
from cbtop.profiler.instrument.libraries.replacing import Replaced, found, replace_calls
from cbtop.profiler.instrument.libraries.scipy_functions import SCIPY
from cbtop.profiler.instrument.libraries.sklearn_functions import SKLEARN
from cbtop.profiler.instrument.trouble import log_own_error
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.errors import RoofsError
from cbtop.protocol.messages import Manifest, TraceNumber, TraceSummary
from cbtop.protocol.roofs import known_roofs, roofs_of_cpu, roofs_over_torch, way_out_on_cpu
from cbtop.protocol.signals import reraise_host_error
from cbtop.protocol.vocabulary import LAUNCHES

LIBRARIES: dict[str, tuple[LibraryFunction, ...]] = {
    "numpy": NUMPY,
    "scipy": SCIPY,
    "sklearn": SKLEARN,
    "cupy": CUPY,
}
_SMALL = "small calls"
MAX_SMALL = 50  # at most this many functions in the announcement of small calls


class TimedLibraries:
    """Times the calls of libraries until `stop`. It is a context manager, too.

    `profiler` has the results. `small_calls` has the number of calls that were too short to be recorded, by function.
    """

    def __init__(self, profiler: BrickProfiler, *, residuals: bool) -> None:
        self.profiler = profiler
        self._checks_residuals = residuals
        self._libraries: list[str] = []
        self._timed: list[tuple[LibraryCalls, Replaced]] = []
        self.is_over = False
        self._has_announced = False
        atexit.register(self._say_small)

    def add(self, libraries: Iterable[str]) -> None:
        """Time the functions of `libraries`: imported libraries now, the others after their import."""
        for library in libraries:
            if library in self._libraries:
                continue
            self._libraries.append(library)
            modules: dict[str, list[LibraryFunction]] = {}
            for row in LIBRARIES[library]:
                checked = row if self._checks_residuals or not row.checks else replace(row, checks=())
                modules.setdefault(row.awaited, []).append(checked)
            for module, rows in modules.items():
                once_imported(module, lambda rows=rows: self._replace(rows))  # type: ignore[misc]

    @property
    def small_calls(self) -> dict[str, int]:
        """The number of small calls of each function that has any."""
        counts: dict[str, int] = {}
        for calls, replaced in self._timed:
            if number := calls.small + replaced.small:
                counts[calls.row.name] = counts.get(calls.row.name, 0) + number
        return counts

    def stop(self) -> None:
        """Restore all functions."""
        self.is_over = True
        self._say_small()
        atexit.unregister(self._say_small)
        for _, replaced in reversed(self._timed):
            replaced.restore()

    def __enter__(self) -> TimedLibraries:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.stop()

    def _replace(self, rows: Iterable[LibraryFunction]) -> None:
        for row in () if self.is_over else rows:
            try:
                target = found(row)
                if target is None or any([target is replaced.target for _, replaced in self._timed]):
                    continue
                library = row.name.partition(".")[0]
                version = getattr(sys.modules.get(library), "__version__", "")
                backend = f"{library} {version}{LAUNCHES if row.module.startswith('cupy') else ''}"
                calls = LibraryCalls(row, backend, self.profiler, self._announce, self._say_small)
                replaced = replace_calls(target, row, calls.timed)
                if replaced is not None:
                    self._timed.append((calls, replaced))
            except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
                log_own_error(error, f"{row.name} is not timed")

    def _announce(self) -> None:
        """Announce the libraries and the roofs of the processor, before the first record."""
        if self._has_announced:
            return
        self._has_announced = True
        threads, blas = blas_threads()
        try:
            roofs = roofs_of_cpu(known_roofs(), threads)
            missing = "" if roofs is not None else way_out_on_cpu(threads)
            for ceiling in () if roofs is None else roofs_over_torch(roofs.ceilings):
                self.profiler.announce(ceiling)
        except RoofsError as error:
            missing = str(error)
        imported = [name for name in self._libraries if name in sys.modules]
        self.profiler.announce(
            Manifest(
                model=", ".join(imported),
                architecture="libraries",
                backend=blas,
                quantization="",
                threads=threads,
                layers=0,
                hidden_size=0,
                context_length=0,
                parameters=0,
                weights_bytes=0,
                roofs=missing,
            )
        )

    def _say_small(self) -> None:
        """Announce how many calls were too short to be recorded."""
        counts = sorted(self.small_calls.items(), key=lambda item: -item[1])[:MAX_SMALL]
        if counts:
            self.profiler.announce(
                TraceSummary(
                    trace=_SMALL,
                    name=f"calls that took less than {SMALL_NS // 1000} us",
                    about="they are counted, and leave no record",
                    forwards=0,
                    numbers=tuple(TraceNumber(name, "calls", float(number)) for name, number in counts),
                    anomalies=(),
                )
            )


def blas_threads() -> tuple[int, str]:
    """Return the largest number of threads of a BLAS library in this process, and its name.

    Without threadpoolctl, return the number of processors that this process may use.
    """
    try:
        import threadpoolctl

        pools = [one for one in threadpoolctl.threadpool_info() if one.get("user_api") == "blas"]
        if pools:
            largest = max(pools, key=lambda one: int(one["num_threads"]))
            return int(largest["num_threads"]), f"{largest['internal_api']} {largest['version']}"
    except Exception as error:  # noqa: BLE001 - threadpoolctl is the host's: it may be missing, old or broken
        reraise_host_error(error)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, ""


_active: TimedLibraries | None = None


def instrumented(
    libraries: Iterable[str], profiler: Callable[[], BrickProfiler], *, residuals: bool
) -> TimedLibraries:
    """Time the calls of `libraries` in this process. Only the first call makes a profiler, and decides on residuals.

    Raises ValueError if a library has no table.
    """
    global _active
    names = list(libraries)
    for name in names:
        if name not in LIBRARIES:
            raise ValueError(f"{name!r} has no table of functions; expected {', '.join(LIBRARIES)}")
    if _active is None or _active.is_over:
        _active = TimedLibraries(profiler(), residuals=residuals)
    _active.add(names)
    return _active


def active() -> TimedLibraries | None:
    """Return the libraries that are timed now, or None."""
    return None if _active is None or _active.is_over else _active


def library_of(module: ModuleType | str) -> str:
    """Return the name of the library of a module (`numpy.fft`: `numpy`)."""
    name: Any = module if isinstance(module, str) else module.__name__
    return str(name).partition(".")[0]
