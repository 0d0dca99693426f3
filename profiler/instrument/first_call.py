"""Loads what instruments before the first call of a module of torch, and not where torch is only imported.

What has to be followed before that call is waited for, too: `generate` of transformers, engines, `Module.compile`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from cbtop.profiler.instrument.awaited import once_imported
from cbtop.profiler.instrument.call_attribute import ATTRIBUTE, is_supported, keep_dynamo_out

EARLIER = ("transformers.generation.utils", "vllm", "sglang")


def await_first_call(begin: Callable[[], None]) -> None:
    """Call `begin` once, before the first call of a module; torch has been imported."""
    torch: Any = sys.modules["torch"]
    kind = torch.nn.Module
    claims = [begin]  # popped by the first of several threads; the others do not wait for it
    compile_it = kind.compile

    def first_call(module: Any, /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or not claims:
            return module._call_impl(*args, **kwargs)
        begin_once()
        return module(*args, **kwargs)

    @functools.wraps(compile_it)
    def first_compile(self: Any, /, *args: Any, **kwargs: Any) -> None:
        begin_once()
        compile_now = kind.compile
        (compile_it if compile_now is first_compile else compile_now)(self, *args, **kwargs)

    def begin_once() -> None:
        is_ours = False
        try:
            try:
                claims.pop()
            except IndexError:
                return
            is_ours = True
            setattr(kind, ATTRIBUTE, None)
            kind.compile = compile_it
            begin()
        except BaseException:  # of the host's signal handler, wherever it came in: the next call begins it
            if is_ours:
                claims.append(begin)
                setattr(kind, ATTRIBUTE, first_call)
                kind.compile = first_compile
            raise

    if not is_supported():
        begin()  # which says so
        return
    keep_dynamo_out()
    setattr(kind, ATTRIBUTE, first_call)
    kind.compile = first_compile
    for name in EARLIER:
        once_imported(name, begin_once)
