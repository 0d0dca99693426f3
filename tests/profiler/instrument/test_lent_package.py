"""Tests of a program in an environment without cbtop.

`cbtop run` lends its own package to this program. The package does no harm in the environment.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import cbtop
from cbtop.commands.run import HOOK
from cbtop.protocol.catalog import CatalogReader
from cbtop.protocol.messages import Manifest, Node
from cbtop.protocol.vocabulary import NodeKind
from tests.integration.hosts import CBTOP, DEADLINE_S
from tests.profiler.instrument.engines import write_engine
from tests.profiler.instrument.test_import_hook import WORKER
from tests.profiler.instrument.under_run import MODULE, fake_torch

OURS = Path(np.__file__).parents[1]
PACKAGE = Path(cbtop.__file__).parent
NOT_IN_THE_OTHER = ("cbtop", "__editable__", "msgpack")
# A fake torch. It does not import cbtop until one of its modules is called.
TORCH = (
    MODULE
    + """
def forward():
    from cbtop.profiler import instrument
    def install(profiler):
        with profiler.step("decode", tokens=1): pass
    instrument.install = install
    nn.Module()()
"""
)


def other_python(directory: Path, *packages: str) -> Path:
    """Create a Python environment with a fake torch and with some packages of this environment.

    Returns its Python.
    """
    venv.create(directory / "other", symlinks=True)
    site = next((directory / "other" / "lib").glob("python*/site-packages"))
    for package in packages:
        for path in OURS.glob(f"{package}*"):
            (site / path.name).symlink_to(path)
    fake_torch(site, TORCH)
    return directory / "other" / "bin" / "python"


def run(
    *command: str | Path, hooked: bool = True, lender: list[str] = CBTOP, **variables: str
) -> tuple[str, str, int]:
    """Return stdout, stderr and exit code of `command`."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*([*lender, "run", "--quiet", "--"] if hooked else []), *command],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False, env=environment | variables,
        cwd=os.environ["CBTOP_RUNTIME_DIR"],  # `python -c` imports from the current folder, so it must be empty.
    )  # fmt: skip
    return done.stdout, done.stderr, done.returncode


def test_a_python_without_cbtop_is_instrumented_and_one_line_says_how(tmp_path: Path, runtime: Path) -> None:
    python = other_python(tmp_path, "numpy")
    stdout, stderr, code = run(python, "-c", "import torch; torch.forward(); print('on'); raise SystemExit(7)")
    assert (stdout, code) == ("on\n", 7)
    assert stderr == f"cbtop: {python} has no cbtop; using {PACKAGE}\n"
    assert list(runtime.glob("*.ring"))


def test_the_line_appears_once_in_a_run_of_several_processes(tmp_path: Path, runtime: Path) -> None:
    python = other_python(tmp_path, "numpy")
    child = "import torch; torch.forward()"
    program = f"import subprocess, sys, torch; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    assert run(python, "-c", program)[1].count("has no cbtop") == 1
    assert list(runtime.glob("*.ring"))


SEES = """
import sys
if BEFORE:
    import torch; torch.forward()
for name in ("msgpack", "msgpack.exceptions", "msgpack._cmsgpack", "rich", "textual", "zmq", "psutil", "pynvml"):
    try:
        __import__(name)
        print(name, "is found")
    except ImportError as error:
        print(error)
print(sys.path, [name for name in sys.modules if name.startswith(("msgpack", "rich", "zmq"))])
"""


def test_the_program_finds_no_package_that_it_lacks(tmp_path: Path, runtime: Path) -> None:
    python = other_python(tmp_path, "numpy")
    bare = run(python, "-c", SEES.replace("BEFORE", "False"), hooked=False)
    assert "is found" not in bare[0]
    assert run(python, "-c", SEES.replace("BEFORE", "True"))[0] == bare[0]
    assert list(runtime.glob("*.ring"))


def test_the_programs_own_msgpack_is_used_if_there_is_one(tmp_path: Path, runtime: Path) -> None:
    python = other_python(tmp_path, "numpy", "msgpack")
    program = "import torch; torch.forward(); from cbtop.protocol import codec; print(codec.msgpack.__name__)"
    stdout, _, code = run(python, "-c", program)
    assert (stdout, code) == ("msgpack\n", 0)


def test_a_directory_named_cbtop_is_not_taken_for_the_package(tmp_path: Path, runtime: Path) -> None:
    python = other_python(tmp_path, "numpy")
    (tmp_path / "cbtop" / "profiler").mkdir(parents=True)
    program = f"import sys; sys.path.append({str(tmp_path)!r}); import torch; torch.forward()"
    stdout, stderr, _ = run(python, "-c", program)
    assert (stdout, "has no cbtop; using" in stderr) == ("", True)
    assert list(runtime.glob("*.ring"))


def test_a_module_of_the_program_named_cbtop_is_left_alone(tmp_path: Path, runtime: Path) -> None:
    python = other_python(tmp_path, "numpy")
    (tmp_path / "cbtop.py").write_text("HERE = 'mine'")
    program = (
        f"import sys; sys.path.append({str(tmp_path)!r}); import cbtop, torch; torch.nn.Module()()\n"
        "print(__import__('cbtop').HERE)"
    )
    stdout, stderr, code = run(python, "-c", program)
    assert (stdout, code, stderr.count("\n")) == ("mine\n", 0, 1)
    assert "runs uninstrumented" in stderr


