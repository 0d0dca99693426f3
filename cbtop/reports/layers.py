"""Write the table of layers as text."""

from __future__ import annotations

from cbtop import units
from cbtop.reports.tables import Table, table
from cbtop.viewmodels.layers import P50_OF_A_CALL
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.training import passes_of_layer


def layers_table(view: SourceView) -> str:
    """Return a table with a line per layer. If a layer is slower than similar layers, its line has the cause."""
    layers = view.layer_times
    if layers is None:
        return "layers: n/a (none of this phase has been recorded)"
    title = f"µs a {layers.unit}"
    has_both = any(all(passes_of_layer(layers, row)) for row in layers.rows)
    passes = ("forward µs", "backward µs") if has_both else ()
    head = ("layer", title, *passes, P50_OF_A_CALL, "median of peers", "× median", "between bricks", "most in")
    rows: Table = [head]
    for row in layers.rows:
        in_passes = passes_of_layer(layers, row) if has_both else ()
        figures = (row.us, *in_passes, row.p50_us, row.median_us, row.to_median, row.between_us)
        most = f"{row.excess[0]} (+{units.duration(row.excess[1])})" if row.excess else ""
        rows.append((row.name, *map(units.number, figures), most))
    return table(rows, left=1)
