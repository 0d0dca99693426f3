"""Samples which Python functions run in the time that no brick covers, and announces them.

Rules
- The thread that samples is C code without the GIL (_cpu_sampler.c). Without the compiled part, nothing is sampled.
- It may use a tenth of the allowed overhead, as processor time of one core. It looks less often if it needs more, or
  if almost all time is timed.
- Before a fork, the thread ends, and it begins again in the parent. A child samples for itself when it records.
- Time before the first step after the warm-up is the start of the program, and not between steps.
- Announcements are made by the host's thread, at the end of a recorded step or with a decision of the governor.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cbtop.protocol import clock
from cbtop.protocol.messages import Node
from cbtop.protocol.sample_messages import (
    BETWEEN_STEPS,
    IN_NO_BRICK,
    MAX_SAMPLED_FUNCTIONS,
    MAX_SAMPLED_PLACES,
    CpuSamples,
    SampledFunction,
    SampledPlace,
)
from cbtop.protocol.signals import reraise_host_error
from cbtop.protocol.vocabulary import WARM_UP, NodeKind, TrainingPart

if TYPE_CHECKING:
    from cbtop.profiler.recorder import RingRecorder

PERIOD_NS = 10_000_000
WINDOW_NS = 30_000_000_000  # an announcement has the samples of the last one to two windows
COST_OF_ALLOWED = 0.1  # the part of the allowed overhead that sampling may use
# Time between two announcements: of the first TOLD_EARLY ones, and of all others.
TELL_NS, TELL_LATER_NS = 1_000_000_000, 5_000_000_000
TOLD_EARLY = 10
#: The variable that switches sampling off.
SWITCH = "CBTOP_CPU_SAMPLES"
OFF = "off"
PARTS = list(TrainingPart)
CODES = {part: 1 + number for number, part in enumerate(PARTS)}
SAMPLED_PARTS = TrainingPart.OTHER, TrainingPart.DATA_WAIT
NO_STEP = 0

_log = logging.getLogger("cbtop")
PlaceKey = tuple[str, str, str]  # phase, model, name
Place = tuple[int, int, int, int]  # place, samples, unread samples, samples of cbtop's own functions
# Place, function, its file and line, the program's function around it, its file and line, samples, samples asleep.
Line = tuple[int, str, str, int, str, str, int, int, int]

try:
    from cbtop.profiler import _cpu_sampler
except ImportError:  # not compiled: no compiler, another system or another Python

    def show_part(code: int, /) -> None:
        """Do nothing, because nothing is sampled."""

    def end_training_step(is_whole: bool, /) -> None:
        """Do nothing, because nothing is sampled."""

    CAN_SAMPLE = False
else:
    show_part = _cpu_sampler.part
    end_training_step = _cpu_sampler.training_step
    CAN_SAMPLE = True


class CpuSampling:
    """Samples this process while `recorder` has a ring, and announces the functions."""

    def __init__(self, recorder: RingRecorder, allowed_share: float) -> None:
        self._recorder = recorder
        self._allowed_share = allowed_share
        self._ring: Path | None = None  # the ring whose places are sampled
        self._has_failed = False
        self._due_ns = 0
        self._told = 0
        self._ignored: set[int] = set()
        self._has_steps = False  # whether a step after the warm-up has begun
        #: The share of a core that sampling has used. It is part of the overhead.
        self.share = 0.0

    def tell_if_due(self) -> None:
        """Begin to sample if the ring is new, and announce the functions if that was not done for some time."""
        now_ns = clock.perf_counter_ns()
        if now_ns >= self._due_ns and not self._has_failed:
            self._due_ns = now_ns + (TELL_NS if self._told < TOLD_EARLY else TELL_LATER_NS)
            self._guarded(self._follow)

    def finish(self) -> None:
        """Announce the last samples, and end the thread."""
        self._guarded(self._end)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:  # the system refuses to read memory, or another thread
            reraise_host_error(error)
            self._has_failed = True
            _log.info("cbtop samples no functions: %s", error)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            reraise_host_error(error)
            self._has_failed = True
            _cpu_sampler.stop()
            _log.warning("cbtop samples no functions: %s: %s", type(error).__name__, error)

    def _follow(self) -> None:
        if self._recorder.path is None:
            return
        if self._recorder.path == self._ring:
            self._tell()
            return
        self._ring = self._recorder.path
        self._ignored = set()
        self._has_steps = has_steps(self._recorder.nodes())
        cost_ppm = max(1, round(1e6 * COST_OF_ALLOWED * self._allowed_share))
        parts = sum(1 << CODES[part] for part in SAMPLED_PARTS)
        _cpu_sampler.start(str(self._ring), _own_folders(), _standard(), PERIOD_NS, WINDOW_NS, cost_ppm, parts)

    def _end(self) -> None:
        if self._ring is not None and self._ring == self._recorder.path and not self._has_failed:
            self._tell()
        self._has_failed = True
        _cpu_sampler.stop()

    def _tell(self) -> None:
        nodes = self._recorder.nodes()
        if not self._has_steps:
            self._has_steps = has_steps(nodes)
            _cpu_sampler.forget_between()
        since_ns, until_ns, ticks, _, cpu_ns, places, lines = _cpu_sampler.samples()
        self.share = cpu_ns / max(1, until_ns - since_ns)
        keys = self._keys_of(places, nodes)
        found = sampled_places(places, lines, keys)
        if found:
            self._told += 1
            self._recorder.announce(CpuSamples(since_ns, until_ns, ticks, cpu_ns, found))

    def _keys_of(self, places: Sequence[Place], nodes: Sequence[Node]) -> dict[int, PlaceKey]:
        """Return the names of the places that are untimed. The sampler then leaves out the others."""
        found: dict[int, PlaceKey] = {}
        for place, *_ in places:
            key = key_of_place(place, nodes)
            if key is not None:
                found[place] = key
            elif 0 < place <= len(nodes) and place not in self._ignored:
                self._ignored.add(place)
                _cpu_sampler.ignore(place)
        return found


def has_steps(nodes: Iterable[Node]) -> bool:
    """Return whether a step after the warm-up has begun."""
    return any(node.kind is NodeKind.STEP and not node.name.endswith(WARM_UP) for node in nodes)


def key_of_place(place: int, nodes: Sequence[Node]) -> PlaceKey | None:
    """Return the phase, model and name of a place of the sampler. None if its time is timed, or is a warm-up."""
    if place == 0:
        return "", "", BETWEEN_STEPS
    if place < 0:
        return "", "", PARTS[-place - 1]
    if place > len(nodes):
        return None
    node = step = nodes[place - 1]
    while step.parent is not None:
        step = nodes[step.parent - 1]
    if node.kind not in (NodeKind.STEP, NodeKind.LAYER) or step.kind is not NodeKind.STEP:
        return None
    if step.name.endswith(WARM_UP):
        return None
    return step.name, step.label, node.own or IN_NO_BRICK


def sampled_places(
    places: Iterable[Place], lines: Iterable[Line], keys: dict[int, PlaceKey]
) -> tuple[SampledPlace, ...]:
    """Add up the samples that have the same key. The largest sums come first."""
    counts: dict[PlaceKey, list[int]] = {}
    of_key: dict[PlaceKey, list[Line]] = {}
    for place, *figures in places:
        if (key := keys.get(place)) is not None:
            counts[key] = [a + b for a, b in zip(counts.get(key, [0, 0, 0]), figures, strict=True)]
    for line in lines:
        if (key := keys.get(line[0])) is not None:
            of_key.setdefault(key, []).append(line)
    found = [
        SampledPlace(*key, samples, unread, own, _functions(of_key.get(key, [])))
        for key, (samples, unread, own) in counts.items()
    ]
    return tuple(sorted(found, key=lambda one: -one.samples)[:MAX_SAMPLED_PLACES])


def _functions(lines: Iterable[Line]) -> tuple[SampledFunction, ...]:
    """Return the functions with the most samples, each with its most sampled line and its most frequent caller."""
    of_function: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        of_function.setdefault((line[1], line[2]), []).append(line)
    found = []
    for (name, file), every in of_function.items():
        at: Counter[int] = Counter()
        callers: Counter[tuple[str, str, int]] = Counter()
        for _, _, _, number, caller, caller_file, caller_line, samples, _ in every:
            at[number] += samples
            callers[caller, caller_file, caller_line] += samples
        caller, caller_file, caller_line = callers.most_common(1)[0][0]
        called_from = f"{_shortened(caller_file)}:{caller_line} {caller}" if caller else ""
        samples, asleep = sum(one[7] for one in every), sum(one[8] for one in every)
        found.append(SampledFunction(name, _shortened(file), at.most_common(1)[0][0], samples, asleep, called_from))
    return tuple(sorted(found, key=lambda one: -one.samples)[:MAX_SAMPLED_FUNCTIONS])


def _shortened(path: str) -> str:
    """Return the path from the folder that Python imports from, or the name of the file."""
    folders = [f"{folder.rstrip(os.sep)}{os.sep}" for folder in sys.path if type(folder) is str and folder]
    inside = [folder for folder in folders if path.startswith(folder)]
    return path[len(max(inside, key=len)) :] if inside else os.path.basename(path)


def _own_folders() -> tuple[str, ...]:
    """Return the folders of the code of cbtop that runs in other processes."""
    here = os.path.dirname(os.path.abspath(__file__))
    protocol = os.path.dirname(os.path.abspath(clock.__file__))
    found = here, os.path.realpath(here), protocol, os.path.realpath(protocol)
    return tuple(f"{folder}{os.sep}" for folder in dict.fromkeys(found))


def _standard() -> tuple[str, ...]:
    """Return the folders of Python's own library."""
    here = os.path.dirname(os.__file__)
    return tuple(dict.fromkeys(f"{folder}{os.sep}" for folder in (here, os.path.realpath(here))))


if CAN_SAMPLE:
    os.register_at_fork(before=_cpu_sampler.pause, after_in_parent=_cpu_sampler.resume)


def begin(recorder: RingRecorder, allowed_share: float) -> CpuSampling | None:
    """Sample this process from its first record on. Returns None if that is switched off or not possible here."""
    if not CAN_SAMPLE or os.environ.get(SWITCH) == OFF:
        return None
    sampling = CpuSampling(recorder, allowed_share)
    recorder.at_flush.append(sampling.tell_if_due)
    recorder.before_goodbye(sampling.finish)
    return sampling
