"""Makes model calls begin and end their steps in C (profiler/_model_steps.h), if the hot path is compiled.

The C code does the same as `ModelCall.__call__`. It writes the same records, and leaves the governor, which limits
the overhead, in the same state.
"""

from __future__ import annotations

from torch.compiler import is_compiling

from cbtop.profiler.hot_path import HotPath, chosen
from cbtop.profiler.instrument import phases
from cbtop.profiler.instrument.capturing import captures
from cbtop.profiler.instrument.dynamo import set_callback
from cbtop.profiler.instrument.generation import end_sampling, sampling_failed
from cbtop.profiler.instrument.governor import (
    GOLDEN,
    PASSED_OVER,
    PLAIN,
    GovernedModel,
    Governor,
    StepKind,
    StepStart,
)
from cbtop.profiler.instrument.model_call import ModelCall
from cbtop.profiler.instrument.open_step import Generation, OpenStep, Unit
from cbtop.profiler.instrument.steps import ModelSteps
from cbtop.profiler.instrument.timed_model import LOOK_EVERY
from cbtop.profiler.instrument.torch_internals import dispatch_modes, is_tracing
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.steps import STEP, ActiveStep, Steps
from cbtop.protocol.signals import reraise_host_error

CACHE, ELSE, USE_CACHE = 32, 64, 65  # the values of ROLE_CACHE, ROLE_ELSE and ROLE_USE_CACHE in C
_FLAG = "_is_compiling_flag"


def _roles() -> dict[str, int]:
    """Return the role of each argument that `describe` reads, by name.

    A role is a number. It says whether the argument has tokens, a cache, or something else. If several arguments have
    one sort, `describe` uses the one with the lowest number.
    """
    ranked = [(name, rank) for rank, name in enumerate(phases.TOKENS)]
    ranked += [(name, CACHE + rank) for rank, name in enumerate(phases.CACHES)]
    ranked.append(("use_cache", USE_CACHE))
    return dict(ranked) | dict.fromkeys((*phases.PICTURES, *phases.POSITIONS, phases.PACKED), ELSE)


def compile_steps() -> None:
    """Use the C code for steps from now on, if the hot path is compiled."""
    if chosen() is HotPath:
        return
    from cbtop.profiler import _hot_path

    is_flag_alone = set(is_compiling.__code__.co_names) <= {"torch", "jit", "is_scripting", _FLAG}
    _hot_path.compile_model_calls(
        (ModelCall, ModelSteps, Unit, Generation, OpenStep, ActiveStep, Steps, Governor, GovernedModel, StepKind),
        {
            "set_callback": set_callback,
            "captures": captures,
            "roles": _roles(),
            "prefill": phases.PREFILL,
            "decode": phases.DECODE,
            "extend": phases.EXTEND,
            "call": phases.Call,
            "mark": StepStart,
            "sort": PLAIN,
            "step": STEP,
            "is_compiling": is_compiling,
            "compiling_flags": is_compiling.__globals__ if is_flag_alone else None,
            "is_tracing": is_tracing,
            "dispatch_stack": dispatch_modes,
            "is_sampled": Governor.is_sampled,
            "golden": GOLDEN,
            "warm_up": PASSED_OVER,
            "every": BrickProfiler._is_sampled,
            "look_every": LOOK_EVERY,
            "reraise_host_error": reraise_host_error,
            "types_of_ids": phases.TYPES_OF_IDS,
            "verify": phases.VERIFY,
            "end_sampling": end_sampling,
            "sampling_failed": sampling_failed,
        },
    )
