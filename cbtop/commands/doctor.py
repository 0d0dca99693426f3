"""`cbtop doctor`: list the features of this machine that profiling can use.

Each fact is looked up or measured now.
"""

# Slow imports are inside the functions that need them, because the command line imports this module.

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import stat
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import pairwise
from pathlib import Path

from cbtop import units
from cbtop.client.collector import Collector
from cbtop.client.store import Store
from cbtop.commands.shared.compiled import why_in_python
from cbtop.commands.shared.engine import how_to_demo, require_engine
from cbtop.commands.shared.settings import check_values, read_config, unknown_keys
from cbtop.daemon.devices.nvml import Nvml
from cbtop.errors import UsageError
from cbtop.profiler.hot_path import chosen
from cbtop.protocol.device_messages import DeviceSample
from cbtop.protocol.ended import rings_of, runs
from cbtop.protocol.endpoint import default_endpoint, runtime_dir
from cbtop.protocol.errors import EndpointError, RoofsError
from cbtop.protocol.ring import DEFAULT_RING_BYTES
from cbtop.protocol.roofs import cpu_name, driver_version, known_roofs
from cbtop.protocol.runtime_directory import is_copied_on_write
from cbtop.protocol.vocabulary import DeviceKind

DESCRIPTION = "Check what profiling needs on this machine: one line for each fact, and a fix if something is missing."
EPILOG = "exit codes: 0 profiling works here, 1 it cannot: nothing can be recorded\n"

