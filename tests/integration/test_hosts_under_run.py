"""Programs of every kind print and end under `cbtop run` as they do without it.

By default, a fast stand-in replaces torch.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import zipapp
from importlib.util import find_spec
from pathlib import Path

import pytest

from cbtop.feeds.replay import ReplayFeed
from tests.integration.hosts import CBTOP, DEADLINE_S, cbtop
from tests.profiler.instrument.under_run import fake_torch
from tests.representatives import first_by_default

SERVER = """
import asyncio, torch
async def answer(reader, writer):
    torch.forward()
    writer.write((await reader.readline()).upper())
    await writer.drain()
    writer.close()
async def ask(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"hello\\n")
    print(await reader.read())
    writer.close()
async def main():
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        await asyncio.gather(*(ask(port) for _ in range(5)))
asyncio.run(main())
"""
MULTIPROCESSING = """
import multiprocessing, sys
def work(number):
    import torch
    torch.forward()
    if number == 2: sys.exit(number)
if __name__ == "__main__":
    context = multiprocessing.get_context("METHOD")
    processes = [context.Process(target=work, args=(number,)) for number in range(3)]
    for process in processes: process.start()
    for process in processes: process.join()
    print([process.exitcode for process in processes])
"""
POOL = """
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
def work(number):
    import torch
    torch.forward()
    if number == 3: raise ValueError(number)
    return number * number
if __name__ == "__main__":
    with EXECUTOR(2) as pool:
        print(list(pool.map(work, range(3))))
        print(pool.submit(work, 3).exception())
