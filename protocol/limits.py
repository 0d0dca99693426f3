"""The limits that `ulimit` sets for this process, as text for error messages."""

from __future__ import annotations

import errno
import resource


def memory_limit() -> str:
    """Return the memory limit (`ulimit -v`) in brackets, or "" without a limit."""
    return _in_words(resource.RLIMIT_AS, "-v", "of addresses")


def file_limit() -> str:
    """Return the limit for the size of a file (`ulimit -f`) in brackets, or "" without a limit."""
    return _in_words(resource.RLIMIT_FSIZE, "-f", "a file")


def reason(error: OSError) -> str:
    """Return the text of `error`. If a limit of this process may have caused the error, add this limit."""
    said = str(error.strerror or error)
    if error.errno == errno.EFBIG:
        return said + file_limit()
    # errno is None in the OSError for a library that could not be loaded
    return said + memory_limit() if error.errno in (errno.ENOMEM, None) else said


def _in_words(which: int, option: str, of_what: str) -> str:
    limit, _ = resource.getrlimit(which)
    return "" if limit == resource.RLIM_INFINITY else f" (ulimit {option} allows {limit // 1024:,} kB {of_what})"
