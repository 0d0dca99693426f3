"""Measure the CPU time from the start of a process to the first token of the demo's model, and the memory of the
process.

In the cold case, the cache of compiled kernels is empty, and the workload of `cbtop demo` runs. It compiles in a
forked process, whose CPU time counts. In the warm case, another process has filled the cache, and a decoder is
called.

The process uses one thread, and no threads of NumPy's BLAS. Those spin when NumPy is imported, for 2.2 s in all on 16
cores. Python's own files are compiled, as in an installed package.

Memory is the resident memory beyond the weights: in the cold case after 64 tokens, in the warm case after prompts of
one token and of a full context.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.base import Figure
from cbtop.compute.demo_model import demo_model

COLD_ROUNDS, WARM_ROUNDS = 3, 7
PROMPTS = (1, 128, 511)  # number of tokens of a prompt; the demo's context has 512
RESIDENT = """
import json, re, sys, time
from pathlib import Path

def resident_mb(model):
    kib = re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]
    return (int(kib) * 1024 - model.weights_bytes) / 1e6
"""
COLD = f"""{RESIDENT}
import resource
from cbtop.compute import workload
from cbtop.compute.settings import WorkloadOptions
from cbtop.profiler.profiler import BrickProfiler

found = {{}}

def progress(what, done):
    if what == "checking the bricks":  # which comes once a prompt has been through the model
        forked = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.setdefault("cpu_s", time.process_time() + forked.ru_utime + forked.ru_stime)

options = WorkloadOptions(model=Path(sys.argv[1]), threads=1, steps=64)
decoder = workload.run(options, BrickProfiler(enabled=False), lambda: False, progress)
found["resident_mb"] = resident_mb(decoder.model)
print(json.dumps(found))
"""
WARM = f"""{RESIDENT}
from cbtop.compute.decoder.int8 import model_to_run
from cbtop.compute.workload import bare_decoder

model = model_to_run(Path(sys.argv[1]), is_exact=False)
decoder = bare_decoder(model, 1, model.context_length)
decoder.prefill(range(8))
found = {{"cpu_s": time.process_time()}}
for tokens in map(int, sys.argv[2:]):
    decoder.restart()
    decoder.prefill(range(tokens))
    found[f"prompt {{tokens}}"] = resident_mb(model)
print(json.dumps(found))
"""


def run() -> list[Figure]:
    path = str(demo_model(lambda what, done: None))
    with tempfile.TemporaryDirectory(prefix="cbtop-bench-") as root:
        caches = (str(Path(root, f"cache {number}")) for number in range(COLD_ROUNDS + 1))
        last = next(caches)
        # Run once without using the result, because this first run also compiles Python's own files.
        _measured(COLD, path, last, root)
        cold = [_measured(COLD, path, last := cache, root) for cache in caches]
        warm = [_measured(WARM, path, last, root) for _ in range(WARM_ROUNDS)]
    return [
        Figure("first token, cold: CPU time", statistics.median(found["cpu_s"] for found in cold), "s"),
        Figure("first token, warm: CPU time", statistics.median(found["cpu_s"] for found in warm), "s"),
        Figure("beyond the weights, resident, cold", statistics.median(found["resident_mb"] for found in cold), "MB"),
        *(
            Figure(
                f"beyond the weights, resident after {tokens} tokens",
                statistics.median(found[f"prompt {tokens}"] for found in warm),
                "MB",
            )
            for tokens in PROMPTS
        ),
    ]


def _measured(program: str, path: str, cache: str, compiled: str) -> dict[str, float]:
    command = [sys.executable, "-c", program, path, *map(str, PROMPTS)]
    variables = os.environ | {"NUMBA_CACHE_DIR": cache, "PYTHONPYCACHEPREFIX": compiled, "OPENBLAS_NUM_THREADS": "1"}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    found: dict[str, float] = json.loads(subprocess.check_output(command, env=variables))
    return found
