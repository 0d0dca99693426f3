"""Run the benchmarks and print their figures.

python -m benchmarks [NAME ...]         all benchmarks, or the named ones; `--help` describes them
python -m benchmarks real [NAME ...]    real programs with and without cbtop; this command has its own options
python -m benchmarks loops [NAME ...]   parts of training steps and the clocks of the program; own options
python -m benchmarks targets            NumPy, SciPy, torch and cbtop side by side; this command has its own option
python -m benchmarks planted            how often a slow layer is named; this command has its own options
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence

from benchmarks import (
    checks,
    compute,
    contracts,
    decode,
    elementwise,
    faults,
    first_token,
    gemv,
    gguf_reader,
    guard,
    hot_path,
    instrument,
    kernels,
    libraries,
    llama_cpp,
    load,
    planted,
    ptx,
    recording,
    screen,
    start_up,
    targets,
    tiles,
    training_loops,
    views,
    widgets,
)
from benchmarks.base import Figure
from benchmarks.real import run as real

BENCHMARKS = {
    "hot_path": hot_path.run,
    "checks": checks.run,
    "compute": compute.run,
    "contracts": contracts.run,
    "decode": decode.run,
    "instrument": instrument.run,
    "guard": guard.run,
    "libraries": libraries.run,
    "kernels": kernels.run,
    "gemv": gemv.run,
    "elementwise": elementwise.run,
    "tiles": tiles.run,
    "llama_cpp": llama_cpp.run,
    "recording": recording.run,
    "screen": screen.run,
    "views": views.run,
    "widgets": widgets.run,
    "load": load.run,
    "faults": faults.run,
    "start_up": start_up.run,
    "first_token": first_token.run,
    "gguf_reader": gguf_reader.run,
    "ptx": ptx.run,
}
WITH_OPTIONS: dict[str, Callable[[Sequence[str]], int]] = {
    "real": real.main,
    "planted": planted.main,
    "targets": targets.main,
    "loops": training_loops.main,
}


def main() -> int:
    if sys.argv[1:2] and sys.argv[1] in WITH_OPTIONS:
        return with_runtime_directory(lambda: WITH_OPTIONS[sys.argv[1]](sys.argv[2:]))
    wants_help = "--help" in sys.argv[1:]
    chosen = [name for name in sys.argv[1:] if name != "--help"] or list(BENCHMARKS)
    if unknown := [name for name in chosen if name not in BENCHMARKS]:
        print(
            f"no benchmark is called {unknown[0]!r}; there are {', '.join([*BENCHMARKS, *WITH_OPTIONS])}",
            file=sys.stderr,
        )
        return 2
    if wants_help:
        for name in chosen:
            print(f"{name}: {sys.modules[BENCHMARKS[name].__module__].__doc__}")
        return 0
    return with_runtime_directory(lambda: run_all(chosen))


def with_runtime_directory(call: Callable[[], int]) -> int:
    """Print the machine and return the result of `call`, which gets an empty runtime directory."""
    print(f"Python {platform.python_version()}, {len(os.sched_getaffinity(0))} cores, {platform.machine()}\n")
    with tempfile.TemporaryDirectory(prefix="cbtop-bench-") as directory:
        os.environ["CBTOP_RUNTIME_DIR"] = directory
        return call()


def run_all(chosen: Sequence[str]) -> int:
    for name in chosen:
        print(f"{name} …", file=sys.stderr, flush=True)
        for figure in BENCHMARKS[name]():
            print(_line(figure), flush=True)
    return 0


def _line(figure: Figure) -> str:
    line = f"{figure.what:<56}{figure.value:>10,.1f} {figure.unit:<12}"
    if figure.ratio is None:
        return line.rstrip()
    spread = f"({figure.ratio.low:.3f} to {figure.ratio.high:.3f})"
    return f"{line}{figure.ratio.median:8.3f} {spread:<18} × {figure.peer}"


sys.exit(main())
