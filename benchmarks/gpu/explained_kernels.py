"""Compare what cbtop says about kernels with the driver: `python -m benchmarks.gpu.explained_kernels [PART ...]`.

- `decode`: a prefill and three tokens of transformers' Llama with the shapes of a 7B (2 layers, bf16).
- `compiled`: the same model under torch.compile.
- `engine`: a token of cbtop's own engine with a 7B in Q4_K_M (2 layers).
- `diff`: two builds of one Triton kernel that differ in registers, recorded by `cbtop run`.
  `cbtop diff` must name the change.

The first three compare blocks per multiprocessor for each launch: cbtop's rules, from CUPTI's record of it, and
`cuOccupancyMaxActiveBlocksPerMultiprocessor` for the function that was launched. Each part runs in its own process,
because torch never releases CUPTI. The exit code is 1 if a part fails.
"""

from __future__ import annotations

import ctypes
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import torch  # provides libcupti

from cbtop.profiler.analysis.machine_code.occupancy import BlockShape, occupancy_of
from cbtop.profiler.device.cupti import (
    KernelRecord,
    TorchsCupti,
    _Called,
    _functions_of,
    decoded,
    demangled,
    library_path,
)
from cbtop.profiler.device.kernel_burst import OF_KERNELS

LAYERS, TOKENS = 2, 3
SECONDS, LIMIT, OVERHEAD = 12, 32, "20%"
DRIVER_CALLS, ENTER = 1, 0  # CUPTI_CB_DOMAIN_DRIVER_API, CUPTI_API_ENTER
REGISTERS = 4  # CU_FUNC_ATTRIBUTE_NUM_REGS
MAX_NAME = 60


class CallbackData(ctypes.Structure):
    """`CUpti_CallbackData` of cupti_callbacks.h (CUDA 12 and 13)."""

    _fields_ = (
        ("site", c_int),
        ("function_name", c_char_p),
        ("parameters", c_void_p),
        ("returned", c_void_p),
        ("symbol_name", c_void_p),
        ("context", c_void_p),
        ("context_number", c_uint32),
        ("data", c_void_p),
        ("correlation", c_uint32),
    )


class LaunchKernel(ctypes.Structure):
    """The parameters of cuLaunchKernel: the function, the grid, the block, and bytes of dynamic shared memory."""

    _fields_ = (("function", c_void_p), ("sizes", c_uint * 6), ("shared_bytes", c_uint))


class LaunchConfig(ctypes.Structure):
    """The beginning of `CUlaunchConfig`."""

    _fields_ = (("sizes", c_uint * 6), ("shared_bytes", c_uint))


class LaunchKernelEx(ctypes.Structure):
    """The parameters of cuLaunchKernelEx: its configuration and the function."""

    _fields_ = (("config", ctypes.POINTER(LaunchConfig)), ("function", c_void_p))


class Launch(NamedTuple):
    """A launch as the driver got it."""

    function: int
    threads: int
    shared_bytes: int


class Checked(NamedTuple):
    """A kernel, and how many of its blocks fit on a multiprocessor: by cbtop, and by the driver."""

    name: str
    threads: int
    registers: int
    shared_bytes: int
    cbtop: int | None
    driver: int
    driver_registers: int


