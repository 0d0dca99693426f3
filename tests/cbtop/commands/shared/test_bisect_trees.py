"""Worktrees of `cbtop bisect` have the right content, and all of them are removed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from math import inf
from pathlib import Path

import pytest

from cbtop.commands.shared.bisect_runs import state_of
from cbtop.commands.shared.bisect_trees import FOLDERS, MARKER, PREFIX, BrokenCommitError, Repository, Trees, locked
from cbtop.commands.shared.runs import OverdueError
from cbtop.errors import CbtopError
from tests.cbtop.commands.made_repository import MadeRepository, made_repository


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MadeRepository:
    found = made_repository(tmp_path / "repository")
    found.commit("first", {"pkg.py": "WHICH = 1\n"})
    found.commit("second", {"pkg.py": "WHICH = 2\n", "src/other.py": "WHICH = 2\n", "below/here": ""})
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.chdir(found.at)
    return found


@pytest.fixture
def log(tmp_path: Path) -> Iterator[int]:
    found = os.open(tmp_path / "log", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    yield found
    os.close(found)


def test_a_worktree_comes_first_on_the_path_of_its_commands(
    repository: MadeRepository, log: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An editable install would set PYTHONPATH like this. It puts the checkout on the path of every Python process.
    monkeypatch.setenv("PYTHONPATH", str(repository.at))
    trees = Trees(Repository.here(), None, inf)
    for revision, which in (("HEAD~1", "1"), ("HEAD", "2")):
        tree = trees.at(repository.git("rev-parse", revision), log)
        script = "import pkg; print(pkg.WHICH)"
        done = subprocess.run(
            [sys.executable, "-P", "-c", script], env=os.environ | tree.environment, capture_output=True, text=True,
            check=True,
        )  # fmt: skip
        assert done.stdout.strip() == which
    subprocess.run([sys.executable, "-P", "-c", "import other"], env=os.environ | tree.environment, check=True)
    trees.close()
    assert repository.worktrees() == 1


def test_commands_run_in_the_folder_that_corresponds_to_the_current_one(
    repository: MadeRepository, log: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository.at / "below")
    trees = Trees(Repository.here(), None, inf)
    tree = trees.at(repository.git("rev-parse", "HEAD"), log)
    assert (tree.directory.name, (tree.directory / "here").exists()) == ("below", True)
    with pytest.raises(BrokenCommitError, match="has no folder below"):
        trees.at(repository.git("rev-parse", "HEAD~1"), log)
    trees.close()
    assert repository.worktrees() == 1


def test_a_killed_bisection_leaves_its_worktrees_to_the_next(repository: MadeRepository, log: int) -> None:
    own = repository.at.parent / "own"  # a worktree of the user
    repository.git("worktree", "add", "--detach", str(own), "HEAD")
    left = Trees(Repository.here(), None, inf)
    commit = repository.git("rev-parse", "HEAD")
    root = left.at(commit, log).directory
    (root / ".git").unlink()  # Remove the .git file of the worktree, as an interrupted removal of the worktree does.
    repository.git("worktree", "lock", str(root))
    assert repository.worktrees() == 3
    Trees(Repository.here(), None, inf).close()
    assert repository.worktrees() == 2
    assert own.exists()
    assert list(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")) == []


def test_worktrees_of_the_user_remain_whatever_their_folders_are_called(repository: MadeRepository) -> None:
    above = repository.at.parent / f"{PREFIX}notes"
    repository.git("worktree", "add", "--detach", str(above / "mine" / "tree"), "HEAD")
    (above / "thesis.txt").write_text("years of work")
    Trees(Repository.here(), None, inf).close()
    assert ((above / "thesis.txt").exists(), repository.worktrees()) == (True, 2)


@pytest.mark.parametrize("marker", [None, "", "another"])
def test_a_listed_folder_without_its_marker_remains(repository: MadeRepository, marker: str | None) -> None:
    folder = repository.at.parent / f"{PREFIX}of-another"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    if marker is not None:
        (folder / MARKER).write_text(marker)
    state = Repository.here().state
    state.mkdir()
    (state / FOLDERS).write_text(json.dumps({str(folder): "identifier"}))
    Trees(Repository.here(), None, inf).close()
    assert (folder / "thesis.txt").exists()


def test_a_listed_folder_that_is_now_a_link_remains(repository: MadeRepository, log: int) -> None:
    Trees(Repository.here(), None, inf).at(repository.git("rev-parse", "HEAD"), log)
    (folder,) = Path(tempfile.gettempdir()).iterdir()
    own = folder.rename(repository.at.parent / "own")
    folder.symlink_to(own)
    Trees(Repository.here(), None, inf).close()
    assert len(list(own.iterdir())) == 2


def test_worktrees_whose_folder_is_gone_are_unknown_to_git_afterwards(repository: MadeRepository, log: int) -> None:
    Trees(Repository.here(), None, inf).at(repository.git("rev-parse", "HEAD"), log)
    (folder,) = Path(tempfile.gettempdir()).iterdir()
    shutil.rmtree(folder)  # Remove the folder, as a restart of the machine does with temporary folders.
    Trees(Repository.here(), None, inf).close()
    assert repository.worktrees() == 1


@pytest.mark.usefixtures("_without_pip")
def test_in_a_hook_the_index_of_the_user_stays_as_it_is(
    repository: MadeRepository, log: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = repository.at / ".git" / "index"
    (repository.at / "pkg.py").write_text("WHICH = 3\n")
    repository.git("add", "pkg.py")
    before, commit = index.read_bytes(), repository.git("rev-parse", "HEAD~1")
    for name, path in (("GIT_INDEX_FILE", index), ("GIT_DIR", index.parent), ("GIT_WORK_TREE", repository.at)):
        monkeypatch.setenv(name, str(path))
    trees = Trees(Repository.here(), "git status >/dev/null; git rev-parse --show-toplevel >&2", inf)
    root = trees.at(commit, log).directory
    built_in = os.pread(log, 1000, 0).decode().strip()
    assert ((root / "pkg.py").read_text(), built_in) == ("WHICH = 1\n", str(root))
    trees.close()
    assert index.read_bytes() == before


def test_a_folder_for_temporary_files_may_be_a_link(
    repository: MadeRepository, log: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "tmp")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "link"))
    trees = Trees(Repository.here(), None, inf)
    trees.at(repository.git("rev-parse", "HEAD"), log)
    assert repository.worktrees() == 2
    trees.close()
    assert repository.worktrees() == 1


def test_a_worktree_that_was_removed_is_made_again(repository: MadeRepository, log: int) -> None:
    trees = Trees(Repository.here(), None, inf)
    commit = repository.git("rev-parse", "HEAD")
    for _ in range(2):
        assert (trees.at(commit, log).directory / "pkg.py").exists()
        (trees.at(commit, log).directory / "pkg.py").write_text("changed by a build\n")
        trees.remove(commit)
        assert repository.worktrees() == 1
    trees.close()


@pytest.fixture
def _without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace `venv.create` by a function that creates only the folder, because pip takes seconds."""
    monkeypatch.setattr("venv.create", lambda at, **_: (at / "lib" / "python3" / "site-packages").mkdir(parents=True))


