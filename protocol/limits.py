"""The limits that `ulimit` sets for this process, as text for an error that one of them may have caused."""

from __future__ import annotations

import errno
import resource


def memory_limit() -> str:
    """Return the limit of `ulimit -v` in brackets, or "" if there is none."""
    return _in_words(resource.RLIMIT_AS, "-v", "of addresses")


def file_limit() -> str:
    """Return the limit of `ulimit -f` in brackets, or "" if there is none."""
    return _in_words(resource.RLIMIT_FSIZE, "-f", "a file")


def reason(error: OSError) -> str:
    """Return the reason of `error`, with the limit of this process that may have been reached."""
    said = str(error.strerror or error)
    if error.errno == errno.EFBIG:
        return said + file_limit()
    return said + memory_limit() if error.errno in (errno.ENOMEM, None) else said  # None: a library did not load


def _in_words(which: int, option: str, of_what: str) -> str:
    limit, _ = resource.getrlimit(which)
    return "" if limit == resource.RLIM_INFINITY else f" (ulimit {option} allows {limit // 1024:,} kB {of_what})"
