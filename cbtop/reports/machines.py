"""Write the machines of the sources, with their devices and processes, as text and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from cbtop import units
from cbtop.protocol.vocabulary import DeviceKind
from cbtop.reports.tables import Table, table
from cbtop.text import source_text
from cbtop.text.statistics import (
    DEVICE_COLUMNS,
    PROCESS_COLUMNS,
    Of,
    container_text,
    device_text,
    has_figure,
    process_text,
    statistics_of,
    why_unknown,
)
from cbtop.viewmodels.devices import DeviceRow, MachineView
from cbtop.viewmodels.source import SourceView

NO_MACHINE = "devices: n/a (no sample of them has come yet)"
BUSY_LINE = "busy % of a GPU is the share of time in which any kernel ran, however little of the GPU it used"
_FIRST = 6  # The first of the two tables of devices has at most this many figures.


def machines_of(sources: Iterable[SourceView]) -> list[MachineView]:
    """Return the machines of the sources, in the order of the sources. Each machine is listed once."""
    return list({machine.daemon: machine for source in sources for machine in source.machines}.values())


def machines_text(machines: Sequence[MachineView]) -> str:
    """Return the text of all machines, one below the other."""
    return "\n\n".join(map(_machine, machines)) or NO_MACHINE


def _machine(machine: MachineView) -> str:
    lines = [f"devices of {machine.host}"]
    stale = {row.sampler: row.age_s for row in machine.devices if row.is_stale}
    lines += [source_text.stale_sampler(sampler, age_s) for sampler, age_s in stale.items()]
    lines += machine.troubles
    rows = [row for row in machine.devices if not row.device.trouble]
    if rows:
        lines += _devices(rows)
    lines += [f"{row.label} {row.device.name}: {row.device.trouble}" for row in machine.devices if row.device.trouble]
    if machine.processes:
        lines += ["", _processes(machine)]
        lines += list(dict.fromkeys(filter(None, map(container_text, machine.processes))))
    lines += [f"n/a: {why_unknown(why)}" for why in machine.unknown]
    if machine.gpus:
        lines.append(BUSY_LINE)
    return "\n".join(lines)


def _devices(rows: Sequence[DeviceRow]) -> list[str]:
    """Return two tables of 80 columns with all figures that any device has.

    The last table also has the devices' names.
    """
    used = [column for column in DEVICE_COLUMNS if any(has_figure(column.statistic, row.device) for row in rows)]
    parts = [part for part in (used[:_FIRST], used[_FIRST:]) if part]
    tables = []
    for part in parts:
        is_last = part is parts[-1]
        cells: Table = [("of", *(column.statistic.title for column in part), *(("name",) if is_last else ()))]
        for row in rows:
            figures = (device_text(column, row.device) for column in part)
            cells.append((row.label, *figures, *((row.device.name,) if is_last else ())))
        tables += ["", table(cells, left=1)]
    return tables[1:]


def _processes(machine: MachineView) -> str:
    columns = [column.statistic for column in PROCESS_COLUMNS]
    cells: Table = [("pid", "process", "profiled", "on", *(column.title for column in columns))]
    for row in machine.processes:
        figures = (process_text(column, row) for column in columns)
        profiled = "yes" if row.source else "no"
        cells.append(
            (str(row.pid), row.name or units.NOT_MEASURED, profiled, row.device or units.NONE_THERE, *figures)
        )
    return table(cells, left=4)


def machine_json(machine: MachineView) -> dict[str, Any]:
    """Return one machine as JSON, with every figure of each device and the reasons for nulls."""
    return {
        "host": machine.host,
        "troubles": list(machine.troubles),
        "devices": [_device_json(row) for row in machine.devices],
        "processes": [asdict(row) for row in machine.processes],
        "elsewhere": list(machine.elsewhere),
    }


def _device_json(row: DeviceRow) -> dict[str, Any]:
    device = row.device
    of = Of.CPU if device.kind is DeviceKind.CPU else Of.GPU
    return {
        "uuid": device.uuid,
        "kind": device.kind,
        "label": row.label,
        "index": device.index,
        "name": device.name,
        "part_of": device.part_of or None,
        "sampler": row.sampler,
        "age_s": row.age_s,
        "stale": row.is_stale,
        "trouble": device.trouble or None,
        **{statistic.key: statistic.value(device) for statistic in statistics_of(of)},
        "unknown": {unknown.figure: unknown.why for unknown in device.unknown},
    }
