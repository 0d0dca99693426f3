"""Requests of a command or a screen to a profiled process.

The ring's header has one word for the request and one for the answer.

Rules
- The process needs no thread, socket or signal. It reads the request once per step, from memory that it has mapped
  anyway.
- A valid word has a known request (KERNELS), up to MAX_STEPS steps, and a number that the answer repeats. Both sides
  refuse other words.
- A process that reads requests announces that (LISTENING). A process without a torch model, or of an older cbtop,
  does not.
- Only one command or screen can have a request at a time. The command holds a lock (flock(2)) on the ring meanwhile.
  A command that gives up clears the request.

Layout
    asked      bits 0-7 request, bits 8-23 steps, bits 24-62 the request's number; 0: no request
    answer     bits 0-7 a State, bits 8-23 number of steps done, bits 24-62 the request's number; 0: not listening
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from cbtop.protocol.errors import RequestError, RingError
from cbtop.protocol.ring import ANSWER_WORD, ASKED_WORD
from cbtop.protocol.ring_reader import RingReader

try:
    import fcntl
except ImportError:
    HAS_LOCKS = False
else:
    HAS_LOCKS = True

KERNELS = 1  # this number requests a burst: the process records the kernels of its next steps
MAX_STEPS = 1000
_STEPS_SHIFT, _NUMBER_SHIFT = 8, 24
_LOW, _STEPS, _NUMBER = 0xFF, 0xFFFF, (1 << 39) - 1
_WORD = struct.Struct("<q")


class State(IntEnum):
    """The state of a request. NOT_UNDERSTOOD and all later states mean that the request is refused, and why."""

    NOBODY = 0
    LISTENING = 1
    RUNNING = 2
    DONE = 3
    NOT_UNDERSTOOD = 16
    NOT_ON_CUDA = 17
    NO_CUPTI = 18
    UNKNOWN_CUPTI = 19
    TAKEN = 20
    NOT_PERMITTED = 21
    FAILED = 22
    LEFT_ON = 23

    @property
    def is_refused(self) -> bool:
        return self >= State.NOT_UNDERSTOOD


WHY = {
    State.NOT_UNDERSTOOD: "it does not understand the request: run the same cbtop on both sides",
    State.NOT_ON_CUDA: "the model that it runs does not lie on a CUDA device",
    State.NO_CUPTI: "torch has brought no CUPTI (libcupti.so) there, or one of before CUDA 12.8",
    State.UNKNOWN_CUPTI: "its CUPTI is of a version whose records this cbtop does not know",
    State.TAKEN: "another tool holds CUPTI there (torch.profiler, Nsight, Proton), or held it: there is room for one",
    State.NOT_PERMITTED: "the driver lets only administrators profile (NVreg_RestrictProfilingToAdminUsers)",
    State.FAILED: "recording kernels failed; its standard error says why",
    State.LEFT_ON: "a graph that is not torch's ran in an earlier burst: to end recording twice would break it",
}


class Request(NamedTuple):
    """A request to record the kernels of `steps` steps."""

    number: int
    steps: int

    def word(self) -> int:
        return KERNELS | self.steps << _STEPS_SHIFT | self.number << _NUMBER_SHIFT


class Answer(NamedTuple):
    """The state of the request `number`, and how many of its steps are done."""

    number: int
    state: State
    steps: int = 0

    def word(self) -> int:
        return self.state | self.steps << _STEPS_SHIFT | self.number << _NUMBER_SHIFT


def number_of(word: int) -> int:
    """Return the number of the request in `word`."""
    return word >> _NUMBER_SHIFT & _NUMBER


def request_of(word: int) -> Request | None:
    """Return the request in `word`, or None if the word is not valid."""
    steps, number = word >> _STEPS_SHIFT & _STEPS, number_of(word)
    if word < 0 or word & _LOW != KERNELS or not 1 <= steps <= MAX_STEPS or not number:
        return None
    return Request(number, steps)


def answer_of(word: int) -> Answer:
    """Return the answer in `word`. Raises RequestError if the word is not valid."""
    try:
        state = State(word & _LOW)
    except ValueError:
        state = None
    steps = word >> _STEPS_SHIFT & _STEPS
    if word < 0 or state is None or steps > MAX_STEPS:
        raise RequestError(f"it answers {word:#x}, which this cbtop does not know: run the same cbtop on both sides")
    return Answer(number_of(word), state, steps)


class RequestSlot:
    """Sends requests to the process that writes the ring at `path`. Raises RequestError if that is impossible.

    A request is one word. It is written to the file without mapping it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.request: Request | None = None
        try:
            RingReader(path).close()  # test that the file is a ring of this version; raises RingError if not
            self._file = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        except (RingError, OSError) as error:
            raise RequestError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
        try:
            status = os.fstat(self._file)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
                raise RequestError(f"{path}: it is not yours")
            if HAS_LOCKS:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._file)
            raise RequestError("another command or screen is asking it") from error
        except BaseException:
            os.close(self._file)
            raise

    @property
    def listens(self) -> bool:
        """Whether the process reads requests."""
        return answer_of(self._word(ANSWER_WORD)).state is not State.NOBODY

    def ask(self, steps: int) -> Request:
        """Request the kernels of `steps` steps."""
        import secrets  # imported here, because the profiled process does not need this module

        before = number_of(self._word(ANSWER_WORD))
        number = before
        while number in (0, before):
            number = secrets.randbits(39)
        self.request = Request(number, steps)
        self._write(self.request.word())
        return self.request

    def answer(self) -> Answer | None:
        """Return the answer to the request, or None while the process has not read the request."""
        found = answer_of(self._word(ANSWER_WORD))
        return found if self.request is not None and found.number == self.request.number else None

    def close(self) -> None:
        """Clear the request, and close the file."""
        try:
            if self.request is not None:
                self._write(0)
        finally:
            os.close(self._file)

    def _word(self, index: int) -> int:
        data = os.pread(self._file, _WORD.size, _WORD.size * index)
        if len(data) < _WORD.size:
            raise RequestError(f"{self.path}: the file has been cut short")
        word: int = _WORD.unpack(data)[0]
        return word

    def _write(self, word: int) -> None:
        if os.fstat(self._file).st_size < _WORD.size * (ASKED_WORD + 1):
            raise RequestError(f"{self.path}: {os.strerror(errno.ENODATA)}")
        os.pwrite(self._file, _WORD.pack(word), _WORD.size * ASKED_WORD)
