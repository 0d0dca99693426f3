"""The metrics of the training steps since the last call, as a tracker takes them: names and numbers."""

from __future__ import annotations

from collections.abc import Mapping

from cbtop.profiler.instrument import temporary
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.session import StepSums
from cbtop.protocol.vocabulary import BACKWARD, RECOMPUTE, is_training, is_warm_up

PREFIX = "cbtop/"
SAMPLE_EVERY = 10  # One training step in this many is recorded inside. All steps are counted and timed.
BRICKS = 5
FORWARD, OTHER = "forward", "other"
# The part of each brick that belongs to neither a forward nor a backward pass. docs/training.md has their names.
PARTS = {
    "DataWait": "data_wait", "Loss": "loss", "BackwardEnd": "backward", "GradientSync": "communication",
    "ClipGradients": "clip", "Optimizer": "optimizer", "ZeroGrad": "zero_grad", "Loop": OTHER,
}  # fmt: skip
PASSES = {BACKWARD: "backward", RECOMPUTE: "backward"}  # the part of bricks whose names end like this


class StepMetrics:
    """Measures the training steps of this process between calls of `since_last`.

    Models are attached at their first call from `begin` to `end`. Under `cbtop run`, all models are attached already.
    Their profiler is read. `bricks` is the number of the costliest bricks with a metric of their own.

    Each model and optimizer has steps of its own. The metrics of the first ones that train have the plain names. The
    metrics of other models begin with the name of their steps, such as `cbtop/train Adam 2/step_ms`.
    """

    def __init__(self, profiler: BrickProfiler | None = None, bricks: int = BRICKS) -> None:
        self._own = profiler
        self._bricks = bricks
        self._has_begun = False
        self._attached: temporary.TemporaryAttachments | None = None
        self._last: dict[str, StepSums] = {}
        self._first = ""  # the name of the steps that have the plain names

    def begin(self) -> None:
        """Measure from now on. A second call changes nothing."""
        if self._has_begun:
            return
        self._has_begun = True
        if not temporary.are_attached():
            self._own = self._own or BrickProfiler(sample_every=SAMPLE_EVERY)
            self._attached = temporary.begin(self._own)
        self._last, self._first = self._phases(), ""

    def end(self) -> None:
        """Detach the models. A second call changes nothing."""
        if self._attached is not None:
            self._attached.end()
        self._attached, self._has_begun = None, False

    def _phases(self) -> dict[str, StepSums]:
        profiler = temporary.installed() or self._own
        return {} if profiler is None else profiler.stats.phases()

    def since_last(self) -> dict[str, float]:
        """Return the metrics of the training steps since the last call. Empty if none has ended, or in the warm-up.

        `step_ms`, `tokens_per_sec` and `samples_per_sec` are of all steps. The percentages are of the recorded steps.
        """
        if not self._has_begun:
            return {}
        before, self._last = self._last, self._phases()
        found: dict[str, float] = {}
        for name, now in self._last.items():
            change = _change(before.get(name, StepSums()), now)
            if change.steps > 0 and is_training(now.phase) and not is_warm_up(now.phase):
                self._first = self._first or name
                prefix = PREFIX if name == self._first else f"{PREFIX}{name}/"
                found |= {f"{prefix}{metric}": value for metric, value in _metrics(change, self._bricks).items()}
        return found


def _change(before: StepSums, now: StepSums) -> StepSums:
    return StepSums(
        phase=now.phase,
        steps=now.steps - before.steps,
        tokens=now.tokens - before.tokens,
        uncounted=now.uncounted - before.uncounted,
        sequences=now.sequences - before.sequences,
        told_sequences=now.told_sequences - before.told_sequences,
        wall_ns=now.wall_ns - before.wall_ns,
        recorded_ns=now.recorded_ns - before.recorded_ns,
        bricks_ns={name: ns - before.bricks_ns.get(name, 0) for name, ns in now.bricks_ns.items()},
    )


def _metrics(steps: StepSums, bricks: int) -> dict[str, float]:
    if not steps.wall_ns:
        return {}
    found = {"step_ms": steps.wall_ns / 1e6 / steps.steps}
    if steps.tokens and not steps.uncounted:
        found["tokens_per_sec"] = 1e9 * steps.tokens / steps.wall_ns
    if steps.sequences and steps.told_sequences == steps.steps:
        found["samples_per_sec"] = 1e9 * steps.sequences / steps.wall_ns
    if steps.recorded_ns > 0:
        found |= {f"percent/{part}": 100 * ns / steps.recorded_ns for part, ns in _parts(steps).items()}
        costliest = sorted(steps.bricks_ns.items(), key=lambda brick: -brick[1])[:bricks]
        found |= {f"brick_percent/{name}": 100 * ns / steps.recorded_ns for name, ns in costliest if ns > 0}
    return found


def _parts(steps: StepSums) -> Mapping[str, int]:
    """Return the time of each part in recorded steps. A brick without a part of its own belongs to the forward.

    The time in no brick belongs to the other parts.
    """
    found: dict[str, int] = {}
    for name, ns in steps.bricks_ns.items():
        passes = (part for ending, part in PASSES.items() if name.endswith(ending))
        part = PARTS.get(name) or next(passes, FORWARD)
        found[part] = found.get(part, 0) + ns
    found[OTHER] = found.get(OTHER, 0) + max(0, steps.recorded_ns - sum(found.values()))
    return {part: ns for part, ns in found.items() if ns > 0}
