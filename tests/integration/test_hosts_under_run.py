"""Programs of every kind under `cbtop run`: what they print and how they end is what it is without us.

Their torch is a stand-in that costs nothing to import, but where a name says otherwise.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipapp
from importlib.util import find_spec
from pathlib import Path

import pytest

from cbtop.protocol.catalog import CatalogReader
from cbtop.protocol.messages import HostHello
from tests.integration.hosts import CBTOP, DEADLINE_S
from tests.profiler.instrument.under_run import fake_torch

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

# What a program does, and how many processes of it record.
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
BY_DEFAULT = {
    "plain",
    "exception in a step",
    "os._exit",
    "KeyboardInterrupt",
    "server",
    "fork",
    "spawn",
    "subprocess",
}
OPTIONS = {"dev mode": ["-X", "dev", "-W", "error"], "optimised": ["-OO"], "safe path": ["-P"], "unbuffered": ["-u"]}


def runs_alike(command: list[str], directory: Path, runtime: Path, *, stdin: str = "", records: int = 1) -> None:
    """`command` prints and ends under `cbtop run` as without it, and so many of its processes at least record."""
    environment = os.environ | {"PYTHONPATH": str(directory)}

    def run(*before: str) -> tuple[str, str, int]:
        done = subprocess.run(
            [*before, *command], input=stdin, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
            env=environment, cwd=directory,
        )  # fmt: skip
        return done.stdout, done.stderr, done.returncode

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


# With torch itself. The model is torch's own; every process calls it twice, so that a step of each is recorded.

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
@pytest.mark.parametrize(
    "name", ["forward, backward, state", *(pytest.param(n, marks=pytest.mark.slow) for n in list(WITH_TORCH)[1:])]
)
def test_a_torch_program_prints_and_ends_as_without_us(name: str, tmp_path: Path, runtime: Path) -> None:
    source, records = WITH_TORCH[name]
    (tmp_path / "main.py").write_text(source)
    runs_alike([sys.executable, "main.py"], tmp_path, runtime, records=records)


@needs_torch
@pytest.mark.slow
def test_the_ranks_of_torchrun_and_accelerate_are_recorded_each(tmp_path: Path, runtime: Path) -> None:
    (tmp_path / "main.py").write_text(RANKS)
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    accelerate = ["accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1"]
    for number, launcher in enumerate((torchrun, accelerate), 1):
        if find_spec(launcher[0].split(".")[0]) is None:
            continue
        command = [sys.executable, "-m", "cbtop", "run", "--", sys.executable, "-m", *launcher, "main.py"]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, cwd=tmp_path,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("2 "), done.stdout
        assert "cbtop:" not in done.stderr
        hellos = [CatalogReader(path).read()[0] for path in runtime.glob("*.catalog")]
        ranks = [hello.rank for hello in hellos if isinstance(hello, HostHello)]
        assert sorted(rank for rank in ranks if rank is not None) == sorted([0, 1] * number)
