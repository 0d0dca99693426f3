"""The clocks of this host. They keep running if a test in the watched program freezes time.

freezegun and `unittest.mock` replace the functions of Python's module `time`, even in modules that have already
imported them. So this module loads a second copy of `time`. The functions of the copy read the same clocks and are
not replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from time import __spec__ as _spec

assert _spec is not None
assert _spec.loader is not None
_unfrozen = _spec.loader.create_module(_spec)
assert _unfrozen is not None
_spec.loader.exec_module(_unfrozen)

monotonic: Callable[[], float] = _unfrozen.monotonic
monotonic_ns: Callable[[], int] = _unfrozen.monotonic_ns
perf_counter_ns: Callable[[], int] = _unfrozen.perf_counter_ns
time: Callable[[], float] = _unfrozen.time
time_ns: Callable[[], int] = _unfrozen.time_ns
