"""Read and reset what Dynamo has compiled.

Each function here imports Dynamo by itself, because the import takes a second.
"""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed: make torch")


def forget_compiled() -> None:
    """Drop all compiled code, its backends and its counts, as in a process that has compiled nothing."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    forget_backends()
    counters.clear()


def forget_backends() -> None:
    """Drop the list of backends that were used, so that cbtop counts operations again. Compiled code stays."""
    from torch._dynamo.eval_frame import cached_backends

    cached_backends.clear()


def graphs_and_breaks() -> tuple[int, int]:
    """Return the numbers of graphs and graph breaks since the last `forget_compiled`."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def cache_hits() -> int:
    """Return how many compiled graphs inductor has read from its cache since the last `forget_compiled`."""
    from torch._dynamo.utils import counters

    return counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]


def callbacks() -> tuple[list[Any], list[Any]]:
    """Return the functions that Dynamo calls when it begins to compile, and when it has ended."""
    from torch._dynamo.callback import callback_handler

    return callback_handler.start_callbacks, callback_handler.end_callbacks
