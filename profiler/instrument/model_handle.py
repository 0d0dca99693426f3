"""The handle that `cbtop.attach` returns: the end of timing, and the figures until then."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Self

from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.session import Report


class ModelHandle(ABC):
    """A model that is timed until `detach`, or until the end of a `with` block:

    with cbtop.attach(model) as run:
        model(x)
    print(run.report())
    """

    profiler: BrickProfiler

    @abstractmethod
    def detach(self) -> None:
        """Stop timing this model."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def report(self, window_s: float | None = None) -> Report:
        """Return the statistics of the model's profiler: since its start, or of the last `window_s` seconds."""
        return self.profiler.report(window_s)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the report, and the tree of layers and bricks. IPython calls this method in a terminal."""
        printer.text(f"{self.report()}\n\n{self.profiler.execution_graph().to_ascii_tree()}")

    def _repr_html_(self) -> str:
        """Return the report, and the graph of layers and bricks. Notebooks call this method to show them."""
        return f"{self.report()._repr_html_()}{self.profiler.execution_graph()._repr_html_()}"