"""

# Programs by name: the code, and how many of its processes record something.
HOSTS = {
    "plain": ("import torch; torch.forward(); print('out'); print('err', file=sys.stderr)", 1),
    "exception": ("import torch; torch.forward()\nraise ValueError('mine')", 1),
    "exception in a step": ("import torch; torch.forward(lambda: 1 / 0)", 1),
    "sys.exit": ("import torch; torch.forward(); sys.exit('a message')", 1),
    "os._exit": ("import torch; torch.forward(); print('lost' * 1000); os._exit(3)", 1),
    "KeyboardInterrupt": ("import torch; torch.forward(); os.kill(os.getpid(), signal.SIGINT); time.sleep(9)", 1),
    "KeyboardInterrupt in a step": ("import torch; torch.forward(lambda: os.kill(os.getpid(), signal.SIGINT))", 1),
    "SIGTERM": ("import torch; torch.forward(); os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)", 1),
    "SIGKILL": ("import torch; torch.forward(); os.kill(os.getpid(), signal.SIGKILL)", 1),
    "SIGHUP": ("import torch; torch.forward(); os.kill(os.getpid(), signal.SIGHUP); time.sleep(9)", 1),
    "a handler that raises in a step": (
        "import torch\ndef late(*_): raise TimeoutError('mine')\nsignal.signal(signal.SIGALRM, late)\n"
        "try: torch.forward(lambda: signal.raise_signal(signal.SIGALRM))\nexcept TimeoutError as e: print(repr(e))\n"
        "torch.forward()",
        1,
    ),
    "timer": (
        "import torch; hit = []; signal.signal(signal.SIGALRM, lambda *_: hit.append(1))\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)\nwhile len(hit) < 20: torch.forward()\n"
        "signal.setitimer(signal.ITIMER_REAL, 0); print(len(hit) > 19)",
        1,
    ),
    "own handler": (
        "import torch; torch.forward(); signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))\n"
        "os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)",
        1,
    ),
    "abort": ("import torch; torch.forward(); os.abort()", 1),
    "atexit": ("import atexit, torch; torch.forward(); atexit.register(print, 'last'); print('first')", 1),
    "step at exit": ("import atexit, torch; torch.forward(); atexit.register(torch.forward)", 1),
    "threads": (
        "import threading, torch\nthreads = [threading.Thread(target=torch.forward) for _ in range(8)]\n"
        "for t in threads: t.start()\nfor t in threads: t.join()\nprint(threading.active_count())",
        1,
    ),
    "import in a thread": (
        "import threading\ndef work():\n    import torch\n    torch.forward()\n"
        "threads = [threading.Thread(target=work) for _ in range(8)]\n"
        "for t in threads: t.start()\nfor t in threads: t.join()",
        1,
    ),
    "daemon thread": (
        "import threading, torch\ndef work():\n    while True: torch.forward()\n"
        "torch.forward(); threading.Thread(target=work, daemon=True).start(); print('left')",
        1,
    ),
    "exception in a thread": (
        "import threading, torch\nthread = threading.Thread(target=torch.forward, args=(lambda: 1 / 0,), name='1')\n"
        "thread.start(); thread.join()",
        1,
    ),
    "asyncio": (
        "import asyncio, torch\nasync def one(n):\n    torch.forward(); await asyncio.sleep(0); return n\n"
        "async def main(): print(await asyncio.gather(*(one(n) for n in range(9))))\nasyncio.run(main())",
        1,
    ),
    "server": (SERVER, 1),
    "fork": (MULTIPROCESSING.replace("METHOD", "fork"), 3),
    "spawn": (MULTIPROCESSING.replace("METHOD", "spawn"), 3),
    "forkserver": (MULTIPROCESSING.replace("METHOD", "forkserver"), 3),
    "fork after import": ("import torch; torch.forward()\n" + MULTIPROCESSING.replace("METHOD", "fork"), 4),
    "process pool": (POOL.replace("EXECUTOR", "ProcessPoolExecutor"), 1),
    "thread pool": (POOL.replace("EXECUTOR", "ThreadPoolExecutor"), 1),
    "os.fork": (
        "import torch; torch.forward(); sys.stdout.flush(); pid = os.fork()\ntorch.forward(); print(bool(pid))\n"
        "if pid: print(os.waitpid(pid, 0)[1])",
        2,
    ),
    "subprocess": (
        "import subprocess, torch; torch.forward()\nprint(subprocess.run([sys.executable, '-c', "
        "'import torch; torch.forward(); print(1); raise SystemExit(5)'], capture_output=True))",
        2,
    ),
    "subprocess switched off": (
        "import subprocess, torch; torch.forward()\nprint(subprocess.run([sys.executable, '-c', "
        "'import torch; torch.forward()'], capture_output=True, env=os.environ | {'CBTOP_RUN': '0'}))",
        1,
    ),
    "exec": (
        "import torch; torch.forward(); os.execv(sys.executable, [sys.executable, '-c', 'import torch; "
        "torch.forward(); print(2)'])",
        2,
    ),
    "shell": (
        "os.execvp('sh', ['sh', '-c', f'{sys.executable} -c \"import torch; torch.forward()\"; exit 8'])",
        1,
    ),
    "runpy": (
        "import runpy, torch; torch.forward()\nif __name__ != 'x': print(len(runpy.run_path('main.py', None, 'x')))",
        1,
    ),
    "stdin": ("import torch; torch.forward(); print(input()); print(sys.stdin.read())", 1),
    "broken pipe": (
        "import torch; torch.forward(); r, w = os.pipe(); os.close(r); os.dup2(w, 1); print('lost'); sys.exit(5)",
        1,
    ),
    "closed stdout": ("import torch; torch.forward(); sys.stdout.close(); torch.forward(); sys.exit(6)", 1),
    "closed stderr": (
        "import torch; torch.forward(); sys.stderr.close(); torch.forward(); raise SystemExit('said')",
        1,
    ),
    "own stderr": (
        "import io, torch; sys.stderr = io.StringIO(); torch.forward(); print(repr(sys.stderr.getvalue()))",
        1,
    ),
    "logging": (
        "import logging, torch; logging.basicConfig(level=logging.DEBUG); torch.forward(); logging.debug('mine')\n"
        "print(logging.root.handlers, sorted(logging.root.manager.loggerDict)[:0])",
        1,
    ),
    "faulthandler": (
        "import faulthandler, tempfile, torch; faulthandler.enable(); torch.forward()\n"
        "file = tempfile.TemporaryFile(); faulthandler.dump_traceback(file); file.seek(0)\n"
        "print(file.read().splitlines()[1:])",
        1,
    ),
    "warnings as errors": (
        "import warnings, torch; warnings.simplefilter('error'); torch.forward(); warnings.warn('mine')",
        1,
    ),
    "recursion": (
        "import torch; sys.setrecursionlimit(150)\ndef deeper(n):\n    torch.forward(); return deeper(n + 1)\n"
        "try: deeper(0)\nexcept RecursionError as e: print(str(e)[:32])\n"
        "sys.setrecursionlimit(1000); torch.forward()",
        1,
    ),
    "collector off": (
        "import gc, torch; gc.disable(); torch.forward(); print(gc.isenabled(), gc.garbage, gc.callbacks)",
        1,
    ),
    "excepthook": ("import torch; sys.excepthook = lambda *a: print('hook', a[1]); torch.forward(lambda: 1 / 0)", 1),
    "random numbers": (
        "import random, torch; random.seed(1)\nfor _ in range(50): torch.forward()\nprint(random.random())",
        1,
    ),
    "pickle": (
        "import pickle, torch; torch.forward(); print(pickle.loads(pickle.dumps(torch.forward)) is torch.forward)",
        1,
    ),
    "Pool": (
        "import multiprocessing\ndef work(n):\n    import torch\n    torch.forward(); return n * n\n"
        "if __name__ == '__main__':\n    with multiprocessing.Pool(2) as pool: print(pool.map(work, range(5)))",
        1,
    ),
    "daemonised": (
        "import torch; torch.forward(); sys.stdout.flush()\nif os.fork(): os._exit(0)\nos.setsid()\n"
        "if os.fork(): os._exit(0)\ntorch.forward(); print('from the daemon'); sys.exit(0)",
        2,
    ),
    "Popen and signals": (
        "import subprocess, torch; torch.forward()\nchild = subprocess.Popen([sys.executable, '-c', "
        "'import time, torch; torch.forward(); print(1, flush=True); time.sleep(99)'], stdout=-1)\n"
        "print(child.stdout.read(1)); child.terminate(); print(child.wait())",
        2,
    ),
    "settrace": (
        "import threading; sys.settrace(lambda *_: None); import torch; torch.forward(); print(bool(sys.gettrace()))",
        1,
    ),
    "closed stdio": ("import torch; torch.forward(); os.close(0); os.close(1); os.close(2)", 1),
    "no descriptors": (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); import torch; torch.forward()",
        1,
    ),
    "reload": (
        "import importlib, torch; torch.forward(); importlib.reload(torch); torch.forward(); print('again')",
        1,
    ),
    "chdir": ("import torch; os.chdir('/'); torch.forward(); print(os.getcwd())", 1),
    "no environment": (
        "kept = os.environ['CBTOP_RUNTIME_DIR']; os.environ.clear(); os.environ['CBTOP_RUNTIME_DIR'] = kept\n"
        "import torch; torch.forward(); print(dict(os.environ))",
        1,
    ),
}
ONE_AFTER_ANOTHER = (
    "threads", "exception in a thread", "asyncio", "import in a thread", "timer", "a handler that raises in a step",
    "stdin", "recursion", "collector off", "random numbers", "pickle", "reload", "chdir", "settrace", "atexit",
    "closed stderr",
)  # fmt: skip
HOSTS["one after another"] = ("\n".join(HOSTS[name][0] for name in ONE_AFTER_ANOTHER), 1)
BY_DEFAULT = {
    "plain",
    "exception in a step",
    "os._exit",
    "KeyboardInterrupt",
    "server",
    "fork",
}
OPTIONS = {"dev mode": ["-X", "dev", "-W", "error"], "optimised": ["-OO"], "safe path": ["-P"], "unbuffered": ["-u"]}


def runs_alike(
    command: list[str], directory: Path, runtime: Path, *, stdin: str = "a line\nand more", records: int = 1
) -> None:
    """Check that `command` prints and ends the same under `cbtop run`.

    At least `records` of its processes must record. The lines of the summary are ignored, but no line may say that
    something was not instrumented.
    """
    environment = os.environ | {"PYTHONPATH": str(directory)}

    def run(*before: str) -> tuple[str, str, int]:
        done = subprocess.run(
            [*before, *command], input=stdin, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
            env=environment, cwd=directory,
        )  # fmt: skip
        lines = done.stderr.splitlines(keepends=True)
        theirs = [line for line in lines if not line.startswith("cbtop: ")]
        assert not any("nothing was instrumented" in line for line in lines if line not in theirs)
        return done.stdout, "".join(theirs), done.returncode

    assert run(*CBTOP, "run", "--") == run()
    assert len(list(runtime.glob("*.ring"))) >= records


@pytest.mark.parametrize(
    "name", [name if name in BY_DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in HOSTS]
)
def test_a_program_prints_and_ends_as_without_us(name: str, tmp_path: Path, runtime: Path) -> None:
    source, records = HOSTS[name]
    fake_torch(tmp_path)
    (tmp_path / "main.py").write_text(f"import os, signal, sys, time\n{source}\n")
    runs_alike([sys.executable, "main.py", "an argument"], tmp_path, runtime, records=records)


WRAPPER = """
import os, sys
os.environ["PYTHONPATH"] = os.pathsep.join([os.environ["SITE"], os.environ["PYTHONPATH"]])
assert os.environ["PYTHONPATH"].startswith(os.environ["SITE"])
os.execl(sys.executable, sys.executable, *sys.argv[1:])
"""
SITE = """
import os, sys
own = os.path.dirname(__file__)
kept = [entry for entry in os.environ["PYTHONPATH"].split(os.pathsep) if entry != own]
os.environ["PYTHONPATH"] = os.pathsep.join(kept)
print("site")
"""
NEXT_SITE = """
sys.path.remove(own)
mine = sys.modules.pop("sitecustomize")
try:
    import sitecustomize
