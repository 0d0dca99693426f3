"""A file that is open for reading, and is closed when nothing refers to it any longer."""

from __future__ import annotations

import os
from copy import copy

from cbtop.protocol.signals import suppressed

TYPE_CHECKING = False  # see `cbtop.protocol.runtime_directory`
if TYPE_CHECKING:
    from pathlib import Path

_NONE = -1


class OpenFile:
    """The file at `path`. Raises OSError if it cannot be opened.

    Its descriptor is closed by `close`, or when this object is deleted. So a reader that is dropped by a test or an
    exception, in a host or its forked child, leaks none. The descriptor is left alone if it belongs to a different
    file by then: a process that becomes a daemon closes every one it finds.
    """

    descriptor = _NONE  # also if a signal handler raises before the first line of `__init__`

    def __init__(self, path: Path) -> None:
        # A pipe of that name must not hold us up.
        self.descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self.status = os.fstat(self.descriptor)  # as it was opened
        except BaseException:
            os.close(self.descriptor)
            self.descriptor = _NONE
            raise

    def read_no_further(self) -> None:
        """Turn off read-ahead. Raises OSError, for instance for a pipe.

        Reading ahead in the unwritten part of a sparse file takes memory: it made a record cost 0.4 ms.
        """
        os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def read_at(self, offset: int, size_bytes: int) -> bytes:
        """Return at most `size_bytes` from `offset` on; fewer at the end of the file. Raises OSError."""
        return os.pread(self.descriptor, size_bytes, offset)

    def status_now(self) -> os.stat_result:
        """Return the current status of the descriptor's file, with its size. Raises OSError."""
        return os.fstat(self.descriptor)

    def duplicate(self) -> OpenFile:
        """Return the same file opened again, even if it no longer has a name. Raises OSError."""
        other = copy(self)
        other.descriptor = _NONE  # until it has its own: garbage collection must not close the first one's
        other.descriptor = os.dup(self.descriptor)
        return other

    def close(self) -> None:
        """Close it; a second call has no effect."""
        descriptor, self.descriptor = self.descriptor, _NONE
        if descriptor != _NONE:
            with suppressed(OSError):  # it was closed already, or closing failed: it is gone in both cases
                if os.path.samestat(os.fstat(descriptor), self.status):
                    os.close(descriptor)

    def __del__(self) -> None:
        self.close()
