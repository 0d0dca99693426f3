"""`%load_ext cbtop`: the magic `%%cbtop`, which times a cell of a notebook by layer and brick."""

# Rules
# - Nothing is printed. The figures are a display of the notebook, so that stdout has only what the cell prints.
# - IPython is not imported. It calls `load_ipython_extension`, so it is there.

from __future__ import annotations

import argparse
import ast
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from cbtop.commands.shared.ring_view import view_of
from cbtop.daemon.source import Source
from cbtop.errors import UsageError
from cbtop.profiler.analysis.markup import plain
from cbtop.profiler.instrument import temporary
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.ended import rings_of_latest
from cbtop.protocol.errors import ProtocolError
from cbtop.protocol.messages import RecordBatch, SourceState
from cbtop.protocol.ring_reader import RingReader
from cbtop.protocol.runtime_directory import runtime_directory
from cbtop.protocol.vocabulary import SourceStatus
from cbtop.reports.html import html_part
from cbtop.reports.overview import brick_lines
from cbtop.reports.text import text_report
from cbtop.viewmodels.source import SourceView

MAGIC = "cbtop"
CELL = "the cell"  # what has ended, next to the word ENDED
TEXT_SECTIONS = ("layers",)
TEXT_BRICKS = 12  # the number of bricks in the text
NOTHING = (
    "cbtop: no step was recorded. A cell is timed if it calls a torch model of several layers, in a kernel that has "
    "imported torch in an earlier cell, or if it uses a BrickProfiler."
)


class Shell(Protocol):
    """The parts of IPython's InteractiveShell that are used here."""

    user_ns: dict[str, Any]
    compile: Any
    display_pub: Any
    magics_manager: Any

    def register_magic_function(self, func: Any, magic_kind: str, magic_name: str) -> None: ...
    def transform_cell(self, raw_cell: str) -> str: ...
    def transform_ast(self, node: ast.Module) -> ast.Module: ...


def load_ipython_extension(shell: Shell) -> None:
    """Add the magics `%%cbtop` and `%cbtop`. IPython calls this function for `%load_ext cbtop`."""
    shell.register_magic_function(CellTimer(shell), "line_cell", MAGIC)


def unload_ipython_extension(shell: Shell) -> None:
    """Remove the magics. IPython calls this function for `%unload_ext cbtop`."""
    for kind in ("line", "cell"):
        shell.magics_manager.magics[kind].pop(MAGIC, None)


class CellTimer:
    """Runs a cell, and shows what its models did.

    `%%cbtop [--phase NAME]` times a cell, and `%cbtop STATEMENT` a statement. A model that the cell calls is attached
    at its first call, and detached after the cell. Records of other profilers of this process are shown, too.
    """

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        # one profiler for all cells, because each one keeps two files open
        self._profiler: BrickProfiler | None = None

    def __call__(self, line: str, cell: str | None = None) -> object:
        phase = None if cell is None else _phase(line)
        run = self._compiled(line if cell is None else cell)
        try:
            before = dict(_produced())
        except ProtocolError as error:
            self._shell.display_pub.publish(data={"text/plain": f"cbtop: nothing is recorded: {error}"})
            return run()
        if self._profiler is None:
            self._profiler = BrickProfiler()
        attached = temporary.begin(self._profiler)
        try:
            return run()
        finally:
            if attached is not None:
                attached.end()
            self._show(list(_views(before, phase)), phase)

    def _compiled(self, source: str) -> Callable[[], object]:
        """Return a function that runs a cell in the user's namespace, and returns the value of its last expression.

        Raises SyntaxError.
        """
        shell = self._shell
        code = shell.transform_cell(source)
        tree = shell.transform_ast(ast.parse(code))
        name = shell.compile.cache(code)  # so that a traceback shows the lines of the cell
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        value = ast.Expression(
            last.value if isinstance(last, ast.Expr) else ast.Constant(None, lineno=1, col_offset=0)
        )
        statements, expression = compile(tree, name, "exec"), compile(ast.fix_missing_locations(value), name, "eval")

        def run() -> object:
            exec(statements, shell.user_ns)
            return eval(expression, shell.user_ns)

        return run

    def _show(self, views: list[SourceView], phase: str | None) -> None:
        missing = _missing(phase, views)
        data = {"text/plain": "\n\n".join([*missing, *map(_text, views)]) or NOTHING}
        if views:
            data["text/html"] = "".join(f"<p>{plain(line)}</p>" for line in missing) + html_part(views)
        self._shell.display_pub.publish(data=data)


def _text(view: SourceView) -> str:
    return "\n".join([text_report([view], TEXT_SECTIONS), "", *brick_lines(view, TEXT_BRICKS)])


def _missing(phase: str | None, views: Sequence[SourceView]) -> list[str]:
    """Return a line if the cell has no steps of the phase that its user has asked for. Otherwise returns []."""
    phases = {steps.phase: None for view in views for steps in view.phases}
    if phase is None or not views or phase in phases:
        return []
    return [f"cbtop: --phase {phase}: the cell has no such steps; choose {' or '.join(phases)}"]


class _CellSource(Source):
    """A ring of this process. Only the cell's own records count: all from number `first` on.

    Their numbers begin with 0, so no record before the cell is missing. The process lives on, but the cell has ended.
    """

    def __init__(self, ring: Path, first: int) -> None:
        super().__init__(ring)
        self._first = first
        self._ring.skip_to(first)
        self.pass_over_records()

    def state_message(self) -> SourceState:
        state = super().state_message()
        if state.state is SourceStatus.LIVE:
            state = replace(state, state=SourceStatus.ENDED, reason=CELL, quiet=None)
        return replace(state, produced=state.produced - self._first)

    def records(self) -> list[RecordBatch]:
        return [
            replace(batch, first=batch.first - self._first, produced=batch.produced - self._first)
            for batch in super().records()
        ]


def _phase(line: str) -> str | None:
    parser = argparse.ArgumentParser(prog=f"%%{MAGIC}", add_help=False, exit_on_error=False)
    parser.add_argument("--phase")
    try:
        options, unknown = parser.parse_known_args(line.split())
    except argparse.ArgumentError as error:
        raise UsageError(f"%%{MAGIC}: {error}") from None
    if unknown:
        raise UsageError(f"%%{MAGIC}: {' '.join(unknown)} is unknown; the only option is --phase NAME")
    phase: str | None = options.phase
    return phase


def _produced() -> Iterator[tuple[Path, int]]:
    """Yield each ring of this process, and the number of records that were written into it."""
    for path in _rings():
        try:
            ring = RingReader(path)
        except (ProtocolError, OSError):
            continue  # this ring cannot be read, so its records are not shown
        yield path, ring.produced
        ring.close()


def _rings() -> list[Path]:
    directory = runtime_directory()
    return [Path(directory, name) for name in rings_of_latest(os.listdir(directory), os.getpid())]


def _views(before: Mapping[Path, int], phase: str | None) -> Iterator[SourceView]:
    """Yield the view of each ring with new records. `before` has the number of records before the cell."""
    for path, produced in _produced():
        if produced <= before.get(path, 0):
            continue
        source = _CellSource(path, before.get(path, 0))
        try:
            view = view_of(source, phase=phase, keeps_records=True)
        finally:
            source.close()
        if view is not None and view.has_data:
            yield view