@pytest.mark.usefixtures("_without_pip")
def test_a_build_ends_when_the_time_is_over(repository: MadeRepository, log: int) -> None:
    trees = Trees(Repository.here(), "sleep 1000", time.monotonic())
    with pytest.raises(OverdueError, match="the time is over while it is built"):
        trees.at(repository.git("rev-parse", "HEAD"), log)
    trees.close()
    assert repository.worktrees() == 1


@pytest.mark.usefixtures("_without_pip")
def test_ctrl_c_ends_a_build(repository: MadeRepository, log: int) -> None:
    before = signal.getsignal(signal.SIGINT)
    trees = Trees(Repository.here(), f"kill -INT {os.getpid()}; sleep 1000", inf)
    with pytest.raises(KeyboardInterrupt):
        trees.at(repository.git("rev-parse", "HEAD"), log)
    trees.close()
    assert signal.getsignal(signal.SIGINT) is before


# A build backend that installs no packages.
PROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""
BACKEND = """\
import os, zipfile
def build_editable(directory, config_settings=None, metadata_directory=None):
    files = {
        "made_pkg.pth": os.getcwd(),
        "made_pkg-1.dist-info/METADATA": "Metadata-Version: 2.1\\nName: made-pkg\\nVersion: 1\\n",
        "made_pkg-1.dist-info/WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    }
    files["made_pkg-1.dist-info/RECORD"] = "".join(f"{name},,\\n" for name in [*files, "made_pkg-1.dist-info/RECORD"])
    with zipfile.ZipFile(os.path.join(directory, "made_pkg-1-py3-none-any.whl"), "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return "made_pkg-1-py3-none-any.whl"
"""


@pytest.mark.slow
def test_pip_of_a_build_installs_into_an_environment_of_its_own(
    repository: MadeRepository, log: int, tmp_path: Path
) -> None:
    commit = repository.commit("installable", {"pyproject.toml": PROJECT, "backend.py": BACKEND})
    trees = Trees(Repository.here(), "pip install --no-build-isolation --no-deps --no-index -e .", inf)
    tree = trees.at(commit, log)
    script = "import importlib.metadata as m, pkg, sys, cbtop; print(m.version('made-pkg'), pkg.__file__, sys.prefix)"
    environment = {name: value for name, value in (os.environ | tree.environment).items() if name != "PYTHONPATH"}
    done = subprocess.run(
        ["python", "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    version, file, prefix = done.stdout.split()
    assert (version, Path(file).parent) == ("1", tree.directory)
    assert prefix == tree.environment["VIRTUAL_ENV"]
    own = subprocess.run(
        [sys.executable, "-c", "import importlib.metadata as m; m.version('made-pkg')"], cwd=tmp_path, check=False,
        capture_output=True,
    )  # fmt: skip
    assert b"PackageNotFoundError" in own.stderr
    trees.close()


def test_two_bisections_of_a_repository_do_not_run_at_once(repository: MadeRepository) -> None:
    with locked(Repository.here()):
        other = repository.at.parent / "linked"
        repository.git("worktree", "add", "--detach", str(other), "HEAD")
        os.chdir(other)
        with (
            pytest.raises(CbtopError, match="another cbtop bisect runs"),
            locked(Repository.here()),
        ):
            pass
    with locked(Repository.here()):
        pass


def test_another_command_has_another_folder_and_restart_empties_it(tmp_path: Path) -> None:
    first = state_of(tmp_path, {"command": ["a"]}, restart=False)
    (first / "round-1.json").write_text("{}")
    assert state_of(tmp_path, {"command": ["b"]}, restart=True) != first
    assert state_of(tmp_path, {"command": ["a"]}, restart=False) == first
    assert (first / "round-1.json").exists()
    assert state_of(tmp_path, {"command": ["a"]}, restart=True) == first
    assert not (first / "round-1.json").exists()