class LaunchedFunctions(TorchsCupti):
    """CUPTI that also keeps which function each call of the driver launches."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: dict[int, Launch] = {}  # by correlation id
        self.others: set[str] = set()  # other calls that launch
        self._callbacks = (*self._callbacks[:2], _Called(self._called))
        enable = ctypes.CDLL(library_path()).cuptiEnableDomain
        enable.argtypes, enable.restype = (c_uint32, c_void_p, c_int), c_int
        self._enable = enable

    def watch(self, *, is_on: bool) -> None:
        """Begin or end to look at calls of the driver."""
        result = self._enable(int(is_on), self._subscriber, DRIVER_CALLS)
        if result:
            raise RuntimeError(f"cuptiEnableDomain returns {result}")

    def _called(self, _data: Any, _domain: int, _which: int, called: int) -> None:
        call = ctypes.cast(called, ctypes.POINTER(CallbackData)).contents
        if call.site != ENTER or not call.parameters:
            return
        name = (call.function_name or b"").decode()
        if name.startswith("cuLaunchKernelEx"):
            given = ctypes.cast(call.parameters, ctypes.POINTER(LaunchKernelEx)).contents
            config = given.config.contents
            launch = Launch(given.function, math.prod(config.sizes[3:]), config.shared_bytes)
        elif name.removesuffix("_ptsz") == "cuLaunchKernel":
            plain = ctypes.cast(call.parameters, ctypes.POINTER(LaunchKernel)).contents
            launch = Launch(plain.function, math.prod(plain.sizes[3:]), plain.shared_bytes)
        else:
            if "Launch" in name:
                self.others.add(name)
            return
        self.launches[call.correlation] = launch


def launched(run: Callable[[], object]) -> tuple[list[Checked], int, set[str]]:
    """Return each different launch of `run`, how many launches had no function, and other calls that launch."""
    torch.cuda.synchronize()
    cupti = LaunchedFunctions()
    cupti.begin(OF_KERNELS)
    try:
        cupti.watch(is_on=True)
        run()
        torch.cuda.synchronize()
        cupti.watch(is_on=False)
        cupti.end()
        raw = cupti._records(_functions_of(library_path())["cuptiActivityGetNextRecord"])
        records = [one for one in map(decoded, raw) if isinstance(one, KernelRecord)]
        found = {}
        unknown = 0
        for one in records:
            launch = cupti.launches.get(one.call)
            if launch is None:
                unknown += 1
                continue
            key = (launch, one.registers, one.static_bytes, one.dynamic_bytes)
            if key not in found:
                found[key] = checked(demangled(cupti.text(one.name_at)), one, launch)
    finally:
        cupti.finalize()
    return list(found.values()), unknown, cupti.others


def checked(name: str, record: KernelRecord, launch: Launch) -> Checked:
    """Compare cbtop's number of blocks for a record with the driver's."""
    major, minor = torch.cuda.get_device_capability()
    threads = math.prod(record.block)
    shared_bytes = record.static_bytes + record.dynamic_bytes
    own = occupancy_of(f"sm_{major}{minor}", BlockShape(threads, record.registers, shared_bytes))
    driver = ctypes.CDLL("libcuda.so.1")
    blocks, registers = c_int(), c_int()
    most = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
    most.argtypes, most.restype = (ctypes.POINTER(c_int), c_void_p, c_int, c_size_t), c_int
    results = [
        most(byref(blocks), launch.function, launch.threads, launch.shared_bytes),
        registers_of(driver, launch, registers),
    ]
    if any(results):
        raise RuntimeError(f"the driver returns {results} for {name}")
    return Checked(
        name, threads, record.registers, shared_bytes, own.blocks if own else None, blocks.value, registers.value
    )


def registers_of(driver: Any, launch: Launch, registers: c_int) -> int:
    """Ask the driver for a function's registers a thread. Returns its result.

    A launch may name a kernel without a context (CUkernel). Then the driver is asked for its function.
    """
    ask, convert = driver.cuFuncGetAttribute, driver.cuKernelGetFunction
    ask.argtypes, ask.restype = (ctypes.POINTER(c_int), c_int, c_void_p), c_int
    convert.argtypes, convert.restype = (ctypes.POINTER(c_void_p), c_void_p), c_int
    if ask(byref(registers), REGISTERS, launch.function) == 0:
        return 0
    function = c_void_p()
    return int(convert(byref(function), launch.function) or ask(byref(registers), REGISTERS, function))


# --- the models ------------------------------------------------------------------------------------------------


def llama() -> Any:
    """Return transformers' Llama with the shapes of a 7B and random weights, in bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(num_hidden_layers=LAYERS, hidden_size=4096, intermediate_size=11008, num_attention_heads=32)
    with torch.device("cuda"):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def generation(*, is_compiled: bool) -> Callable[[], object]:
    """Return a function that runs a prefill and TOKENS steps of decoding. It has run once before."""
    model = llama()
    forward = torch.compile(model, dynamic=True) if is_compiled else model
    words = torch.randint(0, 32000, (1, 128), device="cuda")

    @torch.no_grad()
    def run() -> None:
        out = forward(words, use_cache=True)
        for _ in range(TOKENS):
            token = out.logits[:, -1:].argmax(-1)
            out = forward(token, past_key_values=out.past_key_values, use_cache=True)

    run()
    return run


def engine_pass() -> Callable[[], object]:
    """Return a function that launches the kernels of a token of cbtop's engine one by one."""
    from benchmarks.gpu.shapes import model_7b
    from cbtop.compute.decoder.on_gpu import GpuDecoder
    from cbtop.compute.gpu.device import Gpu
    from cbtop.compute.gpu.passes import LaunchedPass
    from cbtop.profiler.profiler import BrickProfiler

    torch.cuda.init()
    gpu = Gpu()
    decoder = GpuDecoder(gpu, model_7b(gpu, LAYERS), BrickProfiler(enabled=False), 512)
    decoder.decode(decoder.prefill([*range(100)]))

    def run() -> None:
        ran = LaunchedPass(gpu, None, decoder._code_space)
        decoder._whole_pass((1,), ran.run, ran.layer)
        gpu.cupy.cuda.runtime.deviceSynchronize()

    return run


