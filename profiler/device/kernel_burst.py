"""Records the kernels of a few steps with CUPTI when a user requests it: their bricks, launches and durations. Such a
recording is a burst.

Rules
- A window is one step of a burst, or a few steps in a row of a model whose steps are recorded by their kernels
  (kernel_windows.py). CUPTI is opened for the window and finalized at its end.
- An executable graph that is launched while kernels are recorded may crash when CUPTI is finalized. So a graph that
  the host replays in a window runs as an executable of cbtop's own, which is destroyed at the end of the window. If
  another executable ran nevertheless, CUPTI is released but not finalized, and the process has no further burst.
- A kernel in a graph is assigned to a brick by its graph node. Any other kernel is assigned by the external id that
  was set when it was launched.
- The data of a burst is bounded, and so is the wait for the end of a step. Data beyond the bounds is only counted.
"""

from __future__ import annotations

import functools
import math
import re
import time
from _thread import get_ident
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from cbtop.profiler.device.cupti import (
    OF_CALLS,
    OF_KERNELS,
    Cupti,
    CuptiError,
    KernelRecord,
    demangled,
)
from cbtop.profiler.device.driver import Driver
from cbtop.protocol import clock
from cbtop.protocol.attributes import Grid
from cbtop.protocol.requests import State

# At most this many different kernels in a burst; kernels of one name differ by brick and by launch configuration.
MAX_KERNELS = 5_000
MAX_RECORDS = 800_000  # most records of all kinds together in one window; a launch has four or five records
CALL_BITS = 32  # In an external id of a call, this number of bits holds the number of the call. The step is above.
WAIT_S = 10.0  # longest wait for the device to finish the work of a step
NAP_S = 200e-6
OURS = "cbtop_"  # prefix of the names of cbtop's own kernels
MAX_NAME_CHARS = 160

# The keys of the step, layers and bricks in which a kernel was launched, outermost first. They are called its place.
Keys = tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class LaunchedKernel:
    """A kernel's name with its launch configuration."""

    name: str
    grid: Grid
    block: Grid
    registers: int
    static_bytes: int
    dynamic_bytes: int
    local_bytes: int = 0  # of a thread


class Durations:
    """Adds up the launches of one kernel and their durations.

    `steps` is the number of ended steps that launched the kernel. Each of these steps has between `fewest` and `most`
    launches.
    """

    __slots__ = ("_ended", "count", "fewest", "max_ns", "min_ns", "most", "steps", "sum_ns", "sum_of_squares")

    def __init__(self) -> None:
        self.count = self.sum_ns = self.sum_of_squares = self.max_ns = 0
        self.min_ns = 1 << 62
        self.steps = self.fewest = self.most = 0
        self._ended = 0  # launches in steps that have ended

    def add(self, duration_ns: int) -> None:
        self.count += 1
        self.sum_ns += duration_ns
        self.sum_of_squares += duration_ns * duration_ns
        self.min_ns, self.max_ns = min(self.min_ns, duration_ns), max(self.max_ns, duration_ns)

    def end_step(self) -> None:
        """End a step. All launches since the previous call of this method belong to the step."""
        launches, self._ended = self.count - self._ended, self.count
        if launches:
            self._count_step(1, launches, launches)

    def _count_step(self, steps: int, fewest: int, most: int) -> None:
        self.fewest = min(self.fewest, fewest) if self.steps else fewest
        self.most = max(self.most, most)
        self.steps += steps

    def merge(self, other: Durations) -> None:
        """Add all launches of a kernel that `other` has counted. All of its steps must have ended."""
        if other.steps:
            self._count_step(other.steps, other.fewest, other.most)
        self._ended += other.count
        self.count += other.count
        self.sum_ns += other.sum_ns
        self.sum_of_squares += other.sum_of_squares
        self.min_ns, self.max_ns = min(self.min_ns, other.min_ns), max(self.max_ns, other.max_ns)

    def copy(self) -> Durations:
        """Return a copy with the same launches."""
        found = Durations()
        found.merge(self)
        return found

    @property
    def mean_ns(self) -> float:
        return min(max(self.sum_ns / self.count, self.min_ns), self.max_ns)

    @property
    def deviation_ns(self) -> float:
        return math.sqrt(max(0, self.count * self.sum_of_squares - self.sum_ns * self.sum_ns)) / self.count


