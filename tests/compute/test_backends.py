"""Tests of the list of backends that a machine has. The machine is simulated."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbtop.compute import backends
from cbtop.compute.backends import cpu_backend
from cbtop.compute.errors import ComputeError


@pytest.mark.parametrize(
    ("siblings", "cores"),
    [(["0,2", "1,3", "0,2", "1,3"], 2), (["0", "1", "2", "3"], 4), ([], 4)],
    ids=["two threads a core", "one thread a core", "not said"],
)
def test_threads_of_one_core_are_one_core(
    siblings: list[str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, text in enumerate(siblings):
        file = tmp_path / f"cpu{number}/topology/thread_siblings_list"
        file.parent.mkdir(parents=True)
        file.write_text(f"{text}\n")
    monkeypatch.setattr(backends, "SYSFS_CPU", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert backends.physical_cores() == cores


def test_compiling_is_told_with_the_kernels_that_are_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.1.nbc", "b.2.nbc", "index.nbi", "c.tmp"):
        (tmp_path / name).touch()
    monkeypatch.setattr(backends, "NUMBA_CACHE", tmp_path)
    assert backends.compiling() == "compiling kernels: 2 done"
    monkeypatch.setattr(backends, "NUMBA_CACHE", None)
    assert backends.compiling() == "compiling kernels"


def test_what_other_processes_use_is_all_that_is_used_less_our_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, own_s = 100.0, 3.0
    stat = tmp_path / "stat"
    stat.write_text("cpu  1000 200 300 99999 50 10 20 30 7 8\ncpu0 1 1 1 1\n")
    monkeypatch.setattr(backends, "PROC_STAT", stat)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(time, "process_time", lambda: own_s)
    others = backends.OtherProcesses()
    now_s, own_s = 110.0, 8.0
    stat.write_text("cpu  2000 300 400 199999 90 20 30 280 7 8\ncpu0 1 1 1 1\n")
    # Four processors have 40 s of time in ten seconds.
    assert others.percent() == pytest.approx(100 * (14.7 - 5.0) / 40)
    stat.unlink()
    others = backends.OtherProcesses()
    now_s = 120.0
    assert others.percent() == 0


def test_without_torch_it_is_said_that_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ComputeError, match="torch is not installed"):
        backends.torch_on(1)


_IN_A_FORK = """
import os, sys
from pathlib import Path
from cbtop.compute.backends import cpu_backend
from cbtop.compute.decoder.base import read_model
from cbtop.compute.decoder import FAMILIES
from cbtop.compute.errors import ComputeError
from cbtop.compute.workload import bare_decoder

model = read_model(Path(sys.argv[1]), FAMILIES)
expected = bare_decoder(model, 2, 16).prefill([3, 1, 4])
several = bare_decoder(model, 2, 16)
if os.fork() == 0:
    for refused in (lambda: several.prefill([3, 1, 4]), lambda: cpu_backend(2)):
        try:
            refused()
        except ComputeError as error:
            assert "2 threads in a fork" in str(error)
        else:
            os._exit(1)
    os._exit(0 if bare_decoder(model, 1, 16).prefill([3, 1, 4]) == expected else 2)
assert os.wait()[1] == 0
assert several.prefill([3, 1, 4]) == expected
"""


def test_a_fork_of_a_decoding_process_gets_an_error_if_openmp_would_end_it(model_files: dict[str, Path]) -> None:
    environment = os.environ | {"NUMBA_NUM_THREADS": "2"}
    command = [sys.executable, "-c", _IN_A_FORK, str(model_files["qwen2"])]
    subprocess.run(command, check=True, timeout=300, env=environment)


_ON_THREADS = """
import sys, threading
from dataclasses import replace
from pathlib import Path
from cbtop.compute.backends import cpu_backend
from cbtop.compute.decoder.base import read_model
from cbtop.compute.decoder import FAMILIES
from cbtop.compute.settings import crossovers, use_crossovers
from cbtop.compute.workload import bare_decoder

model = read_model(Path(sys.argv[1]), FAMILIES)
prompt = [3, 1, 4, 1, 5]

def tokens(decoder):
    found = [decoder.prefill(prompt)]
    while decoder.position < decoder.context:
        found.append(decoder.decode(found[-1]))
    return found

def several():
    for _ in range(4):
        wrong.append(tokens(bare_decoder(model, 2, 24)) != expected)

expected, wrong = tokens(bare_decoder(model, 1, 24)), []
use_crossovers(replace(crossovers(), product_bytes=1, attention_products=1))
threads = [threading.Thread(target=several) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(cpu_backend(2).threading_layer, len(wrong), sum(wrong))
"""


@pytest.mark.slow
def test_decoders_on_threads_take_turns_if_numba_has_threads_for_only_one(model_files: dict[str, Path]) -> None:
    environment = os.environ | {"NUMBA_NUM_THREADS": "2", "NUMBA_THREADING_LAYER": "workqueue"}
    command = [sys.executable, "-c", _ON_THREADS, str(model_files["qwen2"])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert (done.returncode, done.stdout) == (0, "workqueue 8 0\n"), done.stderr


@pytest.mark.parametrize("threads", [True, False, 1.5, "2"])
def test_what_is_no_number_of_threads_is_refused_by_name(threads: Any) -> None:
    with pytest.raises(ComputeError, match=rf"^{threads} threads: this process may use 1 to "):
        cpu_backend(threads)


def test_a_number_of_threads_may_be_of_numpy() -> None:
    one: Any = np.int64(1)
    assert cpu_backend(one) == cpu_backend(1)


def test_threads_that_numba_cannot_start_are_an_error_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(threads: int) -> None:
        raise ValueError("No threading layer could be loaded.\nHINT: install it")

    monkeypatch.setattr("numba.set_num_threads", fail)
    with pytest.raises(ComputeError, match=r"^Numba starts no threads \(No threading layer could be loaded\.\)$"):
        backends.cpu_backend(1)
