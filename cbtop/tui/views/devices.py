"""The view of machines: their devices, one per row, and the processes on these devices."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from textual.app import ComposeResult
from textual.geometry import Size
from textual.widget import Widget

from cbtop import units
from cbtop.protocol.vocabulary import DeviceKind
from cbtop.text import source_text
from cbtop.text.statistics import (
    DEVICE_COLUMNS,
    PROCESS_COLUMNS,
    ScreenColumn,
    container_text,
    device_text,
    has_figure,
    process_text,
    why_unknown,
)
from cbtop.tui.views.base import View
from cbtop.tui.views.figures import figure
from cbtop.tui.widgets.braille import sparkline
from cbtop.tui.widgets.columns import Cells, Column, head_line, place, row_line
from cbtop.tui.widgets.curve import Chart, charts
from cbtop.tui.widgets.lines import BLANK, Line, clean, clip, fit_line, plain, rule, width_of
from cbtop.tui.widgets.pager import Page, Pager
from cbtop.viewmodels.devices import DeviceRow, MachineView, ProcessRow
from cbtop.viewmodels.source import SourceView


def _column(shown: ScreenColumn) -> Column[DeviceRow]:
    key, is_text = shown.statistic.key, shown.statistic.key == "slowed_by"

    def cell(row: DeviceRow, width: int) -> Line:
        role = "strong" if key == "utilization_percent" else "warn" if is_text and row.device.slowed_by else ""
        return figure(clip(clean(device_text(shown, row.device)), width), "faint" if row.is_stale else role)

    doc = shown.statistic.help + (f"; then {shown.limit.help}" if shown.limit else "")
    return Column(
        shown.statistic.title, shown.width, shown.priority, cell, doc,
        align="left" if is_text else "right", stretch=int(is_text), max_width=30,
    )  # fmt: skip


def _label(row: DeviceRow, width: int) -> Line:
    return ((clean(row.label), "strong accent" if row.device.kind is DeviceKind.GPU else "accent"),)


def _curve(row: DeviceRow, width: int) -> Line:
    return busy_curve(row.busy_percent, width)


def _device_name(row: DeviceRow, width: int) -> Line:
    return ((clip(clean(row.device.name), width), "dim"),)


def _pid(row: ProcessRow, width: int) -> Line:
    return ((str(row.pid), "strong" if row.source else ""),)


def _process_name(row: ProcessRow, width: int) -> Line:
    mark = "● " if row.source else "  "
    return ((mark, "accent"), (clip(clean(row.name or units.NOT_MEASURED), width - 2), "strong"))


def _process_device(row: ProcessRow, width: int) -> Line:
    return ((clean(row.device), "accent"),) if row.device else ((units.NONE_THERE, "faint"),)


def _process_column(shown: ScreenColumn) -> Column[ProcessRow]:
    def cell(row: ProcessRow, width: int) -> Line:
        return figure(process_text(shown.statistic, row))

    return Column(shown.statistic.title, shown.width, shown.priority, cell, shown.statistic.help)


COLUMNS: tuple[Column[DeviceRow], ...] = (
    Column("of", 3, 0, _label, "a GPU's index, with that of a MIG device in it; cpu: all of the host", align="left",
           stretch=1, max_width=5),
    *(_column(shown) for shown in DEVICE_COLUMNS[:1]),
    Column("busy, 0–100 %", 13, 7, _curve, "busy % in the last two minutes, the newest at the right", align="left",
           stretch=1, max_width=60, is_drawn=True),
    *(_column(shown) for shown in DEVICE_COLUMNS[1:]),
    Column("name", 20, 12, _device_name, "what it calls itself", align="left", stretch=1, max_width=40),
)  # fmt: skip
PROCESSES: tuple[Column[ProcessRow], ...] = (
    Column("pid", 8, 0, _pid, "the process, as its pid namespace calls it"),
    Column("process", 12, 1, _process_name, "its name; ● is one that is profiled", align="left", stretch=1,
           max_width=40),
    Column("on", 4, 2, _process_device, "the GPU, a row for each that it is on", align="left"),
    *(_process_column(shown) for shown in PROCESS_COLUMNS),
)  # fmt: skip


def process_columns(rows: Sequence[ProcessRow]) -> list[Column[ProcessRow]]:
    """Return the columns of the processes. Columns that are empty for every process are left out, such as GPU memory
    on a machine without GPU.
    """

    def is_known(column: Column[ProcessRow]) -> bool:
        return any(plain(column.cell(row, column.width)).strip() != units.NONE_THERE for row in rows)

    return [column for column in PROCESSES if is_known(column)]


def busy_curve(percents: Sequence[float | None], width: int) -> Line:
    """Draw a curve of percentages on a scale from 0 to 100. The newest value is at the right end. Unknown values are
    blank.
    """
    return sparkline(percents, width, 100.0, "accent")


class Devices(View):
    """The view of the machines, their devices and the processes on them."""

    title = "Devices"
    section = "devices"
    doc = (
        "The GPUs and the processors of the machine that the process runs on, as its daemon samples them every "
        "second, and the processes that use them: profiled ones (●), others on a GPU, and the ten that take most "
        "processor time. busy % is not how much of a GPU is used: one small kernel at a time "
        "makes it 100. Power and bytes say more, and the roofline shows how close a brick is to its limit. The "
        "reason for each n/a is at the end. – means that the device does not have this. Below are the last two "
        "minutes of each device and of each profiled process, with mean and extremes (derived)."
    )
    columns_doc = (
        *((column.title, column.doc) for column in COLUMNS),
        *((column.title, column.doc) for column in PROCESSES),
    )

    def compose(self) -> ComposeResult:
        with Pager(id="devices-pager") as self._pager:
            self._page = DevicesPage(id="devices-page")
            yield self._page

    @property
    def focus_target(self) -> Widget:
        return self._pager

    def show_source(self, source: SourceView) -> None:
        self._page.show_machines(source.machines)

    def cells(self) -> Cells | None:
        machines = self.source.machines if self.source is not None else ()
        return Cells.of(COLUMNS, [row for machine in machines for row in machine.devices])


class DevicesPage(Page):
    """A page about all machines, one below the other, which the user can scroll."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._machines: Sequence[MachineView] = ()
        self._height = 0  # height in lines of the scrolling container around this page
        # the size of the last drawing and its lines: (width, height, lines)
        self._made: tuple[int, int, Sequence[Line]] | None = None

    def show_machines(self, machines: Sequence[MachineView]) -> None:
        if machines == self._machines:
            return
        self._machines, self._made = machines, None
        width, height = self.size
        # Request a new layout only if the height has changed, because a new layout sends the whole screen to the
        # terminal.
        if len(self.text(width)) != height:
            self.refresh(layout=True)
        self.redraw()

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        self._height = container.height
        return super().get_content_height(container, viewport, width)

    def text(self, width: int) -> Sequence[Line]:
        """Return the lines of the page: the tables and the charts. The charts fill the lines that the tables leave
        free.
        """
        if self._made is None or self._made[:2] != (width, self._height):
            self._made = width, self._height, self._drawn(width)
        return self._made[2]

    def _drawn(self, width: int) -> Sequence[Line]:
        if not self._machines:
            return _wrapped("n/a: ", ["no sample of the devices has come yet"], width, "dim")
        lines: list[Line] = []
        for machine in self._machines:
            title: Line = ((clean(machine.host), "strong"),)
            lines += [*([rule(title, width)] if len(self._machines) > 1 else []), *machine_lines(machine, width)]
        wanted = [chart for machine in self._machines for chart in machine_charts(machine)]
        if drawn := charts(wanted, width, self._height - len(lines) - 1):
            lines += [BLANK, *drawn]
        return [line if width_of(line) <= width else fit_line(line, width) for line in lines]


