"""cbtop: measure the bricks (named operations) of an inference process, and watch them live.

No slow module is imported here. The public names are imported on first use (PEP 562).

The word PYTEST_DONT_REWRITE tells pytest not to rewrite the asserts of this package. Without the word, pytest warns
if the package was imported before pytest could rewrite it.
"""

from __future__ import annotations

from cbtop.version import __version__

# Only type checkers treat `TYPE_CHECKING` as true. Importing the real constant from `typing` takes longer than
# starting Python.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from cbtop.compute.ceilings import measure_ceilings
    from cbtop.compute.ptx_registry import PtxRegistry
    from cbtop.profiler.analysis.budget import ByteBudget, TokenBudget
    from cbtop.profiler.analysis.divergence import Fingerprints
    from cbtop.profiler.analysis.graph.execution_graph import ExecutionGraph
    from cbtop.profiler.analysis.graph.nodes import Function, Layer
    from cbtop.profiler.checks import Bounded, CheckOutcome, Equivalent, Finite
    from cbtop.profiler.definitions import BrickDefinition, KernelDefinition
    from cbtop.profiler.guard_setting import NotFiniteError
    from cbtop.profiler.instrument import attach
    from cbtop.profiler.instrument.libraries import instrument, step
    from cbtop.profiler.profiler import BrickProfiler
    from cbtop.profiler.traces.base import TracerConfig
    from cbtop.profiler.traces.tracer import ModelTracer
    from cbtop.protocol.attributes import Work
    from cbtop.protocol.messages import Ceiling, Manifest
    from cbtop.protocol.vocabulary import (
        BrickCategory,
        BrickId,
        NodeKind,
        Provenance,
        SyncMode,
        TransferDirection,
    )
    from cbtop.reading.compared import diff
    from cbtop.reading.live import live
    from cbtop.reading.recording import Recording, read
    from cbtop.tuning.tuner import BrickTuner

_HOMES = {
    "Ceiling": "cbtop.protocol.messages",
    "Manifest": "cbtop.protocol.messages",
    "measure_ceilings": "cbtop.compute.ceilings",
    "attach": "cbtop.profiler.instrument",
    "diff": "cbtop.reading.compared",
    "instrument": "cbtop.profiler.instrument.libraries",
    "step": "cbtop.profiler.instrument.libraries",
    "live": "cbtop.reading.live",
    "load_ipython_extension": "cbtop.notebook",
    "unload_ipython_extension": "cbtop.notebook",
    "read": "cbtop.reading.recording",
    "BrickProfiler": "cbtop.profiler.profiler",
    "BrickTuner": "cbtop.tuning.tuner",
    "BrickDefinition": "cbtop.profiler.definitions",
    "Bounded": "cbtop.profiler.checks",
    "CheckOutcome": "cbtop.profiler.checks",
    "Equivalent": "cbtop.profiler.checks",
    "Finite": "cbtop.profiler.checks",
    "KernelDefinition": "cbtop.profiler.definitions",
    "Work": "cbtop.protocol.attributes",
    "ByteBudget": "cbtop.profiler.analysis.budget",
    "ExecutionGraph": "cbtop.profiler.analysis.graph.execution_graph",
    "Fingerprints": "cbtop.profiler.analysis.divergence",
    "Function": "cbtop.profiler.analysis.graph.nodes",
    "Layer": "cbtop.profiler.analysis.graph.nodes",
    "NotFiniteError": "cbtop.profiler.guard_setting",
    "ModelTracer": "cbtop.profiler.traces.tracer",
    "BrickCategory": "cbtop.protocol.vocabulary",
    "BrickId": "cbtop.protocol.vocabulary",
    "NodeKind": "cbtop.protocol.vocabulary",
    "Provenance": "cbtop.protocol.vocabulary",
    "PtxRegistry": "cbtop.compute.ptx_registry",
    "Recording": "cbtop.reading.recording",
    "SyncMode": "cbtop.protocol.vocabulary",
    "TokenBudget": "cbtop.profiler.analysis.budget",
    "TracerConfig": "cbtop.profiler.traces.base",
    "TransferDirection": "cbtop.protocol.vocabulary",
}

__all__ = [
    "Bounded",
    "BrickCategory",
    "BrickDefinition",
    "BrickId",
    "BrickProfiler",
    "BrickTuner",
    "ByteBudget",
    "Ceiling",
    "CheckOutcome",
    "Equivalent",
    "ExecutionGraph",
    "Fingerprints",
    "Finite",
    "Function",
    "KernelDefinition",
    "Layer",
    "Manifest",
    "ModelTracer",
    "NodeKind",
    "NotFiniteError",
    "Provenance",
    "PtxRegistry",
    "Recording",
    "SyncMode",
    "TokenBudget",
    "TracerConfig",
    "TransferDirection",
    "Work",
    "__version__",
    "attach",
    "diff",
    "instrument",
    "live",
    "measure_ceilings",
    "read",
    "step",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'cbtop' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
