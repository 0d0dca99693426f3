"""llama-cpp-python under `cbtop run`: the real llama.cpp of xllamacpp, below a stand-in for the Python package.

The stand-in has the names and parameters of llama-cpp-python. tests/engines compares them with an installed package.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from ctypes import CFUNCTYPE, Structure, c_bool, c_int, c_void_p, cast
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import cbtop
from benchmarks.llama_peer import Llama as Peer
from benchmarks.llama_peer import library, write_model
from cbtop.compute.demo_model import TINY
from cbtop.profiler.instrument import trouble
from cbtop.profiler.instrument.llama_cpp_python import follow
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.messages import Node
from tests.integration.hosts import CBTOP, DEADLINE_S
from tests.profiler.instrument.engines import places_of, steps_of
from tests.profiler.memory import Memory, is_plain

pytest.importorskip("cbtop.profiler._llama_cpp", reason="there was no compiler where cbtop was installed")
PROMPT = (1, 2, 3, 4, 5)
CALLBACK = CFUNCTYPE(c_bool, c_void_p, c_bool, c_void_p)


class Parameters(Structure):
    """The parameters of a context that cbtop reads and writes."""

    _fields_ = (("cb_eval", CALLBACK), ("cb_eval_user_data", c_void_p), ("embeddings", c_bool), ("n_ctx", c_int))


def _package(model: Path) -> dict[str, ModuleType]:
    """Return the stand-in's modules by name."""

    class LlamaContext:
        def __init__(self, *, model: Any, params: Parameters, verbose: bool = True) -> None:
            self.params, self.ctx = params, None
            function = cast(params.cb_eval, c_void_p).value or 0
            self.peer = Peer(model, function, params.cb_eval_user_data or 0)

        def decode(self, batch: Any) -> None:
            if batch.batch.n_tokens == 0:
                raise RuntimeError("llama_decode returned -1")
            self.logits = self.peer.decode(batch.batch.token)

    class Llama:
        def __init__(self, params: Parameters) -> None:
            self.context = LlamaContext(model=model, params=params)
            self.tokens = 0

        def eval(self, tokens: Any) -> None:
            count = len(tokens)
            batch = SimpleNamespace(
                n_tokens=count,
                token=list(tokens),
                pos=range(self.tokens, self.tokens + count),
                seq_id=[[0]] * count,
            )
            self.context.decode(SimpleNamespace(batch=batch))
            self.tokens += count

        def sample(self) -> int:
            return int(self.context.logits.argmax())

    modules = {name: ModuleType(name) for name in ("llama_cpp", *(f"llama_cpp.{part}" for part in PARTS))}
    vars(modules["llama_cpp._internals"])["LlamaContext"] = LlamaContext
    vars(modules["llama_cpp.llama"])["Llama"] = Llama
    vars(modules["llama_cpp.llama_cpp"]).update(
        ggml_backend_sched_eval_callback=CALLBACK, llama_supports_gpu_offload=lambda: False
    )
    return modules


PARTS = "_internals", "llama", "llama_cpp"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("xllamacpp", reason="xllamacpp is not installed: pip install xllamacpp")
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_model(path, TINY)
    library()
    return path


