"""`cbtop calibrate`: measure this machine's roofs (speed limits of the hardware) and crossovers, and store them.

A crossover is the size of work at which another method becomes the faster one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import datetime

from cbtop import units
from cbtop.commands.shared.crossovers import crossover_lines, measured_crossovers
from cbtop.commands.shared.engine import require_engine
from cbtop.commands.shared.numbers import count
from cbtop.commands.shared.progress import ProgressLine
from cbtop.commands.shared.short_measurement import measure_short
from cbtop.errors import NoDataError, UsageError
from cbtop.protocol.crossovers import MachineCrossovers, crossovers_file, keep_crossovers, known_crossovers
from cbtop.protocol.roofs import (
    DeviceRoofs,
    cpu_name,
    driver_version,
    keep_roofs,
    known_roofs,
    roofs_file,
    try_to_keep,
)
from cbtop.text import roof_text, time_text
from cbtop.version import __version__
from cbtop.viewmodels.roofline import CeilingRow, ceiling_rows

DESCRIPTION = (
    "Measure how fast this machine reads memory and computes: its processor with one thread, a thread a core and all "
    "threads, and each NVIDIA GPU. Takes seconds for each; the machine should do nothing else. What is measured is "
    "kept, and is the roof over the models that `cbtop run` and cbtop.attach show. Measured, too, are the crossovers "
    "that `cbtop demo`, bench, tune, verify, map and overhead go by here: from how much work on threads are faster "
    "than one, bfloat16 than int8 where there is AMX, weights as they lie in the file than interleaved ones, and, "
    "for --backend auto, the first GPU than the processor."
)
EPILOG = """\
A GPU is measured through torch or CuPy, whichever is installed; with nvidia-ml-py its power limit is noted, and
whether others used it. Roofs of a processor apply to programs with as many threads, also to those that run already.
Roofs of a GPU apply to programs that start later, on the same GPU with the same driver. Measured again, they are
replaced, except by a worse measurement under load.