MODELS: dict[str, Callable[[], Callable[[], object]]] = {
    "decode": lambda: generation(is_compiled=False),
    "compiled": lambda: generation(is_compiled=True),
    "engine": engine_pass,
}


def compare(part: str) -> bool:
    """Print the blocks per multiprocessor of a model's kernels. Returns whether all agree."""
    rows, unknown, others = launched(MODELS[part]())
    print(f"{'kernel':{MAX_NAME}} {'threads':>7} {'registers':>9} {'shared B':>8} {'cbtop':>5} {'driver':>6}")
    for row in sorted(rows):
        differs = row.cbtop != row.driver
        print(
            f"{row.name[:MAX_NAME]:{MAX_NAME}} {row.threads:>7} {row.registers:>9} {row.shared_bytes:>8} "
            f"{'n/a' if row.cbtop is None else row.cbtop:>5} {row.driver:>6}"
            + ("  DIFFERS" if differs else "")
            + (f"  ({row.driver_registers} registers by the driver)" if row.registers != row.driver_registers else "")
        )
    equal = sum(row.cbtop == row.driver for row in rows)
    names = len({row.name for row in rows})
    passes = 0 < len(rows) == equal and not unknown
    print(
        f"{part}: {'PASS' if passes else 'FAIL'}: {equal} of {len(rows)} launch shapes of {names} kernels agree; "
        f"{unknown} launches without a function{'; other calls: ' + ', '.join(sorted(others)) if others else ''}"
    )
    return passes


# --- two builds of one kernel ----------------------------------------------------------------------------------


def diff_of_builds() -> bool:
    """Record two builds of a Triton kernel, and print their `cbtop diff`. Returns whether it names the registers."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / "base.cbtop", Path(folder) / "new.cbtop"]
        builds = [recorded(file, *options) for file, options in zip(files, ((), (str(LIMIT),)), strict=True)]
        command = [sys.executable, "-m", "cbtop", "diff", *map(str, files)]
        text, raw = (
            subprocess.run([*command, "--format", form], capture_output=True, text=True, check=False)
            for form in ("text", "json")
        )
    print(text.stdout, text.stderr, raw.stderr, sep="")
    return names_cause(raw.stdout, text.stdout, builds[0]["registers"], builds[1]["registers"])


def recorded(file: Path, *options: str) -> dict[str, int]:
    """Record a run of the model with Triton kernels. Returns the registers and spills that Triton reports."""
    program = [sys.executable, "-m", "benchmarks.gpu.triton_norm", str(SECONDS), *options]
    command = [sys.executable, "-m", "cbtop", "run", "--overhead", OVERHEAD, "--record", str(file), "--", *program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr[-3000:], sep="")
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}")
    build: dict[str, int] = next(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    return build


def names_cause(raw: str, text: str, before: int, now: int) -> bool:
    """Print and return whether a diff names the change of registers that Triton reports, and in its text, too."""
    kernels = json.loads(raw)["causes"]["kernels"] if raw else []
    changes = [(one["kernel"], one["before"], one["now"]) for one in kernels if one["what"] == "registers"]
    is_named = any("norm_rows" in name and (a, b) == (before, now) for name, a, b in changes)
    is_shown = f"{before} → {now} registers" in text
    passes = before != now and is_named and is_shown
    print(f"diff: {'PASS' if passes else 'FAIL'}: Triton reports {before} and {now} registers; causes: {changes}")
    return passes


def main(parts: list[str]) -> int:
    if len(parts) == 1:
        return not (diff_of_builds() if parts[0] == "diff" else compare(parts[0]))
    results = {}
    for part in parts or [*MODELS, "diff"]:
        begun_s = time.monotonic()
        command = [sys.executable, "-m", "benchmarks.gpu.explained_kernels", part]
        results[part] = subprocess.run(command, check=False).returncode
        print(f"({part}: {time.monotonic() - begun_s:.0f} s)", flush=True)
    failed = [part for part, code in results.items() if code]
    outcome = "FAIL" if failed else "PASS"
    print(
        f"{outcome}: {len(results) - len(failed)} of {len(results)} parts pass", *(f"{one} fails" for one in failed)
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
