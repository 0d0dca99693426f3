"""Everything that the lints ask about one function. Each part is computed when it is first asked for."""

from __future__ import annotations

from functools import cached_property

from cbtop.profiler.analysis.ptx.model import Function, Module, Variable


class FunctionAnalysis:
    """A function of a module with the results of the analyses."""

    def __init__(self, module: Module, function: Function) -> None:
        self.module = module
        self.function = function

    @cached_property
    def variables(self) -> dict[str, Variable]:
        """The variables that the function can name."""
        return {
            one.name: one for one in (*self.module.variables, *self.function.parameters, *self.function.variables)
        }

    def place_of(self, index: int | None) -> tuple[int, tuple[str, int] | None]:
        """Return the line of an instruction in the PTX, and its file and line in the source if there are debug
        lines."""
        if index is None:
            return self.function.line, None
        one = self.function.instructions[index]
        path = self.module.files.get(one.source[0]) if one.source else None
        return one.line, (path, one.source[1]) if path and one.source else None
