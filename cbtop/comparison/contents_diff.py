"""Find how the contents of two runs' steps differ, by brick and layer."""

# Rules
# - Only numbers that are exact in both runs are compared. A number that varies in both is equal, as with a mixture of
#   experts. If it varies in one, the difference is unknown.
# - If only one run has recorded a kind of piece, the difference is unknown, because the other may have such pieces,
#   too.
# - Bricks are compared first. Kernels of removed or new bricks are not compared.

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cbtop.comparison.contents import BESIDE, PhaseContents, Piece, PieceKind, Place, Range
from cbtop.protocol.attributes import Grid
from cbtop.units import count, counted

LISTED_LAYERS = 2
LISTED_NAMES = 8
_INNER = (PieceKind.KERNEL, PieceKind.OPERATION, PieceKind.TRANSFER)
_Pieces = Mapping[Piece, Range]


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between the contents of two runs, the same in all of `layers`.

    `kind` is the kind of these pieces. If not `is_sure`, the runs may be equal here, and `text` says what is unknown.
    """

    kind: PieceKind
    layers: tuple[str, ...]  # names of these layers; "" is outside of layers
    brick: str  # the brick that differs, or "" for a whole layer or step
    text: str
    is_sure: bool = True
    # whether every layer of the new run has it, and there are at least three
    is_everywhere: bool = False

    @property
    def place(self) -> str:
        """The place of the difference as text, for example `Layer 3 › DownProjection`. Several layers are listed
        together.
        """
        more = len(self.layers) - LISTED_LAYERS
        layers = ", ".join(self.layers[:LISTED_LAYERS]) + (f" and {counted(more, 'more layer')}" if more > 0 else "")
        return BESIDE.join(filter(None, ("every layer" if self.is_everywhere else layers, self.brick)))

    @property
    def first_place(self) -> str:
        """The place of the difference as text, with only the first layer."""
        return BESIDE.join(filter(None, (*self.layers[:1], self.brick)))


def differences_of(base: PhaseContents, now: PhaseContents) -> list[Difference]:
    """Return how the steps of one phase differ between two runs, in the order of the steps."""
    found: dict[tuple[PieceKind, str, str, bool], dict[str, None]] = {}
    befores, afters = _by_place(base), _by_place(now)
    kinds = [kind for kind in _INNER if base.has(kind) and now.has(kind)]
    names = _shown_names([*befores, *afters])
    layers = [_layers_of(one) for one in (base, now)]
    for place in _in_order(befores, afters):
        if place[0] in {*layers[0]} ^ {*layers[1]} and place not in (*layers[0].values(), *layers[1].values()):
            # A removed or new layer is listed already, so leave out its contents.
            continue
        for kind, text, is_sure in _at_place(befores.get(place, {}), afters.get(place, {}), kinds):
            found.setdefault((kind, names[place], text, is_sure), {})[place[0]] = None
    everywhere = {place[0] for place in afters if place[0]}
    differences = [
        Difference(kind, tuple(of), brick, text, is_sure, len(of) > LISTED_LAYERS and everywhere == {*of})
        for (kind, brick, text, is_sure), of in found.items()
    ]
    return differences + [
        Difference(kind, (), "", f"{kind}s were recorded only in {whose}", is_sure=False)
        for kind in _INNER
        for whose, own, other in (("the baseline", base, now), ("the new run", now, base))
        if own.has(kind) and not other.has(kind) and kind is not PieceKind.TRANSFER
    ]


def _layers_of(phase: PhaseContents) -> dict[str, Place]:
    """Return the layers with their own record. Each has its own position, as a layer may be inside a brick."""
    return {piece.layer: piece.place for piece in phase.pieces if piece.kind is PieceKind.LAYER}


def _by_place(phase: PhaseContents) -> dict[Place, dict[Piece, Range]]:
    found: dict[Place, dict[Piece, Range]] = {}
    for piece, number in phase.pieces.items():
        found.setdefault(piece.place, {})[piece] = number
    return found


def _in_order(befores: Iterable[Place], afters: Iterable[Place]) -> list[Place]:
    """Return both runs' places in the order of the new run. Removed ones come last in their layer."""
    layers = list(dict.fromkeys(place[0] for place in (*afters, *befores)))
    places = dict.fromkeys((*afters, *befores))
    return sorted(places, key=lambda place: layers.index(place[0]))


def _shown_names(places: Iterable[Place]) -> dict[Place, str]:
    """Return the name of the brick at each place, with the label if its layer has another brick of this name."""
    labels: dict[tuple[str, str], set[str]] = {}
    for layer, brick, label in places:
        labels.setdefault((layer, brick), set()).add(label)
    return {place: f"{place[1]} {place[2]}".strip() if len(labels[place[:2]]) > 1 else place[1] for place in places}


