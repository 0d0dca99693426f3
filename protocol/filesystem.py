"""Finds out how a file system treats a mapped file, and explains how to fix a failed file operation."""

from __future__ import annotations

import errno
import struct
import sys

from cbtop.protocol.signals import reraise_host_error

# The numbers of the ioctl calls for a file's flags, from linux/fs.h for x86-64, aarch64 and riscv64. Kernels of other
# machines refuse these numbers.
_GET_FLAGS, _SET_FLAGS = 0x80086601, 0x40086602
_NO_COPY_ON_WRITE = 0x00800000
# The flags "compress" and "do not compress". While either is set, btrfs refuses the flag "no copy-on-write".
_COMPRESSION = 0x00000404
# The kernel's headers declare a long for the flags of a file. In fact, the kernel reads and writes an int.
_FLAGS = struct.Struct("@ixxxx")


def copies_on_write(descriptor: int) -> bool:
    """Whether the file system of this file or directory is btrfs, even below an overlay.

    The test sets the flag "no copy-on-write", which only btrfs accepts. The flag stays set, so the file or directory
    should be empty and ours.
    """
    if sys.platform != "linux":
        return False
    try:
        import fcntl
    except ImportError:
        return False
    flags = bytearray(_FLAGS.size)
    try:
        fcntl.ioctl(descriptor, _GET_FLAGS, flags)
        wanted = _FLAGS.unpack(flags)[0]
        if wanted & _COMPRESSION:
            wanted &= ~_COMPRESSION
            fcntl.ioctl(descriptor, _SET_FLAGS, _FLAGS.pack(wanted))
        fcntl.ioctl(descriptor, _SET_FLAGS, _FLAGS.pack(wanted | _NO_COPY_ON_WRITE))
        fcntl.ioctl(descriptor, _GET_FLAGS, flags)
    except OSError as error:
        reraise_host_error(error)
        # These errors also mean btrfs. It has accepted the flag, but has no space to store it.
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return bool(_FLAGS.unpack(flags)[0] & _NO_COPY_ON_WRITE)


def in_words(error: OSError) -> str:
    """Explain a failed file operation in the runtime directory and how to fix it."""
    what = error.strerror or type(error).__name__
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{what}; raise the limit (ulimit -n)"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{what}; make room, or set CBTOP_RUNTIME_DIR to a directory with room"
    if error.errno == errno.EFBIG:
        # Import this here. An import at the top of this module would delay the command of `cbtop run`.
        from cbtop.protocol.limits import reason

        return f"{reason(error)}; raise the limit"
    return f"{what}; set CBTOP_RUNTIME_DIR to a directory of yours that can be written"
