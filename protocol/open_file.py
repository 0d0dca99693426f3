"""A file that is open for reading and is closed when the last reference to it is gone."""

from __future__ import annotations

import os
from copy import copy

from cbtop.protocol.signals import suppressed

TYPE_CHECKING = False  # see `cbtop.protocol.runtime_directory`
if TYPE_CHECKING:
    from pathlib import Path

_NONE = -1


class OpenFile:
    """The file at `path`, opened for reading. Raises OSError if it cannot be opened.

    `close` closes its descriptor, and so does the deletion of this object. So no descriptor leaks if a test or an
    exception drops a reader in a host or its forked child. A descriptor that now belongs to a different file is not
    closed. That can happen because a process that daemonizes closes all its descriptors.
    """

    descriptor = _NONE  # Defined even if a signal handler raises before the first line of `__init__`.

    def __init__(self, path: Path) -> None:
        # If the path is a pipe, do not wait for it.
        self.descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self.status = os.fstat(self.descriptor)  # the file's status when it was opened
        except BaseException:
            os.close(self.descriptor)
            self.descriptor = _NONE
            raise

    def read_no_further(self) -> None:
        """Turn off read-ahead. Raises OSError, for example for a pipe.

        Read-ahead in the unwritten part of a sparse file allocates memory. A record cost 0.4 ms because of it.
        """
        os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def read_at(self, offset: int, size_bytes: int) -> bytes:
        """Return `size_bytes` bytes from `offset` on, or fewer at the end of the file. Raises OSError."""
        return os.pread(self.descriptor, size_bytes, offset)

    def status_now(self) -> os.stat_result:
        """Return the current status, including the size, of the open file. Raises OSError."""
        return os.fstat(self.descriptor)

    def duplicate(self) -> OpenFile:
        """Return another object for the same open file, which need not have a name any longer. Raises OSError."""
        other = copy(self)
        # Until the copy has its own descriptor, garbage collection must not close the original's.
        other.descriptor = _NONE
        other.descriptor = os.dup(self.descriptor)
        return other

    def close(self) -> None:
        """Close the file. A second call has no effect."""
        descriptor, self.descriptor = self.descriptor, _NONE
        if descriptor != _NONE:
            # The descriptor was closed already, or closing failed. It is invalid in both cases.
            with suppressed(OSError):
                if os.path.samestat(os.fstat(descriptor), self.status):
                    os.close(descriptor)

    def __del__(self) -> None:
        self.close()