def machine_lines(machine: MachineView, width: int) -> list[Line]:
    """Return the lines about one machine: its devices, its processes, and the reasons for n/a."""
    lines = _troubles(machine, width)
    placed = place(_columns_for(machine), width - 2)
    if machine.devices:
        lines.append(((" ", ""), *head_line(placed, "", descending=True)))
    for row in machine.devices:
        if row.device.trouble:
            said = clip(clean(f"{row.device.name}: {row.device.trouble}"), width - 7)
            lines.append(((" ", ""), *_label(row, 4), (" " * (6 - len(row.label)), ""), (said, "bad")))
        else:
            lines.append(((" ", ""), *row_line(placed, row)))
    if machine.processes:
        on_processes = place(process_columns(machine.processes), width - 2)
        lines += [BLANK, ((" ", ""), *head_line(on_processes, "", descending=True))]
        lines += [((" ", ""), *row_line(on_processes, row)) for row in machine.processes]
        limits = dict.fromkeys(filter(None, map(container_text, machine.processes)))
        lines += _wrapped("", list(limits), width, "dim")
    if machine.unknown:
        lines += [BLANK, *_wrapped("n/a: ", [why_unknown(why) for why in machine.unknown], width, "dim")]
    return lines


def machine_charts(machine: MachineView) -> list[Chart]:
    """Return charts of each device and each profiled process over the last two minutes."""
    found: list[Chart] = []
    for row in machine.devices:
        device, seen = row.device, row.history
        name = "CPU" if device.kind is DeviceKind.CPU else f"GPU {clean(row.label)}"
        role = "faint" if row.is_stale else "accent"
        memory, clock = [moment.memory_bytes for moment in seen], [moment.clock_mhz for moment in seen]
        watts, celsius = [moment.watts for moment in seen], [moment.celsius for moment in seen]
        found += [
            figure_chart(f"{name} busy %", role, row.busy_percent, units.percent_number, 100.0),
            figure_chart(f"{name} memory", role, memory, units.size_bytes, device.memory_total_bytes),
            figure_chart(f"{name} W", role, watts, units.whole, device.power_limit_watts),
            figure_chart(f"{name} MHz", role, clock, units.whole, device.clock_max_mhz),
            figure_chart(f"{name} °C", role, celsius, units.whole),
        ]
    for process in {row.pid: row for row in machine.processes if row.source}.values():
        found += process_charts(process)
    return [chart for chart in found if any(value is not None for value in chart.values)]


