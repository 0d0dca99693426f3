"""A file that is open for reading, and is closed when nobody holds it any more."""

from __future__ import annotations

import os

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

    def __init__(self, path: Path) -> None:
        self._descriptor = _NONE
        # A pipe of that name must not hold us up.
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self.status = os.fstat(self._descriptor)  # as it was opened
        except BaseException:
            os.close(self._descriptor)
            self._descriptor = _NONE
            raise

    def read_at(self, offset: int, size_bytes: int) -> bytes:
        """At most `size_bytes` from there on; fewer at the end of the file. Raises OSError."""
        return os.pread(self._descriptor, size_bytes, offset)

    def status_now(self) -> os.stat_result:
        """What the descriptor is of, and how large that is now. Raises OSError."""
        return os.fstat(self._descriptor)

    def close(self) -> None:
        """Let go of it; again has no effect."""
        descriptor, self._descriptor = self._descriptor, _NONE
        if descriptor != _NONE:
            with suppressed(OSError):  # it was closed already, or its end was not heard: it is gone all the same
                if os.path.samestat(os.fstat(descriptor), self.status):
                    os.close(descriptor)

    def __del__(self) -> None:
        self.close()
