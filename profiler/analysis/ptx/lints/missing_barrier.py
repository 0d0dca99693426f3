"""Lint: a race. Threads access the same shared memory without a barrier in between, and at least one writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cbtop.profiler.analysis.ptx.analysis import FunctionAnalysis, SharedAccess, are_in_one_warp
from cbtop.profiler.analysis.ptx.lints.base import Lint, LintSeverity, Problem
from cbtop.profiler.analysis.ptx.opcodes import is_warp_sync, may_order
from cbtop.profiler.analysis.ptx.paths import has_unordered_path

MAX_PAIRS = 500  # at most this many pairs of different accesses to compare; each comparison takes milliseconds


def _between_warps(analysis: FunctionAnalysis) -> Iterator[Problem]:
    yield from _races(analysis, in_warps=False)


def _in_warps(analysis: FunctionAnalysis) -> Iterator[Problem]:
    """Yield the races inside a warp. Accesses that also race with another warp are left out, because the barrier that
    they need also orders a warp's threads.
    """
    races = list(_races(analysis, in_warps=True))
    need_barrier = {one.instruction for one in _between_warps(analysis)} if races else ()
    yield from (one for one in races if one.instruction not in need_barrier)


def _races(analysis: FunctionAnalysis, *, in_warps: bool) -> Iterator[Problem]:
    """Yield the second of two accesses by different threads to the same bytes, if one is a store.

    There are two conditions. A path without a barrier leads from the first access to the second. And one of the
    accesses never runs without the other. If only thread ids decide whether the accesses run, it is enough that the
    thread of the second access takes such a path.
    """
    accesses = analysis.shared_accesses
    # (array, whether the accesses are stores) -> accesses.
    partners: dict[tuple[object, bool], list[SharedAccess]] = {}
    for one in accesses:
        partners.setdefault((one.root, one.is_store), []).append(one)
    reported: set[int] = set()
    pairs: dict[tuple[object, ...], tuple[int, int] | None] = {}
    for first in accesses:
        others = partners.get((first.root, not first.is_store), ())
        reached = _reached_unordered(analysis, first.at, in_warps=in_warps) if others else frozenset()
        for second in others:
            if second.at in reported or second.at not in reached:
                continue
            is_together = _belong_together(analysis, first.at, second.at)
            if not is_together and not _is_always_run(analysis, first, second):
                continue
            user = second if is_together else _within(second, first.threads)
            key = (*first.footprint, *user.footprint)
            if key not in pairs:
                pairs[key] = _pair(first, user, in_warps=in_warps) if len(pairs) < MAX_PAIRS else None
            if (pair := pairs[key]) is None:
                continue
            thread = None if is_together else pair[1]
            if not has_unordered_path(analysis, first.at, second.at, in_warps=in_warps, thread=thread):
                continue
            reported.add(second.at)
            does, did = ("reads", "writes") if first.is_store else ("writes", "reads")
            a, b = pair
            line = analysis.instructions[first.at].line
            missing = "synchronisation of the warp" if in_warps else "barrier"
            yield Problem(
                second.at,
                f"thread {b} {does} shared bytes that thread {a} {did} at line {line}, with no {missing} between",
            )


def _pair(first: SharedAccess, second: SharedAccess, *, in_warps: bool) -> tuple[int, int] | None:
    """Return two different threads, one of each access, that use the same byte. One writes it, and the other is not
    among its writers.
    """
    users, others = _users(first), _users(second)
    for byte in sorted(others.keys() & users.keys()):
        writers = users[byte] if first.is_store else others[byte]
        for thread in sorted(users[byte] if first.is_store else users[byte] - writers):
            for other in sorted(others[byte] - writers if first.is_store else others[byte]):
                if are_in_one_warp(thread, other) is in_warps:
                    return thread, other
    return None


def _users(access: SharedAccess) -> dict[int, set[int]]:
    """Return the threads that access each byte, by offset."""
    users: dict[int, set[int]] = {}
    for thread in access.threads:
        for byte in range(access.offsets[thread], access.offsets[thread] + access.size_bytes):
            users.setdefault(byte, set()).add(thread)
    return users


def _belong_together(analysis: FunctionAnalysis, first: int, second: int) -> bool:
    """Whether the control flow shows that one of two accesses never runs without the other."""
    flow = analysis.flow
    a, b = flow.block_of[first], flow.block_of[second]
    return flow.dominates(a, b) or flow.post_dominates(b, a) or flow.dominates(b, a) or flow.post_dominates(a, b)


def _is_always_run(analysis: FunctionAnalysis, first: SharedAccess, second: SharedAccess) -> bool:
    """Whether two accesses both run in every launch, in some threads of a block."""
    return all(map(analysis.depends_on_threads_alone, (first.at, second.at)))


def _within(access: SharedAccess, threads: tuple[int, ...]) -> SharedAccess:
    return replace(access, threads=tuple(sorted({*access.threads} & {*threads})))


def _reached_unordered(analysis: FunctionAnalysis, start: int, *, in_warps: bool) -> frozenset[int]:
    """Return the instructions that a thread can reach before any instruction that orders memory accesses."""
    flow = analysis.flow
    found: set[int] = set()
    done: set[int] = set()
    work = [(flow.block_of[start], start + 1)]
    while work:
        number, at = work.pop()
        while at < flow.blocks[number].end:
            one = analysis.instructions[at]
            if may_order(one) or (in_warps and is_warp_sync(one)):
                break
            found.add(at)
            at += 1
        else:
            for successor in flow.blocks[number].successors:
                if successor not in done:
                    done.add(successor)
                    work.append((successor, flow.blocks[successor].start))
    return frozenset(found)


MISSING_BARRIER = Lint(
    "missing-barrier", LintSeverity.CORRECTNESS,
    "A thread uses bytes of shared memory that a thread of a different warp writes, or the reverse, and a path has "
    "no barrier between.",
    "put bar.sync (__syncthreads) between the two accesses", _between_warps,
)  # fmt: skip
MISSING_WARP_SYNC = Lint(
    "missing-warp-sync", LintSeverity.LIKELY,
    "A thread uses bytes of shared memory that another thread of its warp writes, without a synchronisation of the "
    "warp between. Threads of a warp do not always run in step.",
    "put bar.warp.sync (__syncwarp) between the two accesses", _in_warps,
)  # fmt: skip
