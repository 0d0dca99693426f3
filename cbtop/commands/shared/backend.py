"""`--backend auto`: choose the CPU or the GPU for a model, from the measurements of `cbtop calibrate`."""

from __future__ import annotations

from pathlib import Path

from cbtop.compute.errors import ComputeError
from cbtop.compute.settings import BACKENDS
from cbtop.protocol.crossovers import Crossover, crossovers_of
from cbtop.protocol.errors import RoofsError
from cbtop.protocol.roofs import cpu_name, driver_version
from cbtop.protocol.vocabulary import Provenance

AUTO = "auto"
WITH_AUTO = (*BACKENDS, AUTO)


def settled(path: Path, prompt_tokens: int | None = None) -> tuple[str, str]:
    """Return which of BACKENDS should run the model at `path`, and a line with the reason.

    The choice is for decoding, or for prompts of `prompt_tokens` tokens. Without an NVIDIA driver, the reason is "".
    The CPU runs a model with less work than the measured crossover. Raises ComputeError if the model cannot be read.
    """
    if not driver_version():
        return "cpu", ""
    from cbtop.compute.backends import available_threads  # imported here, because this import loads Numba
    from cbtop.compute.gpu_crossovers import DECODING, PROMPTS, layer_bytes

    name = DECODING if prompt_tokens is None else PROMPTS
    try:
        kept = crossovers_of(cpu_name(), available_threads())
    except RoofsError as error:
        return _said("cpu", f"{error}; `cbtop calibrate` measures from when on a GPU is quicker")
    found = next((one for one in kept.crossovers if one.name == name), None) if kept else None
    if found is None:
        return _said("cpu", "from when on a GPU is quicker was not measured: `cbtop calibrate` does")
    if found.provenance is not Provenance.MEASURED:
        return _said("cpu", f"the GPU was not quicker for certain ({found.note})")
    return _by(found, layer_bytes(path) * (prompt_tokens or 1), path)


def _by(found: Crossover, work: int, path: Path) -> tuple[str, str]:
    what = f"{work:,} of {found.name}, from {found.value:,} on {found.note} is quicker"
    if work < found.value:
        return _said("cpu", what)
    from cbtop.compute.gpu.device import Gpu

    try:
        gpu = Gpu()
        gpu.require_room(path.stat().st_size, "the weights")
    except ComputeError as error:
        return _said("cpu", str(error))
    if gpu.name != found.note:
        return _said("cpu", f"measured was {found.note}, here is {gpu.name}: `cbtop calibrate` measures it")
    return _said("cuda", what)


def _said(backend: str, why: str) -> tuple[str, str]:
    return backend, f"backend {backend}: {why}"
