"""Follows SGLang: under `cbtop run` each forward of its model runner is a step.

Rules
- SGLang has no suitable plugins, so its classes are patched when its modules are imported.
- The names come from SGLang's runtime (srt). SGLang itself was not available, so tests use stand-ins with the same
  names and signatures.
- A step begins with the runner's `forward`. It ends with the worker's `forward_batch_generation`, which chooses the
  tokens. Without a worker (forwards of a draft, embeddings) it ends with `forward`.
- A step that verifies a draft counts the draft's tokens. Only the device knows how many are accepted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cbtop.profiler.instrument import phases
from cbtop.profiler.instrument.generation import generates
from cbtop.profiler.instrument.open_step import unit
from cbtop.profiler.instrument.runners import Engine, loads, once_there, runs, samples

if TYPE_CHECKING:
    from torch import nn

RUNNER = "sglang.srt.model_executor.model_runner"
WORKER = "sglang.srt.managers.tp_worker"


def await_import() -> None:
    """Patch SGLang's runner and worker when their modules are imported."""
    engine = Engine(
        "SGLang", _model_of, _bricks, _describe, samples_later=lambda result: unit().generation is not None
    )
    wrappers = {
        "forward": lambda original: runs(original, engine),
        "load_model": lambda original: loads(original, engine),
        "sample": samples,
    }
    once_there(engine, RUNNER, "ModelRunner", wrappers)
    once_there(engine, WORKER, "TpModelWorker", {"forward_batch_generation": generates})


def _model_of(runner: Any) -> nn.Module:
    model: nn.Module = runner.model
    return model


def _bricks(runner: Any) -> tuple[bool, str]:
    args = runner.server_args
    graphs = getattr(args, "cuda_graph_config", None)
    if graphs is None:
        decode, prefill = not args.disable_cuda_graph, not getattr(args, "disable_piecewise_cuda_graph", True)
    else:
        decode, prefill = (_is_on(phase.backend) for phase in (graphs.decode, graphs.prefill))
    if prefill or args.enable_torch_compile:
        return False, "compiles its model: its steps are shown, its bricks where that and graphs are disabled"
    if decode:
        return True, "replays captured graphs: steps that do have no bricks, unless CUDA graphs are disabled"
    return True, ""


def _is_on(backend: Any) -> bool:
    return bool(getattr(backend, "value", backend) != "disabled")


def _describe(forward_batch: Any, *args: Any, **kwargs: Any) -> phases.Call | None:
    mode, sequences = forward_batch.forward_mode, forward_batch.batch_size
    if mode.is_idle() or not sequences:
        return None
    if mode.is_decode():
        phase, tokens = phases.DECODE, sequences
    else:
        tokens = forward_batch.extend_num_tokens
        tokens = len(forward_batch.input_ids) if tokens is None else tokens
        prefixes = forward_batch.extend_prefix_lens_cpu or [forward_batch.seq_lens_sum - tokens]
        if mode.is_target_verify():
            phase = phases.VERIFY
        elif mode.is_mixed():
            phase = phases.MIXED
        else:
            phase = phases.of_several(phases.of_sequence(0, cached, writes=False) for cached in prefixes)
    return phases.Call(phase, tokens, sequences, forward_batch.seq_lens_sum - tokens if sequences == 1 else None)
