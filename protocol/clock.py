"""The clocks of this host, which a test of a watched program does not freeze.

freezegun and `unittest.mock` replace the functions of Python's module `time`. freezegun also replaces them in every
module that has imported them. This module loads `time` a second time: the functions read the same clocks but are
other objects. So a step in frozen time is timed, and a deadline passes.
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
