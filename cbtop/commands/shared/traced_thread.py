"""Calls functions in a stopped thread of a different process, by ptrace(2), on Linux for x86-64.

Rules
- Only one thread is stopped, for about a millisecond (2 cores, Zen 5). The other threads of the process run on.
- All registers of the thread, with those for vectors, and its blocked signals are restored. Signals that arrive
  meanwhile wait. A system call that the stop has interrupted begins again, as after SIGSTOP and SIGCONT.
- No code of the process is changed. A function returns to address 0, and the thread faults there. Only this process
  gets the fault.
- A call that waits in the kernel for too long is given up: the thread continues at the place of its stop. A call that
  computes is never given up, because it could hold a lock. It only needs a processor.
- A restartable sequence (rseq(2), which Google's tcmalloc uses) is not begun again if the stop is inside it. Such a
  sequence has a few instructions.
- If this process ends during a call, the traced process fails by SIGSEGV. So signals to this process wait, and
  `in_own_process` traces in a process that nobody kills together with the viewer.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import select
import signal
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from cbtop.errors import CbtopError

CONTINUE, GET_REGISTERS, SET_REGISTERS, DETACH = 7, 12, 13, 17
GET_REGISTER_SET, SET_REGISTER_SET = 0x4204, 0x4205
SEIZE, INTERRUPT, GET_BLOCKED, SET_BLOCKED = 0x4206, 0x4207, 0x420A, 0x420B
VECTORS = 0x202  # NT_X86_XSTATE: the registers for floating point and vectors
VECTOR_BYTES = 1 << 15  # those with AMX take 11 KiB
EVENT_STOP = 128  # PTRACE_EVENT_STOP: stopped by INTERRUPT, or with the whole process by a signal such as SIGSTOP
ALL_TASKS = 0x40000000  # __WALL
FIELDS = (
    "r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx", "rsi", "rdi", "orig_rax",
    "rip", "cs", "eflags", "rsp", "ss", "fs_base", "gs_base", "ds", "es", "fs", "gs",
)  # fmt: skip
REGISTERS = struct.Struct(f"<{len(FIELDS)}Q")
ARGUMENTS = ("rdi", "rsi", "rdx", "rcx", "r8", "r9")
NO_SYSTEM_CALL = (1 << 64) - 1
RED_ZONE_BYTES = 128  # a function may use this much below its stack pointer
FLAGS_TO_CLEAR = 0x500  # the direction flag and the trap flag, which are clear when a function is called
FUTEX = 202
# Results of an interrupted wait for a futex that may also end by EINTR. A wait with result 513 is for a lock that
# inherits priorities. It never ends so: its caller would take the lock as its own.
RESTARTED = {NO_SYSTEM_CALL - code + 1 for code in (512, 516)}
INTERRUPTED = NO_SYSTEM_CALL - errno.EINTR + 1
# The thread's own faults reach this process at once. If they were blocked, the kernel would reset their handlers.
FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP)
BLOCKED = sum(1 << (number - 1) for number in range(1, 65) if number not in FAULTS)
STOP_WITHIN_S = 1.0
CALL_WITHIN_S = 0.5
STACK_WORDS = 64  # the functions of the C library that wait for a lock use less
LIBCS = ("libc.so.", "libc-2.", "ld-musl-", "libpthread")
ANSWER_WITHIN_S = 5.0
DONE, MAX_ANSWER_BYTES = "done ", 1024
POLL_S = 0.0  # Only let others run, because a sleep of 20 µs takes 75 µs, as long as most stops.


class TracedThread:
    """The first thread of the process `pid`, stopped in the block: `with TracedThread(pid) as thread:`.

    Raises PermissionError if the kernel does not allow it, and CbtopError if the thread does not stop.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.ptrace.restype = ctypes.c_long
        self._libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
        self._registers = b""
        self._vectors = b""
        self._blocked = b""
        self._held: set[int | signal.Signals] = set()
        self._wakes = False

    def __enter__(self) -> TracedThread:
        self._held = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._ask(SEIZE)
            self._stop(STOP_WITHIN_S)
            self._registers = self._read(GET_REGISTERS, REGISTERS.size)
            self._vectors = self._vectors_now()
            self._blocked = self._read(GET_BLOCKED, 8, 8)
            self._write(SET_BLOCKED, struct.pack("<Q", BLOCKED), 8)
        except BaseException:
            # If the thread has not stopped, the kernel lets it go when this process ends.
            with suppress(OSError):
                self._ask(DETACH)
            signal.pthread_sigmask(signal.SIG_SETMASK, self._held)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            registers = dict(zip(FIELDS, REGISTERS.unpack(self._registers), strict=True))
            if self._wakes:
                registers |= {"rax": INTERRUPTED, "orig_rax": NO_SYSTEM_CALL}
            self._restore(registers)
            self._write(SET_BLOCKED, self._blocked, 8)
            self._ask(DETACH)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._held)

    def wake(self, address: int) -> None:
        """End the thread's wait for a lock when the block ends, if code of the file with `address` waits for it.

        That code must wait again. Python runs pending calls before. Other code may take the lock as its own.
        """
        registers = dict(zip(FIELDS, REGISTERS.unpack(self._registers), strict=True))
        if registers["orig_rax"] != FUTEX or registers["rax"] not in RESTARTED:
            return
        with open(f"/proc/{self._pid}/mem", "rb", buffering=0) as memory:
            memory.seek(registers["rsp"])
            stack = memory.read(STACK_WORDS * 8)
        code = executable_parts(self._pid)
        callers = (_file_at(word, code) for (word,) in struct.iter_unpack("<Q", stack[: len(stack) // 8 * 8]))
        caller = next((file for file in callers if file and not os.path.basename(file).startswith(LIBCS)), "")
        self._wakes = caller == _file_at(address, code) != ""

    def call(self, address: int, *arguments: int) -> int:
        """Call the function at `address`, and return its result. Raises CbtopError if it does not return in time."""
        registers = dict(zip(FIELDS, REGISTERS.unpack(self._registers), strict=True))
        before = dict(registers)
        stack = (registers["rsp"] - RED_ZONE_BYTES) // 16 * 16 - 8
        self.write(stack, bytes(8))  # the address to return to
        registers |= dict(zip(ARGUMENTS, arguments, strict=False))
        registers |= {"rip": address, "rsp": stack, "rax": 0, "orig_rax": NO_SYSTEM_CALL}
        registers["eflags"] &= ~FLAGS_TO_CLEAR
        self._write(SET_REGISTERS, REGISTERS.pack(*registers.values()))
        try:
            return self._returned()
        finally:
            self._restore(before)

    def write(self, address: int, data: bytes) -> None:
        """Write `data` into the memory of the process."""
        with open(f"/proc/{self._pid}/mem", "r+b", buffering=0) as memory:
            memory.seek(address)
            memory.write(data)

    def _returned(self) -> int:
        """Let the thread run until its function has returned. Returns the function's result."""
        self._ask(CONTINUE)
        deadline_s = time.monotonic() + CALL_WITHIN_S
        while True:
            stop = self._next_stop(deadline_s)
            if stop is None:
                self._stop(math.inf)
                if self._waits():
                    raise CbtopError(f"process {self._pid} was busy with its interpreter: try again")
                deadline_s = time.monotonic() + CALL_WITHIN_S
                self._ask(CONTINUE)
                continue
            if stop == (signal.SIGSEGV, 0):
                values = REGISTERS.unpack(self._read(GET_REGISTERS, REGISTERS.size))
                now = dict(zip(FIELDS, values, strict=True))
                if now["rip"] == 0:
                    return int(now["rax"])
            if stop[1] != EVENT_STOP:
                raise CbtopError(f"a function called in process {self._pid} failed by signal {stop[0]}")
            self._ask(CONTINUE)

    def _waits(self) -> bool:
        """Whether the stopped thread is in a system call, as when it waits for a lock."""
        registers = dict(zip(FIELDS, REGISTERS.unpack(self._read(GET_REGISTERS, REGISTERS.size)), strict=True))
        return bool(registers["orig_rax"] != NO_SYSTEM_CALL)

    def _stop(self, within_s: float) -> None:
        """Stop the thread, and wait until it has stopped."""
        self._ask(INTERRUPT)
        deadline_s = time.monotonic() + within_s
        while True:
            stop = self._next_stop(deadline_s)
            if stop is None:
                raise CbtopError(f"process {self._pid} does not stop: it waits in the kernel, for a disk or a driver")
            if stop == (signal.SIGTRAP, EVENT_STOP):
                return
            if stop[1] == EVENT_STOP:
                raise CbtopError(f"process {self._pid} is suspended: kill -CONT {self._pid}, then try again")
            self._ask(CONTINUE, stop[0])  # a signal for the process has arrived first

    def _next_stop(self, deadline_s: float) -> tuple[int, int] | None:
        """Return the signal and the event of the thread's next stop. None if it does not stop in time."""
        while True:
            pid, status = os.waitpid(self._pid, os.WNOHANG | ALL_TASKS)
            if pid and not os.WIFSTOPPED(status):
                raise CbtopError(f"process {self._pid} has ended")
            if pid:
                return os.WSTOPSIG(status), status >> 16
            if time.monotonic() > deadline_s:
                return None
            time.sleep(POLL_S)

    def _restore(self, registers: dict[str, int]) -> None:
        self._write(SET_REGISTERS, REGISTERS.pack(*registers.values()))
        self._with_vectors(SET_REGISTER_SET, ctypes.create_string_buffer(self._vectors, len(self._vectors)))

    def _vectors_now(self) -> bytes:
        space = ctypes.create_string_buffer(VECTOR_BYTES)
        size_bytes = self._with_vectors(GET_REGISTER_SET, space)
        return space.raw[:size_bytes]

    def _with_vectors(self, request: int, space: ctypes.Array[ctypes.c_char]) -> int:
        """Read or write the vector registers. Returns their size in bytes."""
        vector = (ctypes.c_size_t * 2)(ctypes.addressof(space), len(space))
        self._ask(request, ctypes.addressof(vector), VECTORS)
        return vector[1]

    def _read(self, request: int, size_bytes: int, address: int = 0) -> bytes:
        space = ctypes.create_string_buffer(size_bytes)
        self._ask(request, ctypes.addressof(space), address)
        return space.raw

    def _write(self, request: int, data: bytes, address: int = 0) -> None:
        space = ctypes.create_string_buffer(data, len(data))
        self._ask(request, ctypes.addressof(space), address)

    def _ask(self, request: int, data: int = 0, address: int = 0) -> None:
        if self._libc.ptrace(request, self._pid, address, data) == -1:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def executable_parts(pid: int) -> list[tuple[int, int, str]]:
    """Return the begin, end and file of each part of a process's memory that it may execute."""
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        span, permissions, _, _, _, *file = line.split(maxsplit=5)
        if "x" in permissions:
            begin, _, end = span.partition("-")
            found.append((int(begin, 16), int(end, 16), file[0] if file else "?"))
    return found


def _file_at(address: int, code: list[tuple[int, int, str]]) -> str:
    """Return the file with the code at `address`, or "" if there is no code."""
    return next((file for begin, end, file in code if begin <= address < end), "")


def in_own_process(work: Callable[[], float]) -> float:
    """Return the result of `work`, done in a forked process of its own session.

    That process finishes even if this one is killed meanwhile. Raises CbtopError with the text of the error that
    `work` raised, or if `work` is not done in time.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _work_and_exit(work, writer)
    os.close(writer)
    with open(reader, "rb", buffering=0) as answers:
        if not select.select([answers], [], [], ANSWER_WITHIN_S)[0]:
            raise CbtopError("the process does not run: it has no processor time, or waits for a disk or a driver")
        answer = answers.read(MAX_ANSWER_BYTES).decode("utf-8", "replace")
    os.waitpid(child, 0)
    if not answer.startswith(DONE):
        raise CbtopError(answer or "the process that traces has ended early")
    return float(answer.removeprefix(DONE))


def _work_and_exit(work: Callable[[], float], writer: int) -> NoReturn:
    answer = ""
    try:
        os.setsid()
        answer = f"{DONE}{work()}"
    except Exception as error:  # noqa: BLE001 - the parent raises it again
        answer = str(error) or type(error).__name__
    finally:
        try:
            os.write(writer, answer.encode("utf-8", "replace")[:MAX_ANSWER_BYTES])
        finally:
            os._exit(0)
