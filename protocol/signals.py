"""Finds out whether a signal handler of the host raised an exception while our code ran."""

from __future__ import annotations

TYPE_CHECKING = False  # `typing` is not imported, because that would be slow, see `cbtop.protocol.runtime_directory`
if TYPE_CHECKING:
    from types import CodeType, FrameType, TracebackType

_OURS = ("cbtop.profiler.", "cbtop.protocol.")
_CO_OPTIMIZED = 1
_CO_VARARGS = 4  # inspect.CO_VARARGS


def is_ours(error: BaseException) -> bool:
    """Whether our code may suppress `error`: it is an Exception, and no signal handler of the host raised it."""
    trace = error.__traceback__
    # If a traceback has only one frame, it is ours and not a signal handler's. Its locals are not read, because
    # reading would keep them alive.
    is_from_here = trace is None or trace.tb_next is None
    return isinstance(error, Exception) and (is_from_here or not is_of_a_signal_handler(error))


def is_of_a_signal_handler(error: BaseException) -> bool:
    """Whether `error` was raised in a signal handler.

    A function counts as a signal handler in two cases: it is set as a handler now, or its locals contain the frame
    that it interrupted.
    """
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        given = _locals_of(frame)
        # If a handler is defined with *args, both of its arguments are in one tuple.
        given += [one for value in given if type(value) is tuple and len(value) == 2 for one in value]
        if frame.f_back is not None and any(value is frame.f_back for value in given):
            return True
        # Looking up the signal handlers takes 50 µs, so first test whether the function takes two arguments as a
        # handler does.
        takes_two = frame.f_code.co_argcount > 1 or frame.f_code.co_flags & _CO_VARARGS
        if takes_two and not _is_of_ours(trace) and frame.f_code in _handlers():
            return True
        trace = trace.tb_next
    return False


def _locals_of(frame: FrameType) -> list[object]:
    """Return the values of the local variables of `frame`.

    Reading them makes a dictionary, which the frame keeps until Python 3.13. It is cleared here. Otherwise, in a
    frame of ours, it would contain the exception, which refers to the frame. Such a cycle would keep everything in
    the surrounding frames alive, even a model, until the next garbage collection.
    """
    there = frame.f_locals
    values = [there.get(name) for name in frame.f_code.co_varnames]
    is_copy = frame.f_code.co_flags & _CO_OPTIMIZED and type(there) is dict
    if is_copy and frame.f_globals.get("__name__", "").startswith(_OURS):
        there.clear()
    return values


def _handlers() -> set[CodeType]:
    """Return the code objects of the signal handlers that are set."""
    import functools
    import signal
    from types import CodeType

    found = set()
    for number in range(1, signal.NSIG):
        handler = signal.getsignal(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        for called in (handler, type(handler).__call__) if callable(handler) else ():
            code = getattr(getattr(called, "__func__", called), "__code__", None)
            if isinstance(code, CodeType):
                found.add(code)
    return found


def reraise_host_error(error: BaseException) -> None:
    """Reraise the host's exception if `error` is one or was caused by one. Otherwise do nothing.

    Call this wherever our code catches an exception, because it may be from a signal handler of the host. Such an
    exception may also have interrupted our code, and so caused `error`.
    """
    for each in _came_from(error):
        if not isinstance(each, Exception) or is_of_a_signal_handler(each):
            raise each


class suppressed:  # noqa: N801 - named like contextlib.suppress
    """Ignores an exception in a block, like contextlib.suppress: `with suppressed(OSError):`.

    An exception of the host is raised.
    """

    def __init__(self, *kinds: type[Exception]) -> None:
        self._kinds = kinds

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool:
        if not isinstance(error, self._kinds):
            return False
        reraise_host_error(error)
        return True


def _came_from(error: BaseException) -> list[BaseException]:
    """Return `error`, and all exceptions that our code was handling when `error` was raised.

    Exceptions that the host itself has caught are left out.
    """
    found = [error]
    at = error.__cause__ or error.__context__
    while at is not None and all(at is not each for each in found) and _is_of_ours(at.__traceback__):
        found.append(at)
        at = at.__cause__ or at.__context__
    return found


def _is_of_ours(trace: TracebackType | None) -> bool:
    frame: FrameType | None = trace.tb_frame if trace else None
    return frame is not None and frame.f_globals.get("__name__", "").startswith(_OURS)
