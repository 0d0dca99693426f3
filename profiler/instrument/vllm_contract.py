"""The classes, methods and parameters of vLLM that cbtop uses, and the check whether an installed vLLM has them.

Rules
- This file imports nothing of vLLM. It reads vLLM's sources.
- SEEN_IN lists the versions that CONTRACT was compared with. `make engines` compares it with the installed vLLM.
- Another version is compared when it starts. If it differs, one line names what is shown and what is not.
- A method that differs is not wrapped. Everything else works on.
"""

from __future__ import annotations

import ast
import multiprocessing
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbtop.profiler.instrument.engine_methods import Methods, differences, unlike
from cbtop.profiler.instrument.trouble import log_once, log_own_error

SEEN_IN = ("0.22.0", "0.32.0")
VLLM_SCHEDULER = "vllm.v1.core.sched.scheduler", "Scheduler"
ENGINE_CORE = "vllm.v1.engine.core", "EngineCore"
FRONT_END = "vllm.v1.engine.output_processor", "OutputProcessor"
# The class that compiles the pieces of a model.
COMPILERS = "vllm.compilation.backends", "CompilerManager"
RUNNER = "GPUModelRunner"
REQUESTS = "requests, latencies and load"
# The Python modules with vLLM's runners, and two methods of the runner: one prepares inputs, the other chooses
# tokens. Runners for other devices are derived from the first runner. A process uses one of the runners.
RUNNERS = {
    "vllm.v1.worker.gpu_model_runner": ("_prepare_inputs", "_sample"),
    "vllm.v1.worker.gpu.model_runner": ("prepare_inputs", "sample"),
}


@dataclass(frozen=True, slots=True)
class Needed:
    """Methods of a class of vLLM, and what cbtop shows with them.

    `needs` names what else must be shown for this. For a runner, the same runner must show it.
    """

    shows: str
    owner: tuple[str, str]  # module and class
    methods: Methods
    needs: str = ""


def _of_runner(module: str, preparing: str, sampling: str) -> list[Needed]:
    owner = module, RUNNER
    return [
        Needed("steps", owner, {"execute_model": ("scheduler_output",)}),
        Needed("bricks", owner, {"load_model": (), "get_model": ()}, "steps"),
        Needed("sampling", owner, {"sample_tokens": ("grammar_output",), sampling: ()}, "steps"),
        Needed("input preparation", owner, {preparing: ("scheduler_output",)}, "steps"),
        Needed("bricks in graphs", owner, {"_dummy_run": ("num_tokens",)}, "steps"),
    ]


CONTRACT: tuple[Needed, ...] = (
    *(needed for module, names in RUNNERS.items() for needed in _of_runner(module, *names)),
    Needed("names of compiled code", COMPILERS, {"compile": ("graph",)}),
    Needed(
        REQUESTS,
        VLLM_SCHEDULER,
        {
            "add_request": ("request",),
            "schedule": (),
            "update_from_output": ("scheduler_output", "model_runner_output"),
            "finish_requests": ("request_ids", "finished_status"),
        },
    ),
    Needed("parts of an engine step", ENGINE_CORE, {"step": (), "step_with_batch_queue": ()}, REQUESTS),
    Needed("detokenising", FRONT_END, {"process_outputs": ("engine_core_outputs",)}),
)
# vLLM class -> the attributes that cbtop reads.
ATTRIBUTES = {
    "Scheduler": (
        "running",
        "waiting",
        "requests",
        "kv_cache_manager",
        "max_num_running_reqs",
        "max_num_scheduled_tokens",
    ),
    # and preempted_req_ids, if it has this
    "SchedulerOutput": ("scheduled_new_reqs", "num_scheduled_tokens", "total_num_scheduled_tokens"),
    "NewRequestData": ("req_id", "num_computed_tokens"),
    "Request": ("request_id", "arrival_time", "num_prompt_tokens"),
    "EngineCoreOutputs": ("outputs",),
    "EngineCoreOutput": ("request_id", "new_token_ids", "finish_reason"),
}


def needed_of(owner: tuple[str, str]) -> Methods:
    """Return all methods of a class that cbtop uses."""
    return {name: first for needed in CONTRACT if needed.owner == owner for name, first in needed.methods.items()}


def is_as_expected(owner: Any, methods: Methods) -> bool:
    """Return whether `owner`, an imported class of vLLM, has these methods with these first parameters.

    If not, log the line of `say_differences`.
    """
    if not differences(owner, methods):
        return True
    say_differences()
    return False


def compare_unknown_version() -> None:
    """Compare vLLM with CONTRACT if its version is not in SEEN_IN. Reading the sources takes about half a second."""
    if "vllm" in sys.modules and _version() not in SEEN_IN:
        say_differences()


def say_differences() -> None:
    """Log one line if vLLM's sources differ from CONTRACT: what is shown, and what is not.

    Only the process that starts vLLM logs it, unless vLLM claims to be one of SEEN_IN. Such a version is not compared
    when it starts.
    """
    if _version() not in SEEN_IN and multiprocessing.parent_process() is not None:
        return
    try:
        line = _differences_line()
    except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
        log_own_error(error, f"vLLM {_version()} was not compared with {' and '.join(SEEN_IN)}")
        return
    if line:
        log_once(line)


def _differences_line() -> str:
    trees: dict[str, ast.Module | None] = {}
    for module in {needed.owner[0] for needed in CONTRACT}:
        source = _source(module)
        trees[module] = None if source is None else ast.parse(source.read_bytes())
    methods = {owner: methods_of(trees[owner[0]], owner[1]) for owner in {needed.owner for needed in CONTRACT}}
    # Older versions have only one of the runners.
    absent = [module for module in RUNNERS if trees[module] is None]
    looked_at = [one for one in CONTRACT if len(absent) == len(RUNNERS) or one.owner[0] not in absent]
    others = [one for one in looked_at if unlike(methods[one.owner], one.methods)]
    lacking = [
        f"{one.owner[1]}.{name}" if methods[one.owner] else one.owner[1]
        for one in others
        for name in unlike(methods[one.owner], one.methods)
    ]
    if not lacking:
        return ""
    shown = dict.fromkeys(one.shows for one in looked_at if one not in others and not _lacks_need(one, others))
    hidden = dict.fromkeys(
        f"{one.shows} with {one.owner[0]}" if one.shows in shown else one.shows
        for one in looked_at
        if one in others or _lacks_need(one, others)
    )
    return (
        f"vLLM {_version() or 'of an unknown version'} has no {' or '.join(dict.fromkeys(lacking))} as in "
        f"{' and '.join(SEEN_IN)}. Shown: {', '.join(shown) or 'nothing'}. Not shown: {', '.join(hidden)}."
    )


def _lacks_need(one: Needed, others: list[Needed]) -> bool:
    return any(two.shows == one.needs and (two.owner == one.owner or two.owner[1] != RUNNER) for two in others)


def methods_of(tree: ast.Module | None, kind: str) -> dict[str, list[str]]:
    """Return the methods of the class `kind` in a module, and their parameters. Returns {} without such a class."""
    classes = [one for one in (tree.body if tree else []) if isinstance(one, ast.ClassDef) and one.name == kind]
    return {
        node.name: [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
        for owner in classes
        for node in owner.body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }


def _version() -> str:
    return str(getattr(sys.modules.get("vllm"), "__version__", ""))


def _source(module: str) -> Path | None:
    """Return the file of a module of vLLM, without importing it."""
    package = getattr(sys.modules.get("vllm"), "__file__", None)
    if package is None:
        return None
    path = Path(package).parent.joinpath(*module.split(".")[1:])
    found = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
    return found[0] if found else None
