"""Find the commits for `cbtop bisect`, and make a temporary worktree for each commit."""

# Rules
# - The user's checkout, index and branches are never changed. Worktrees are detached, in a temporary folder, and made
#   without hooks.
# - A bisection removes folders that killed bisections of its repository have left. They are listed in the state
#   folder, and have a marker file with the listed identifier.
# - A git hook sets variables such as GIT_DIR, which git and all commands must not get.
# - Each worktree is first on PYTHONPATH, or an editable install elsewhere might be measured.
# - With a build command, each worktree has its own virtual environment, because `pip install` would change a shared
#   one.

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cbtop.commands.shared.git import commit_of, git, outside_environment
from cbtop.commands.shared.interrupts import noted_interrupt
from cbtop.commands.shared.paired_sides import Process
from cbtop.commands.shared.runs import OverdueError
from cbtop.errors import CbtopError, UsageError
from cbtop.reports.bisect import SHORT, Commit
from cbtop.tuning.measuring import InterruptedTurnError

STATE = "cbtop-bisect"  # name of cbtop's folder in the git directory
PREFIX = "cbtop-bisect-"  # temporary folders of bisections have names with this prefix
MARKER = ".cbtop-bisect"  # Each temporary folder contains a file of this name, with the folder's identifier.
FOLDERS = "folders.json"  # A file of this name in the folder `STATE` maps temporary folders to their identifiers.
# Name of a .pth file. Python reads .pth files in the order of their names, so this file is read after the .pth files
# of a build.
LAST_PATH_FILE = "zz-of-the-user.pth"
SHOWN_ERROR = 200


class BrokenCommitError(CbtopError):
    """A commit cannot be checked out, built or run, so it cannot be judged."""

    def __init__(self, commit: str, why: str, exit_code: int = CbtopError.exit_code) -> None:
        super().__init__(f"{commit[:SHORT]}: {why}")
        self.commit, self.why, self.exit_code = commit, why, exit_code


@dataclass(frozen=True, slots=True)
class Repository:
    """The git repository that contains the current directory."""

    root: Path  # root directory of the git checkout
    below: str  # the current directory, relative to the root of the checkout
    state: Path  # folder in the git directory for the measured runs

    @staticmethod
    def here() -> Repository:
        """Return the repository of the current directory. Raises UsageError if the directory is in no repository."""
        root, common = git("rev-parse", "--path-format=absolute", "--show-toplevel", "--git-common-dir").split(b"\n")[
            :2
        ]
        below = git("rev-parse", "--show-prefix").decode().strip()
        return Repository(Path(os.fsdecode(root)), below, Path(os.fsdecode(common)) / STATE)

    def ends(self, good: str, bad: str) -> tuple[str, str]:
        """Return the full hashes of the commits GOOD and BAD. Raises UsageError if GOOD is not an ancestor of BAD."""
        first, last = commit_of(good, self.root), commit_of(bad, self.root)
        if first == last:
            raise UsageError(f"GOOD and BAD are the same commit, {first[:SHORT]}")
        if self._is_ancestor(last, first):
            raise UsageError(f"BAD ({bad}) is an ancestor of GOOD ({good}); swap them")
        if not self._is_ancestor(first, last):
            try:
                base = git("merge-base", first, last, at=self.root).decode().strip()
                way_out = f"bisect from their merge base: cbtop bisect {base[:SHORT]} {bad}"
            except UsageError:  # Git fails without a message if two commits have no common ancestor.
                way_out = "they have no commit in common"
            raise UsageError(f"GOOD ({good}) is not an ancestor of BAD ({bad}); {way_out}")
        return first, last

    def _is_ancestor(self, first: str, last: str) -> bool:
        return not git("rev-list", "--max-count=1", first, "--not", last, at=self.root)

    def between(self, goods: Sequence[str], bad: str, *, first_parent: bool, is_halved: bool = False) -> list[str]:
        """Return `bad` and its ancestors, newest first, without `goods` and their ancestors.

        With `is_halved`, the commit that divides the list in half comes first, as in `git rev-list --bisect-all`.
        """
        only = ["--first-parent"] * first_parent + ["--bisect-all"] * is_halved
        lines = git("rev-list", *only, bad, "--not", *goods, at=self.root).decode().splitlines()
        return [line.split()[0] for line in lines]

    def commits(self, names: Sequence[str]) -> tuple[Commit, ...]:
        """Return the subject, author and date of the commits `names`, in this order."""
        words = ["log", "--no-walk=unsorted", "--stdin", "--format=%H%x00%s%x00%an%x00%aI"]
        text = git(*words, at=self.root, text="".join(f"{name}\n" for name in names)).decode(errors="replace")
        # Git prints a commit only once, even if it is named twice.
        known = {found.name: found for line in text.split("\n") if line for found in [Commit(*line.split("\0"))]}
        return tuple(known[name] for name in names)

    def parent(self, name: str) -> str | None:
        """Return the first parent of a commit, or None for a first commit."""
        parents = git("rev-list", "--parents", "--max-count=1", name, at=self.root).decode().split()[1:]
        return parents[0] if parents else None


