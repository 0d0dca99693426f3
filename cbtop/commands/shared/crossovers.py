"""Apply the stored crossovers before a decoder starts, and format crossovers as text.

A crossover is the size of work at which another method becomes the faster one. `cbtop calibrate` measures crossovers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from cbtop import units
from cbtop.commands.shared.progress import ProgressLine
from cbtop.compute.settings import CROSSOVERS, STATIC_CROSSOVERS, Crossovers, use_crossovers
from cbtop.protocol.crossovers import NEVER, Crossover, MachineCrossovers, crossovers_of
from cbtop.protocol.errors import RoofsError
from cbtop.protocol.roofs import cpu_name
from cbtop.protocol.vocabulary import Provenance

TITLES = {
    "product_bytes": "products go to threads from",
    "attention_products": "attention goes to threads from",
    "bf16_tokens": "products are of bfloat16 from",
    "exact_bytes": "weights stay as they lie from",
    "gpu_layer_bytes": "tokens go to the GPU from",
    "gpu_prompt_bytes": "prompts go to the GPU from",
}
UNITS = {
    "product_bytes": "bytes of weights x tokens",
    "attention_products": "products",
    "bf16_tokens": "tokens",
    "exact_bytes": "bytes of a matrix",
    "gpu_layer_bytes": "bytes of a layer",
    "gpu_prompt_bytes": "bytes of a layer x tokens",
}
ON_GPU = ("CPU", "GPU")
WAYS = {
    "bf16_tokens": ("int8", "bfloat16"),
    "exact_bytes": ("interleaved, int8", "as they lie, floats"),
    "gpu_layer_bytes": ON_GPU,
    "gpu_prompt_bytes": ON_GPU,
}
# Default names of the two methods that a crossover separates. They are used if WAYS has no entry for the crossover.
ON_THREADS = "one thread", "threads"


def use_kept_crossovers() -> str:
    """Use the crossovers that were measured on this machine, and defaults for the rest.

    Returns a line with the values, or with why stored ones cannot be used. It is empty if nothing was stored.
    """
    from cbtop.compute.backends import available_threads  # imported here, because this import loads Numba

    try:
        found = crossovers_of(cpu_name(), available_threads())
    except RoofsError as error:
        use_crossovers(STATIC_CROSSOVERS)
        return f"crossovers are static: {error}; `cbtop calibrate` measures them"
    wanted = measured_crossovers(found.crossovers if found else ())
    use_crossovers(wanted)
    if found is None or not wanted.measured:
        return ""
    values = ", ".join(f"{name} {_value(getattr(wanted, name))}" for name in CROSSOVERS if name in wanted.measured)
    return f"crossovers measured on {found.day} with {found.threads} threads: {values}"


def go_by_kept_crossovers(line: ProgressLine) -> None:
    """Call `use_kept_crossovers` and print its line on stderr, after clearing the progress line.

    Call this before a model is read, because the layout of its weights depends on the crossovers.
    """
    if said := use_kept_crossovers():
        line.clear()
        sys.stderr.write(f"{said}\n")
        sys.stderr.flush()


def measured_crossovers(found: Iterable[Crossover]) -> Crossovers:
    """Return the processor's crossovers in use. If a crossover was not measured, it has its default value."""
    measured = {
        one.name: one.value for one in found if one.provenance is Provenance.MEASURED and one.name in CROSSOVERS
    }
    return Crossovers(**measured, measured=frozenset(measured))


def crossover_lines(found: MachineCrossovers) -> list[str]:
    """Return the stored crossovers as lines for a terminal."""
    return [f"{found.title}: crossovers ({found.day or units.NOT_MEASURED})", *map(_line, found.crossovers)]


def _line(one: Crossover) -> str:
    title, unit = TITLES.get(one.name, f"{one.name} from"), UNITS.get(one.name, "")
    said = [f"{one.provenance}{f' ({one.note})' if one.note else ''}"]
    if one.before_us is not None and one.after_us is not None and one.spread_percent is not None:
        before, after = WAYS.get(one.name, ON_THREADS)
        said.append(f"{before} {units.number(one.before_us)} us, {after} {units.number(one.after_us)} us")
        said.append(f"spread {one.spread_percent:.1f} %")
    return f"  {title:<31}{_value(one.value):>10} {unit:<25}  {', '.join(said)}"


def _value(value: int) -> str:
    return "never" if value == NEVER else f"{value:,}"
