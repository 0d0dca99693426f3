"""The words and figures of a brick's counters."""

from __future__ import annotations

from collections.abc import Iterator

from cbtop.viewmodels.counters import BrickCounts


def facts(counted: BrickCounts, call_us: float) -> Iterator[tuple[str, str]]:
    """Return the (title, value) of each counter of a mean call. Counters that are not known are left out.

    `call_us` is the mean time of a call in µs. The loads from each level in GB/s are derived from it.
    """
    yield "counted calls", f"{counted.calls:,}"
    for title, value in (
        ("page faults", counted.page_faults),
        ("from disk", counted.disk_faults),
        ("waits", counted.voluntary_switches),
        ("preempted", counted.involuntary_switches),
        ("IPC", counted.ipc),
        ("branch misses", counted.branch_misses),
        ("L1 misses", counted.l1_misses),
        ("L2 misses", counted.l2_misses),
        ("L3 misses", counted.l3_misses),
        ("L2 loads GB/s", _rate(counted.l2_bytes, call_us)),
        ("L3 loads GB/s", _rate(counted.l3_bytes, call_us)),
        ("DRAM loads GB/s", _rate(counted.dram_bytes, call_us)),
    ):
        if value is not None:
            yield title, number(value)


def _rate(size_bytes: float | None, call_us: float) -> float | None:
    return size_bytes / call_us / 1e3 if size_bytes is not None and call_us else None


def number(value: float) -> str:
    """Return a mean count with three significant digits, such as 0.004, 1.37 or 1,250."""
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.3g}"