class KernelBurstResults:
    """The kernels of all recorded steps (windows) of a burst."""

    def __init__(self) -> None:
        self.kernels: dict[tuple[Keys, LaunchedKernel], Durations] = {}
        self.steps: Counter[Hashable] = Counter()  # key of a step -> number of recorded steps with this key
        self.unplaced = self.lost = self.left_out = 0
        #: Place -> time of its kernels in ns. If kernels overlap, the time counts for the kernel that began first.
        #: Kernels without a place have the key (). None: these times are not collected.
        self.covered_ns: Counter[Keys] | None = None

    def end_step(self, step: Hashable) -> None:
        """End a step with the key `step`. All launches since the last end of a step belong to it."""
        self.steps[step] += 1
        for durations in self.kernels.values():
            durations.end_step()

    def launches_in_step(self, keys: Keys, durations: Durations) -> tuple[int, int]:
        """Return the smallest and the largest number of launches of a kernel per step. `keys` is the kernel's
        place.
        """
        return durations.fewest if durations.steps == self.steps[keys[0]] else 0, durations.most

    def cover(self, spans: list[tuple[int, int, Keys]]) -> None:
        """Add the times of kernels to `covered_ns`. A span has the begin and end of one kernel in ns, and the keys of
        its step, layers and bricks.
        """
        if self.covered_ns is not None:
            until_ns = 0
            for start_ns, end_ns, keys in sorted(spans, key=lambda span: span[0]):
                self.covered_ns[keys] += max(0, end_ns - max(start_ns, until_ns))
                until_ns = max(until_ns, end_ns)

    def add(self, keys: Keys, kernel: LaunchedKernel, duration_ns: int) -> None:
        """Count a launch of `kernel` in the step, layers and bricks with these `keys`."""
        found = self.kernels.get((keys, kernel))
        if found is None:
            if len(self.kernels) >= MAX_KERNELS:
                self.left_out += 1
                return
            found = self.kernels[keys, kernel] = Durations()
        found.add(duration_ns)


