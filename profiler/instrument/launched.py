"""Instruments a process under `cbtop run`, before the process calls a module of torch for the first time."""

from __future__ import annotations

import functools
import logging

from cbtop.profiler import instrument as instrumentation
from cbtop.profiler.instrument import vllm_plugin
from cbtop.profiler.instrument.awaited import once_imported
from cbtop.profiler.instrument.run_profiler import profiler_of_run
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.signals import reraise_host_error

CONTINUOUS_BATCHING = "transformers.generation.continuous_batching.continuous_api"
_log = logging.getLogger("cbtop")


def instrument(overhead_percent: float, nothing_yet: str, is_lent: bool) -> None:
    """Instrument every model that this process calls. The overhead is at most `overhead_percent` of the process's
    time.

    `is_lent` says that cbtop is not installed in this environment. vLLM then does not find cbtop among its plugins.
    """
    profiler = profiler_of_run(overhead_percent, nothing_yet)
    instrumentation.install(profiler)
    once_imported("llama_cpp", functools.partial(_follow_llama, profiler))
    once_imported(CONTINUOUS_BATCHING, _follow_continuous_batching)
    once_imported("sglang", _await_sglang)
    if is_lent:
        once_imported("vllm", vllm_plugin.register)


def _follow_continuous_batching() -> None:
    """Follow the requests of transformers' continuous batching. Called when transformers has imported it."""
    from cbtop.profiler.instrument import continuous_batching

    continuous_batching.follow()


def _follow_llama(profiler: BrickProfiler) -> None:
    """Follow llama-cpp-python. Called when it was imported."""
    from cbtop.profiler.instrument import llama_cpp_python

    llama_cpp_python.follow(profiler)


def _await_sglang() -> None:
    """Wait for the import of SGLang's model runner. Called when SGLang was imported."""
    try:
        from cbtop.profiler.instrument import sglang_runner

        sglang_runner.await_import()
    except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
        reraise_host_error(error)
        _log.warning("cbtop: SGLang is not shown: %s", error)
