"""Whose exception it is: what the host's own signal handler raises while code of ours runs is the host's."""

from __future__ import annotations


def is_ours(error: BaseException) -> bool:
    """Whether what was raised in here may be kept from the host: no interrupt, and of none of its signal handlers."""
    trace = error.__traceback__
    # What was raised right here was raised in no handler; to look at this frame's names would keep them alive.
    is_from_here = trace is None or trace.tb_next is None
    return isinstance(error, Exception) and (is_from_here or not is_of_a_signal_handler(error))


def is_of_a_signal_handler(error: BaseException) -> bool:
    """Whether `error` was raised in a signal handler: that is called with the frame that it interrupted."""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        given = [frame.f_locals.get(name) for name in frame.f_code.co_varnames]
        given += [one for value in given if type(value) is tuple and len(value) == 2 for one in value]  # *arguments
        if frame.f_back is not None and any(value is frame.f_back for value in given):
            return True
        trace = trace.tb_next
    return False
