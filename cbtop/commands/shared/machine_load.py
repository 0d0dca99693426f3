"""The use of this machine's processors by other processes, from /proc/stat."""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False  # typing takes longer to load than the rest
if TYPE_CHECKING:
    from collections.abc import Callable

PROC_STAT = "/proc/stat"
# The kernel counts in ticks of 10 ms, and each processor's count may be late or early by one. In the sum over many
# processors most of that cancels out.
TICKS_S, TICKS_S_OF_EACH = 0.03, 0.004
QUIET_PROCESSORS = 0.1  # processors that others may use on a quiet machine
QUIET_SHARE = 0.01  # or this share of all processors, if that is more: a large machine has more services


class MachineLoad:
    """Processor time used by other processes since this object was made.

    `own_s` returns the time used by the measurement itself, which is subtracted.
    """

    def __init__(
        self, own_s: Callable[[], float] = lambda: 0.0, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._own_s, self._clock_s = own_s, clock_s
        self._begun_s, self._before_s = clock_s(), self._others_s()

    @property
    def elapsed_s(self) -> float:
        """The time since this object was made."""
        return self._clock_s() - self._begun_s

    def others_s(self) -> float | None:
        """Return the processor time of others, or None if the kernel does not report it."""
        now_s = self._others_s()
        return None if now_s is None or self._before_s is None else max(now_s - self._before_s, 0.0)

    def is_quiet(self) -> bool:
        """Return whether others used so little that a measurement is not disturbed. False if that is not known."""
        others_s = self.others_s()
        processors = os.cpu_count() or 1
        unsure_s = max(TICKS_S, TICKS_S_OF_EACH * processors)
        allowed_s = max(QUIET_PROCESSORS, QUIET_SHARE * processors) * self.elapsed_s
        return others_s is not None and others_s <= unsure_s + allowed_s

    def percent(self) -> float:
        """Return the share of all processors that others used; 0 if it is not known."""
        available_s = max(self.elapsed_s, 1e-9) * (os.cpu_count() or 1)
        return min(100 * (self.others_s() or 0.0) / available_s, 100.0)

    def _others_s(self) -> float | None:
        try:
            with open(PROC_STAT, encoding="ascii") as file:
                user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
        except (OSError, ValueError):  # another system, or a sandbox
            return None
        return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK") - self._own_s()