except ImportError:
    sys.modules["sitecustomize"] = mine
sys.path.insert(0, own)
"""


@first_by_default("site", [SITE, SITE + NEXT_SITE], ids=["alone", "chained"])
def test_a_wrapper_that_puts_its_sitecustomize_first_is_reached(
    site: str, tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_torch(tmp_path)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(site)
    (tmp_path / "wrapper.py").write_text(WRAPPER)
    (tmp_path / "main.py").write_text("import sys, torch; torch.forward(); print(sys.path)")
    monkeypatch.setenv("SITE", str(tmp_path / "site"))
    runs_alike([sys.executable, "wrapper.py", "main.py"], tmp_path, runtime)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_pythons_own_options_do_as_without_us(options: list[str], tmp_path: Path, runtime: Path) -> None:
    fake_torch(tmp_path)
    (tmp_path / "main.py").write_text("import sys, torch; torch.forward(); print(sys.flags, sys.path, sys.argv)")
    runs_alike([sys.executable, *options, "main.py"], tmp_path, runtime)


@pytest.mark.slow
def test_modules_archives_and_standard_input_do_as_without_us(tmp_path: Path, runtime: Path) -> None:
    fake_torch(tmp_path)
    package = tmp_path / "served"
    package.mkdir()
    (package / "__main__.py").write_text("import sys, torch; torch.forward(); print(__name__, sys.path, sys.argv)")
    zipapp.create_archive(package, tmp_path / "served.pyz")
    runs_alike([sys.executable, "-m", "served", "-a"], tmp_path, runtime)
    runs_alike([sys.executable, "served.pyz", "-a"], tmp_path, runtime, records=2)
    program = "import sys, torch; torch.forward(); print(sys.path, sys.argv)"
    runs_alike([sys.executable, "-", "-a"], tmp_path, runtime, stdin=program, records=3)
    runs_alike([sys.executable, "-i", "-c", "import torch"], tmp_path, runtime, stdin="torch.forward()\n", records=4)


# The programs below use the real torch. Each process calls the model twice, so each records a step.

MODEL = """
import sys, torch
from torch import nn
torch.manual_seed(7)
torch.set_num_threads(1)
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.down_proj = nn.Linear(16, 32), nn.Linear(32, 16)
    def forward(self, x): return x + self.down_proj(torch.relu(self.gate_proj(x)))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
    def forward(self, x):
        for layer in self.layers: x = layer(x)
        return x
