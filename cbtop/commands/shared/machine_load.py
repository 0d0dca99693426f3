"""Measure the use of this machine's processors by other processes, from /proc/stat."""

from __future__ import annotations

import os
import time

# Only type checkers treat `TYPE_CHECKING` as true. Importing `typing` takes longer than all other imports here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

PROC_STAT = "/proc/stat"
# Possible error of the kernel's processor times in seconds: at least the first number for all processors together,
# plus the second number for each further processor. A time is counted in ticks of 10 ms and may be wrong by one. Over
# many processors, most errors cancel out.
TICKS_S, TICKS_S_OF_EACH = 0.03, 0.004
QUIET_PROCESSORS = 0.1  # On a quiet machine, other processes use at most this many processors on average.
# Large machines run more services, so other processes may use this share of all processors. The larger of both limits
# applies.
QUIET_SHARE = 0.01


class MachineLoad:
    """The processor time that other processes have used since this object was made.

    `own_s` returns the processor time of the measurement itself, which is subtracted.
    """

    def __init__(
        self, own_s: Callable[[], float] = lambda: 0.0, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._own_s, self._clock_s = own_s, clock_s
        self._begun_s, self._before_s = clock_s(), self._others_s()

    @property
    def elapsed_s(self) -> float:
        """Seconds since this object was made. The load is measured over this time."""
        return self._clock_s() - self._begun_s

    def others_s(self) -> float | None:
        """Return the processor time of other processes in seconds, or None if the kernel does not report it."""
        now_s = self._others_s()
        return None if now_s is None or self._before_s is None else max(now_s - self._before_s, 0.0)

    def is_quiet(self) -> bool:
        """Return whether the other processes used so little time that they did not disturb a measurement.

        Returns False if the time is not known.
        """
        others_s = self.others_s()
        processors = os.cpu_count() or 1
        unsure_s = max(TICKS_S, TICKS_S_OF_EACH * processors)
        allowed_s = max(QUIET_PROCESSORS, QUIET_SHARE * processors) * self.elapsed_s
        return others_s is not None and others_s <= unsure_s + allowed_s

    def percent(self) -> float:
        """Return the percentage of all processors' time that other processes used, or 0 if the percentage is not
        known.
        """
        available_s = max(self.elapsed_s, 1e-9) * (os.cpu_count() or 1)
        return min(100 * (self.others_s() or 0.0) / available_s, 100.0)

    def _others_s(self) -> float | None:
        try:
            with open(PROC_STAT, encoding="ascii") as file:
                user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
        except (OSError, ValueError):
            # The kernel does not report the times: the system is not Linux, or a sandbox hides them.
            return None
        return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK") - self._own_s()
