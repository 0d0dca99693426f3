"""A file that is open for reading, and is closed when nobody holds it any more."""

from __future__ import annotations

import os
from copy import copy

from cbtop.protocol.signals import suppressed

TYPE_CHECKING = False  # see `cbtop.protocol.runtime_directory`
if TYPE_CHECKING:
    from pathlib import Path

_NONE = -1


class OpenFile:
    """The file at `path`. Raises OSError where it cannot be opened.

    Its descriptor is given back by `close`, or else when this object goes: a reader that is dropped, in a test or by
    an exception, in a host or its forked child, takes none along. It is left alone where it is another file's by
    then: a process that becomes a daemon closes every one it finds.
    """

    _descriptor = _NONE  # also if a signal handler raises before the first line of `__init__`

    def __init__(self, path: Path) -> None:
        # A pipe of that name must not hold us up.
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self.status = os.fstat(self._descriptor)  # as it was opened
        except BaseException:
            os.close(self._descriptor)
            self._descriptor = _NONE
            raise

    def read_no_further(self) -> None:
        """Have no more read than is asked for. Raises OSError, of a pipe for instance.

        What was never written of a sparse file takes memory when it is read ahead: a record of it took 0.4 ms.
        """
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def read_at(self, offset: int, size_bytes: int) -> bytes:
        """At most `size_bytes` from there on; fewer at the end of the file. Raises OSError."""
        return os.pread(self._descriptor, size_bytes, offset)

    def status_now(self) -> os.stat_result:
        """What the descriptor is of, and how large that is now. Raises OSError."""
        return os.fstat(self._descriptor)

    def duplicate(self) -> OpenFile:
        """The same file once more, also where it has no name any more. Raises OSError."""
        other = copy(self)
        other._descriptor = _NONE  # until it has its own: what is collected closes no other's
        other._descriptor = os.dup(self._descriptor)
        return other

    def close(self) -> None:
        """Let go of it; again has no effect."""
        descriptor, self._descriptor = self._descriptor, _NONE
        if descriptor != _NONE:
            with suppressed(OSError):  # it was closed already, or its end was not heard: it is gone all the same
                if os.path.samestat(os.fstat(descriptor), self.status):
                    os.close(descriptor)

    def __del__(self) -> None:
        self.close()
