"""Attaches to a running process from outside, by a thread there that shows its models while this viewer lives."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from types import TracebackType

import cbtop.profiler
from cbtop.commands.shared.attachable import OF_LIBC, AttachableProcess, not_permitted
from cbtop.commands.shared.traced_thread import TracedThread, in_own_process
from cbtop.errors import CbtopError
from cbtop.profiler.instrument.attach_hook import ATTACHED, DETACHED
from cbtop.protocol.endpoint import runtime_dir
from cbtop.protocol.packing import msgpack_directory
from cbtop.protocol.process import process_start

PACKAGE = Path(cbtop.profiler.__file__).parent.parent
HOOK = "profiler/instrument/attach_hook.py"
DETACH_WITHIN_S = 5.0
POLL_S = 0.25
FIRST_WAKE_S = 0.5  # then after 1, 2, 4 s, …
# mmap(2): readable and writable memory without a file
READ_WRITE, PRIVATE_ANONYMOUS, NO_FILE = 3, 0x22, (1 << 64) - 1
PAGE_BYTES = 4096
# The main thread executes this between two instructions. It only starts a thread and binds no name. If a signal
# handler of the host raises an exception meanwhile, it passes it on. If gevent has replaced the function that starts
# threads, its original is used: loading cbtop in a greenlet would stop all greenlets for a second.
START = """\
try: (lambda name, find: find and find('_thread', name) or getattr(__import__('_thread'), name))('start_new_thread', \
getattr(__import__('sys').modules.get('gevent.monkey'), 'get_original', None))(__import__('builtins').exec, \
({code!r}, {{'__name__': '_cbtop_attach'}}))
except RuntimeError: pass
except: (lambda c: c.pythonapi.PyThreadState_SetAsyncExc(c.c_ulong(__import__('_thread').get_ident()), \
c.py_object(__import__('sys').exc_info()[0])))(__import__('ctypes'))
"""


class OutsideAttachment:
    """Attaches the models of a process in the block, and detaches them after it.

    The process also detaches if this viewer ends in another way. Raises CbtopError if the process refuses, or runs no
    Python code within `timeout_s`.
    """

    def __init__(self, process: AttachableProcess, overhead_percent: float, timeout_s: float) -> None:
        self._process = process
        self._overhead_percent = overhead_percent
        self._timeout_s = timeout_s
        self._started = process_start(process.pid)
        self._address = str(runtime_dir() / f"attach-{process.pid}-{os.getpid()}")
        self._host: socket.socket | None = None
        self.stopped_ms = 0.0  # how long the main thread was stopped

    def __enter__(self) -> OutsideAttachment:
        with socket.socket(socket.AF_UNIX) as listening:
            try:
                listening.bind(self._address)
                listening.listen(1)
                listening.settimeout(POLL_S)
                self._start()
                self._host = self._answer(listening)
            finally:
                Path(self._address).unlink(missing_ok=True)
        try:
            self._host.settimeout(self._timeout_s)
            try:
                answer = self._read()
            except TimeoutError:
                late = f"process {self._process.pid} is not attached after {self._timeout_s:g} s, so cbtop leaves it"
                raise CbtopError(f"{late}: it is busy, perhaps with its imports; raise --timeout") from None
            if answer != ATTACHED:
                why = answer.partition(" ")[2] or "it has ended"
                raise CbtopError(f"process {self._process.pid} cannot be attached: {why}")
        except BaseException:
            self._host.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        host, pid = self._host, self._process.pid
        assert host is not None
        with host:
            try:
                host.shutdown(socket.SHUT_WR)
                host.settimeout(DETACH_WITHIN_S)
                is_detached = self._read() == DETACHED
            except OSError:
                is_detached = False
        if process_start(pid) != self._started:
            line = f"process {pid} has ended"
        elif is_detached:
            line = f"process {pid} runs on without cbtop; `cbtop post-mortem` has what it recorded"
        else:
            line = f"process {pid} has not detached yet: it does when it next runs Python code"
        sys.stderr.write(f"cbtop: {line}\n")

    def _start(self) -> None:
        """Start the thread in the process."""
        code = START.format(code=self._code()).encode() + b"\0"
        if len(code) > PAGE_BYTES:
            raise CbtopError(f"the paths of cbtop are too long to attach: {PACKAGE}")
        self.stopped_ms = in_own_process(lambda: self._inject(code))

    def _inject(self, code: bytes) -> float:
        """Let the main thread of the process execute `code` when it next runs Python code.

        Returns for how many milliseconds the thread was stopped.
        """
        functions, pid = self._process.functions, self._process.pid
        begun_s = time.monotonic()
        try:
            with TracedThread(pid) as thread:
                if not thread.call(functions["Py_IsInitialized"]):
                    raise CbtopError(f"the interpreter of process {pid} is starting or ending")
                page = thread.call(functions[OF_LIBC], 0, PAGE_BYTES, READ_WRITE, PRIVATE_ANONYMOUS, NO_FILE, 0)
                if page >= NO_FILE - PAGE_BYTES:
                    raise CbtopError(f"process {pid} has no memory left")
                thread.write(page, code)
                if thread.call(functions["Py_AddPendingCall"], functions["PyRun_SimpleString"], page):
                    raise CbtopError(f"process {pid} was busy with other calls: try again")
                thread.wake(functions["Py_AddPendingCall"])
        except PermissionError as error:
            raise CbtopError(not_permitted(pid)) from error
        except ProcessLookupError as error:
            raise CbtopError(f"process {pid} has ended") from error
        return 1e3 * (time.monotonic() - begun_s)

    def _wake(self) -> float:
        """Wake the main thread again if Python waits there. Returns for how many milliseconds it was stopped."""
        begun_s = time.monotonic()
        try:
            with TracedThread(self._process.pid) as thread:
                thread.wake(self._process.functions["Py_AddPendingCall"])
        except ProcessLookupError as error:
            raise CbtopError(f"process {self._process.pid} has ended") from error
        return 1e3 * (time.monotonic() - begun_s)

    def _code(self) -> str:
        """Return the Python code of the thread that shows the models."""
        hook = str(PACKAGE / HOOK)
        arguments = (self._address, str(runtime_dir()), str(PACKAGE), msgpack_directory() or "")
        return (
            f"exec(compile(open({hook!r}, 'rb').read(), {hook!r}, 'exec'))\n"
            f"show_until_the_end{(*arguments, self._overhead_percent)!r}"
        )

    def _answer(self, listening: socket.socket) -> socket.socket:
        """Wait until the thread in the process connects."""
        begun_s, pid = time.monotonic(), self._process.pid
        wake_after_s = FIRST_WAKE_S
        while (waited_s := time.monotonic() - begun_s) < self._timeout_s:
            try:
                return listening.accept()[0]
            except TimeoutError:
                if process_start(pid) != self._started:
                    raise CbtopError(f"process {pid} has ended") from None
            if waited_s >= wake_after_s:
                # The thread may have begun to wait just after the stop.
                self.stopped_ms += in_own_process(self._wake)
                wake_after_s *= 2
        raise CbtopError(
            f"the main thread of process {pid} has run no Python code for {self._timeout_s:g} s, so nothing is "
            "attached: it sleeps or is in a long call; raise --timeout"
        )

    def _read(self) -> str:
        """Return the next line that the process sends, or "" at its end."""
        assert self._host is not None
        data = b""
        while not data.endswith(b"\n") and (piece := self._host.recv(1024)):
            data += piece
        return data.decode("utf-8", "replace").strip()
