"""A file that is open for reading. It is closed when the last reference to this object is gone."""

from __future__ import annotations

import os
from copy import copy

from cbtop.protocol.signals import suppressed

TYPE_CHECKING = False  # `typing` is not imported, because that would be slow, see `cbtop.protocol.runtime_directory`
if TYPE_CHECKING:
    from pathlib import Path

_NONE = -1


class OpenFile:
    """The file at `path`, opened for reading. Raises OSError if it cannot be opened.

    The method `close` or the deletion of this object closes the descriptor. So no descriptor leaks if a test or an
    exception drops a reader, in a host or in its forked child.

    A process that daemonizes closes all its descriptors, and a different file may then get this number. In this case,
    the descriptor is not closed.
    """

    descriptor = _NONE  # `__del__` reads this value if a signal handler raises before the first line of `__init__`

    def __init__(self, path: Path) -> None:
        # O_NONBLOCK: if the path is a pipe, do not wait for its writer.
        self.descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self.status = os.fstat(self.descriptor)  # the stat result of the file when it was opened
        except BaseException:
            os.close(self.descriptor)
            self.descriptor = _NONE
            raise

    def read_no_further(self) -> None:
        """Turn off read-ahead. Raises OSError, for example for a pipe.

        In the unwritten part of a sparse file, read-ahead allocates memory. This cost 0.4 ms per record.
        """
        os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def read_at(self, offset: int, size_bytes: int) -> bytes:
        """Return `size_bytes` bytes from `offset` on, or fewer at the end of the file. Raises OSError."""
        return os.pread(self.descriptor, size_bytes, offset)

    def status_now(self) -> os.stat_result:
        """Return the current status, including the size, of the open file. Raises OSError."""
        return os.fstat(self.descriptor)

    def duplicate(self) -> OpenFile:
        """Return another object for the same open file, even if the file has no name any longer. Raises OSError."""
        other = copy(self)
        # Until the copy has its own descriptor, deleting the copy must not close the original's descriptor.
        other.descriptor = _NONE
        other.descriptor = os.dup(self.descriptor)
        return other

    def close(self) -> None:
        """Close the file. A second call has no effect."""
        descriptor, self.descriptor = self.descriptor, _NONE
        if descriptor != _NONE:
            # Ignore two harmless cases: something else has closed the file already, or this close fails.
            with suppressed(OSError):
                if os.path.samestat(os.fstat(descriptor), self.status):
                    os.close(descriptor)

    def __del__(self) -> None:
        self.close()
