"""Time the modules of an unedited program without cbtop.

    python -m benchmarks.real.oracle RESULT.json PROGRAM.py [ARGUMENT ...]

On a CPU, the own time of a module is the time of its calls minus the time of the modules inside it. On a GPU, it is
the time of the kernels that torch.profiler saw the module launch. The kernels of a replayed CUDA graph belong to the
modules of an earlier eager call that launched the same kernels in the same order.

The result has an entry for each kind of call of a root module, such as `LlamaForCausalLM 1, 1 position`. It has the
number of calls, the microseconds of each brick, and the microseconds in all other modules.
"""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.real.names import ATTENTION, FUSED_ATTENTION, brick_of

GRAPH_LAUNCH = "cudaGraphLaunch"
ROOT, BRICK = "root:", "brick:"
POSITIONS = ("input_ids", "decoder_input_ids")
Brick = tuple[str, str] | None
Kinds = dict[str, dict[Brick, float]]  # for each kind of root call and each brick: its time in microseconds
# A function that begins the time of a module. It returns a function that ends it.
Enter = Callable[[str | None, Brick], Callable[[], None]]


def main() -> None:
    result, program, *arguments = sys.argv[1:]
    sys.argv = [program, *arguments]
    sys.path[0] = str(Path(program).parent)
    times = by_profiler(program) if torch.cuda.is_available() else by_hooks(program)
    Path(result).write_text(json.dumps(as_json(*times)))


def as_json(kinds: Kinds, calls: Counter[str]) -> dict[str, Any]:
    return {
        kind: {
            "calls": calls[kind],
            "bricks": [
                {"name": brick[0], "category": brick[1], "us": us}
                for brick, us in sorted(bricks.items(), key=lambda item: -item[1])
                if brick is not None
            ],
            "between_us": bricks.get(None, 0.0),
        }
        for kind, bricks in kinds.items()
    }


def by_hooks(program: str) -> tuple[Kinds, Counter[str]]:
    """Run `program`. Returns the time of each brick, measured by hooks around its modules' calls."""
    kinds: Kinds = defaultdict(lambda: defaultdict(float))
    calls: Counter[str] = Counter()
    here = threading.local()

    def enter(root: str | None, brick: Brick) -> Callable[[], None]:
        if root is not None:
            here.kind, here.inside = root, [0]
        kind, inside = here.kind, here.inside
        inside.append(0)
        begun = time.perf_counter_ns()

        def leave() -> None:
            took = time.perf_counter_ns() - begun
            kinds[kind][brick] += (took - inside.pop()) / 1000
            inside[-1] += took
            calls[kind] += root is not None

        return leave

    hook_modules(enter)
    runpy.run_path(program, run_name="__main__")
    return kinds, calls


def hook_modules(enter: Enter) -> None:
    """Call `enter` when a module or a fused attention begins. `enter` returns a function, which is called when that
    ends.
    """
    here = threading.local()
    known: dict[int, tuple[Any, Brick]] = {}
    roots: dict[int, int] = {}

    def before(module: Any, args: Any, keywords: Any) -> None:
        open_: list[Callable[[], None]] = here.__dict__.setdefault("open", [])
        root = None
        if not open_:
            if id(module) not in roots:
                roots[id(module)] = len(roots) + 1
                for path, inner in module.named_modules():
                    is_leaf = next(inner.children(), None) is None
                    known.setdefault(id(inner), (inner, brick_of(path, type(inner).__name__, is_leaf)))
            root = f"{type(module).__name__} {roots[id(module)]}, {positions(args, keywords)}"
        open_.append(enter(root, known.get(id(module), (None, None))[1]))

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def attend(*args: Any, **keywords: Any) -> Any:
            if not getattr(here, "open", None):
                return function(*args, **keywords)
            leave = enter(None, (FUSED_ATTENTION, ATTENTION))
            try:
                return function(*args, **keywords)
            finally:
                leave()

        return attend

    original = torch.nn.Module.__call__

    # Replace the method of the module, because torch's global hooks do not receive keyword arguments.
    def call(module: Any, *args: Any, **keywords: Any) -> Any:
        before(module, args, keywords)
        try:
            return original(module, *args, **keywords)
        finally:
            here.open.pop()()

    torch.nn.Module.__call__ = call
    functional = torch.nn.functional
    functional.scaled_dot_product_attention = timed(functional.scaled_dot_product_attention)
    if importlib.util.find_spec("transformers"):
        # The attention function in transformers also prepares keys and values. cbtop counts this time as part of the
        # same brick.
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS["sdpa"] = timed(ALL_ATTENTION_FUNCTIONS["sdpa"])


def positions(args: Any, keywords: Any) -> str:
    """Return the number of positions in the input of a call, or `input` without token ids.

    This number distinguishes decode from prefill.
    """
    words = next((keywords[name] for name in POSITIONS if keywords.get(name) is not None), None)
    if words is None:
        words = next((one for one in [*args, *keywords.values()] if isinstance(one, torch.Tensor)), None)
    if words is None or words.is_floating_point() or words.dim() not in (1, 2):
        return "input"
    return f"{words.shape[-1]} positions"


