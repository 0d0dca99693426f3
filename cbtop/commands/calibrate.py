"""`cbtop calibrate`: measure this machine's roofs, and keep them for the roofline of torch programs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from cbtop import formatting as fmt
from cbtop.commands.shared.numbers import count
from cbtop.commands.shared.progress import ProgressLine
from cbtop.errors import NoDataError, UsageError
from cbtop.protocol.messages import Ceiling
from cbtop.protocol.roofs import DeviceRoofs, cpu_name, driver_version, keep_roofs, known_roofs, roofs_file

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

BUSY_PERCENT = 5  # of a processor: what an idle system does is less
INSTALL = "install torch for CUDA, or CuPy (cupy-cuda12x, cupy-cuda13x)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--show", action="store_true", help="print what is known, and measure nothing")
    parser.add_argument("--threads", type=count, metavar="N", help="the processor with N threads alone")


def run(options: argparse.Namespace) -> int:
    if options.show:
        return _show()
    line = ProgressLine(sys.stderr)
    measured = []
    for roofs, missing in _measured(options.threads, line):
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


def _measured(threads: int | None, line: ProgressLine) -> Iterator[tuple[DeviceRoofs | None, Sequence[str]]]:
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
        yield _processor(number, line)
    if threads:
        return
    line.show("looking for GPUs")
    try:
        yield from measure_gpus(line.show)
    except ComputeError as error:
        yield None, [f"NVIDIA GPU n/a: {error}" + (f"; {INSTALL}" if driver_version() else "")]


def _processor(threads: int, line: ProgressLine) -> tuple[DeviceRoofs, Sequence[str]]:
    from cbtop.compute.backends import OtherProcesses
    from cbtop.compute.ceilings import measure_ceilings, measure_product
    from cbtop.compute.errors import ComputeError

    missing = []
    roofs, others = DeviceRoofs(cpu_name(), (), threads), OtherProcesses()
    line.show(f"{roofs.title}: dram_read, fma_float32")
    ceilings = measure_ceilings(threads)
    line.show(f"{roofs.title}: matmul_bfloat16")
    try:
        ceilings.append(measure_product(threads))
    except ComputeError as error:
        missing.append(f"matmul_bfloat16 n/a: {error}")
    note = ""
    if (percent := others.percent()) >= BUSY_PERCENT:
        note = f"other processes used {percent:.0f} % of the processors: its roofs may be low"
    return replace(roofs, ceilings=tuple(ceilings), note=note), missing


def _text(roofs: DeviceRoofs | None, missing: Sequence[str] = ()) -> str:
    lines = []
    if roofs is not None:
        lines.append(f"{roofs.title} ({roofs.measured_on or fmt.NOT_MEASURED})")
        lines += map(_row, roofs.ceilings)
        lines += [f"  ⚠ {roofs.note}"] if roofs.note else []
    lines += [f"  {one}" if roofs is not None else one for one in missing]
    return "".join(f"{one}\n" for one in lines)


def _row(ceiling: Ceiling) -> str:
    spread = f"median {fmt.number(ceiling.median)}, lowest {fmt.number(ceiling.lowest)}"
    return f"  {ceiling.name:<18}{fmt.number(ceiling.value):>10} {ceiling.unit:<8}  {spread}"
