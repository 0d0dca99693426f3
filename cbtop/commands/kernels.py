"""`cbtop kernels`: record a few steps of a running process, and list the kernels that each brick launches."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from contextlib import closing
from dataclasses import asdict
from itertools import zip_longest

from cbtop import units
from cbtop.commands.shared.choose import add_source_argument
from cbtop.commands.shared.chosen_process import chosen_process
from cbtop.commands.shared.progress import ProgressLine
from cbtop.commands.shared.show import positive_seconds
from cbtop.feeds.kernel_request import (
    DEFAULT_STEPS,
    DEFAULT_WAIT_S,
    POLL_S,
    KernelRequest,
)
from cbtop.protocol.attributes import Grid
from cbtop.protocol.requests import MAX_STEPS
from cbtop.reports.tables import Table, table
from cbtop.text import kernel_text
from cbtop.viewmodels.kernel_findings import findings_of
from cbtop.viewmodels.kernels import BrickKernels, BurstView, KernelRow, PhaseKernels

DESCRIPTION = (
    "Ask a process of yours that runs on an NVIDIA GPU for its kernels: for a few steps CUPTI records them, and each "
    "is shown under its brick, with how it was launched and how long it took. The process runs under `cbtop run`, or "
    "with cbtop.attach. Each of these steps takes some 20 ms more, and they are in no statistics; afterwards it is "
    "as it was before."
)
EPILOG = """\
examples:
  cbtop kernels                         of the one process that runs here
  cbtop kernels --source 4711 --steps 10
  cbtop kernels --json | jq '.phases[0].bricks[] | {brick, us_per_step}'

Launches and times are per step, over all layers. A maker is known from hooks of Triton, from inductor's code, or from
the forms of libraries' names ("by name"). "Other kernels" are launched outside of all modules' calls, or by
compiled code.
In a captured graph an executable of our own runs in the host's place, and computes the same. One tool holds CUPTI in
a process: where torch.profiler, Nsight or Proton has it, or had it, the process refuses. The graph of `cbtop` shows
the kernels of the last burst, too, and its key K asks for three steps as this command does.