class KernelWindow:
    """Records the kernels of one step, or of several steps in a row. The thread that runs them calls `begin`."""

    def __init__(self, cupti: Cupti, driver: Driver, *, has_calls: bool) -> None:
        self._cupti, self._driver = cupti, driver
        self._kinds = OF_CALLS if has_calls else OF_KERNELS
        self._places: list[Keys] = []
        # A number for each tuple of keys (step, layers and bricks) that was passed to `move`.
        self._number_of: dict[Keys, int] = {}
        # Numbers of the places (layers and bricks) that were entered and not left yet, the innermost last.
        self._open: list[int] = []
        # The keys of the steps that `begin_step` began, and the keys of the calls in these steps.
        self._steps: list[Hashable] = []
        self._calls: Sequence[Keys] = ()
        self._base = 0  # the external ids of calls in the current step are greater than this
        self._executables: list[int] = []
        # (executable graph, node) -> the keys of the node's step, layers and bricks
        self._of_node: dict[tuple[int, int], Keys] = {}
        self._streams: dict[int, None] = {}
        self._moved: set[int] = set()  # ids of the threads in which `move` has set an external id
        self.is_on = False
        self.is_left_on = False  # whether CUPTI was released for other tools, but could not be finalized

    def begin(self) -> None:
        """Start recording. If CUPTI was closed since the step began, open it again. Raises CuptiError."""
        self._cupti.begin(self._kinds)
        self.is_on = True
        for number in self._open:
            self._cupti.push(number)

    def enter(self, keys: Keys) -> None:
        """Assign all launches from now on to the step, layers and bricks with these `keys`."""
        self._places.append(keys)
        number = len(self._places)
        self._open.append(number)
        if self.is_on:
            self._cupti.push(number)

    def begin_step(self, key: Hashable, calls: Sequence[Keys]) -> None:
        """Begin a step with this `key`. `calls` has the keys of the layers and bricks of each of its calls."""
        self._steps.append(key)
        self._calls = calls
        self._base = len(self._steps) << CALL_BITS

    def enter_call(self, number: int) -> None:
        """Assign all launches from now on to a call of the step: the call at `number` - 1 in the places of the
        calls.
        """
        number |= self._base
        self._open.append(number)
        if self.is_on:
            self._cupti.push(number)

    def leave(self) -> None:
        """Undo `enter`, or `enter_call`."""
        if self._open:
            self._open.pop()
            if self.is_on:
                self._cupti.pop()

    def forget_entered(self) -> None:
        """Forget all places that were entered and not left, because another thread goes on."""
        self._open.clear()

    @property
    def has_graphs(self) -> bool:
        """Whether clones of captured graphs were launched in this window."""
        return bool(self._executables)

    def use(self, stream: int) -> None:
        """Wait for the launches on `stream`, too, when the window ends."""
        self._streams[stream] = None

    def settle(self, stream: int, most_s: float) -> bool:
        """Wait until all earlier launches have ended, at most `most_s` seconds. Returns whether they have ended."""
        self.use(stream)
        return self._wait(most_s)

    def move(self, keys: Keys) -> None:
        """Count the calling thread's next launches for the step, layers and bricks in `keys`, until its next `move`.

        Launches between `enter` and `leave` belong to the entered place instead. Any thread may call this method.
        """
        number = self._number_of.get(keys)
        if number is None:
            self._places.append(keys)
            number = self._number_of[keys] = len(self._places)
        if self.is_on:
            if get_ident() in self._moved:
                self._cupti.pop()
            self._moved.add(get_ident())
            self._cupti.push(number)

    def launch(self, graph: int, keys_of: Callable[[int], Keys | None], stream: int) -> None:
        """Launch a clone of `graph`, so that CUPTI can be finalized after the clone is destroyed. `keys_of` takes a
        node of the graph, and returns the keys of its layer and brick.
        """
        driver, cupti = self._driver, self._cupti
        with driver.relaxed():
            executable = driver.instantiate(graph)
        self._executables.append(executable)
        self._streams[stream] = None
        number = cupti.graph_number(executable)
        for node in driver.nodes(graph):
            keys = keys_of(node)
            if keys is not None:
                self._of_node[number, cupti.node_number(node)] = keys
        driver.launch_graph(executable, stream)

    def end(self, stream: int, burst: KernelBurstResults) -> None:
        """Stop recording, add the records to `burst`, and release CUPTI. Raises CuptiError."""
        if not self.is_on:
            return
        self.is_on = False
        is_through = False
        try:
            self._streams[stream] = None
            is_through = self._wait()
            self._cupti.end()
            kernels = self._read(burst)
            ours = {number for number, _ in self._of_node}
            self.is_left_on = not is_through or any([one.graph and one.graph not in ours for one in kernels])
        except BaseException:  # a signal handler may have interrupted the wait for the device, so wait again
            self.is_left_on = True
            is_through = is_through or self._wait()
            self.is_left_on = not is_through
            raise
        finally:
            self._of_node.clear()
            self._close(is_through=is_through)
        if not is_through:
            raise CuptiError(f"a step did not end within {WAIT_S:g} s")

    def _wait(self, most_s: float | None = None) -> bool:
        """Wait until all launches have ended. Returns whether they have ended."""
        deadline_s = clock.monotonic() + (WAIT_S if most_s is None else most_s)
        with self._driver.relaxed():  # another thread may be capturing a graph
            for stream in self._streams:
                while not self._driver.is_done(stream):
                    if clock.monotonic() > deadline_s:
                        return False
                    time.sleep(NAP_S)
        return True

    def _read(self, burst: KernelBurstResults) -> list[KernelRecord]:
        kernels, external, lost = self._cupti.read(MAX_RECORDS)
        burst.lost += lost
        burst.lost += self._cupti.dropped
        # Address of a kernel's name, and its launch configuration -> the kernel, or None for kernels of cbtop.
        known: dict[tuple[Any, ...], LaunchedKernel | None] = {}
        spans: list[tuple[int, int, Keys]] = []
        is_covered = burst.covered_ns is not None
        for one in kernels:
            launched = (one.name_at, *one[3:9])
            if launched not in known:
                name = _name_of(self._cupti.text(one.name_at))
                known[launched] = None if name.startswith(OURS) else LaunchedKernel(name, *one[3:9])
            kernel = known[launched]
            if kernel is None:
                continue
            keys = self._of_node.get((one.graph, one.graph_node)) if one.graph else None
            number = external.get(one.call, 0)
            if keys is None and not one.graph and number:
                keys = self._keys_of(number)
            if is_covered:
                spans.append((one.start_ns, one.end_ns, keys or ()))
            if keys is None:
                burst.unplaced += 1
            else:
                burst.add(keys, kernel, one.end_ns - one.start_ns)
        burst.cover(spans)
        return kernels

    def _keys_of(self, number: int) -> Keys | None:
        """Return the keys with the external id `number`, or None if the id is not one of cbtop's."""
        step, call = number >> CALL_BITS, number & ((1 << CALL_BITS) - 1)
        if not step:
            return self._places[number - 1] if number <= len(self._places) else None
        if step > len(self._steps) or not 0 < call <= len(self._calls):
            return None
        return (self._steps[step - 1], *self._calls[call - 1])

    def _close(self, *, is_through: bool) -> None:
        try:
            if is_through:  # an executable graph that may still run must not be destroyed
                while self._executables:
                    self._driver.destroy_executable(self._executables.pop())
        finally:
            if self.is_left_on:
                self._cupti.let_go()
            else:
                self._cupti.finalize()