def _at_place(before: _Pieces, now: _Pieces, kinds: Sequence[PieceKind]) -> Iterator[tuple[PieceKind, str, bool]]:
    """Yield (kind of the pieces, text, whether it is sure) for each difference in one brick or layer."""
    own = [{piece: number for piece, number in side.items() if piece.kind not in _INNER} for side in (before, now)]
    changed = ""
    if own[0] or own[1]:
        kind = next(iter(own[1] or own[0])).kind
        if not own[0] or not own[1]:
            number = _sum((own[1] or own[0]).values())
            yield kind, "new" if own[1] else "gone", bool(number[0])
            return
        before_number, now_number = _sum(own[0].values()), _sum(own[1].values())
        if (text := _other_number(before_number, now_number)) is not None:
            yield kind, f"called {text}", _is_exact(before_number) and _is_exact(now_number)
        types = [" + ".join(sorted({piece.dtype for piece in side if piece.dtype})) for side in own]
        if types[0] != types[1] and all(types):
            changed = " → ".join(types)
            yield kind, changed, True
    for kind in kinds:
        yield from _inside(kind, _of_kind(before, kind), _of_kind(now, kind), changed)


def _of_kind(pieces: _Pieces, kind: PieceKind) -> dict[str, dict[Piece, Range]]:
    """Return the pieces of the kind `kind`, grouped by their names."""
    found: dict[str, dict[Piece, Range]] = {}
    for piece, number in pieces.items():
        if piece.kind is kind:
            found.setdefault(piece.name, {})[piece] = number
    return found


def _inside(
    kind: PieceKind, before: Mapping[str, _Pieces], now: Mapping[str, _Pieces], changed: str
) -> Iterator[tuple[PieceKind, str, bool]]:
    """Yield the differences of kernels, operations or copies in one brick or layer.

    `changed` is the already reported change of its number type.
    """
    gone = {name: _sum(pieces.values()) for name, pieces in before.items() if name not in now}
    new = {name: _sum(pieces.values()) for name, pieces in now.items() if name not in before}
    is_sure = all(number[0] for number in (*gone.values(), *new.values()))
    if gone and new:
        yield kind, f"{_named(gone)} → {_named(new)}", is_sure
    else:
        if len(new) > 1 and is_sure:
            yield kind, f"more {kind}s: {_named(new)}", True
        else:
            yield from ((kind, _more(number, kind, name), bool(number[0])) for name, number in new.items())
        for name, number in gone.items():
            yield kind, _fewer(number, kind, name), bool(number[0])
    for name in (name for name in now if name in before):
        was, is_now = _sum(before[name].values()), _sum(now[name].values())
        if was != is_now and _is_exact(was) and _is_exact(is_now):
            more = is_now[0] - was[0]
            text = _more((more, more), kind, name) if more > 0 else _fewer((-more, -more), kind, name)
            yield kind, text, True
        elif _is_exact(was) != _is_exact(is_now):
            yield kind, f"{name} runs {_other_number(was, is_now)}", False
        else:
            texts = _other_attributes(name, before[name], now[name])
            yield from ((kind, text, True) for text in texts if text != f"{name}: {changed}")


def _other_attributes(name: str, before: _Pieces, now: _Pieces) -> Iterator[str]:
    """Yield changes of number types and launch configurations, for kernels and operations that run as often as
    before.
    """
    types = [" + ".join(sorted({piece.dtype for piece in side if piece.dtype})) for side in (before, now)]
    if types[0] != types[1] and all(types):
        yield f"{name}: {types[0]} → {types[1]}"
    for what in ("grid", "block"):
        grids = [sorted({grid for piece in side if (grid := getattr(piece.kernel, what))}) for side in (before, now)]
        if grids[0] != grids[1] and all(grids):
            yield f"{name}: {what} {_sizes(grids[0])} → {_sizes(grids[1])}"


def _sizes(grids: Sequence[Grid]) -> str:
    return " + ".join("×".join(str(size) for size in grid) for grid in grids)


def _named(numbers: Mapping[str, Range]) -> str:
    names = [name if number == (1, 1) else f"{_text(number)} {name}" for name, number in numbers.items()]
    more = [f"{len(names) - LISTED_NAMES} more"] if len(names) > LISTED_NAMES else []
    return " + ".join([*names[:LISTED_NAMES], *more])


def _more(number: Range, kind: PieceKind, name: str) -> str:
    return f"one more {kind} {name}" if number == (1, 1) else f"{_text(number)} more {kind}s {name}"


def _fewer(number: Range, kind: PieceKind, name: str) -> str:
    return f"one {kind} fewer: {name}" if number == (1, 1) else f"{_text(number)} {kind}s fewer: {name}"


def _other_number(before: Range, now: Range) -> str | None:
    """Return the change of a number per step as text. None if it is equal in both runs, or varies in both."""
    if before == now or not (_is_exact(before) or _is_exact(now)):
        return None
    return f"{_text(now)} times a step, was {_text(before)}"


def _is_exact(number: Range) -> bool:
    return number[0] == number[1]


def _text(number: Range) -> str:
    return count(number[0]) if _is_exact(number) else f"{count(number[0])} to {count(number[1])}"


def _sum(numbers: Iterable[Range]) -> Range:
    fewest, most = 0, 0
    for one in numbers:
        fewest, most = fewest + one[0], most + one[1]
    return fewest, most
