"""Prevents garbage collections because of the many objects that attaching makes."""

from __future__ import annotations

import gc

MANY_OBJECTS = 10_000  # to collect this number of young objects takes 2 ms or more


class nothing_collected:  # noqa: N801 - used as a function
    """A context (`with nothing_collected():`). Objects made inside it trigger no garbage collection, then or later.

    At the end the new objects, all of which stay alive, move to the oldest generation. For 24,000 modules, attaching
    took 1.1 s, 0.4 s of it for collections. A collection that these objects triggered in a later step took 0.2 s.
    """

    def __enter__(self) -> None:
        self._is_on = gc.isenabled()
        gc.disable()

    def __exit__(self, *raised: object) -> None:
        if self._is_on:
            # If the host has frozen objects, `unfreeze` would unfreeze them, too.
            if gc.get_count()[0] >= MANY_OBJECTS and not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
