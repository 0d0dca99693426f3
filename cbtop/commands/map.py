"""`cbtop map`: list the kernels of a model file and where they are defined, or those of a running process and what
made them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from cbtop.commands.shared.choose import add_source_argument
from cbtop.commands.shared.chosen_process import chosen_process
from cbtop.commands.shared.crossovers import go_by_kept_crossovers
from cbtop.commands.shared.engine import require_engine
from cbtop.commands.shared.progress import ProgressLine
from cbtop.compute.errors import ComputeError
from cbtop.compute.ptx_registry import PtxRegistry
from cbtop.compute.settings import BACKENDS
from cbtop.errors import NoDataError, UsageError
from cbtop.feeds.replay import ReplayFeed
from cbtop.profiler.analysis.graph.nodes import printable
from cbtop.protocol.errors import DecodeError, RecordingError, VersionError
from cbtop.protocol.kernel_messages import KernelBurst
from cbtop.protocol.messages import Node
from cbtop.reports.tables import Table, table
from cbtop.text.kernel_text import per_step
from cbtop.units import NOT_MEASURED
from cbtop.viewmodels.running_kernels import RunningKernel, running_kernels

if TYPE_CHECKING:
    from cbtop.compute.decoder.plan import Planned

DESCRIPTION = (
    "Print layer, brick, kernel and where that is written, with how often a pass launches it, by the plan of the "
    "decoder: nothing runs, and no GPU is needed. With --running, print the kernels that a process was seen to "
    "launch: who made each, who loaded it, and the brick that launches it."
)
EPILOG = """\
examples:
  cbtop map qwen2.5-1.5b-q4_k_m.gguf                      a token's pass on the CPU
  cbtop map qwen2.5-1.5b-q4_k_m.gguf --backend cuda       on a GPU, with grids and blocks
  cbtop map qwen2.5-1.5b-q4_k_m.gguf --prefill            a prompt's
  cbtop map qwen2.5-1.5b-q4_k_m.gguf --kernel rms_norm    where that kernel runs
  cbtop map qwen2.5-1.5b-q4_k_m.gguf --reverse attention  kernel -> bricks, of attention's kernels
  cbtop map --running                                     of a process that runs here, with makers
  cbtop map --running run.cbtop --reverse gemm            of a recording

Layers that launch the same are one line. A NAME may be part of a kernel's name, or of the name of its file.
With --running, kernels are known after `cbtop kernels`, or if an engine reports them. Without evidence of its maker
or loader, a kernel has n/a. A PTX that was registered on this machine has its name.

