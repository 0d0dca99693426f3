"""What a file system does that a mapped file depends on."""

from __future__ import annotations

import struct
import sys

# linux/fs.h, as x86-64, aarch64 and riscv64 number them; elsewhere the kernel knows no such call.
_GET_FLAGS, _SET_FLAGS = 0x80086601, 0x40086602
_NO_COPY_ON_WRITE, _COMPRESSED = 0x00800000, 0x00000004  # btrfs takes one of them
_FLAGS = struct.Struct("@ixxxx")  # the kernel says a long, and moves an int


def copies_on_write(descriptor: int) -> bool:
    """Whether the file system of this empty file or directory (of ours) is btrfs, also below an overlay.

    It is the one that lets the flag "no copy-on-write" be set: the others refuse, or do not know it. Where the flag
    can be set it stays set, which is why the file should be empty, and our own.
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
        wanted = _FLAGS.unpack(flags)[0] & ~_COMPRESSED | _NO_COPY_ON_WRITE
        fcntl.ioctl(descriptor, _SET_FLAGS, _FLAGS.pack(wanted))
        fcntl.ioctl(descriptor, _GET_FLAGS, flags)
    except OSError:
        return False
    return bool(_FLAGS.unpack(flags)[0] & _NO_COPY_ON_WRITE)