"""
RANKS = (
    MODEL
    + """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(Model())
for _ in range(2):
    loss = model(torch.full((4, 16), float(dist.get_rank()))).sum()
    loss.backward()
total = loss.detach().clone()
dist.all_reduce(total)
if dist.get_rank() == 0: print(dist.get_world_size(), total.item().hex(), flush=True)
dist.barrier()
dist.destroy_process_group()
"""
)
WITH_TORCH = {
    "forward, backward, state": (
        MODEL
        + """
import copy, io, pickle
if __name__ == "__main__":
    model = Model()
    x = torch.ones(2, 16)
    model(x).sum().backward()
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    twin = copy.deepcopy(model)
    print(twin(x).sum().item().hex(), pickle.loads(pickle.dumps(model))(x).sum().item().hex(), len(buffer.getvalue()))
    print(list(model.state_dict()), sum(p.grad.sum() for p in model.parameters()).item().hex())
    raise ValueError("at its end")
""",
        1,
    ),
    "loader": (
        MODEL
        + """
from torch.utils.data import DataLoader
if __name__ == "__main__":
    model = Model()
    for batch in DataLoader(torch.arange(64.0).reshape(4, 16), batch_size=2, num_workers=2):
        print(model(batch).sum().item().hex())
""",
        1,
    ),
    "jit, saved whole, copied": (
        MODEL
        + """
