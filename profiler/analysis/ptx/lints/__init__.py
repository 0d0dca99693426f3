"""All lints: first those that prove errors, then those that find likely errors, then those that give advice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cbtop.profiler.analysis.ptx.analysis import FunctionAnalysis
from cbtop.profiler.analysis.ptx.lints.alignment import MISALIGNED
from cbtop.profiler.analysis.ptx.lints.base import Lint, LintFinding, LintSeverity
from cbtop.profiler.analysis.ptx.lints.divergent_barrier import DIVERGENT_BARRIER, MAYBE_DIVERGENT_BARRIER
from cbtop.profiler.analysis.ptx.lints.exit_before_barrier import (
    EXIT_BEFORE_BARRIER,
    EXITED_THREADS,
    MAYBE_EXIT_BEFORE_BARRIER,
)
from cbtop.profiler.analysis.ptx.lints.flags import UNFENCED_FLAG, UNFENCED_WAIT, WEAK_SPIN
from cbtop.profiler.analysis.ptx.lints.fusion import NOT_FUSED
from cbtop.profiler.analysis.ptx.lints.idle_barrier import IDLE_BARRIER
from cbtop.profiler.analysis.ptx.lints.launch_shape import LAUNCH_SHAPE
from cbtop.profiler.analysis.ptx.lints.load_types import LOAD_TYPE
from cbtop.profiler.analysis.ptx.lints.local_memory import LOCAL_MEMORY
from cbtop.profiler.analysis.ptx.lints.loop_split import SPLIT_LOOP
from cbtop.profiler.analysis.ptx.lints.mbarriers import MBARRIER_COUNT
from cbtop.profiler.analysis.ptx.lints.missing_barrier import MISSING_BARRIER, MISSING_WARP_SYNC
from cbtop.profiler.analysis.ptx.lints.named_barriers import BARRIER_COUNT
from cbtop.profiler.analysis.ptx.lints.predicates import PREDICATE_PRESSURE
from cbtop.profiler.analysis.ptx.lints.reachability import NO_EXIT, UNREACHABLE
from cbtop.profiler.analysis.ptx.lints.shared_addresses import GENERIC_SHARED, SHARED_64_BIT, SHARED_NOT_CONVERTED
from cbtop.profiler.analysis.ptx.lints.shared_bounds import SHARED_BOUNDS
from cbtop.profiler.analysis.ptx.lints.tile_shapes import IDLE_THREADS, PARTIAL_FRAGMENT, SHARED_SIZE
from cbtop.profiler.analysis.ptx.lints.uninitialized import MAYBE_UNINITIALIZED, UNINITIALIZED
from cbtop.profiler.analysis.ptx.model import Module

LINTS: tuple[Lint, ...] = (
    DIVERGENT_BARRIER, EXIT_BEFORE_BARRIER, MISSING_BARRIER, SHARED_NOT_CONVERTED, SHARED_BOUNDS, MBARRIER_COUNT,
    NO_EXIT, LOAD_TYPE, UNINITIALIZED, WEAK_SPIN, LAUNCH_SHAPE, PARTIAL_FRAGMENT,
    MISALIGNED, SHARED_SIZE, BARRIER_COUNT,
    MAYBE_DIVERGENT_BARRIER, MAYBE_EXIT_BEFORE_BARRIER, MISSING_WARP_SYNC, SHARED_64_BIT, UNREACHABLE,
    MAYBE_UNINITIALIZED, UNFENCED_FLAG, UNFENCED_WAIT,
    GENERIC_SHARED, LOCAL_MEMORY, PREDICATE_PRESSURE, NOT_FUSED, IDLE_BARRIER, EXITED_THREADS, SPLIT_LOOP,
    IDLE_THREADS,
)  # fmt: skip


def findings(
    module: Module,
    severities: Sequence[LintSeverity] = tuple(LintSeverity),
    launches: Mapping[str, Sequence[int]] | None = None,
) -> list[LintFinding]:
    """Run the lints of these severities on all functions of a module. Returns their findings by line.

    `launches` has each function's threads of a block along x, y and z, if known.
    """
    found = []
    for function in module.functions:
        if function.is_declaration or not function.instructions:
            continue
        analysis = FunctionAnalysis(module, function, (launches or {}).get(function.name))
        for lint in LINTS:
            if lint.severity in severities:
                for index, message in lint.find(analysis):
                    line, source = analysis.place_of(index)
                    found.append(LintFinding(lint, function.name, line, source, message))
    return sorted(found, key=lambda one: one.line)
