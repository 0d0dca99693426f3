"""Find the hardware's speed limits (roofs) that were measured on this machine after a process had announced its
own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from cbtop.client.source_record import SourceRecord
from cbtop.protocol.errors import RoofsError
from cbtop.protocol.messages import Ceiling, Manifest
from cbtop.protocol.process import boot_id
from cbtop.protocol.roofs import (
    DeviceRoofs,
    known_roofs,
    roofs_file,
    roofs_of_cpu,
    roofs_over_torch,
    way_out_on_cpu,
)
from cbtop.protocol.vocabulary import Provenance

# The roof for reading a model's weights, measured by reading as many bytes.
WEIGHTS = "weights_read"


def lacks_roofs(record: SourceRecord) -> bool:
    """Return whether the process runs a torch model on the CPU, and said that its roofs (speed limits) are
    unknown.
    """
    manifest = record.manifest
    return manifest is not None and not record.ceilings and manifest.roofs == way_out_on_cpu(manifest.threads)


class StoredRoofs:
    """Reads the file with this machine's measured roofs, again whenever it changes."""

    def __init__(self) -> None:
        self._boot_id = boot_id()
        self._stamp: tuple[int, ...] | None = None
        self._known: tuple[DeviceRoofs, ...] = ()

    def over(self, record: SourceRecord) -> Iterable[Ceiling]:
        """Return the roofs of a process. A roof that was measured later on the same device replaces the announced
        one.
        """
        announced = record.ceilings.values()
        hello, manifest = record.hello, record.manifest
        if hello is None or manifest is None or not self._boot_id or hello.boot_id != self._boot_id:
            return announced
        lacks_long = any(one.is_short for one in announced) or lacks_roofs(record)
        if not announced and not lacks_long:
            return announced
        self._read()
        if lacks_long and (found := roofs_of_cpu(self._known, manifest.threads)) is not None:
            return roofs_over_torch(found.ceilings)
        return [self._newest(one, manifest, WEIGHTS in record.ceilings) for one in announced]

    def _newest(self, announced: Ceiling, manifest: Manifest, with_weights: bool) -> Ceiling:
        if announced.provenance is not Provenance.MEASURED:
            return announced
        if announced.gpu:
            found = next((one for one in reversed(self._known) if one.uuid == announced.gpu), None)
        else:
            found = roofs_of_cpu(self._known, manifest.threads, manifest.weights_bytes if with_weights else None)
        for kept in found.ceilings if found else ():
            if kept.name == announced.name and (kept.measured_s or 0.0) > (announced.measured_s or 0.0):
                return kept
        return announced

    def _read(self) -> None:
        try:
            found = os.stat(roofs_file())
            stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
            if stamp != self._stamp:
                self._stamp, self._known = stamp, known_roofs()
        except (OSError, RoofsError):
            # The file is missing or not readable. `cbtop calibrate` tells why.
            self._known = ()
