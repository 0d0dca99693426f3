"""Attaches every model at its first call, until `end`: for a cell of a notebook, or for a training run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cbtop.profiler.profiler import BrickProfiler

if TYPE_CHECKING:  # imported for types only, because this import needs torch
    from cbtop.profiler.instrument.attachment import Attachment

_attaching: dict[int, object] = {}  # process -> the thread's claim. A forked child has a claim of its own.


@dataclass(frozen=True, slots=True)
class TemporaryAttachments:
    """The models that are attached since `begin`. `kept` are the attachments from before, which stay."""

    profiler: BrickProfiler
    kept: tuple[Attachment, ...]

    def end(self) -> None:
        """Detach the models. On a GPU, wait for the times of their last steps."""
        from cbtop.profiler.instrument import attachment

        attachment.uninstall(self.kept)
        self.profiler.finalize()


def begin(profiler: BrickProfiler) -> TemporaryAttachments | None:
    """Attach each model at its first call from now on. Returns None without torch, or if `cbtop run` does so."""
    if "torch" not in sys.modules or are_attached():
        return None
    # imported here, because this import needs torch
    from cbtop.profiler.instrument import attachment

    kept = tuple(attachment.attachments())
    attachment.install(profiler)
    return TemporaryAttachments(profiler, kept)


@contextmanager
def alone() -> Iterator[bool]:
    """Let no other thread attach in the block. Gives False if another one does, or has done so.

    Two viewers may attach to one process at the same moment.
    """
    claim = object()
    if _attaching.setdefault(os.getpid(), claim) is not claim:
        yield False
        return
    try:
        yield not are_attached()
    finally:
        del _attaching[os.getpid()]


def are_attached() -> bool:
    """Return whether models are attached at their first call already. `cbtop run` installs this at the first one."""
    if "torch" not in sys.modules:
        return False
    from cbtop.profiler.instrument.call_attribute import meeting

    return meeting.first_call is not None


def installed() -> BrickProfiler | None:
    """Return the profiler of models that are attached at their first call, or None. `cbtop run` has one."""
    if "torch" not in sys.modules:
        return None
    from cbtop.profiler.instrument import attachment

    return attachment.installed()
