"""Request the kernels of a local process and wait for the answer. `cbtop kernels` and the screen use this module."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Self

from cbtop.daemon.source import Source
from cbtop.errors import CbtopError, NoDataError
from cbtop.protocol.ended import ring_of, rings_of, runs
from cbtop.protocol.endpoint import runtime_dir
from cbtop.protocol.errors import ProtocolError
from cbtop.protocol.kernel_messages import KernelBurst
from cbtop.protocol.messages import Node
from cbtop.protocol.requests import WHY, Answer, RequestSlot, State
from cbtop.protocol.vocabulary import SourceStatus
from cbtop.viewmodels.kernels import BurstView, burst_view

DEFAULT_STEPS = 3
DEFAULT_WAIT_S = 60.0
POLL_S = 0.05


class KernelRequest:
    """A request for the kernels of a process's next steps. Call `poll` until they arrive. `close` withdraws it.

    Raises CbtopError if the process accepts no requests or refuses this one, NoDataError if it ends or does not
    answer within `wait_s`, and RequestError if the request cannot be sent. The caller must close `source`.
    """

    def __init__(self, source: Source, steps: int = DEFAULT_STEPS, wait_s: float = DEFAULT_WAIT_S) -> None:
        self._source, self._steps, self._wait_s = source, steps, wait_s
        self._pid = pid_of(source)
        self._deadline_s = time.monotonic() + wait_s
        self.status = f"waiting for a step of pid {self._pid}, at most {wait_s:g} s"
        self.done: float | None = None  # progress of the request from 0 to 1; None if unknown
        self._asker = RequestSlot(source.ring_path)
        try:
            if not self._asker.listens:
                raise CbtopError(
                    f"pid {self._pid} takes no requests: it runs no model of torch that is attached yet, "
                    "or an older cbtop"
                )
            self._asker.ask(steps)
        except BaseException:
            self._asker.close()
            raise

    def poll(self) -> BurstView | None:
        """Return the recorded kernels, or None while waiting for them."""
        answer = self._asker.answer()
        if answer is not None and answer.state.is_refused:
            raise CbtopError(f"pid {self._pid} refuses: {WHY[answer.state]}")
        found = self._found(answer)
        if found is not None:
            return found
        if answer is not None:
            self.status, self.done = f"recording kernels of pid {self._pid}", answer.steps / self._steps
        if self._source.state is not SourceStatus.LIVE:
            raise NoDataError(f"pid {self._pid} has ended: {self._source.reason}")
        if time.monotonic() > self._deadline_s:
            raise NoDataError(self._why_late(answer))
        return None

    def close(self) -> None:
        """Withdraw the request."""
        self._asker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _found(self, answer: Answer | None) -> BurstView | None:
        _read(self._source)
        if answer is None or answer.state is not State.DONE:
            return None
        said = self._source.catalog
        bursts = [one for one in said if isinstance(one, KernelBurst) and one.number == answer.number]
        nodes = [one for one in said if isinstance(one, Node)]
        return burst_view(self._source.key, self._pid, nodes, bursts[0]) if bursts else None

    def _why_late(self, answer: Answer | None) -> str:
        waited = f"in {self._wait_s:g} s"
        longer = "`cbtop kernels --timeout` waits longer"
        if answer is None:
            return f"pid {self._pid} has begun no step {waited} that can be recorded; is it idle? {longer}"
        if answer.state is State.DONE:
            return f"pid {self._pid} has recorded its kernels, and not written them {waited}; ask again in a while"
        return f"pid {self._pid} has run {answer.steps} of {self._steps} steps {waited}; {longer}"


def live_source(ring: Path) -> Source | None:
    """Return the source of a ring. None if its process has ended or belongs to another user."""
    try:
        if not runs(ring):
            return None
        source = Source(ring)
    except (ProtocolError, OSError):  # The process has ended in the meantime, or the file is not a ring.
        return None
    _read(source)
    if source.state is not SourceStatus.LIVE:
        source.close()
        return None
    return source


def own_source(key: str) -> Source:
    """Return the source shown as `key`.

    Raises NoDataError if its process does not run on this machine, or is another user's.
    """
    host, *numbers = key.rsplit(":", 3)
    for ring in rings_of([ring_of(key)]):
        source = live_source(runtime_dir() / ring)
        if source is not None and source.key == key:
            return source
        if source is not None:
            source.close()
    raise NoDataError(
        f"pid {numbers[0] if numbers else '?'} on {host} is no process of yours that runs on this machine: "
        "ask it there, with `cbtop kernels`"
    )


def pid_of(source: Source) -> int:
    """Return the pid of a ring's process, or 0 if it is not known yet."""
    return source.hello.pid if source.hello else 0


def _read(source: Source) -> None:
    source.poll()
    while source.is_behind:
        source.poll()