exit codes: 0 kernels seen, 1 refused, 2 usage, 3 no such process or no step in time
"""
SCHEMA = "cbtop.kernels/1"
NAME_CHARS = 64  # A kernel's name in the table has at most this many characters. On a narrow terminal, fewer fit.
LEAST_NAME_CHARS = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_argument(parser)
    parser.add_argument(
        "--steps", type=_steps, default=DEFAULT_STEPS, metavar="N",
        help=f"how many steps to record (default: {DEFAULT_STEPS}, at most {MAX_STEPS})",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=positive_seconds, default=DEFAULT_WAIT_S, metavar="SEC",
        help=f"how long to wait for these steps (default: {DEFAULT_WAIT_S:g})",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    line = ProgressLine(sys.stderr)
    with closing(chosen_process(options.source)) as source:
        try:
            with KernelRequest(source, options.steps, options.timeout) as request:
                while (found := request.poll()) is None:
                    line.show(request.status, request.done)
                    time.sleep(POLL_S)
        finally:
            line.clear()
    sys.stdout.write(_json(found) if options.json else _text(found))
    return 0


# --- output --------------------------------------------------------------------------------------------------------


def _json(found: BurstView) -> str:
    document = {
        "schema": SCHEMA,
        "source": found.source,
        "pid": found.pid,
        "steps": found.steps,
        "unplaced_launches": found.unplaced,
        "lost_records": found.lost,
        "left_out_launches": found.left_out,
        "phases": [
            {
                "phase": phase.phase,
                "steps": phase.steps,
                "launches_per_step": phase.launches_per_step,
                "us_per_step": phase.us_per_step,
                "bricks": [_brick_json(brick) for brick in phase.bricks],
                "findings": [asdict(one) for one in findings_of(phase)],
            }
            for phase in found.phases
        ],
    }
    return json.dumps(document, allow_nan=False) + "\n"


def _brick_json(brick: BrickKernels) -> dict[str, object]:
    return {
        "brick": brick.brick,
        "label": brick.label or None,
        "layers": brick.layers,
        "launches_per_step": brick.launches_per_step,
        "us_per_step": brick.us_per_step,
        "kernels": [_kernel_json(row) for row in brick.kernels],
    }


def _kernel_json(row: KernelRow) -> dict[str, object]:
    times = {key: getattr(row, key) for key in ("mean_us", "deviation_us", "min_us", "max_us", "us_per_step")}
    waves = None if row.waves is None else asdict(row.waves)
    return {
        "name": row.name,
        "launches_per_step": row.launches_per_step,
        **asdict(row.kernel),
        **times,
        "maker": asdict(row.maker),
        "waves": waves,
    }


def _text(found: BurstView) -> str:
    lines = []
    for head, phase in zip_longest(kernel_text.burst(found), found.phases):
        lines += [head, "", *(_phase(phase) if phase else [])]
    lines.append(
        "measured by CUPTI in these steps, which are in no other times; mean ± standard deviation of launches; waves "
        "are derived\nfrom grid, registers and shared memory; n/a: not known"
    )
    return "\n".join([*lines, *kernel_text.burst_notes(found)]) + "\n"


_HEAD = (
    "brick, kernel",
    "launches",
    "grid",
    "block",
    "registers",
    "shared B",
    "waves",
    "mean µs",
    "±",
    "min",
    "max",
    "µs/step",
)
_NUMBERS_CHARS = 103  # number of characters of a table row without the kernel's name


def _phase(phase: PhaseKernels) -> list[str]:
    lines = [table([_HEAD, *_rows(phase)], left=1), "", table(_makers(phase), left=3), ""]
    findings = findings_of(phase)
    if findings:
        lines.append("losses of launches (derived), longest kernels first:")
        lines += [
            f"  {units.number(one.us_per_step)} µs/step  {one.kernel} of {one.brick}: {one.what}" for one in findings
        ]
        lines.append("")
    return lines


def _makers(phase: PhaseKernels) -> Table:
    """Return a row for each library or source file that defines launched kernels, with the names of its kernels."""
    names: dict[tuple[str, str], list[str]] = {}
    for row in (row for brick in phase.bricks for row in brick.kernels):
        names.setdefault((str(row.maker) or units.NOT_MEASURED, row.maker.source), []).append(row.name)
    rows: Table = [("maker", "source", "kernels")]
    for (maker, source), kernels in names.items():
        listed = ", ".join(dict.fromkeys(kernels))
        rows.append((maker, source, listed if len(listed) <= NAME_CHARS else listed[: NAME_CHARS - 1] + "…"))
    return rows


def _rows(phase: PhaseKernels) -> Table:
    room = max(LEAST_NAME_CHARS, min(NAME_CHARS, shutil.get_terminal_size((200, 24)).columns - _NUMBERS_CHARS))
    rows: Table = []
    for brick in phase.bricks:
        where = f" ({units.counted(brick.layers, 'layer')})" if brick.layers else ""
        name = f"{brick.brick} {brick.label}".strip() + where
        rows.append((name, kernel_text.per_step(brick.launches_per_step), *[""] * 9, units.number(brick.us_per_step)))
        rows += [_row(row, room) for row in brick.kernels]
    return rows


def _row(row: KernelRow, room: int) -> tuple[str, ...]:
    name = row.name if len(row.name) <= room else row.name[: room - 1] + "…"
    kernel = row.kernel
    return (
        f"  {name}",
        kernel_text.per_step(row.launches_per_step),
        _grid(kernel.grid),
        _grid(kernel.block),
        units.count(kernel.registers)
        + (f" + {units.count(kernel.local_memory_bytes)} local B" if kernel.local_memory_bytes else ""),
        f"{units.count(kernel.static_shared_memory_bytes)}+{units.count(kernel.shared_memory_bytes)}",
        units.number(None if row.waves is None else row.waves.waves),
        units.number(row.mean_us),
        units.number(row.deviation_us),
        units.number(row.min_us),
        units.number(row.max_us),
        units.number(row.us_per_step),
    )


def _grid(grid: Grid | None) -> str:
    return units.NOT_MEASURED if grid is None else "×".join(str(size) for size in grid)


def _steps(text: str) -> int:
    value = int(text) if text.isdecimal() and len(text) < 6 else 0
    if not 1 <= value <= MAX_STEPS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {MAX_STEPS}")
    return value
