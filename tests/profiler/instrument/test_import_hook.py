"""Tests of the import hook: the hook instruments a program from its start, and never disturbs the program."""

from __future__ import annotations

import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

from cbtop.protocol.catalog import CatalogReader
from cbtop.protocol.messages import Manifest, Node
from cbtop.protocol.vocabulary import WARM_UP, NodeKind
from tests.integration.hosts import CBTOP, DEADLINE_S
from tests.profiler.instrument.engines import PACKAGES, write_engine
from tests.profiler.instrument.under_run import MODULE, TORCH, fake_torch, run_python
from tests.representatives import first_by_default

SEES = """
import atexit, sys  # the first is a part of Python that we load
print(sys.path, sys.argv, sys.flags, sorted(sys.modules), len(sys.meta_path) - HOOKED)
print(sorted(sys.path_importer_cache))
"""


def test_path_modules_and_arguments_are_unchanged_in_a_program_without_torch() -> None:
    bare = run_python(SEES.replace("HOOKED", "0"), hooked=False)
    under_run = run_python(SEES.replace("HOOKED", "1"))
    assert (under_run.stdout, under_run.stderr, under_run.returncode) == (bare.stdout, "", 0)


@pytest.mark.parametrize("own", ["print('my site')", "import gone", "raise ValueError", None])
def test_the_programs_own_sitecustomize_runs_as_without_us(tmp_path: Path, own: str | None) -> None:
    if own is not None:
        (tmp_path / "sitecustomize.py").write_text(own)
    (tmp_path / "usercustomize.py").write_text("print('my user')")
    program = (
        "import sys; own = sys.modules.get('sitecustomize')\n"
        "print(getattr(own, '__file__', None), 'usercustomize' in sys.modules)"
    )
    bare = run_python(program, tmp_path, hooked=False)
    under_run = run_python(program, tmp_path)
    assert (under_run.stdout, under_run.stderr, under_run.returncode) == (bare.stdout, bare.stderr, bare.returncode)