exit codes: 0 printed, 2 usage, 3 no such kernel or process
"""
SCHEMA = "cbtop.map/1"
RUNNING_SCHEMA = "cbtop.map-running/1"
PREFILL_TOKENS = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, nargs="?", metavar="MODEL.gguf", help="the model")
    parser.add_argument(
        "--running", nargs="?", const="", metavar="RUN.cbtop", help="kernels of a process, or of one in a recording"
    )
    add_source_argument(parser)
    parser.add_argument("--backend", choices=BACKENDS, default="cpu", help="what computes (default: %(default)s)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--kernel", metavar="NAME", help="only kernels with this in their name or their file's")
    which.add_argument("--reverse", metavar="NAME", help="the same kernels first, then the bricks that launch them")
    parser.add_argument("--prefill", action="store_true", help=f"a pass of {PREFILL_TOKENS} tokens, not of one")
    parser.add_argument("--json", action="store_true", help="print JSON, each layer by itself")


def run(options: argparse.Namespace) -> int:
    if options.running is not None:
        return _map_running(options)
    if options.model is None or options.source:
        raise UsageError("pass a MODEL.gguf, or --running for a process; --source chooses among processes only")
    require_engine("cbtop map")
    from cbtop.compute.decoder.plan import MULTIPROCESSORS, planned  # imported here, because it loads numpy and Numba

    tokens = PREFILL_TOKENS if options.prefill else 1
    if options.backend == "cpu":
        go_by_kept_crossovers(ProgressLine(sys.stderr))
    try:
        launched = planned(options.model, options.backend, tokens)
    except ComputeError as error:
        raise UsageError(str(error)) from error
    name = options.kernel or options.reverse
    # Search the names of files, too. For example, only the file name of a GPU kernel called `few_64` shows that the
    # kernel computes attention.
    chosen = [one for one in launched if name is None or name in one.kernel or name in Path(one.file).stem]
    if not chosen:
        kernels = ", ".join(sorted({one.kernel for one in launched}))
        raise NoDataError(f"no kernel has {name!r} in its name or in that of its file; there are {kernels}")
    if options.json:
        document: dict[str, object] = {"schema": SCHEMA, "backend": options.backend, "tokens": tokens}
        if options.backend == "cuda":
            document["multiprocessors"] = MULTIPROCESSORS
        launches = [asdict(one) for one in chosen]
        sys.stdout.write(json.dumps(document | {"launches": launches}, indent=2) + "\n")
        return 0
    total = sum(one.launches for one in chosen)
    passes = f"a pass of {tokens} token{'s' * (tokens > 1)}"
    said = f"{total:,} launches {passes} on {options.backend}, by the decoder's plan"
    if options.backend == "cuda":
        said += f"; grids are those of an H100's {MULTIPROCESSORS} multiprocessors"
    sys.stdout.write(f"{_by_kernel(chosen) if options.reverse else _by_layer(chosen)}\n\n{said}\n")
    return 0


def _map_running(options: argparse.Namespace) -> int:
    """Print the kernels of a running process, or of a process in a recording."""
    if options.model is not None or options.backend != "cpu" or options.prefill:
        raise UsageError("--running takes no MODEL.gguf, no --backend and no --prefill")
    key, kernels = _in_recording(options) if options.running else _in_process(options)
    if not kernels:
        raise NoDataError(f"no kernel of {key} is known; `cbtop kernels` records those of its next steps")
    name = options.kernel or options.reverse
    chosen = [one for one in kernels if name is None or name in one.kernel or name in one.maker.source]
    if not chosen:
        there = ", ".join(sorted({one.kernel for one in kernels}))
        raise NoDataError(f"no kernel has {name!r} in its name or source; there are {there}")
    if options.json:
        document = {"schema": RUNNING_SCHEMA, "source": key, "kernels": [asdict(one) for one in chosen]}
        sys.stdout.write(json.dumps(document, allow_nan=False) + "\n")
        return 0
    places: dict[tuple[str, ...], list[RunningKernel]] = {}
    for one in chosen:
        launcher = (one.kernel, one.brick) if options.reverse else (one.brick, one.kernel)
        made = str(one.maker) or NOT_MEASURED, one.maker.source, one.maker.loader or NOT_MEASURED
        places.setdefault((*launcher, one.phase, *made), []).append(one)
    first, second = ("kernel", "brick") if options.reverse else ("brick", "kernel")
    rows: Table = [(first, second, "layer", "phase", "made by", "source", "loaded by", "launches")]
    for place, same in places.items():
        launches = [one.launches for one in same if one.launches is not None]
        layers = _layers([int(one.layer) if one.layer and one.layer.isdecimal() else None for one in same])
        rows.append((*place[:2], layers, *place[2:], per_step(sum(launches)) if launches else NOT_MEASURED))
    if options.reverse:
        rows[1:] = sorted(rows[1:])
    sys.stdout.write(
        f"{table(rows, left=7)}\n\n{len(chosen)} places of {key} launch a kernel; launches a step are those of the "
        "last burst\n"
    )
    return 0


def _in_process(options: argparse.Namespace) -> tuple[str, list[RunningKernel]]:
    with closing(chosen_process(options.source)) as source:
        nodes = [one for one in source.catalog if isinstance(one, Node)]
        bursts = [one for one in source.catalog if isinstance(one, KernelBurst)]
        return source.key, _with_names(running_kernels(nodes, bursts[-1] if bursts else None))


def _in_recording(options: argparse.Namespace) -> tuple[str, list[RunningKernel]]:
    path = Path(options.running)
    try:
        with ReplayFeed(path, selected=options.source) as feed:
            feed.seek(feed.duration_s)
            records = {key: seen.record for key, seen in feed.seen().items()}
    except (RecordingError, VersionError, DecodeError) as error:
        raise UsageError(str(error)) from error
    found = {key: running_kernels(one.nodes.nodes, one.burst) for key, one in records.items()}
    known = {key: kernels for key, kernels in found.items() if kernels}
    if len(known) > 1:
        raise UsageError(f"{path} has kernels of several processes: choose one by --source ({', '.join(known)})")
    key, kernels = next(iter(known.items()), (str(path), []))
    return key, _with_names(kernels)


def _with_names(kernels: list[RunningKernel]) -> list[RunningKernel]:
    """Add the name and path of each PTX that was registered on this machine."""
    registry, named = PtxRegistry(), dict[int, str]()
    for ptx_hash in {one.ptx_hash for one in kernels if one.ptx_hash is not None}:
        words = registry.lookup_name(ptx_hash), registry.lookup_path(ptx_hash)
        named[ptx_hash] = printable(" ".join(str(word) for word in words if word is not None))
    return [
        replace(one, maker=replace(one.maker, source=named[one.ptx_hash]))
        if one.ptx_hash is not None and named[one.ptx_hash] and not one.maker.source
        else one
        for one in kernels
    ]


def _by_layer(launched: Sequence[Planned]) -> str:
    """Return a table of kernel launches in execution order. Layers with the same launches share one block."""
    blocks: dict[tuple[Planned, ...], list[int | None]] = {}
    for layer, same in groupby(launched, key=lambda one: one.layer):
        blocks.setdefault(tuple(replace(one, layer=None) for one in same), []).append(layer)
    rows: Table = [("layer", "brick", "kernel", "written in", "launches", "grid", "block")]
    for block, layers in blocks.items():
        for number, (brick, same) in enumerate(groupby(block, key=lambda one: one.brick)):
            for at, one in enumerate(same):
                where = _layers(layers) if number == at == 0 else ""
                rows.append((where, brick if at == 0 else "", *_kernel(one)))
    return table(_without_empty(rows), left=4)


def _by_kernel(launched: Sequence[Planned]) -> str:
    """Return a table of all kernel launches, with the bricks and layers that use each launch."""
    users: dict[Planned, dict[str, list[int | None]]] = {}
    for one in launched:
        users.setdefault(replace(one, layer=None, brick=""), {}).setdefault(one.brick, []).append(one.layer)
    rows: Table = [("kernel", "brick", "layer", "written in", "launches", "grid", "block")]
    for kernel, bricks in users.items():
        for at, (brick, layers) in enumerate(bricks.items()):
            name, *how = _kernel(kernel)
            rows.append((name if at == 0 else "", brick, _layers(layers), *how))
    return table(_without_empty(rows), left=4)


def _kernel(one: Planned) -> tuple[str, ...]:
    return one.kernel, f"{one.file}:{one.line}", str(one.launches), _sizes(one.grid), _sizes(one.block)


def _sizes(sizes: Sequence[int] | None) -> str:
    """Return a launch size such as `1184x2`, without trailing ones."""
    if sizes is None:
        return ""
    used = max([at for at, size in enumerate(sizes) if size > 1], default=0) + 1
    return "x".join(str(size) for size in sizes[:used])


def _layers(layers: Sequence[int | None]) -> str:
    """Return layer numbers as text, such as `0-3, 5`. The text `-` means launches outside of all layers."""
    runs: list[list[int]] = []
    for number in sorted({layer for layer in layers if layer is not None}):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return ", ".join(["-"] * (None in layers) + parts)


def _without_empty(rows: Table) -> Table:
    """Remove columns without any value. For example, kernels on a CPU have no grid and no block."""
    kept = [at for at in range(len(rows[0])) if any(row[at] for row in rows[1:])]
    return [tuple(row[at] for at in kept) for row in rows]
