"""The thread that `cbtop attach` starts in a process, here in this process. `tests/integration/test_attach.py` starts
real ones.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import cbtop.profiler
from cbtop.profiler.instrument import attach, install, temporary
from cbtop.profiler.instrument.attach_hook import ATTACHED, DETACHED, show_until_the_end
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.ended import rings_of_latest, runs
from tests.integration.hosts import DEADLINE_S
from tests.profiler.instrument import tiny
from tests.profiler.memory import Memory

torch = tiny.torch
PACKAGE = str(Path(cbtop.profiler.__file__).parent.parent)


class Viewer:
    """The viewer's end of a socket, and the thread that shows this process to it."""

    def __init__(self, directory: Path, records: Path | None) -> None:
        self._listening = socket.socket(socket.AF_UNIX)
        address = str(directory / "attach-test")
        self._listening.bind(address)
        self._listening.listen(1)
        self._listening.settimeout(DEADLINE_S)
        self.thread = threading.Thread(
            target=show_until_the_end, args=(address, str(records or directory), PACKAGE, "", 100.0), daemon=True
        )
        self.thread.start()
        self._host, _ = self._listening.accept()
        self._host.settimeout(DEADLINE_S)
        self.lines = self._host.makefile(encoding="utf-8")
        self.answer = self.lines.readline().strip()

    def end(self) -> str:
        """Say that no more follows, and return what the process answers."""
        self._host.shutdown(socket.SHUT_WR)
        return self.lines.readline().strip()

    def close(self) -> None:
        for each in (self.lines, self._host, self._listening):
            each.close()
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()


@contextmanager
def viewer(directory: Path, records: Path | None = None) -> Iterator[Viewer]:
    """Let a viewer attach to this process. The process's files are in `records`, by default in `directory`."""
    found = Viewer(directory, records)
    try:
        yield found
    finally:
        found.close()


def called(model: object) -> object:
    with torch.inference_mode():
        return model(torch.ones(2, 4))  # type: ignore[operator]


def attribute() -> object:
    return vars(torch.nn.Module)["_compiled_call_impl"]


@pytest.fixture
def model() -> object:
    return tiny.Stack()


def test_models_are_attached_at_their_next_call_until_the_viewer_ends(runtime: Path, model: object) -> None:
    expected = called(model)
    with viewer(runtime) as there:
        assert there.answer == ATTACHED
        assert torch.equal(called(model), expected)
        (ring,) = rings_of_latest(os.listdir(runtime), os.getpid())
        assert runs(runtime / ring)
        assert there.end() == DETACHED
    assert attribute() is None
    assert not runs(runtime / ring)
    assert torch.equal(called(model), expected)


def test_a_viewer_that_is_killed_leaves_nothing_attached(runtime: Path, model: object) -> None:
    with viewer(runtime) as there:
        called(model)
    assert there.answer == ATTACHED
    assert attribute() is None


def test_a_model_that_the_host_has_attached_itself_stays_attached(runtime: Path, model: object) -> None:
    of_host = tiny.Stack()
    own = attach(of_host, BrickProfiler(recorder=Memory()))
    with viewer(runtime) as there:
        called(model)
        assert there.end() == DETACHED
    assert own.is_attached
    assert attribute() is not None
    own.detach()


def test_a_process_under_cbtop_run_refuses_a_second_profiler(runtime: Path) -> None:
    profiler = BrickProfiler(recorder=Memory())
    install(profiler)
    with viewer(runtime) as there:
        assert there.answer.startswith("refused its models are attached already")
    assert os.listdir(runtime) == ["attach-test"]


def test_of_two_viewers_at_the_same_moment_one_is_refused(runtime: Path) -> None:
    with temporary.alone() as is_alone:  # the other viewer, which has installed nothing yet
        assert is_alone
        with viewer(runtime) as there:
            assert there.answer.startswith("refused its models are attached already")
    assert attribute() is None
    (runtime / "attach-test").unlink()
    with viewer(runtime) as there:
        assert there.answer == ATTACHED


def test_a_process_without_torch_refuses(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    with viewer(runtime) as there:
        assert there.answer == "refused its Python has not imported torch"


def test_a_directory_that_cannot_be_written_is_named(runtime: Path) -> None:
    (runtime / "file").touch()
    with viewer(runtime, runtime / "file") as there:
        assert there.answer == f"refused it cannot write into {runtime / 'file'}"
    assert attribute() is None


def test_a_viewer_that_has_ended_before_is_no_error(runtime: Path) -> None:
    show_until_the_end(str(runtime / "ended"), str(runtime), PACKAGE, "", 100.0)
    assert attribute() is None
    assert os.listdir(runtime) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_not_attached(runtime: Path, model: object) -> None:
    with viewer(runtime) as there:
        called(model)
        child = os.fork()
        if child == 0:
            os._exit(3 if attribute() is None else 4)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        assert attribute() is not None
        there.end()
