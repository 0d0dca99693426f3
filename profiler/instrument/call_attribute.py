"""torch's private attribute by which calls of modules are timed: whether this torch honours it, and who is told.

Each process that imports torch under `cbtop run` loads this, whether it calls a model or not: it imports little.
"""

from __future__ import annotations

import functools
import sys
from types import CodeType, FunctionType
from typing import Any

import torch

ATTRIBUTE = "_compiled_call_impl"


@functools.cache
def is_supported() -> bool:
    """Whether this torch calls what the attribute is, keeps it out of pickles and copies, and Dynamo can be told."""
    called: list[None] = []
    probe: Any = torch.nn.Identity()
    probe.__dict__[ATTRIBUTE] = lambda: called.append(None)
    probe()
    is_left_out = ATTRIBUTE not in probe.__getstate__()
    dynamo = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    can_be_told = all([hasattr(dynamo, name) for name in ("set_code_exec_strategy", "_debug_get_cache_entry_list")])
    return getattr(torch.nn.Module, ATTRIBUTE, True) is None and bool(called) and is_left_out and can_be_told


def keep_dynamo_out() -> None:
    """Let Dynamo compile no frame of ours: it looks on at what they call, as it does with those of torch.nn.

    Where it comes to a function of ours while it compiles one of the host's, it goes into it all the same.
    """
    frames = torch._C._dynamo.eval_frame
    actions = frames._FrameAction
    as_it_is = frames._FrameExecStrategy(actions.SKIP, actions.DEFAULT)  # the second: of what it calls
    codes = [
        member.__code__
        for name, module in list(sys.modules.items())
        if name.startswith(("cbtop.profiler", "cbtop.protocol"))
        for holder in (module, *(one for one in vars(module).values() if isinstance(one, type)))
        for member in vars(holder).values()
        if isinstance(member, FunctionType)
    ]
    while codes:
        code = codes.pop()
        frames.set_code_exec_strategy(code, as_it_is)
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]


def keep_jit_out() -> None:
    """Let torch.jit script a module as if it had no attribute of ours, whose annotation it cannot read.

    It stays so: a module that was called keeps an attribute that is None, whatever is attached.
    """
    ignored: list[str] = getattr(sys.modules.get("torch.jit._recursive"), "ignored_attributes", [])
    if ATTRIBUTE not in ignored:
        ignored.append(ATTRIBUTE)
