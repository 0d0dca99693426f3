"""`cbtop calibrate`: measure this machine's roofs, and keep them for the roofline of torch programs."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from cbtop import formatting as fmt
from cbtop.commands.shared.numbers import count
from cbtop.commands.shared.progress import ProgressLine
from cbtop.errors import NoDataError, UsageError
from cbtop.protocol.roofs import (
    DeviceRoofs,
    cpu_name,
    driver_version,
    keep_roofs,
    known_roofs,
    roofs_file,
    try_to_keep,
)
from cbtop.viewmodels.model import CeilingRow
from cbtop.viewmodels.roofline import ceiling_rows

DESCRIPTION = (
    "Measure how fast this machine reads memory and computes: its processor with one thread, a thread a core and all "
    "threads, and each NVIDIA GPU. Takes seconds for each; the machine should do nothing else. What is measured is "
    "kept, and is the roof over the models that `cbtop run` and cbtop.attach show."
)
EPILOG = """\
A GPU is measured through torch or CuPy, whichever is installed; with nvidia-ml-py its power limit is noted, and
whether others used it. Roofs are shown to programs that start later, on the same processor with as many threads, or
on the same GPU with the same driver. Measured again, they are replaced.
"""

INSTALL = "install torch for CUDA, or CuPy (cupy-cuda12x, cupy-cuda13x)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--show", action="store_true", help="print what is known, and measure nothing")
    parser.add_argument("--threads", type=count, metavar="N", help="the processor with N threads alone")
    parser.add_argument(
        "--weights", type=count, metavar="BYTES",
        help="measure reading as many bytes as a model's weights, too: those of a small one may stay in the cache",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    if options.show:
        return _show()
    try_to_keep()  # before seconds are measured for nothing
    line = ProgressLine(sys.stderr)
    measured = []
    for roofs, missing in _measured(options.threads, options.weights, line):
        line.clear()
        if roofs is not None:
            measured.append(roofs)
        sys.stdout.write(_text(roofs, missing))
        sys.stdout.flush()  # the next takes seconds
    keep_roofs(measured)
    sys.stdout.write(f"kept in {roofs_file()}\n")
    return 0


def _show() -> int:
    known = known_roofs()
    if not known:
        raise NoDataError("no roofs are known: run `cbtop calibrate`")
    sys.stdout.write("".join(_text(roofs) for roofs in known))
    return 0


def _measured(
    threads: int | None, weights_bytes: int | None, line: ProgressLine
) -> Iterator[tuple[DeviceRoofs | None, Sequence[str]]]:
    """What is measured of each device in turn, and in words what could not be."""
    # Numba, torch and CuPy take their time to load.
    from cbtop.compute.backends import available_threads, cpu_backend, physical_cores
    from cbtop.compute.errors import ComputeError
    from cbtop.compute.gpu_ceilings import measure_gpus

    line.show("compiling kernels")
    try:
        cpu_backend(threads or available_threads())
    except ComputeError as error:
        raise UsageError(str(error)) from error
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

    missing = []
    roofs = DeviceRoofs(cpu_name(), (), threads, weights_bytes=weights_bytes)
    line.show(f"{roofs.title}: dram_read, caches, fma_float32")
    ceilings = measure_ceilings(threads, weights_bytes)
    line.show(f"{roofs.title}: matmul_bfloat16")
    try:
        ceilings.append(measure_product(threads))
    except ComputeError as error:
        missing.append(f"matmul_bfloat16 n/a: {error}")
    return replace(roofs, ceilings=tuple(ceilings)), missing


def _text(roofs: DeviceRoofs | None, missing: Sequence[str] = ()) -> str:
    lines = []
    if roofs is not None:
        rows = ceiling_rows(roofs.ceilings, time.time())
        age = fmt.age(max((row.age_s for row in rows if row.age_s is not None), default=None))
        lines.append(f"{roofs.title} ({roofs.measured_on or fmt.NOT_MEASURED}, age {age})")
        lines += map(_row, rows)
        lines += [f"  ⚠ {doubt}" for doubt in fmt.ceiling_doubts(rows)]
    lines += [f"  {one}" if roofs is not None else one for one in missing]
    return "".join(f"{one}\n" for one in lines)


def _row(ceiling: CeilingRow) -> str:
    value = f"{fmt.number(ceiling.value):>10} {ceiling.unit:<8}"
    return f"  {ceiling.name:<18}{value}  {fmt.ceiling_rounds(ceiling)}"
