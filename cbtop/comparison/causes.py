"""List differences between two runs that can explain different times: versions, settings, kernel launches.

Only values that both runs have recorded are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cbtop.comparison.contents import MIN_STEPS, PhaseContents, Piece, PieceKind
from cbtop.comparison.contents_diff import differences_of
from cbtop.comparison.judged import Judged, Outcome
from cbtop.comparison.part_diff import PlaceDiff
from cbtop.comparison.run_diff import RunDiff
from cbtop.comparison.runs import Run
from cbtop.protocol.attributes import Grid
from cbtop.protocol.vocabulary import LAUNCH_BOUND

# The condition with the number of threads, which the model's manifest has.
THREADS = "threads"
# Properties of a kernel to compare between runs -> a function that returns a change as text.
_PROPERTIES = {
    "registers": "{} registers",
    "local_memory_bytes": "{} B of local memory",
    "shared_memory_bytes": "{} B of dynamic shared memory",
    "static_shared_memory_bytes": "{} B of static shared memory",
    "occupancy_percent": "{} % occupancy",
    "grid": "grid {}",
    "block": "block {}",
}


@dataclass(frozen=True, slots=True)
class ConditionChange:
    """A condition that differs between two runs, such as the version of a library."""

    name: str
    before: str
    now: str

    @property
    def text(self) -> str:
        """The change of a condition as text, for example `Triton 3.6.0 → 3.7.0`."""
        return f"{self.name} {self.before} → {self.now}"


@dataclass(frozen=True, slots=True)
class KernelChange:
    """A property of a brick's kernel launch that differs between two runs, equally in all of `layers`.

    `kernel` is the kernel's name, or both names if it changed.
    """

    phase: str
    brick: str
    layers: tuple[str, ...]  # names of these layers; "" is outside of layers
    kernel: str
    what: str  # name of the property, a field of KernelAttributes
    before: int | Grid
    now: int | Grid

    @property
    def text(self) -> str:
        """The change of a kernel's property as text, for example `64 → 72 registers`."""
        return _PROPERTIES[self.what].format(f"{_value(self.before)} → {_value(self.now)}")


@dataclass(frozen=True, slots=True)
class GraphChange:
    """A certain difference between two runs in the contents of a phase's steps."""

    phase: str
    place: str  # where, such as `Layer 3 › DownProjection`, or "" for the whole step
    what: str  # the difference of the contents as text, for example `float32 → bfloat16`

    @property
    def text(self) -> str:
        return ": ".join(filter(None, (self.phase, self.place, self.what)))


@dataclass(frozen=True, slots=True)
class Causes:
    """Changes between two runs that may explain different times, as measured or reported. They prove no cause."""

    conditions: tuple[ConditionChange, ...] = ()
    kernels: tuple[KernelChange, ...] = ()
    graph: tuple[GraphChange, ...] = ()

    def of_brick(self, phase: str, brick: str, layer: str | None = None) -> list[str]:
        """Return the changes of a brick's kernels as text, such as `64 → 72 registers`, in one layer or in all."""
        name = brick.removesuffix(f", {LAUNCH_BOUND}")
        own = [
            one.text
            for one in self.kernels
            if (one.phase, one.brick) == (phase, name) and (layer is None or layer in one.layers)
        ]
        return list(dict.fromkeys(own))

    @property
    def of_process(self) -> list[str]:
        """Return the changed conditions as text, such as `Triton 3.6.0 → 3.7.0`."""
        return [one.text for one in self.conditions]


def causes_of(base: Run, now: Run) -> Causes:
    """Return the changes from the run `base` to the run `now` that can explain different times."""
    befores, afters = _conditions(base), _conditions(now)
    conditions = tuple(
        ConditionChange(name, befores[name], value)
        for name, value in afters.items()
        if befores.get(name, value) != value
    )
    earlier = [(base.contents.of(phase.phase), phase) for phase in now.contents.phases]
    pairs = [(before, after) for before, after in earlier if before is not None]
    return Causes(
        conditions,
        tuple(one for before, after in pairs for one in _of_kernels(before, after)),
        tuple(one for before, after in pairs for one in _of_graph(before, after)),
    )


def with_causes(judged: Sequence[Judged], found: RunDiff) -> list[Judged]:
    """Return the results. A broken result of two runs gets a text about the differences between them."""
    causes = causes_of(found.base, found.now)
    if not (causes.conditions or causes.kernels):
        return list(judged)
    places = {(part.phase, place.name): place for part in found.parts for place in part.places if place.brick}
    return [replace(one, said=_with_causes(one, causes, places)) for one in judged]


def _with_causes(one: Judged, causes: Causes, places: Mapping[tuple[str, str], PlaceDiff]) -> str:
    if one.outcome is not Outcome.BROKEN:
        return one.said
    phase, name = one.about.partition(": ")[0], one.guilty.partition(", most in ")[0]
    place = places.get((phase, name))
    own = causes.of_brick(phase, place.brick[0], place.layer) if place and place.brick else []
    return "; ".join(filter(None, (one.said, ", ".join(own), ", ".join(causes.of_process))))


def _conditions(run: Run) -> dict[str, str]:
    threads = run.surroundings.threads
    return dict(run.contents.conditions) | ({} if threads is None else {THREADS: str(threads)})


def _of_graph(before: PhaseContents, now: PhaseContents) -> Iterator[GraphChange]:
    if min(before.steps, now.steps) < MIN_STEPS or not (before.pieces and now.pieces):
        return
    for one in differences_of(before, now):
        if one.is_sure:
            yield GraphChange(now.phase, one.place, one.text)


def _of_kernels(before: PhaseContents, now: PhaseContents) -> Iterator[KernelChange]:
    found: dict[tuple[str, str, str, int | Grid, int | Grid], dict[str, None]] = {}
    befores, afters = _kernels(before), _kernels(now)
    for place, (names, after) in afters.items():
        names_before, earlier = befores.get(place, ("", None))
        if earlier is None:
            continue
        for what in _PROPERTIES:
            values = getattr(earlier.kernel, what), getattr(after.kernel, what)
            if None not in values and values[0] != values[1]:
                kernel = names if names == names_before else f"{names_before} → {names}"
                found.setdefault((after.brick, kernel, what, *values), {})[after.layer] = None
    for (brick, kernel, what, was, is_now), layers in found.items():
        yield KernelChange(now.phase, brick, tuple(layers), kernel, what, was, is_now)


def _kernels(phase: PhaseContents) -> dict[tuple[str, str, str, str], tuple[str, Piece]]:
    """Return a brick's kernels that can be compared between two runs, by name.

    Kernels of the same name are compared. Otherwise, a kernel is compared with the brick's only kernel. A kernel with
    several launch configurations is left out.
    """
    by_name: dict[tuple[str, str, str, str], list[Piece]] = {}
    in_brick: dict[tuple[str, str, str], int] = {}
    for piece in phase.pieces:
        if piece.kind is PieceKind.KERNEL:
            by_name.setdefault((*piece.place, piece.name), []).append(piece)
            in_brick[piece.place] = in_brick.get(piece.place, 0) + 1
    return {
        (*place[:3], "" if in_brick[place[:3]] == 1 else place[3]): (place[3], pieces[0])
        for place, pieces in by_name.items()
        if len(pieces) == 1
    }


def _value(value: int | Grid) -> str:
    return "×".join(str(size) for size in value) if isinstance(value, tuple) else f"{value:,}"
