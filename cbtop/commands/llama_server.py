"""`cbtop llama-server URL`: make a running llama-server a source, from its `/metrics` and `/slots`."""

# Rules
# - cbtop reads from the server once an interval, and changes nothing there. There are no bricks and no single steps.
# - Each interval with generated tokens is one plain step of the phase PHASE, from one answer to the next.
#   Its tokens are the interval's, so tokens/s are right, and the duration of such a step is the interval's.
# - /metrics counts the tokens of a request when the request ends. /slots has the tokens of running requests.

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from cbtop.commands.shared.interrupts import noted_interrupt
from cbtop.commands.shared.show import positive_seconds
from cbtop.errors import CbtopError, UsageError

if TYPE_CHECKING:
    from cbtop.profiler.profiler import BrickProfiler

DESCRIPTION = (
    "Make a running llama-server of llama.cpp a source: tokens/s, running and waiting requests. It has no bricks, "
    "because it is only asked over HTTP for /metrics and /slots. Start it with --metrics. Watch it with `cbtop` in "
    "another terminal."
)
EPILOG = """\
examples:
  cbtop llama-server http://127.0.0.1:8080              beside `llama-server -m model.gguf --metrics`
  cbtop llama-server http://127.0.0.1:8080 --every 0.2  ask five times a second

exit codes: 0 interrupted, 1 no answer, or no llama-server answers, 2 usage
"""
PHASE = "llama-server, polled"
ANSWER_S = 5.0  # longest time to wait for an answer
MAX_ANSWER_BYTES = 16 << 20
MAX_COUNT = 2**48
COUNTERS = ("tokens_predicted_total", "requests_processing", "requests_deferred")
_SAMPLE = re.compile(r"^llamacpp:(\w+) ([-+.\deE]+)$", re.MULTILINE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", type=_url, metavar="URL", help="address of the server, http://HOST:PORT")
    parser.add_argument(
        "--every",
        type=positive_seconds,
        default=1.0,
        metavar="SEC",
        help="seconds between two questions (default: 1)",
    )


def run(options: argparse.Namespace) -> int:
    from cbtop.profiler.profiler import BrickProfiler

    first = ask(options.url)  # before a ring is opened, so that a wrong address leaves nothing
    print(f"cbtop: asking {options.url} every {options.every:g} s; watch it with: cbtop", file=sys.stderr)  # noqa: T201
    profiler = BrickProfiler()
    try:
        with noted_interrupt() as is_interrupted:
            follow(options.url, profiler, first, lambda: _waited(options.every, is_interrupted))
    finally:
        profiler.close()
    return 0


@dataclass(frozen=True, slots=True)
class ServerState:
    """An answer of the server. `running` has the generated tokens of each running request, by slot and task."""

    at_ns: int
    generated: int  # tokens of all requests that have ended
    processing: int
    deferred: int
    running: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """All generated tokens since the server began."""
        return self.generated + sum(self.running.values())


def ask(url: str) -> ServerState:
    """Ask the server at `url`.

    Raises CbtopError with one line if it cannot be reached, or if it is not a llama-server.
    """
    at_ns = time.perf_counter_ns()
    metrics = dict(_SAMPLE.findall(_get(url, "/metrics", "start it with --metrics")))
    missing = [name for name in COUNTERS if name not in metrics]
    if missing:
        raise CbtopError(f"{url}/metrics has no llamacpp:{missing[0]}; expected a llama-server")
    slots = _get(url, "/slots", "start it without --no-slots")
    try:
        generated, processing, deferred = (_count(float(metrics[name])) for name in COUNTERS)
        return ServerState(at_ns, generated, processing, deferred, slots_of(json.loads(slots)))
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise CbtopError(f"{url} answers what no llama-server answers: {error}") from error


def slots_of(slots: Any) -> dict[tuple[int, int], int]:
    """Return the generated tokens of each running request, by slot and task, from the answer of `/slots`."""
    found = {}
    for slot in slots if isinstance(slots, list) else ():
        if slot.get("is_processing"):
            next_token = slot.get("next_token") or {}
            state = next_token[0] if isinstance(next_token, list) else next_token  # a list since autumn 2025
            found[slot["id"], slot.get("id_task", -1)] = _count(state.get("n_decoded", 0))
    return found


def _count(value: float) -> int:
    """Return a number of tokens or requests. Raises ValueError if it cannot be one."""
    if not 0 <= value <= MAX_COUNT:
        raise ValueError(f"{value:g} is not a number of tokens or requests")
    return round(value)


def follow(url: str, profiler: BrickProfiler, first: ServerState, wait: Callable[[], bool]) -> None:
    """Record the answers of the server at `url` after `first`, until `wait` returns False.

    Raises CbtopError if the server no longer answers.
    """
    from cbtop.protocol.serving_messages import EngineLoad

    number, before = 0, first
    while True:
        profiler.announce(EngineLoad(number, before.at_ns, before.processing, before.deferred))
        number += 1
        if not wait():
            return
        answer = ask(url)
        # A request may end between the answers of /metrics and /slots. Its tokens then count in the next interval.
        tokens = max(0, answer.tokens - before.tokens)
        if tokens:
            profiler.parts.steps.record(PHASE, tokens, before.at_ns, answer.at_ns, None)
        before = (
            answer if answer.tokens >= before.tokens or answer.generated < before.generated else _held(before, answer)
        )


def _held(before: ServerState, answer: ServerState) -> ServerState:
    """Return `answer` with the count of tokens of `before`, which is higher because a request has just ended."""
    ended = {(-1, -1): before.tokens - answer.generated}
    return ServerState(answer.at_ns, answer.generated, answer.processing, answer.deferred, ended)


def _get(url: str, path: str, hint: str) -> str:
    try:
        with urllib.request.urlopen(url + path, timeout=ANSWER_S) as answer:
            found: bytes = answer.read(MAX_ANSWER_BYTES)
    except urllib.error.HTTPError as error:
        raise CbtopError(f"{url}{path}: {error.code} {error.reason}; {hint}") from error
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", None) or error
        raise CbtopError(f"{url} does not answer: {why}; is a llama-server running there?") from error
    return found.decode("utf-8", "replace")


def _waited(seconds: float, is_interrupted: Callable[[], bool]) -> bool:
    """Wait. Returns False as soon as the user interrupts."""
    until = time.monotonic() + seconds
    while not is_interrupted() and (left := until - time.monotonic()) > 0:
        time.sleep(min(left, 0.1))
    return not is_interrupted()


def _url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{text!r} is no address of a server; expected http://HOST:PORT")
    return text.rstrip("/")