@contextmanager
def locked(repository: Repository) -> Iterator[None]:
    """Lock a repository during a bisection. Two bisections at once would disturb each other's measurements."""
    repository.state.mkdir(parents=True, exist_ok=True)
    lock = os.open(repository.state, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CbtopError("another cbtop bisect runs in this repository; wait for it, or end it") from error
        yield
    finally:
        os.close(lock)


@dataclass(frozen=True, slots=True)
class Tree:
    """A temporary worktree of a commit: its directory, and variables to add to the environment of its commands."""

    directory: Path
    environment: dict[str, str]


class Trees:
    """The temporary worktrees of a bisection. `close` removes them."""

    def __init__(self, repository: Repository, build: str | None, until_s: float) -> None:
        self._repository, self._build, self._until_s = repository, build, until_s
        self._remove_left()
        self._folder = self._made_folder()
        self._trees: dict[str, Tree] = {}

    def at(self, commit: str, log: int) -> Tree:
        """Return the worktree of a commit, which is made and built if necessary.

        Output goes to the descriptor `log`. Raises BrokenCommitError if this fails, and OverdueError at the time
        limit.
        """
        if commit not in self._trees:
            at = self._folder / commit[:SHORT]
            root = at / "tree"
            try:
                git(
                    "-c", "core.hooksPath=/dev/null", "worktree", "add", "--detach", "--quiet", str(root), commit,
                    at=self._repository.root,
                )  # fmt: skip
            except UsageError as error:
                raise BrokenCommitError(commit, f"cannot be checked out: {error}") from error
            directory = root / self._repository.below
            if not directory.is_dir():
                raise BrokenCommitError(commit, f"has no folder {self._repository.below}")
            environment = self._environment(root, at / "environment")
            if self._build is not None:
                self._run_build(commit, Tree(root, environment), log)
            self._trees[commit] = Tree(directory, environment)
        return self._trees[commit]

    def remove(self, commit: str) -> None:
        """Remove the temporary worktree of a commit, if there is one."""
        self._trees.pop(commit, None)
        self._remove(self._folder / commit[:SHORT])

    def close(self) -> None:
        """Remove all temporary worktrees. The first Ctrl-C does not interrupt the removal."""
        with noted_interrupt():
            self._remove_folder(self._folder)
            self._write_folders({})

    def _environment(self, root: Path, at: Path) -> dict[str, str]:
        path = [str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")]
        found = {"PYTHONPATH": os.pathsep.join(filter(None, path))}
        if self._build is None:
            return found
        try:
            venv.create(at, symlinks=True, with_pip=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise CbtopError(f"no virtual environment can be made for --build: {error}") from error
        (packages,) = (at / "lib").glob("python*/site-packages")
        mine = [each for each in sys.path if os.path.isdir(each) and self._is_of_packages(each)]
        (packages / LAST_PATH_FILE).write_text("".join(f"{each}\n" for each in mine), encoding="utf-8")
        path = [str(at / "bin"), os.environ.get("PATH", os.defpath)]
        return found | {"VIRTUAL_ENV": str(at), "PATH": os.pathsep.join(path)}

    def _is_of_packages(self, path: str) -> bool:
        """Return whether packages are installed in a folder of `sys.path`.

        The user's checkout and Python's own library contain no installed packages.
        """
        if "site-packages" in path or "dist-packages" in path:
            return True
        is_own = Path(path).is_relative_to(self._repository.root) or Path(path).is_relative_to(sys.base_prefix)
        return not is_own

    def _run_build(self, commit: str, tree: Tree, log: int) -> None:
        assert self._build is not None
        environment = outside_environment() | tree.environment
        process = Process(("/bin/sh", "-c", self._build), "the build", tree.directory, environment)
        begins = os.lseek(log, 0, os.SEEK_END)
        with noted_interrupt() as is_interrupted:
            try:
                _, code = process.run(log, log, lambda: is_interrupted() or time.monotonic() > self._until_s)
            except InterruptedTurnError:
                if is_interrupted():
                    raise KeyboardInterrupt from None
                raise OverdueError(f"{commit[:SHORT]}: the time is over while it is built") from None
        if code:
            why = f"does not build: exit code {code}{last_line(log, begins)}"
            raise BrokenCommitError(commit, why)

    def _remove(self, at: Path) -> None:
        """Remove a worktree that cbtop has made, and the folder `at` that contains it."""
        root = at / "tree"
        try:
            self._remove_worktree(root)
        except UsageError:  # git refuses to remove a worktree with missing files, except if all files are missing
            shutil.rmtree(root, ignore_errors=True)
            self._remove_worktree(root)
        shutil.rmtree(at, ignore_errors=True)

    def _remove_worktree(self, root: Path) -> None:
        if str(root) in self._known():
            # Pass --force twice, because an interrupted `git worktree add` may have left the worktree locked.
            git("worktree", "remove", "--force", "--force", str(root), at=self._repository.root)

    def _known(self) -> list[str]:
        lines = git("worktree", "list", "--porcelain", at=self._repository.root).decode(errors="replace").splitlines()
        return [line.partition(" ")[2] for line in lines if line.startswith("worktree ")]

    def _made_folder(self) -> Path:
        """Make a temporary folder, and list it so that `_remove_left` finds it if this process is killed."""
        # Resolve symbolic links, because git lists worktrees by paths without them.
        folder = Path(tempfile.mkdtemp(prefix=PREFIX)).resolve()
        identifier = secrets.token_hex(16)
        (folder / MARKER).write_text(identifier, encoding="utf-8")
        self._write_folders({str(folder): identifier})
        return folder

    def _remove_left(self) -> None:
        """Remove the temporary folders of bisections that were killed. The lock of the repository must be held."""
        for name, identifier in self._folders().items():
            folder = Path(name)
            if not folder.exists():  # The temporary folder was removed without git, so git still lists its worktrees.
                for known in self._known():
                    if Path(known).is_relative_to(folder):
                        self._remove_worktree(Path(known))
            elif _is_marked(folder, identifier):
                self._remove_folder(folder)
        self._write_folders({})

    def _remove_folder(self, folder: Path) -> None:
        for at in list(folder.iterdir()):
            if at.is_dir():
                self._remove(at)
        shutil.rmtree(folder, ignore_errors=True)

    def _folders(self) -> dict[str, str]:
        file = self._repository.state / FOLDERS
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            # The list of folders does not exist yet, or a killed process has written only a part of it.
            return {}
        return {name: identifier for name, identifier in found.items() if isinstance(identifier, str)}

    def _write_folders(self, folders: dict[str, str]) -> None:
        self._repository.state.mkdir(parents=True, exist_ok=True)
        (self._repository.state / FOLDERS).write_text(json.dumps(folders), encoding="utf-8")


def _is_marked(folder: Path, identifier: str) -> bool:
    """Return whether the marker file of a folder contains this identifier. Returns False if the path to the marker
    contains a symbolic link.
    """
    marker = folder / MARKER
    try:
        return marker.resolve() == marker and marker.read_text(encoding="utf-8") == identifier
    except OSError:
        return False


def last_line(log: int, begins: int) -> str:
    """Return ": " and the last line of a log, or "" if nothing follows the first `begins` bytes.

    Lines of cbtop itself are skipped, unless all lines are.
    """
    text = os.pread(log, os.lseek(log, 0, os.SEEK_END) - begins, begins).decode(errors="replace")
    every = text.strip().splitlines()
    lines = [line for line in every if not line.startswith("cbtop: ")] or every
    return f": {lines[-1].strip()[:SHOWN_ERROR]}" if lines else ""
