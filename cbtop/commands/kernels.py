"""`cbtop kernels`: which kernels a running process launches for each brick, recorded now for a few of its steps."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cbtop import formatting as fmt
from cbtop.commands.shared.choose import add_source_argument
from cbtop.commands.shared.progress import ProgressLine
from cbtop.commands.show import positive_seconds
from cbtop.daemon.source import Source
from cbtop.errors import CbtopError, NoDataError, UsageError
from cbtop.protocol.attributes import Grid
from cbtop.protocol.ended import rings_of, runs
from cbtop.protocol.endpoint import runtime_dir
from cbtop.protocol.errors import ProtocolError
from cbtop.protocol.messages import KernelBurst, Node
from cbtop.protocol.requests import MAX_STEPS, WHY, Answer, Asker, State
from cbtop.protocol.vocabulary import SourceStatus
from cbtop.reports.tables import Table, table
from cbtop.viewmodels.kernels import BrickKernels, KernelRow, PhaseKernels, kernels_of

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

Launches and times are per step, over all layers. "Other kernels" are launched between bricks, or by compiled code.
In a captured graph an executable of our own runs in the host's place, and computes the same. One tool holds CUPTI in
a process: where torch.profiler, Nsight or Proton has it, or had it, the process refuses. The graph of `cbtop` shows
the kernels of the last burst, too.

exit codes: 0 kernels seen, 1 refused, 2 usage, 3 no such process or no step in time
"""
SCHEMA = "cbtop.kernels/1"
DEFAULT_STEPS = 3
POLL_S = 0.05
NAME_CHARS = 64  # of a kernel, where lines may be as long as they want
LEAST_NAME_CHARS = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_argument(parser)
    parser.add_argument(
        "--steps", type=_steps, default=DEFAULT_STEPS, metavar="N",
        help=f"how many steps to record (default: {DEFAULT_STEPS}, at most {MAX_STEPS})",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=positive_seconds, default=60.0, metavar="SEC",
        help="how long to wait for these steps (default: 60)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    source = _chosen(options.source)
    try:
        line = ProgressLine(sys.stderr)
        try:
            burst = _asked(source, options.steps, time.monotonic() + options.timeout, line)
        finally:
            line.clear()
        phases = kernels_of([said for said in source.catalog if isinstance(said, Node)], burst)
        found = Found(source.key, _pid(source), burst.steps, burst.unplaced, burst.lost, burst.left_out, phases)
    finally:
        source.close()
    sys.stdout.write(_json(found) if options.json else _text(found))
    return 0


@dataclass(frozen=True, slots=True)
class Found:
    """What a burst found in one process."""

    source: str
    pid: int
    steps: int
    unplaced: int
    lost: int
    left_out: int
    phases: tuple[PhaseKernels, ...]


def _chosen(wanted: Sequence[str]) -> Source:
    """The process that runs here and is meant. Raises NoDataError for none, UsageError for several."""
    directory = runtime_dir()
    found: list[Source] = []
    try:
        for name in sorted(rings_of(os.listdir(directory))):
            source = _live(directory / name, wanted)
            if source is not None:
                found.append(source)
        if not found:
            which = f" as --source {' or '.join(wanted)}" if wanted else ""
            raise NoDataError(f"nothing runs here{which}; `cbtop run -- python …` starts what can be asked")
        if len(found) > 1:
            pids = ", ".join(str(_pid(source)) for source in found)
            raise UsageError(f"several processes run here: choose one by --source (pid {pids})")
    except BaseException:
        for source in found:
            source.close()
        raise
    return found[0]


def _live(ring: Path, wanted: Sequence[str]) -> Source | None:
    try:
        if not runs(ring):
            return None
        source = Source(ring)
    except (ProtocolError, OSError):  # it went meanwhile, or is no ring
        return None
    _read(source)
    names = [source.key, str(_pid(source)), f"rank={source.hello.rank if source.hello else None}"]
    if source.state is not SourceStatus.LIVE or (wanted and not any(name in wanted for name in names)):
        source.close()
        return None
    return source


def _read(source: Source) -> None:
    source.poll()
    while source.is_behind:
        source.poll()


def _pid(source: Source) -> int:
    return source.hello.pid if source.hello else 0


def _asked(source: Source, steps: int, deadline_s: float, line: ProgressLine) -> KernelBurst:
    """What the process has found when it was asked."""
    asker = Asker(source.ring_path)
    try:
        if not asker.listens:
            raise CbtopError(
                f"pid {_pid(source)} takes no requests: it runs no model of torch that is attached yet, "
                "or an older cbtop"
            )
        asker.ask(steps)
        line.show(f"waiting for a step of pid {_pid(source)}")
        while True:
            answer = asker.answer()
            if answer is not None and answer.state.is_refused:
                raise CbtopError(f"pid {_pid(source)} refuses: {WHY[answer.state]}")
            burst = _found(source, answer)
            if burst is not None:
                return burst
            if answer is not None:
                line.show(f"recording kernels of pid {_pid(source)}", answer.steps / steps)
            if source.state is not SourceStatus.LIVE:
                raise NoDataError(f"pid {_pid(source)} has ended: {source.reason}")
            if time.monotonic() > deadline_s:
                raise NoDataError(_why_late(source, answer, steps))
            time.sleep(POLL_S)
    finally:
        asker.close()


def _found(source: Source, answer: Answer | None) -> KernelBurst | None:
    _read(source)
    if answer is None or answer.state is not State.DONE:
        return None
    bursts = [said for said in source.catalog if isinstance(said, KernelBurst) and said.number == answer.number]
    return bursts[0] if bursts else None


def _why_late(source: Source, answer: Answer | None, steps: int) -> str:
    pid = _pid(source)
    if answer is None:
        return f"pid {pid} has begun no step that can be recorded; is it idle? --timeout waits longer"
    if answer.state is State.DONE:
        return f"pid {pid} has recorded its kernels, and not written them yet; ask again in a while"
    return f"pid {pid} has run {answer.steps} of {steps} steps; --timeout waits longer"


# --- what is printed ------------------------------------------------------------------------------------------------


def _json(found: Found) -> str:
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
    return {"name": row.name, "launches_per_step": row.launches_per_step, **asdict(row.kernel), **times}


def _text(found: Found) -> str:
    lines = []
    for phase in found.phases:
        lines += [
            f"{phase.phase}: {fmt.counted(phase.steps, 'step')} recorded of pid {found.pid}, "
            f"{_per_step(phase.launches_per_step)} launches a step, {fmt.duration(phase.us_per_step)} in kernels",
            "",
            table([_HEAD, *_rows(phase)], left=1),
            "",
        ]
    if not found.phases:
        lines += [f"{fmt.counted(found.steps, 'step')} recorded of pid {found.pid}, and no kernel in them", ""]
    lines.append(
        "measured by CUPTI in these steps, which are in no other times; mean ± standard deviation of launches"
    )
    notes = (
        (found.unplaced, "launches in no call of a module that is known"),
        (found.lost, "records lost"),
        (found.left_out, "launches left out: too many different ones"),
    )
    lines += [f"{fmt.count(count)} {what}" for count, what in notes if count]
    return "\n".join(lines) + "\n"


_HEAD = (
    "brick, kernel",
    "launches",
    "grid",
    "block",
    "registers",
    "shared B",
    "mean µs",
    "±",
    "min",
    "max",
    "µs/step",
)
_NUMBERS_CHARS = 96  # what the other columns take


def _rows(phase: PhaseKernels) -> Table:
    room = max(LEAST_NAME_CHARS, min(NAME_CHARS, shutil.get_terminal_size((200, 24)).columns - _NUMBERS_CHARS))
    rows: Table = []
    for brick in phase.bricks:
        where = f" ({fmt.counted(brick.layers, 'layer')})" if brick.layers else ""
        name = f"{brick.brick} {brick.label}".strip() + where
        rows.append((name, _per_step(brick.launches_per_step), *[""] * 8, fmt.number(brick.us_per_step)))
        rows += [_row(row, room) for row in brick.kernels]
    return rows


def _row(row: KernelRow, room: int) -> tuple[str, ...]:
    name = row.name if len(row.name) <= room else row.name[: room - 1] + "…"
    kernel = row.kernel
    return (
        f"  {name}",
        _per_step(row.launches_per_step),
        _grid(kernel.grid),
        _grid(kernel.block),
        fmt.count(kernel.registers),
        f"{fmt.count(kernel.static_shared_memory_bytes)}+{fmt.count(kernel.shared_memory_bytes)}",
        fmt.number(row.mean_us),
        fmt.number(row.deviation_us),
        fmt.number(row.min_us),
        fmt.number(row.max_us),
        fmt.number(row.us_per_step),
    )


def _per_step(launches: float) -> str:
    return f"{launches:,.0f}" if launches == round(launches) else f"{launches:,.1f}"


def _grid(grid: Grid | None) -> str:
    return fmt.NOT_MEASURED if grid is None else "×".join(str(size) for size in grid)


def _steps(text: str) -> int:
    value = int(text) if text.isdecimal() and len(text) < 6 else 0
    if not 1 <= value <= MAX_STEPS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {MAX_STEPS}")
    return value
