"""Loads the instrumentation before the first call of a torch module, not when torch is imported.

Some things must be followed from their beginning. So it also loads when the host imports an engine or `generate` of
transformers, or calls `Module.compile`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cbtop.profiler.instrument.awaited import once_imported
from cbtop.profiler.instrument.call_attribute import (
    end,
    is_supported,
    meeting,
    of_host,
    replacement,
    stand_by,
)
from cbtop.profiler.instrument.dynamo import is_compiling_here, keep_dynamo_out, without_dynamo

EARLIER = ("transformers.generation.utils", "vllm", "sglang")


def await_first_call(begin: Callable[[], None]) -> None:
    """Call `begin` once, before the first call of a module. Requires that torch has been imported."""
    claims = [begin]  # the first thread takes `begin`, so later threads find an empty list

    def first_call(module: Any) -> Any:
        if is_compiling_here():
            return of_host(module)
        begin_once()
        return of_host(module) if meeting.first_call is first_call else replacement(module)

    def begin_once() -> None:
        is_ours = False
        try:
            try:
                claims.pop()
            except IndexError:
                return
            is_ours = True
            end()
            without_dynamo(begin)
        except BaseException:  # a signal handler of the host raised this error, so the next call tries again
            if is_ours:
                claims.append(begin)
                wait()
            raise

    def was_set(module: Any) -> None:
        begin_once()
        if meeting.was_set is not was_set:
            meeting.was_set(module)

    def wait() -> None:
        meeting.first_call, meeting.was_set = first_call, was_set
        stand_by()

    if not is_supported():
        begin()  # `begin` logs why this version of torch is not supported
        return
    keep_dynamo_out()
    wait()
    for name in EARLIER:
        once_imported(name, begin_once)