def test_torch_is_instrumented_at_its_import_and_cbtop_is_absent_before(tmp_path: Path) -> None:
    fake_torch(tmp_path)
    done = run_python(
        """
import importlib.util, sys
assert not [name for name in sys.modules if name.startswith("cbtop")]
found = importlib.util.find_spec("torch")   # as transformers and accelerate look for it
assert found.origin.endswith("__init__.py") and found.loader.get_source("torch")
import torch
loaded = {name.removeprefix("cbtop.") for name in sys.modules if name.startswith("cbtop.")}
assert loaded == {  # until a module is called
    "version", "profiler", "protocol", "protocol.signals", "profiler.instrument", "profiler.instrument.awaited",
    "profiler.instrument.call_attribute", "profiler.instrument.dynamo", "profiler.instrument.first_call",
    "profiler.instrument.trouble",
}, loaded
assert "numpy" not in sys.modules
assert vars(torch.__spec__.loader).keys() == {"name", "path"} and not [f for f in sys.meta_path if "cust" in repr(f)]
torch.forward()
from pathlib import Path; import os
print(sorted(path.suffix for path in Path(os.environ["CBTOP_RUNTIME_DIR"]).iterdir()))
""",
        tmp_path,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("['.catalog', '.ring']\n", "", 0)


def test_a_failed_import_of_torch_fails_as_it_does_bare_and_can_be_retried(tmp_path: Path) -> None:
    fake_torch(tmp_path, "import os\nif 'BROKEN' in os.environ: raise OSError('libtorch.so')\nforward = None\n")
    done = run_python(
        """
import os, sys
os.environ["BROKEN"] = "1"
try:
    import torch
except OSError as error:
    assert str(error) == "libtorch.so"
assert "torch" not in sys.modules
del os.environ["BROKEN"]
import torch
print("cbtop.profiler" in sys.modules)
""",
        tmp_path,
    )
    assert done.stdout == "True\n"


@pytest.mark.parametrize(
    ("fails", "why"),
    [
        ("instrument.install = lambda profiler: 1 / 0", "division by zero"),
        (
            "import sys; sys.modules['msgpack'] = None",
            "import of msgpack",
        ),
    ],
)
def test_whatever_of_ours_fails_is_one_line_and_the_program_runs_on(tmp_path: Path, fails: str, why: str) -> None:
    fake_torch(tmp_path, f"{MODULE}\nfrom cbtop.profiler import instrument\n{fails}\n")
    done = run_python("import torch; torch.nn.Module()(); print('on'); raise SystemExit(7)", tmp_path, launched=True)
    assert (done.stdout, done.returncode) == ("on\n", 7)
    assert done.stderr.count("\n") == 1
    assert f"runs uninstrumented: {why}" in done.stderr


def test_a_signal_handlers_error_during_installation_reaches_the_program(tmp_path: Path) -> None:
    fake_torch(
        tmp_path,
        MODULE
        + """
import os, signal
from cbtop.profiler import instrument
def interrupted(number, frame): raise TimeoutError("the program's own")
signal.signal(signal.SIGALRM, interrupted)
instrument.install = lambda profiler: os.kill(os.getpid(), signal.SIGALRM)
""",
    )
    done = run_python(
        "import torch\ntry:\n    torch.nn.Module()()\nexcept TimeoutError as error:\n    print(error)", tmp_path
    )
    assert done.stdout == "the program's own\n"
    assert "uninstrumented" not in done.stderr


def test_the_programs_finders_are_asked_as_without_us(tmp_path: Path) -> None:
    program = """
import sys
class Old:  # of before there was find_spec
    def find_module(self, name, path=None): pass
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch": print("asked")
sys.meta_path.insert(0, Finder())
sys.meta_path.insert(2, Old())
import torch
torch.forward()
"""
    done = run_python(program, fake_torch(tmp_path), launched=True)
    assert (done.stdout, done.stderr) == ("asked\n", "")


def test_torch_imported_by_a_pth_file_is_shown_and_customisations_run(tmp_path: Path, runtime: Path) -> None:
    venv.create(tmp_path / "venv", symlinks=True, system_site_packages=True)
    site = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    ours = Path(sysconfig.get_path("purelib"))
    fake = str(fake_torch(tmp_path))
    (site / "a.pth").write_text(f"import site, sys; site.addsitedir({str(ours)!r}); sys.path.insert(0, {fake!r})\n")
    (site / "b.pth").write_text("import torch\n")
    (site / "sitecustomize.py").write_text("print('my site')")
    (site / "usercustomize.py").write_text("print('my user')")
    python = str(tmp_path / "venv" / "bin" / "python")
    program = "import sys, torch; torch.forward(); print(sys.prefix, sys.path, __import__('sitecustomize').__file__)"
    bare, under_run = (
        subprocess.run(
            [*before, python, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        for before in ((), (*CBTOP, "run", "--quiet", "--"))
    )
    # Debian's Python has a sitecustomize.py of its own next to the standard library, which is found first.
    has_own = (Path(sysconfig.get_path("stdlib")) / "sitecustomize.py").exists()
    assert bare.stdout.startswith(f"my user\n{tmp_path}" if has_own else f"my site\nmy user\n{tmp_path}")
    assert (under_run.stdout, under_run.stderr, under_run.returncode) == (bare.stdout, bare.stderr, 0)
    assert list(runtime.glob("*.ring"))


def test_a_signal_handlers_error_at_the_first_step_reaches_the_program(
    tmp_path: Path,
) -> None:
    program = """
import os, signal, torch
def interrupted(number, frame): raise TimeoutError("the program's own")
signal.signal(signal.SIGALRM, interrupted)
os.unlink = lambda path: signal.raise_signal(signal.SIGALRM)
try:
    torch.forward()
except TimeoutError as error:
    print(error)
"""
    done = run_python(program, fake_torch(tmp_path))
    assert done.stdout == "the program's own\n"


CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import torch; torch.forward()'], check=True)"
BEYOND = ", nor in a child that was reached (not one with an environment of its own, -I, -E or -S)"
NOT_REACHED = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'sum(range(3_000_000))'], env={})"
FORKED = "import os, torch\npid = os.fork()\nif not pid: torch.forward()\nelse: os.waitpid(pid, 0)"


@first_by_default(
    ("program", "launched", "says"),
    [
        ("pass", True, "nothing was instrumented: torch was never imported"),
        ("pass", False, ""),
        # This program imports cbtop and records itself, so cbtop reports nothing.
        ("from cbtop import BrickProfiler", True, ""),
        ("import torch", True, "nothing was instrumented: no call of a model was seen"),
        pytest.param(
            "import torch", False, "nothing was instrumented: no call of a model was seen", marks=pytest.mark.slow
        ),
        ("import torch; torch.forward()", True, ""),
        pytest.param(CHILD, True, "", marks=pytest.mark.slow),
        (FORKED, True, ""),
        (CHILD.replace("; torch.forward()", ""), True, "nothing was instrumented: no call of a model was seen"),
        pytest.param(
            FORKED.replace("torch.forward()", "raise SystemExit"),
            True,
            "nothing was instrumented: no call of a model",
            marks=pytest.mark.slow,
        ),
        (NOT_REACHED, True, f"nothing was instrumented: torch was never imported{BEYOND}"),
        ("import sys; sys.stderr.close(); import torch", True, ""),
        pytest.param("import sys; sys.stderr = None", True, "", marks=pytest.mark.slow),
    ],
    4,
)
def test_a_run_that_instrumented_nothing_says_so_once_at_its_end(
    tmp_path: Path, program: str, launched: bool, says: str
) -> None:
    done = run_python(program, fake_torch(tmp_path), launched=launched)
    assert done.stderr.startswith(f"cbtop: {says}" if says else "")
    assert done.stderr.count("\n") == bool(says)
    assert (done.stdout, done.returncode) == ("", 0)


FULL_DISK = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
SAYS_MORE = """
    from cbtop.protocol.messages import Sampling
    profiler.announce(Sampling(4, None, None, None, 1.0))
    def step"""


@first_by_default(
    ("program", "says"),
    [
        ("import torch", "nothing was instrumented: no call of a model was seen"),
        ("import torch; torch.forward()", "cbtop records nothing in process "),
    ],
)
def test_where_the_disk_is_full_no_other_reason_is_given(tmp_path: Path, program: str, says: str) -> None:
    torch = fake_torch(tmp_path, TORCH.replace("\n    def step", SAYS_MORE))
    done = run_python(FULL_DISK + program, torch, launched=True)
    assert says in done.stderr
    assert (done.stdout, done.stderr.count("\n"), done.returncode) == ("", 1, 0)


def test_where_it_is_switched_off_nothing_happens(tmp_path: Path) -> None:
    program = (
        "import sys, torch; torch.forward(); print([n for n in sys.modules if 'cbtop' in n], len(sys.meta_path))"
    )
    fake_torch(tmp_path, "def forward(): pass")
    bare = run_python(program, tmp_path, hooked=False)
    off = run_python(program, tmp_path, launched=True, CBTOP_RUN="0")
    assert (off.stdout, off.stderr) == (bare.stdout, "")


WORKER = """
from types import SimpleNamespace as Namespace
def serve():
    import sys, torch  # as the engines do first
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    runner = GPUModelRunner()
    runner.load_model()
    runner._dummy_run(8)
    runner.execute_model(SchedulerOutput([NewRequestData("a")], CachedRequestData(), {"a": 5}, 5))
    runner.sample_tokens(None)
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    TpModelWorker().forward_batch_generation(ForwardBatch(ForwardMode.DECODE, 1, torch.zeros(1, dtype=torch.long), 6))
"""


@pytest.mark.slow
def test_spawned_vllm_and_sglang_workers_show_each_run_of_their_runners(tmp_path: Path, runtime: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed: make torch")
    for engine in PACKAGES:
        write_engine(engine, tmp_path)
    (tmp_path / "worker.py").write_text(WORKER)
    program = (
        "import multiprocessing, worker\nchild = multiprocessing.get_context('spawn').Process(target=worker.serve)\n"
        "child.start(); child.join(); raise SystemExit(child.exitcode)"
    )
    done = run_python(program, tmp_path, launched=True)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
    (catalog,) = runtime.glob("*.catalog")
    said = CatalogReader(catalog).read()
    nodes = [node for node in said if isinstance(node, Node)]
    steps = [node.name.removesuffix(WARM_UP) for node in nodes if node.kind is NodeKind.STEP]
    assert list(dict.fromkeys(steps)) == ["prefill", "decode"]
    assert [one.backend for one in said if isinstance(one, Manifest)] == ["vLLM"]
    assert sum(node.name == "QkvProjection" for node in nodes) == 4
