"""Write the requests of an engine, its latencies, its load and the parts of its time."""

from __future__ import annotations

from cbtop.units import NOT_MEASURED, count, counted, duration, number, percent
from cbtop.viewmodels.serving import LatencyView, LoadView, ServingView


def lines(found: ServingView) -> list[str]:
    """Return two lines: the latencies and the load, and the parts of an iteration."""
    shown = [latencies(found)]
    if found.load is not None:
        shown[0] += f"; {load(found.load)}"
    if found.parts:
        shown.append(parts(found))
    return shown


def latencies(found: ServingView) -> str:
    """Return `engine TTFT p50 12.1 ms, p99 80.2 ms (64 requests); inter-token p50 7.9 ms, p99 9.4 ms (32 gaps)`."""
    return (
        f"engine TTFT {_latency(found.first_token, 'request')}; inter-token {_latency(found.between_tokens, 'gap')}"
    )


def load(found: LoadView) -> str:
    """Return `3 running, 0 waiting, KV cache 41 % used`."""
    cache = NOT_MEASURED if found.cache_percent is None else percent(found.cache_percent)
    return f"{count(found.running)} running, {count(found.waiting)} waiting, KV cache {cache} used"


def parts(found: ServingView) -> str:
    """Return the parts in one line: `engine step 8.2 ms, 3.9 requests: scheduler 2.1 %, … (the latest 256 steps)`."""
    shares = ", ".join(f"{part.name} {percent(part.percent)}" for part in found.parts if part.percent)
    running = "" if found.schedules is None else f", {number(found.schedules.mean_requests)} requests"
    return f"engine step {duration(found.mean_us)}{running}: {shares} ({of_iterations(found)})"


def of_iterations(found: ServingView) -> str:
    return f"the latest {counted(found.iterations, 'step')}"


def _latency(found: LatencyView | None, of: str) -> str:
    if found is None:
        return NOT_MEASURED
    return f"p50 {duration(found.p50_us)}, p99 {duration(found.p99_us)} ({counted(found.measured, of)})"