@pytest.fixture
def package(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import the stand-in, and return its module `llama`."""
    monkeypatch.setattr(trouble, "_said", {})
    for name, module in _package(model).items():
        monkeypatch.setitem(sys.modules, name, module)
    return sys.modules["llama_cpp.llama"]


def _generate(llama: Any, tokens: int) -> list[int]:
    llama.eval(PROMPT)
    found = [llama.sample()]
    for _ in range(tokens):
        llama.eval([found[-1]])
        found.append(llama.sample())
    return found


def test_each_decode_is_a_step_with_the_bricks_of_its_graph(package: Any, memory: Memory) -> None:
    bare = _generate(package.Llama(Parameters()), 3)
    follow(BrickProfiler(recorder=memory))
    assert _generate(package.Llama(Parameters()), 3) == bare
    assert steps_of(memory) == [("prefill", 5), *[("decode", 1)] * 3]
    places = places_of(memory)
    for layer in range(TINY.layers):
        assert places[f"decode / {layer} / QkvProjection"] == 9
        assert places[f"decode / {layer} / DownProjection"] == 3
    assert places["decode / LmHead"] == 3
    assert places["Sampling"] == 4


def test_steps_that_are_not_recorded_are_timed_as_a_whole(package: Any, memory: Memory) -> None:
    follow(BrickProfiler(recorder=memory, sample_every=4))
    _generate(package.Llama(Parameters()), 8)
    assert steps_of(memory) == [("prefill", 5), *[("decode", 1)] * 2]  # those with bricks
    assert places_of(memory)["decode / LmHead"] == 2
    assert [elements for tag, _, _, elements in memory.records if is_plain(tag)] == [1] * 6


def test_a_later_part_of_a_prompt_extends_the_sequence(package: Any, memory: Memory) -> None:
    follow(BrickProfiler(recorder=memory))
    llama = package.Llama(Parameters())
    llama.eval(PROMPT)
    llama.eval(PROMPT)
    assert steps_of(memory) == [("prefill", 5), ("extend", 5)]


def test_a_callback_of_the_program_stays_and_its_steps_have_no_bricks(
    package: Any, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[bool] = []

    @CALLBACK
    def own(tensor: int, is_asked: bool, data: int) -> bool:
        asked.append(is_asked)
        return False

    follow(BrickProfiler(recorder=memory))
    package.Llama(Parameters(cb_eval=own)).eval(PROMPT)
    assert asked
    assert steps_of(memory) == [("prefill", 5)]
    assert "decode / LmHead" not in places_of(memory)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith("has a callback of its own: its steps are shown, its bricks are not")


def test_a_failed_decode_raises_and_the_next_step_is_right(package: Any, memory: Memory) -> None:
    follow(BrickProfiler(recorder=memory))
    llama = package.Llama(Parameters())
    with pytest.raises(RuntimeError, match="llama_decode returned -1"):
        llama.eval([])
    llama.eval(PROMPT)
    assert steps_of(memory)[-1] == ("prefill", 5)


def test_another_version_of_the_package_is_named_in_one_line(
    package: Any, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    context = sys.modules["llama_cpp._internals"].LlamaContext  # type: ignore[attr-defined]
    context.compute = context.decode
    del context.decode
    package.Llama.eval = lambda self, tokens: self.context.compute(
        SimpleNamespace(batch=SimpleNamespace(n_tokens=len(tokens), token=list(tokens)))
    )
    follow(BrickProfiler(recorder=memory))
    package.Llama(Parameters()).eval(PROMPT)
    assert not [said for said in memory.said if isinstance(said, Node)]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "cbtop: this llama-cpp-python has no LlamaContext.decode as in 0.3.36: it is not shown"


# The package on the disk gets its classes from this file.
INIT = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.profiler.instrument.test_llama_cpp_python import _package, library
library()
sys.modules.update({{name: one for name, one in _package(Path(sys.argv[1])).items() if name != __name__}})
"""
PROGRAM = """
import sys
import llama_cpp
llama = sys.modules["llama_cpp.llama"].Llama(PARAMETERS())
llama.eval((1, 2, 3))
for _ in range(30):
    llama.eval([llama.sample()])
assert "torch" not in sys.modules
"""


@pytest.mark.slow  # starts a process; the other tests cover all but the import hook
def test_an_unedited_program_without_torch_is_shown(model: Path, tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    (tmp_path / "llama_cpp").mkdir()
    (tmp_path / "llama_cpp" / "__init__.py").write_text(INIT.format(root=str(root)))
    name = "sys.modules['tests.profiler.instrument.test_llama_cpp_python'].Parameters"
    (tmp_path / "main.py").write_text(PROGRAM.replace("PARAMETERS", name))
    command = [
        *CBTOP,
        "run",
        "--overhead",
        "100%",
        "--record",
        "run.cbtop",
        "--",
        sys.executable,
        "main.py",
        str(model),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "llama.cpp, or a part of it, is not shown" not in done.stderr
    with cbtop.read(tmp_path / "run.cbtop") as run:
        steps, bricks = run.steps(), set(run.bricks().column("brick"))
    assert steps.column("tokens").tolist() == [3, *[1] * 30]
    assert {"QkvProjection", "DownProjection", "LmHead"} <= bricks