@pytest.mark.slow
def test_what_was_built_for_another_python_is_not_needed(tmp_path: Path, runtime: Path) -> None:
    """The files of cbtop are copied without the parts that were compiled for this version of Python."""
    python = other_python(tmp_path, "numpy")
    for package, path in (("cbtop", PACKAGE), ("msgpack", OURS / "msgpack")):
        shutil.copytree(
            path, tmp_path / "lender" / package, ignore=shutil.ignore_patterns("*.so", "__pycache__", "compute")
        )
    (tmp_path / "lender" / "cbtop" / "compute").mkdir()
    for name in ("__init__.py", "errors.py"):
        shutil.copy(PACKAGE / "compute" / name, tmp_path / "lender" / "cbtop" / "compute" / name)
    start = f"import sys; sys.path.insert(0, {str(tmp_path / 'lender')!r}); from cbtop.cli import main; main()"
    stdout, stderr, code = run(
        python, "-c", "import torch; torch.forward(); print('on')", lender=[sys.executable, "-c", start]
    )
    assert (stdout, code) == ("on\n", 0)
    assert stderr == (
        f"cbtop: {python} has no cbtop; using {tmp_path / 'lender' / 'cbtop'}, "
        "without its compiled parts: recording costs more than with cbtop installed\n"
    )
    assert list(runtime.glob("*.ring"))


def test_without_numpy_one_line_says_what_to_install_and_the_program_runs(tmp_path: Path, runtime: Path) -> None:
    python = other_python(tmp_path)
    stdout, stderr, code = run(python, "-c", "import torch; torch.nn.Module()(); print('on'); raise SystemExit(7)")
    assert (stdout, code, stderr.count("\n")) == ("on\n", 7, 1)
    assert stderr.endswith(f"runs uninstrumented: cbtop needs NumPy there: {python} -m pip install numpy\n")


@pytest.fixture
def hook() -> ModuleType:
    """Return the import hook as a module. With the name that it has here, it does not start anything."""
    spec = importlib.util.spec_from_file_location("hook_to_test", Path(HOOK) / "sitecustomize.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_package_is_lent_to_the_versions_of_python_that_it_supports(hook: ModuleType) -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    first, below = (".".join(map(str, version)) for version in (hook.LENT_FROM, hook.LENT_BELOW))
    assert project["requires-python"] == f">={first},<{below}"


@pytest.mark.parametrize("bounds", [((3, 0), (3, 11)), ((4, 0), (4, 1))])
def test_no_other_version_of_python_gets_it(
    hook: ModuleType, monkeypatch: pytest.MonkeyPatch, bounds: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    monkeypatch.setattr(hook, "LENT_FROM", bounds[0])
    monkeypatch.setattr(hook, "LENT_BELOW", bounds[1])
    before = sys.modules["cbtop"]
    with pytest.raises(RuntimeError, match=r"cbtop needs CPython 3\.11 to 3\.13"):
        hook.load_package(str(PACKAGE))
    assert sys.modules["cbtop"] is before


def test_a_package_that_cannot_be_loaded_leaves_nothing_behind(
    hook: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delitem(sys.modules, "cbtop")
    with pytest.raises(FileNotFoundError):
        hook.load_package(str(tmp_path / "gone"))
    assert "cbtop" not in sys.modules


def older_python() -> str | None:
    """Return the path of a Python on this machine that the import hook supports but cbtop does not, or None."""
    for minor in range(6, 11):
        # pyenv has its versions of Python in these folders.
        beside_this = Path(sys.base_prefix).parent.glob(f"3.{minor}*/bin/python3")
        for path in filter(None, (shutil.which(f"python3.{minor}"), *beside_this)):
            if subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
                return str(path)
    return None


def test_an_older_python_runs_its_program_and_one_line_says_why(tmp_path: Path, runtime: Path) -> None:
    python = older_python()
    if python is None:
        pytest.skip("there is no Python 3.6 to 3.10 here")
    fake_torch(tmp_path, MODULE)
    stdout, stderr, code = run(python, "-c", "import torch; print('on')", PYTHONPATH=str(tmp_path))
    assert (stdout, code, stderr.count("\n")) == ("on\n", 0, 1)
    assert "runs uninstrumented: cbtop needs CPython 3.11 to 3.13" in stderr


@pytest.mark.slow
def test_vllm_which_finds_no_plugin_without_an_installation_is_shown(tmp_path: Path, runtime: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed: make torch")
    venv.create(tmp_path / "other", symlinks=True)
    site = next((tmp_path / "other" / "lib").glob("python*/site-packages"))
    for path in OURS.iterdir():
        if not path.name.startswith(NOT_IN_THE_OTHER) and path.suffix != ".pth":
            (site / path.name).symlink_to(path)
    write_engine("vllm", tmp_path)
    (tmp_path / "worker.py").write_text(
        WORKER.partition("    from sglang")[0].replace("load_general_plugins()\n", "pass\n", 1)
    )
    stdout, stderr, code = run(
        tmp_path / "other" / "bin" / "python", "-c", "import worker; worker.serve()", PYTHONPATH=str(tmp_path)
    )
    assert (stdout, code) == ("", 0)
    assert stderr.count("\n") == 1
    (catalog,) = runtime.glob("*.catalog")
    said = CatalogReader(catalog).read()
    assert [node.name for node in said if isinstance(node, Node) and node.kind is NodeKind.STEP]
    assert [one.backend for one in said if isinstance(one, Manifest)] == ["vLLM"]
