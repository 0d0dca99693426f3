"""The origin of an exception: one raised by the host's own signal handler while our code runs is the host's."""

from __future__ import annotations

TYPE_CHECKING = False  # see `cbtop.protocol.runtime_directory`
if TYPE_CHECKING:
    from types import CodeType, FrameType, TracebackType

_OURS = ("cbtop.profiler.", "cbtop.protocol.")
_CO_OPTIMIZED = 1
_CO_VARARGS = 4  # inspect's


def is_ours(error: BaseException) -> bool:
    """Whether `error`, raised in our code, may be kept from the host: no interrupt, and from none of its handlers."""
    trace = error.__traceback__
    # An exception raised in this frame did not come from a handler. Reading the frame's locals would keep them alive.
    is_from_here = trace is None or trace.tb_next is None
    return isinstance(error, Exception) and (is_from_here or not is_of_a_signal_handler(error))


def is_of_a_signal_handler(error: BaseException) -> bool:
    """Whether `error` was raised in a signal handler.

    That is a handler that is set now, or any that still holds its argument: the frame that it interrupted.
    """
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        given = _locals_of(frame)
        given += [one for value in given if type(value) is tuple and len(value) == 2 for one in value]  # *arguments
        if frame.f_back is not None and any(value is frame.f_back for value in given):
            return True
        takes_two = frame.f_code.co_argcount > 1 or frame.f_code.co_flags & _CO_VARARGS  # 50 µs to get the handlers
        if takes_two and not _is_of_ours(trace) and frame.f_code in _handlers():
            return True
        trace = trace.tb_next
    return False


def _locals_of(frame: FrameType) -> list[object]:
    """Return the values of the local variables of `frame`.

    Until Python 3.13 a frame keeps the dictionary of its locals that it returns. In a frame of ours, that dictionary
    holds the exception that holds the frame. Such a cycle would keep everything in the surrounding frames, even a
    model, until it is collected.
    """
    there = frame.f_locals
    values = [there.get(name) for name in frame.f_code.co_varnames]
    is_copy = frame.f_code.co_flags & _CO_OPTIMIZED and type(there) is dict
    if is_copy and frame.f_globals.get("__name__", "").startswith(_OURS):
        there.clear()
    return values


def _handlers() -> set[CodeType]:
    """Return the code of the signal handlers that are set."""
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
    """Raise the host's part of `error`; return if no part of it is the host's.

    Call it wherever our code catches an exception. `error` may also have been caused by a signal handler's exception
    that our code stumbled over, or turned into an error of its own.
    """
    for each in _came_from(error):
        if not isinstance(each, Exception) or is_of_a_signal_handler(each):
            raise each


class suppressed:  # noqa: N801 - as contextlib.suppress, which keeps from the host what is the host's
    """`with suppressed(OSError):` continues after the block if that failed, except for exceptions of the host."""

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
    """Return `error` and the exceptions our code caught on the way to it, but none that the host handles."""
    found = [error]
    at = error.__cause__ or error.__context__
    while at is not None and all(at is not each for each in found) and _is_of_ours(at.__traceback__):
        found.append(at)
        at = at.__cause__ or at.__context__
    return found


def _is_of_ours(trace: TracebackType | None) -> bool:
    frame: FrameType | None = trace.tb_frame if trace else None
    return frame is not None and frame.f_globals.get("__name__", "").startswith(_OURS)