def left_on() -> CuptiError:
    """Return the error for a burst in a process where an earlier burst could not finalize CUPTI."""
    return CuptiError("CUPTI was left in this process", State.LEFT_ON)


# --- names ------------------------------------------------------------------------------------------------------

_ARGUMENTS = re.compile(r"\([^()]*\)(?: const)?")
_LAMBDAS = re.compile(r"::(?:\{[^{}]*\}|operator\b|'[^']*')")
_NAMESPACES = re.compile(r"\b[A-Za-z_]\w*::")
_SPACES = re.compile(r"\s+")


@functools.lru_cache(maxsize=4096)
def _name_of(text: bytes) -> str:
    return short(demangled(text))


def short(name: str) -> str:
    """Shorten a kernel's name: remove result type, arguments and namespaces. Keep the template arguments that fit."""
    name = _SPACES.sub(" ", name.replace("(anonymous namespace)::", ""))
    for pattern in (_ARGUMENTS, _LAMBDAS, _NAMESPACES):
        before = ""
        while before != name:
            before, name = name, pattern.sub("", name)
    name = _without_result(name.replace("> >", ">>").replace("> >", ">>").strip()) or "kernel"
    depth = _depth(name)
    # If the name is too long, cut its innermost template arguments first.
    while len(name) > MAX_NAME_CHARS and depth > 0:
        depth -= 1
        name = _cut(name, depth)
    return name if len(name) <= MAX_NAME_CHARS else name[: MAX_NAME_CHARS - 1] + "…"


def _without_result(name: str) -> str:
    level = 0
    for at in range(len(name) - 1, -1, -1):
        level += {">": 1, "<": -1}.get(name[at], 0)
        if name[at] == " " and not level:
            return name[at + 1 :]
    return name


def _depth(name: str) -> int:
    level = deepest = 0
    for character in name:
        level += {"<": 1, ">": -1}.get(character, 0)
        deepest = max(deepest, level)
    return deepest


def _cut(name: str, depth: int) -> str:
    """Replace template arguments that are nested deeper than `depth` by "…"."""
    found: list[str] = []
    level = 0
    for character in name:
        if character == "<":
            level += 1
            if level == depth + 1:
                found.append("<…>")
        if level <= depth:
            found.append(character)
        if character == ">" and level:
            level -= 1
    return "".join(found)
