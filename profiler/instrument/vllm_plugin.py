"""A plugin for vLLM (`vllm.general_plugins`). Under `cbtop run` each run of vLLM's model runner is a step.

vLLM calls `register` in every process that it starts. This file imports nothing of vLLM. Without `cbtop run` it also
imports nothing else of cbtop.

Rules
- Names come from vLLM's engine version 1, with both of its model runners. Tests use stand-ins with the same names and
  signatures. vLLM 0.22 was run on a GPU, with the first of the runners.
- A step begins with the runner's `execute_model`. It ends with `sample_tokens` if vLLM calls that separately.
- The scheduled requests decide the phase. A request without output is a prompt: prefill if no tokens are computed
  yet, else extend (a later chunk, or a cached prefix). A request with a draft's tokens is verify.
- The tokens of a step are the scheduled tokens. If all requests verify a draft, the accepted tokens are counted
  instead, if the host has them.
- If vLLM compiles the model, only replays of graphs with a whole call have bricks (timed parts). By default these are
  decode steps. Dynamo's records name the compiled code between two calls of attention. A call of attention is named
  by its layer.
- Prompts and mixed steps run one graph per piece, so they have no bricks.
"""

from __future__ import annotations

import functools
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from cbtop.profiler.instrument.phases import Call

WHOLE = 2  # value of vLLM's CUDAGraphMode for graphs with a whole call of the model
# Method of an attention backend that launches kernels outside of compiled code -> its brick (None: the module's
# brick).
OPAQUE: tuple[tuple[str, str | None], ...] = (("forward", None), ("do_kv_cache_update", "KvWrite"))


def register() -> None:
    """Patch vLLM's runners. vLLM calls this, in some processes more than once."""
    if os.environ.get("CBTOP_RUN", "0") == "0" or "torch" not in sys.modules:
        return
    from cbtop.profiler.instrument import phases, vllm_contract, vllm_serving
    from cbtop.profiler.instrument.functions import brick_of_name
    from cbtop.profiler.instrument.runners import (
        Engine,
        compiles_pieces,
        ends,
        loads,
        once_there,
        prepares_inputs,
        runs,
        runs_without_requests,
        samples,
    )
    from cbtop.profiler.instrument.vllm_contract import COMPILERS, RUNNER, RUNNERS

    # Importing `phases` in `_describe` would take a microsecond of each step.
    describe = functools.partial(_describe, phases)
    engine = Engine(
        "vLLM",
        _model_of,
        _bricks,
        describe,
        samples_later=lambda result: result is None,
        describe_capture=functools.partial(_describe_capture, phases),
        opaque_methods=functools.partial(_opaque_methods, brick_of_name),
        say_differences=vllm_contract.say_differences,
    )
    for module, (preparing, sampling) in RUNNERS.items():
        wrappers = {
            "execute_model": lambda original: runs(original, engine),
            "load_model": lambda original: loads(original, engine),
            "sample_tokens": lambda original: ends(original, _accepted),
            sampling: samples,
            "_dummy_run": lambda original: runs_without_requests(original, engine),
            preparing: prepares_inputs,
            "__init__": vllm_serving.names_engine,
        }
        once_there(engine, module, RUNNER, wrappers)
    once_there(engine, *COMPILERS, {"compile": compiles_pieces})
    vllm_serving.follow()
    vllm_contract.compare_unknown_version()


def _model_of(runner: Any) -> nn.Module:
    model: nn.Module = runner.get_model()  # vLLM's wrapper replays graphs, so use the model inside it
    return model


def _bricks(runner: Any) -> tuple[bool, str]:
    config = runner.vllm_config.compilation_config
    # cudagraph_mode is one number, or one for decode steps and one for all other steps
    graphs = config.cudagraph_mode.value
    # before vLLM 0.11, the setting `mode` was called `level`
    if int(config.mode if hasattr(config, "mode") else config.level):
        if (graphs[0] if isinstance(graphs, tuple) else graphs) == WHOLE:
            return False, "compiles its model: only decode steps have bricks, unless with enforce_eager"
        return False, "compiles its model: its steps are shown, its bricks with enforce_eager"
    if any(graphs) if isinstance(graphs, tuple) else graphs:
        return True, "replays captured graphs: steps that do have no bricks, unless with enforce_eager"
    return True, ""


def _describe(
    phases: ModuleType,
    scheduler_output: Any,
    intermediate_tensors: Any = None,
    dummy_run: bool = False,
    **more: Any,
) -> Call | None:
    scheduled, tokens = scheduler_output.num_scheduled_tokens, scheduler_output.total_num_scheduled_tokens
    new, known = scheduler_output.scheduled_new_reqs, scheduler_output.scheduled_cached_reqs
    drafts = scheduler_output.scheduled_spec_decode_tokens
    if dummy_run or not tokens:
        return None
    computed = [request.num_computed_tokens for request in new] + list(known.num_computed_tokens)
    if not new and not drafts and tokens == len(scheduled) and 0 not in known.num_output_tokens:
        phase = phases.DECODE
    else:
        of_new = [phases.of_sequence(scheduled[one.req_id], one.num_computed_tokens, writes=False) for one in new]
        rows = zip(known.req_ids, known.num_computed_tokens, known.num_output_tokens, strict=True)
        phase = phases.of_several(
            [
                phases.VERIFY if name in drafts else phases.of_sequence(scheduled[name], before, writes=written > 0)
                for name, before, written in rows
            ]
            + of_new
        )
    cached = computed[0] if len(set(computed)) == 1 else None
    call: Call = phases.Call(phase, tokens, len(scheduled), cached)
    return call


def _describe_capture(
    phases: ModuleType,
    runner: Any,
    num_tokens: int,
    cudagraph_runtime_mode: Any = None,
    *args: Any,
    uniform_decode: bool = False,
    **more: Any,
) -> Call | None:
    if getattr(cudagraph_runtime_mode, "name", "") != "FULL":
        return None
    each = getattr(runner, "uniform_decode_query_len", 1) if uniform_decode else 1
    call: Call = phases.Call(phases.DECODE if each == 1 else phases.VERIFY, num_tokens, num_tokens // each, None)
    return call


def _opaque_methods(brick_of_name: Any, module: Any) -> list[tuple[Any, str, Any]]:
    backend = getattr(module, "impl", None)
    return [
        (backend, name, None if brick is None else brick_of_name(brick))
        for name, brick in OPAQUE
        if callable(getattr(backend, name, None))
    ]


def _accepted(output: Any) -> int | None:
    chosen = getattr(output, "sampled_token_ids", None)
    if not isinstance(chosen, list) or not all(isinstance(tokens, list) for tokens in chosen):
        return None  # the chosen tokens are still on the device, so their number is unknown
    return sum(map(len, chosen))