# Wait this many seconds for a daemon's answer. A running daemon answers within a quarter of this time.
ANSWER_S = 1.0
DRIVER_S = 5.0  # Wait this many seconds for NVML. Loading a driver takes up to three seconds.
CLOCK_READS = 10_000
CLOCK_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
OLDEST_PYTHON = (3, 11)
CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
VECTORS = ("avx512f", "avx2", "avx", "sse4.2", "sve", "neon")  # LLVM's names of vector instructions, the widest first


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact about this machine. `state` is `ok`, `missing` (an optional feature cannot be used) or `failed`
    (nothing can be recorded).
    """

    name: str
    value: str
    state: str = "ok"
    way_out: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    facts = []
    for look in FACTS:
        for fact in look():
            facts.append(fact)
            if not options.json:
                sys.stdout.write(_line(fact) + "\n")
                sys.stdout.flush()  # Print each fact immediately, because finding some facts takes a second.
    works = all(fact.state != "failed" for fact in facts)
    if options.json:
        document = {"schema": "cbtop.doctor/1", "works": works, "facts": [asdict(fact) for fact in facts]}
        sys.stdout.write(json.dumps(document) + "\n")
    return 0 if works else 1


def _line(fact: Fact) -> str:
    mark = {"ok": "✓", "missing": "–", "failed": "✗"}[fact.state]
    return f"{mark} {fact.name:<18}{fact.value}" + (f" → {fact.way_out}" if fact.way_out else "")


def _python() -> Iterator[Fact]:
    version = f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}"
    yield Fact("python", version, *(() if sys.version_info >= OLDEST_PYTHON else ("failed", "use 3.11 or newer")))


def _platform() -> Iterator[Fact]:
    system = f"{platform.system()} {platform.release()} on {platform.machine()}"
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    linux = () if sys.platform == "linux" else ("missing", "only Linux is tested")
    yield Fact("platform", f"{system}, {processors} processors to run on", *linux)


def _recorder() -> Iterator[Fact]:
    recorder = chosen().implementation
    found = why_in_python()
    yield Fact("recorder", f"{recorder}: {found[0]}", "missing", found[1]) if found else Fact("recorder", recorder)


def _clock() -> Iterator[Fact]:
    clock = time.perf_counter_ns
    reads = [clock() for _ in range(CLOCK_READS)]
    steps = [after - before for before, after in pairwise(reads)]
    try:
        source = f", kernel source {CLOCK_SOURCE.read_text(encoding='ascii').strip()}"
    except OSError:
        source = ""
    smallest = min((step for step in steps if step), default=0)
    measured = f"smallest step {smallest} ns, a read every {statistics.median(steps):.0f} ns"
    yield Fact("clock", f"{time.get_clock_info('perf_counter').implementation}{source}: {measured}")


def _runtime_directory() -> Iterator[Fact]:
    try:
        path = runtime_dir()
    except EndpointError as error:
        yield Fact("runtime directory", str(error), "failed", "until then nothing is recorded and no daemon can run")
        return
    if not os.access(path, os.W_OK):
        way_out = "nothing is recorded; set CBTOP_RUNTIME_DIR to a directory of yours that can be written"
        yield Fact("runtime directory", f"{path} cannot be written", "failed", way_out)
        return
    if is_copied_on_write(str(path)):
        way_out = "no ring can be made there; set CBTOP_RUNTIME_DIR to a directory of a tmpfs, such as /dev/shm"
        yield Fact("runtime directory", f"{path} is on btrfs, which copies on write", "failed", way_out)
        return
    free = shutil.disk_usage(path).free
    value = f"{path}, mode {stat.S_IMODE(path.stat().st_mode):04o}, yours alone, {units.size_bytes(free)} free"
    if free < DEFAULT_RING_BYTES:
        way_out = f"a process needs {units.size_bytes(DEFAULT_RING_BYTES)}: make room, or set CBTOP_RUNTIME_DIR"
        yield Fact("runtime directory", value, "failed", way_out)
        return
    yield Fact("runtime directory", value)
    yield _daemon(default_endpoint())
    yield _sources(path)


def _daemon(endpoint: str) -> Fact:
    """Return whether a daemon answers. A socket alone proves nothing, because its daemon may have been killed."""
    none = "viewers start one inside themselves; `cbtop daemon` serves many"
    if not Path(endpoint.removeprefix("ipc://")).is_socket():
        return Fact("daemon", f"none runs at {endpoint}", "missing", none)
    store = Store()
    collector = Collector(endpoint, store)
    deadline_s = time.monotonic() + ANSWER_S
    try:
        while store.daemon is None and not collector.refused and time.monotonic() < deadline_s:
            collector.poll(50)
    finally:
        collector.close()
    if collector.refused:
        return Fact("daemon", f"at {endpoint}: {collector.refused}", "missing", "stop it, or use its cbtop")
    if store.daemon is None:
        return Fact("daemon", f"none answers at {endpoint}", "missing", none)
    return Fact("daemon", f"cbtop {store.daemon.version}, pid {store.daemon.pid}, at {endpoint}")


def _sources(directory: Path) -> Fact:
    rings = [directory / name for name in rings_of(os.listdir(directory))]
    # Skip processes without a ring file, because they have recorded nothing yet.
    rings = [ring for ring in rings if ring.exists()]
    live = [int(ring.stem.partition("-")[0]) for ring in rings if runs(ring)]
    ended = len(rings) - len(live)
    if not live and not ended:
        return Fact("sources", "none", "missing", f"{how_to_demo()} is something to watch")
    pids = f" (pid {', '.join(map(str, sorted(live)))})" if live else ""
    return Fact("sources", f"{len(live)} live{pids}, {ended} ended")


def _gpu() -> Iterator[Fact]:
    """Yield the facts that NVML reports. They are read in a separate thread, because a driver may hang."""
    found: list[tuple[DeviceSample, str]] = []

    def look() -> None:
        sampler = Nvml()
        sample = sampler.sample(())
        found.append((sample, sampler.driver() if sample.devices else ""))
        sampler.close()

    asking = threading.Thread(target=look, daemon=True)
    asking.start()
    asking.join(DRIVER_S)
    if not found:
        yield Fact("GPU", f"its driver has not answered for {DRIVER_S:g} s", "missing", "nothing of it is sampled")
        return
    ((sample, driver),) = found
    if sample.trouble:
        way_out = "the devices view shows the CPU alone; what runs on a GPU is timed where a device_clock is given"
        yield Fact("GPU", sample.trouble, "missing", way_out)
        return
    names = Counter(device.name for device in sample.devices if not device.trouble)
    lost = [f"{device.name} {device.trouble}" for device in sample.devices if device.trouble]
    value = ", ".join([*(f"{count} × {name}" for name, count in names.items()), *lost])
    mig = " (no utilisation of MIG devices)" if any(one.kind is DeviceKind.MIG for one in sample.devices) else ""
    yield Fact("GPU", f"{value}{mig}, {driver}: sampled by NVML")


def _roofs() -> Iterator[Fact]:
    way_out = "`cbtop calibrate` measures them: they are the roofline's over models of torch"
    try:
        known = known_roofs()
    except RoofsError as error:
        yield Fact("roofs", str(error), "missing", way_out)
        return
    cpu, driver = cpu_name(), driver_version()
    here = [one for one in known if (one.device == cpu if one.threads else one.driver == driver)]
    if not here:
        yield Fact("roofs", "not known", "missing", way_out)
        return
    yield Fact("roofs", ", ".join(f"{one.title} ({one.measured_on or units.NOT_MEASURED})" for one in here))


def _numba() -> Iterator[Fact]:
    from cbtop.compute.errors import ComputeError

    try:
        require_engine("`cbtop demo`")
    except UsageError as error:
        yield Fact("numba", "the engine is not installed, and profiling does not need it", "missing", str(error))
        return
    try:
        # Do not load Numba for this fact. Loading takes half a second, or longer if Numba's kernels are not cached.
        from cbtop.compute.backends import cpu_backend
        from cbtop.compute.jit.cpu import CPU_NAME, HAS_TILES, TIER, has_feature

        backend = cpu_backend()
    except (ImportError, ComputeError) as error:
        yield Fact("numba", f"cannot be used: {error}", "missing", "`cbtop demo` needs it, profiling does not")
        return
    widest = next(filter(has_feature, VECTORS), "none of " + ", ".join(VECTORS))
    version = metadata.version("numba")
    vectors = f"vectors {widest} on {CPU_NAME}"
    products = "of floats" if TIER == "generic" else f"of int8 by {TIER}"
    of_many = ", of many tokens of bfloat16 by AMX" if HAS_TILES else ""
    yield Fact("numba", f"{version}, {backend.label}, {vectors}, products {products}{of_many}")


def _cuda() -> Iterator[Fact]:
    """Yield the facts about CuPy and NVIDIA's compiler. `--backend cuda` needs CuPy, the compiler, and a driver."""
    from cbtop.compute.errors import ComputeError

    way_out = "pip install 'cbtop[cuda]': `cbtop demo --backend cuda` needs it"
    try:
        version = metadata.version(next(name for name in CUPY if _is_installed(name)))
        from cbtop.compute.cuda.compiler import architectures

        known = architectures()
    except StopIteration:
        yield Fact("cuda", "CuPy is not installed", "missing", way_out)
    except ComputeError as error:
        yield Fact("cuda", str(error).partition(": pip")[0], "missing", way_out)
    else:
        yield Fact("cuda", f"CuPy {version}, kernels are compiled for {known[0]} to {known[-1]}")


