"""A device's clock compared with the host's: pairs of readings, and the line between them. Integer nanoseconds.

Rules
- A pair means that the device showed `device_ns` when the host's monotonic clock showed `host_ns`, give or take
  `error_ns`. A float cannot hold either time: nanoseconds since the epoch take 61 bits.
- Between pairs, and after the last, the difference of the clocks follows a line. The error of the line adds to the
  errors of the pairs: the drift may depart from its mean between the pairs (WANDER_PPM), and with a single pair it is
  up to MAX_DRIFT_PPM.
- A pair that this drift cannot explain (the host slept, a clock was set) begins anew.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

MAX_DRIFT_PPM = 100  # 6 to 24 measured
WANDER_PPM = 1
MAX_PAIRS = 64
BASELINE = 8  # pairs: the slope after the last is the one since this many before it
_MILLION = 1_000_000


class ClockPair(NamedTuple):
    """One reading of both clocks."""

    device_ns: int
    host_ns: int
    error_ns: int

    @property
    def offset_ns(self) -> int:
        return self.host_ns - self.device_ns


class DeviceTime:
    """The times of one device on the host's monotonic clock."""

    def __init__(self) -> None:
        self._pairs: deque[ClockPair] = deque(maxlen=MAX_PAIRS)

    @property
    def last(self) -> ClockPair | None:
        """The newest pair."""
        return self._pairs[-1] if self._pairs else None

    def add(self, pair: ClockPair) -> None:
        """Add a reading of both clocks that is later than all others."""
        last = self.last
        if last is not None:
            elapsed_ns = pair.device_ns - last.device_ns
            strayed_ns = abs(pair.offset_ns - last.offset_ns)
            allowed_ns = last.error_ns + pair.error_ns + _part(elapsed_ns, MAX_DRIFT_PPM)
            if elapsed_ns <= 0 or strayed_ns > allowed_ns:
                self._pairs.clear()
        self._pairs.append(pair)

    def host_ns(self, device_ns: int) -> int:
        """Return the host's time when the device showed `device_ns`. Raises LookupError if no pair is known."""
        first, second = self._line(device_ns)
        elapsed_ns = second.device_ns - first.device_ns
        if not elapsed_ns:
            return device_ns + second.offset_ns
        distance_ns = device_ns - second.device_ns
        gained_ns = (second.offset_ns - first.offset_ns) * distance_ns // elapsed_ns
        most_ns = _part(abs(distance_ns), MAX_DRIFT_PPM)
        return device_ns + second.offset_ns + max(-most_ns, min(gained_ns, most_ns))

    def error_ns(self, device_ns: int) -> int:
        """Return the possible error of `host_ns`, either way."""
        first, second = self._line(device_ns)
        elapsed_ns = second.device_ns - first.device_ns
        if not elapsed_ns:
            return second.error_ns + _part(abs(device_ns - second.device_ns), MAX_DRIFT_PPM) + 1
        wrong_ns = max(first.error_ns, second.error_ns)
        beyond_ns = max(0, device_ns - second.device_ns, first.device_ns - device_ns)
        if beyond_ns:
            tilt_ns = (first.error_ns + second.error_ns) * beyond_ns // elapsed_ns
            wandered_ns = _part(beyond_ns, WANDER_PPM)
            return wrong_ns + min(tilt_ns + wandered_ns, _part(2 * beyond_ns, MAX_DRIFT_PPM)) + 2
        nearer_ns = min(device_ns - first.device_ns, second.device_ns - device_ns)
        return wrong_ns + _part(nearer_ns, WANDER_PPM) + 2

    def _line(self, device_ns: int) -> tuple[ClockPair, ClockPair]:
        """Return the pairs whose line applies to `device_ns`: those around it, or the newest's first and last."""
        pairs = self._pairs
        if not pairs:
            raise LookupError("no reading of both clocks")
        later = None
        for pair in reversed(pairs):
            if pair.device_ns <= device_ns:
                if later is not None:
                    return pair, later
                break
            later = pair
        else:
            if len(pairs) > 1:  # before the first
                return pairs[0], pairs[1]
        return pairs[max(0, len(pairs) - BASELINE)], pairs[-1]


def _part(duration_ns: int, ppm: int) -> int:
    return duration_ns * ppm // _MILLION + 1
