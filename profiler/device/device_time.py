"""Converts times of a device's clock to the host's clock, by lines between pairs of readings.

All times are integer nanoseconds.

Rules
- A pair says that the device's clock showed `device_ns` when the host's monotonic clock showed `host_ns`, within
  `error_ns`. Floats cannot hold these times exactly, because nanoseconds since the epoch take 61 bits.
- The difference of the clocks is interpolated between two pairs by a line, and extrapolated after the last pair. The
  line has an additional error: between pairs, the drift may differ from its mean by WANDER_PPM. With a single pair,
  the drift may be up to MAX_DRIFT_PPM.
- If a new pair shows a larger drift (the host slept, a clock was set), all earlier pairs are discarded.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

# Largest assumed drift between the clocks of device and host, in ppm. Measured drifts are 6 to 24 ppm.
MAX_DRIFT_PPM = 100
WANDER_PPM = 1
MAX_PAIRS = 64
# Times after the last pair of readings are converted by a line through the oldest and the newest of this many last
# pairs.
BASELINE = 8
_MILLION = 1_000_000


class ClockPair(NamedTuple):
    """One reading of the device's and the host's clock together."""

    device_ns: int
    host_ns: int
    error_ns: int

    @property
    def offset_ns(self) -> int:
        return self.host_ns - self.device_ns


class DeviceTime:
    """Converts times of one device to the host's monotonic clock."""

    def __init__(self) -> None:
        self._pairs: deque[ClockPair] = deque(maxlen=MAX_PAIRS)

    @property
    def last(self) -> ClockPair | None:
        """The newest pair."""
        return self._pairs[-1] if self._pairs else None

    def add(self, pair: ClockPair) -> None:
        """Add a reading of the clocks of device and host. The reading must be later than all earlier readings."""
        last = self.last
        if last is not None:
            elapsed_ns = pair.device_ns - last.device_ns
            strayed_ns = abs(pair.offset_ns - last.offset_ns)
            allowed_ns = last.error_ns + pair.error_ns + _part(elapsed_ns, MAX_DRIFT_PPM)
            if elapsed_ns <= 0 or strayed_ns > allowed_ns:
                self._pairs.clear()
        self._pairs.append(pair)

    def host_ns(self, device_ns: int) -> int:
        """Convert `device_ns` from the device's clock to the host's clock. Raises LookupError without a pair."""
        first, second = self._line(device_ns)
        elapsed_ns = second.device_ns - first.device_ns
        if not elapsed_ns:
            return device_ns + second.offset_ns
        distance_ns = device_ns - second.device_ns
        gained_ns = (second.offset_ns - first.offset_ns) * distance_ns // elapsed_ns
        most_ns = _part(abs(distance_ns), MAX_DRIFT_PPM)
        return device_ns + second.offset_ns + max(-most_ns, min(gained_ns, most_ns))

    def error_ns(self, device_ns: int) -> int:
        """Return the possible error of `host_ns(device_ns)`, in either direction."""
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
        """Return the two pairs of readings for the line at `device_ns`.

        These are the pair before and the pair after it. After the last pair, they are the last pair and an earlier
        one (see BASELINE).
        """
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
            if len(pairs) > 1:  # `device_ns` is before the first pair of readings
                return pairs[0], pairs[1]
        return pairs[max(0, len(pairs) - BASELINE)], pairs[-1]


def _part(duration_ns: int, ppm: int) -> int:
    return duration_ns * ppm // _MILLION + 1