import copy, io
model, x = Model(), torch.ones(2, 16)
traced, scripted = torch.jit.trace(model, x), torch.jit.script(torch.nn.Sequential(Layer(), Layer()))
model(x)
buffer = io.BytesIO()
torch.save(model, buffer)
buffer.seek(0)
loaded = torch.load(buffer, weights_only=False)
print(traced(x).sum().item().hex(), scripted(x).shape, loaded(x).sum().item().hex(), list(loaded.state_dict()))
print(copy.copy(model)(x).sum().item().hex(), traced.code)
again = torch.jit.trace(model, x)
print(again.code == traced.code)
""",
        1,
    ),
    "torch's spawn": (
        MODEL
        + """
import torch.multiprocessing
def work(rank):
    model = Model()
    print(rank, model(torch.ones(1, 16)).sum().item().hex()) if rank == 0 else model(torch.ones(1, 16))
    if rank: sys.exit(0)
if __name__ == "__main__":
    torch.multiprocessing.spawn(work, nprocs=2)
""",
        2,
    ),
    "threads": (
        MODEL
        + """
import threading
model = Model()
found = []
def work(): found.append(model(torch.ones(1, 16)).sum().item().hex())
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(found)
""",
        1,
    ),
}
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed: make torch")


@needs_torch
# The default run skips this test. It tests programs without torch here, and programs with torch in test_two_ranks.py.
@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_TORCH)
def test_a_torch_program_prints_and_ends_as_without_us(name: str, tmp_path: Path, runtime: Path) -> None:
    source, records = WITH_TORCH[name]
    (tmp_path / "main.py").write_text(source)
    runs_alike([sys.executable, "main.py"], tmp_path, runtime, records=records)


KILLED = (
    MODEL
    + """
import os
class Last(nn.Linear):
    def forward(self, x):
        if len(x) == 3: os.kill(os.getpid(), 9)
        return super().forward(x)
model = Model()
model.layers[1].down_proj = Last(32, 16)
for rows in (1, 2, 3): model(torch.ones(rows, 16))
"""
)


@needs_torch
@pytest.mark.slow  # The default run skips this test, because test_post_mortem.py tests this without a model.
def test_of_a_program_that_is_killed_the_brick_in_flight_is_named(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(KILLED)
    command = [*CBTOP, "run", "--overhead", "100%", "--", sys.executable, str(tmp_path / "main.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == -signal.SIGKILL
    assert all(line.startswith("cbtop: ") for line in done.stderr.splitlines())
    told = cbtop("post-mortem").stdout
    assert "it was killed" in told
    in_flight = told.partition("in flight")[2]
    assert "forward → Layer 1 → DownProjection down_proj [measured]" in in_flight


BY_A_SHELL = """
export MASTER_ADDR=127.0.0.1 MASTER_PORT=$1 WORLD_SIZE=2
RANK=1 $2 main.py &
RANK=0 $2 main.py
code=$?
wait
exit $code
"""


@needs_torch
@pytest.mark.slow  # The default run skips this test, because test_two_ranks.py runs two ranks there.
@pytest.mark.parametrize("with_torchrun", [False, True])
def test_two_ranks_that_train_are_recorded_and_shown_each(with_torchrun: bool, tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(RANKS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "main.py"]
    shell = ["sh", "-c", BY_A_SHELL, "ranks", str(port), sys.executable]
    done = subprocess.run(
        [*CBTOP, "run", "--quiet", "--overhead", "100%", "--record", "run.cbtop", "--"]
        + ([sys.executable, *torchrun] if with_torchrun else shell),
        capture_output=True, text=True, timeout=DEADLINE_S, check=False, cwd=tmp_path, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 "), done.stdout
    ours = [line for line in done.stderr.splitlines() if line.startswith("cbtop: ")]
    assert [line.split(", ")[1] for line in ours] == ["2 processes"], done.stderr
    with ReplayFeed(tmp_path / "run.cbtop") as feed:
        feed.seek(feed.duration_s)
        views = [view for source in feed.sources() if (view := feed.view(source.key)) is not None]
    assert sorted((view.rank, view.world_size, view.steps.count) for view in views if view.steps) == [
        (0, 2, 2),
        (1, 2, 2),
    ]
    assert all("DownProjection" in {row.name for row in view.bricks} for view in views)


@needs_torch
@pytest.mark.slow
@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
def test_what_accelerate_launches_prints_and_ends_as_without_us(tmp_path: Path, runtime: Path) -> None:
    (tmp_path / "main.py").write_text(f"{MODEL}\nfor _ in range(2): print(Model()(torch.ones(1, 16)).sum())\n")
    options = "--cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no"
    command = [sys.executable, "-m", "accelerate.commands.launch", *options.split(), "main.py"]
    runs_alike(command, tmp_path, runtime)