def process_charts(process: ProcessRow) -> list[Chart]:
    """Return charts of a process's use of the host over the last two minutes."""
    name = f"{clean(process.name or units.NOT_MEASURED)} {process.pid}"
    cpu = [moment.cpu_percent for moment in process.history]
    resident = [moment.resident_bytes for moment in process.history]
    return [
        figure_chart(f"{name} CPU %", "norm", cpu, units.percent_number),
        figure_chart(f"{name} resident", "norm", resident, units.size_bytes),
    ]


def figure_chart(
    title: str,
    role: str,
    values: Sequence[float | None],
    text: Callable[[float | None], str],
    top: float | None = None,
    *,
    has_mean: bool = True,
) -> Chart:
    """Return a chart with the last value and the extremes of a figure. If all samples have equal weight, the mean is
    added.
    """
    known = [value for value in values if value is not None]
    figures: list[Line] = [((text(values[-1] if values else None), "strong"),)]
    if has_mean and known:
        figures.append(((f"mean {text(sum(known) / len(known))}", "dim"),))
    figures.append(((f"{text(min(known, default=None))} to {text(max(known, default=None))}", "dim"),))
    return Chart(title, figures, values, role, text, top)


def _columns_for(machine: MachineView) -> list[Column[DeviceRow]]:
    """Return the columns of figures that at least one device has."""
    devices = [row.device for row in machine.devices]
    unused = {one.statistic.title for one in DEVICE_COLUMNS if not any(has_figure(one.statistic, d) for d in devices)}
    return [column for column in COLUMNS if column.title not in unused]


def _troubles(machine: MachineView, width: int) -> list[Line]:
    stale = {row.sampler: row.age_s for row in machine.devices if row.is_stale}
    old = [source_text.stale_sampler(sampler, age_s) for sampler, age_s in stale.items()]
    return [*_wrapped("✗ ", old, width, "bad"), *_wrapped("", machine.troubles, width, "dim")]


def _wrapped(mark: str, texts: Sequence[str], width: int, role: str) -> list[Line]:
    rows = [
        row
        for text in texts
        for row in textwrap.wrap(mark + clean(text), max(20, width - 2), subsequent_indent=" " * len(mark))
    ]
    return [((" ", ""), (row, role)) for row in rows]