def _nvidia_tools() -> Iterator[Fact]:
    """Yield a fact for each NVIDIA tool that reads machine code."""
    from cbtop.profiler.analysis.machine_code.tools import HOW_TO_GET, tools

    uses = {
        "ptxas": "`cbtop ptx` then has registers, spills and occupancy",
        "nvdisasm": "`cbtop ptx` then has accesses and intensity",
        "cuobjdump": "`cuobjdump -ptx PROGRAM` then prints the PTX of a program, for `cbtop ptx`",
    }
    for name, use in uses.items():
        found = tools(name)
        if not found:
            yield Fact(
                name, "not found on the PATH, in CUDA_HOME, or in packages", "missing", f"{HOW_TO_GET[name]}: {use}"
            )
            continue
        version = ".".join(map(str, found[0].version)) or "of an unknown version"
        others = f", and {len(found) - 1} older" if len(found) > 1 else ""
        yield Fact(name, f"{version}, {found[0].path}{others}")


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def _terminal() -> Iterator[Fact]:
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout)):
        yield Fact("terminal", "none: input or output is redirected", "missing", "`cbtop` prints a report there")
        return
    from rich.console import Console

    size, console = shutil.get_terminal_size(), Console()
    utf8 = console.encoding.startswith("utf")
    value = f"{size.columns}x{size.lines}, {console.color_system or 'no'} colours, {console.encoding}"
    yield Fact("terminal", value, *(() if utf8 else ("missing", "set LANG to a UTF-8 locale: cbtop draws with it")))


def _config() -> Iterator[Fact]:
    from cbtop.commands.shared.show import SETTINGS

    try:
        config = read_config()
        check_values(config, SETTINGS)
    except UsageError as error:
        yield Fact("config", str(error), "missing", "no screen and no report before it is mended")
        return
    for line in unknown_keys(config, SETTINGS):
        yield Fact("config", line, "missing", "correct it there")
    presets = f", presets {', '.join(config.presets)}" if config.presets else ""
    yield Fact("config", f"{config.path}{presets}" if config.is_there else f"none: there is no {config.path}")


def _extras() -> Iterator[Fact]:
    yield _installed("prometheus", ("prometheus-client",), "pip install prometheus-client")
    yield _installed("opentelemetry", ("opentelemetry-sdk",), "pip install opentelemetry-sdk")


def _installed(name: str, distributions: tuple[str, ...], way_out: str) -> Fact:
    for distribution in distributions:
        try:
            return Fact(name, f"{distribution} {metadata.version(distribution)}")
        except metadata.PackageNotFoundError:
            continue
    return Fact(name, "not installed", "missing", way_out)


FACTS: tuple[Callable[[], Iterator[Fact]], ...] = (
    _python,
    _platform,
    _recorder,
    _clock,
    _runtime_directory,
    _gpu,
    _roofs,
    _numba,
    _cuda,
    _nvidia_tools,
    _terminal,
    _config,
    _extras,
)