A crossover is the first size of work from which on the other way is faster beyond the spread of 51 rounds, there and
at every larger size. Where that is not clear, or there is one thread, the default stays, and is called static. Those
of another machine, another number of processors or another version of cbtop are not used.
"""

SCHEMA = "cbtop.calibrate/1"
INSTALL = "install torch for CUDA, or CuPy (cupy-cuda12x, cupy-cuda13x)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--show", action="store_true", help="print what is known, and measure nothing")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--threads", type=count, metavar="N", help="the roofs of the processor with N threads, and nothing else"
    )
    parser.add_argument(
        "--short", action="store_true",
        help="measure only the processor's memory and float32 products, in 2 s and without the engine, as "
        "`cbtop run` does by itself; if other programs are at work, nothing is kept",
    )  # fmt: skip
    parser.add_argument(
        "--weights", type=count, metavar="BYTES",
        help="measure reading as many bytes as a model's weights, too: those of a small one may stay in the cache",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    if options.show:
        return _show(options.json)
    if options.short:
        return _short(options)
    require_engine("cbtop calibrate")
    # If results cannot be stored, raise the error before seconds of measurement.
    try_to_keep()
    line = ProgressLine(sys.stderr)
    measured: list[DeviceRoofs] = []
    absent: list[str] = []
    crossovers = None
    for found, missing in _measured(options.threads, options.weights, line):
        line.clear()
        absent += missing
        if isinstance(found, MachineCrossovers):
            crossovers = found
        elif found is not None:
            measured.append(found)
        if not options.json:
            sys.stdout.write(_text(found, missing))
            sys.stdout.flush()  # Write each result immediately, because the next measurement takes seconds.
    kept = keep_roofs(measured)
    files = str(roofs_file())
    if crossovers is not None:
        keep_crossovers(crossovers)
        files += f" and {crossovers_file().name}"
    if options.json:
        sys.stdout.write(_json(measured, [crossovers] if crossovers else [], absent))
    else:
        sys.stdout.write("".join(map(_older, kept, measured)))
        sys.stdout.write(f"kept in {files}\n")
    return 0


def _short(options: argparse.Namespace) -> int:
    if options.weights is not None:
        raise UsageError("--short measures no weights; leave out --weights")
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = options.threads or processors
    if threads > processors:
        raise UsageError(f"{threads} threads: this process may use {processors} processors")
    try_to_keep()
    found = measure_short(threads)
    sys.stdout.write(_json([found], []) if options.json else f"{_text(found)}kept in {roofs_file()}\n")
    return 0


def _older(kept: DeviceRoofs, measured: DeviceRoofs) -> str:
    """Return a line about older roofs that stay, because the new measurement was more disturbed. "" if all are
    replaced.
    """
    names = ", ".join(old.name for old, new in zip(kept.ceilings, measured.ceilings, strict=True) if old is not new)
    return f"{measured.title}: the older {names} stays: it was disturbed less\n" if names else ""


def _show(as_json: bool) -> int:
    roofs, crossovers = known_roofs(), known_crossovers()
    if not roofs and not crossovers:
        raise NoDataError("no roofs are known: run `cbtop calibrate`")
    known: list[DeviceRoofs | MachineCrossovers] = [*roofs, *crossovers]
    sys.stdout.write(_json(roofs, crossovers) if as_json else "".join(map(_text, known)))
    return 0


def _measured(
    threads: int | None, weights_bytes: int | None, line: ProgressLine
) -> Iterator[tuple[DeviceRoofs | MachineCrossovers | None, Sequence[str]]]:
    """Yield the measured values of each device, with the reasons of failed measurements."""
    # Imported here, because Numba, torch and CuPy load slowly.
    from cbtop.compute.backends import available_threads, cpu_backend, physical_cores
    from cbtop.compute.errors import ComputeError
    from cbtop.compute.gpu_ceilings import measure_gpus

    line.show("compiling kernels")
    try:
        cpu_backend(threads or available_threads())
    except ComputeError as error:
        raise UsageError(str(error)) from error
    # Measure before torch is loaded, because the threads that torch starts would disturb the measurement.
    if not threads:
        yield _crossovers(line), ()
    for number in [threads] if threads else sorted({1, physical_cores(), available_threads()}):
        yield _processor(number, weights_bytes, line)
    if threads:
        return
    line.show("looking for GPUs")
    try:
        yield from measure_gpus(line.show)
    except ComputeError as error:
        yield None, [f"NVIDIA GPU n/a: {error}" + (f"; {INSTALL}" if driver_version() else "")]


def _processor(threads: int, weights_bytes: int | None, line: ProgressLine) -> tuple[DeviceRoofs, Sequence[str]]:
    from cbtop.compute.ceilings import measure_ceilings, measure_product
    from cbtop.compute.errors import ComputeError
    from cbtop.compute.jit.cpu import TIER

    missing = []
    roofs = DeviceRoofs(cpu_name(), (), threads, weights_bytes=weights_bytes)
    line.show(f"{roofs.title}: dram_read, caches, fma_float32, dot_int8")
    ceilings = measure_ceilings(threads, weights_bytes)
    if TIER == "generic":
        missing.append("dot_int8 n/a: neither AVX2 nor AVX-512 VNNI, products take floats")
    line.show(f"{roofs.title}: matmul_bfloat16")
    try:
        ceilings.append(measure_product(threads))
    except ComputeError as error:
        missing.append(f"matmul_bfloat16 n/a: {error}")
    return replace(roofs, ceilings=tuple(ceilings)), missing


def _crossovers(line: ProgressLine) -> MachineCrossovers:
    from cbtop.compute.backends import available_threads
    from cbtop.compute.crossovers import measure_crossovers
    from cbtop.compute.errors import ComputeError
    from cbtop.compute.gpu_crossovers import measure_gpu_crossovers
    from cbtop.compute.settings import with_crossovers

    threads, now = available_threads(), datetime.now().astimezone().isoformat(timespec="seconds")

    def show(name: str) -> None:
        line.show(f"measuring crossovers: {name}")

    found = measure_crossovers(threads, show)
    # While the crossovers to the GPU are measured, use the processor's new ones, because the GPU is compared with the
    # processor. Without a GPU, a later step raises the error.
    with suppress(ComputeError), with_crossovers(measured_crossovers(found)):
        found += measure_gpu_crossovers(threads, show)
    return MachineCrossovers(cpu_name(), threads, __version__, now, found)


def _json(roofs: Iterable[DeviceRoofs], crossovers: Iterable[MachineCrossovers], missing: Sequence[str] = ()) -> str:
    document = {
        "schema": SCHEMA,
        "roofs": [asdict(one) for one in roofs],
        "crossovers": [asdict(one) for one in crossovers],
        "missing": list(missing),
    }
    return json.dumps(document, allow_nan=False) + "\n"


def _text(roofs: DeviceRoofs | MachineCrossovers | None, missing: Sequence[str] = ()) -> str:
    lines = []
    if isinstance(roofs, MachineCrossovers):
        lines += crossover_lines(roofs)
    elif roofs is not None:
        rows = ceiling_rows(roofs.ceilings, time.time())
        age = time_text.age(max((row.age_s for row in rows if row.age_s is not None), default=None))
        lines.append(f"{roofs.title} ({roofs.measured_on or units.NOT_MEASURED}, age {age})")
        lines += map(_row, rows)
        lines += [f"  ⚠ {doubt}" for doubt in roof_text.ceiling_doubts(rows)]
        if any(one.name == "fma_float32" and not one.dtype for one in roofs.ceilings):
            lines.append("  dot_int8 n/a: measured by an older cbtop; run `cbtop calibrate`")
    lines += [f"  {one}" if roofs is not None else one for one in missing]
    return "".join(f"{one}\n" for one in lines)


def _row(ceiling: CeilingRow) -> str:
    value = f"{units.number(ceiling.value):>10} {ceiling.unit:<8}"
    return f"  {ceiling.name:<18}{value}  {roof_text.ceiling_rounds(ceiling)}"
