"""Starts programs like `cbtop run` does, with a fake torch that imports fast.

Each call of the fake torch is one step.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from cbtop.commands.run import HOOK
from tests.integration.hosts import DEADLINE_S

MODULE = """
import sys
class nn:
    class Module:
        _compiled_call_impl = None
        def compile(self): pass
        def _wrapped_call_impl(self): return (self._compiled_call_impl or self._call_impl)()
        __call__ = _wrapped_call_impl
        def _call_impl(self): pass
        def __getstate__(self): return {}
    Identity = Module
class compiler: is_compiling = is_dynamo_compiling = bool
class jit: is_tracing = bool
class Tensor: pass
class _C:
    DisableTorchFunction = _has_torch_function_unary = _is_tracing = bool
    _get_dispatch_mode = _len_torch_dispatch_stack = int
    _get_tracing_state = staticmethod(lambda: None)
    class _TorchDispatchModeKey: FAKE = PROXY = None
    class _dynamo:
        class eval_frame:
            class _FrameAction: SKIP = DEFAULT = None
            _FrameExecStrategy = set_code_exec_strategy = _debug_get_cache_entry_list = staticmethod(lambda *_: None)
class _guards: CompileContext = None
sys.modules["torch.compiler"] = compiler
sys.modules["torch._guards"] = _guards
sys.modules["torch._C"] = _C
"""
TORCH = (
    MODULE
    + """
from contextlib import nullcontext as step
from cbtop.profiler import instrument
def install(profiler):
    global step
    def step(): return profiler.step("decode", tokens=1)
instrument.install = install
def forward(do=lambda: None):
    nn.Module()()
    with step(): do()
"""
)


def fake_torch(directory: Path, source: str = TORCH) -> Path:
    """Write a fake package `torch` with this source into the directory. Returns the directory."""
    (directory / "torch").mkdir(parents=True, exist_ok=True)
    (directory / "torch" / "__init__.py").write_text(source)
    return directory


def run_python(
    source: str, *paths: Path | str, hooked: bool = True, launched: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `python -c source` with `paths` on PYTHONPATH.

    If `hooked`, the import hook of cbtop runs first. If `launched`, the process was `cbtop run` before it became this
    program.
    """
    nothing_yet = Path(os.environ["CBTOP_RUNTIME_DIR"]) / "run-1-1"
    nothing_yet.touch()
    hook = {"CBTOP_RUN": "1", "CBTOP_RUN_ID": f"1:{nothing_yet}"} if hooked else {}
    if launched:
        become = f"os.execv(sys.executable, [sys.executable, '-c', {source!r}])"
        source = f"import os, sys; os.environ['CBTOP_RUN_ID'] = f'{{os.getpid()}}:{nothing_yet}'; {become}"
    path = os.pathsep.join(filter(None, [*[HOOK] * hooked, *map(str, paths), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=DEADLINE_S, check=False,
        stdin=subprocess.DEVNULL, env=os.environ | hook | ({"PYTHONPATH": path} if path else {}) | variables,
    )  # fmt: skip