def by_profiler(program: str) -> tuple[Kinds, Counter[str]]:
    """Run `program` under torch.profiler. Returns the time of each brick's kernels."""

    def enter(root: str | None, brick: Brick) -> Callable[[], None]:
        ranges = [] if root is None else [torch.profiler.record_function(ROOT + root)]
        ranges.append(torch.profiler.record_function(BRICK + ("/".join(brick) if brick else "")))
        for one in ranges:
            one.__enter__()

        def leave() -> None:
            for one in reversed(ranges):
                one.__exit__(None, None, None)

        return leave

    hook_modules(enter)
    both = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=both) as profiler:
        runpy.run_path(program, run_name="__main__")
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        return of_trace(json.loads(Path(file.name).read_text())["traceEvents"])


def of_trace(events: Iterable[dict[str, Any]]) -> tuple[Kinds, Counter[str]]:
    """Return the time of each brick in a trace of torch.profiler.

    A kernel belongs to the range in which it was launched.
    """
    # ranges of calls in the trace, by thread: (begin, end, name)
    ranges: dict[int, list[tuple[float, float, str]]] = defaultdict(list)
    # launches of kernels in the trace, by correlation id: (thread, begin, name)
    launches: dict[int, tuple[int, float, str]] = {}
    # kernels in the trace, by correlation id: (begin, duration, name)
    kernels: dict[int, list[tuple[float, float, str]]] = defaultdict(list)
    for event in events:
        category, name = event.get("cat"), event.get("name", "")
        if category == "user_annotation" and name.startswith((ROOT, BRICK)):
            ranges[event["tid"]].append((event["ts"], event["ts"] + event["dur"], name))
        elif category in ("cuda_runtime", "cuda_driver") and "correlation" in event["args"]:
            launches[event["args"]["correlation"]] = event["tid"], event["ts"], name
        elif category in ("kernel", "gpu_memcpy", "gpu_memset"):
            kernels[event["args"]["correlation"]].append((event["ts"], event["dur"], name))
    kinds: Kinds = defaultdict(lambda: defaultdict(float))
    calls: Counter[str] = Counter()
    orders: dict[tuple[str, ...], list[Brick]] = {}
    by_call: dict[tuple[int, float], list[tuple[str, Brick]]] = defaultdict(list)
    owners = owners_of(ranges, ((tid, ts, correlation) for correlation, (tid, ts, _) in launches.items()))
    replays = []
    for correlation in sorted(kernels, key=lambda one: launches.get(one, (0, 0.0, ""))[1]):
        if correlation not in launches:
            continue
        if launches[correlation][2].startswith(GRAPH_LAUNCH):
            replays.append(sorted(kernels[correlation]))
        elif correlation in owners:
            call, kind, brick = owners[correlation]
            for _, duration, name in kernels[correlation]:
                kinds[kind][brick] += duration
                by_call[call].append((name, brick))
    for listed in by_call.values():
        orders[tuple(name for name, _ in listed)] = [brick for _, brick in listed]
    for listed_kernels in replays:
        order = orders.get(tuple(name for _, _, name in listed_kernels))
        if order is None:
            calls["replay of unknown kernels"] += 1
            continue
        calls["replay"] += 1
        for (_, duration, _), brick in zip(listed_kernels, order, strict=True):
            kinds["replay"][brick] += duration
    calls.update(name.removeprefix(ROOT) for listed in ranges.values() for _, _, name in listed if name[:5] == ROOT)
    return kinds, calls


def owners_of(
    ranges: dict[int, list[tuple[float, float, str]]], launches: Iterable[tuple[int, float, int]]
) -> dict[int, tuple[tuple[int, float], str, Brick]]:
    """For each launch by its correlation id, return the root call, the kind of this call, and the innermost brick."""
    owners: dict[int, tuple[tuple[int, float], str, Brick]] = {}
    by_thread: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for tid, begun, correlation in launches:
        by_thread[tid].append((begun, correlation))
    for tid, listed in by_thread.items():
        nested: list[tuple[float, float, str]] = []
        coming = sorted(ranges.get(tid, []), key=lambda one: (one[0], -one[1]))
        at = 0
        for begun, correlation in sorted(listed):
            while at < len(coming) and coming[at][0] <= begun:
                while nested and nested[-1][1] <= coming[at][0]:
                    nested.pop()
                nested.append(coming[at])
                at += 1
            while nested and nested[-1][1] < begun:
                nested.pop()
            root = next((one for one in nested if one[2].startswith(ROOT)), None)
            if root is not None:
                name = nested[-1][2].removeprefix(BRICK)
                brick = tuple(name.split("/")) if "/" in name else None
                owners[correlation] = (tid, root[0]), root[2].removeprefix(ROOT), brick  # type: ignore[assignment]
    return owners


if __name__ == "__main__":
    main()
