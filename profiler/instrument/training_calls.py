"""Times the calls of modules in a recorded training step, forward and backward, on the host's clock.

Autograd numbers its nodes in the order of the forward, and runs the backward in the reverse order,
in the thread that called `backward`. So each noted call has the range of numbers of the nodes that it made. Before
the backward runs, the nodes are sorted by number. A hook is set on each node whose call is not the one of the node
before. When a hook runs, the previous call's backward has ended.

Rules
- A node belongs to the innermost call that made it. Nodes outside of the model's calls belong to the loss.
- What a node does before its inputs are repeated (non-reentrant checkpoints) has no brick. It only looks them up.
- A node that adds a gradient to a weight runs right after the node that computed the gradient, and counts with it.
- Modules that are called while the backward runs are recomputed (gradient checkpointing).
- A backward has one matrix product for each operand that needs a gradient. Its FLOP are their FLOP.
- A hook gives nothing back and is removed after the backward, so gradients are the same bit for bit.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from cbtop.profiler.definitions import BrickDefinition
from cbtop.profiler.instrument.capturing import MAX_CALLS, Capture
from cbtop.profiler.instrument.host_steps import noting_cost
from cbtop.profiler.instrument.torch_internals import without_torch_function
from cbtop.profiler.instrument.trouble import log_own_error
from cbtop.protocol import clock
from cbtop.protocol.attributes import Work
from cbtop.protocol.vocabulary import BACKWARD, RECOMPUTE, BrickCategory, BrickId, NodeKind, TrainingPart

if TYPE_CHECKING:
    from torch import nn

Keys = tuple[Hashable, ...]
Part = tuple[Keys, int, int, int]  # keys from below the step, begin in ns, end in ns, elements
Handle = Any  # of a hook: `remove` removes it

MAX_NODES = 100_000  # of a graph of autograd; the backward of a larger one is not split by bricks
#: Returns the number of the next node that this thread makes; None in a torch that does not tell.
next_number: Callable[[], int] | None = getattr(torch._C._autograd, "_get_sequence_nr", None)
_ACCUMULATES = 1 << 63  # nodes that add a gradient to a weight have no number of their own, but one above this
# In place of a call: no call; the nodes that no call of the model made; the end of a backward after its last node; in
# that, the wait of DistributedDataParallel for gradients.
OUTSIDE, LOSS, _AFTER, _SYNC = -1, -2, -3, -4
# The bricks of a backward that belong to no call of the model.
LOSS_BACKWARD = BrickDefinition(f"Loss{BACKWARD}", BrickCategory.OTHER, backend="torch")
BACKWARD_END = BrickDefinition("BackwardEnd", BrickCategory.OTHER, backend="torch", label="after the last node")
GRADIENT_SYNC = BrickDefinition("GradientSync", BrickCategory.COMMUNICATION, backend="torch", label="other ranks")


_AMOUNTS = "flops_per_call", "flops_per_element", "bytes_per_call", "bytes_per_element"  # of Work
#: The operands of a product that may need a gradient: their places among the next nodes, by the node's name.
_OPERANDS = {
    "AddmmBackward0": (1, 2),
    "MmBackward0": (0, 1),
    "LinearBackward0": (0, 1),
    "ConvolutionBackward0": (0, 1),
}


class Products:
    """Counts the matrix products that the nodes of one call compute, compared with its forward.

    The gradient of each operand is a product of the same FLOP as the forward's. Frozen operands have none.
    """

    __slots__ = ("_backward", "_forward", "_is_sized")

    def __init__(self) -> None:
        self._forward = self._backward = 0  # multiplications
        self._is_sized = True

    def add(self, node: Any) -> None:
        """Add a node of autograd, if it is of a product."""
        operands = _OPERANDS.get(node.name())
        if operands is not None:
            after = node.next_functions
            size = _size_of(node)
            self._is_sized &= size > 1
            self._forward += size
            self._backward += size * sum(after[at][0] is not None for at in operands)

    def scale(self, flops: float | None) -> float:
        """Return the FLOP of the backward, as a multiple of the forward's `flops`. 0 if there is no product.

        A product of frozen operands has no node. So nodes tell the forward's FLOP only if `flops` is not known.
        """
        if not self._forward:
            return 0.0
        return round(2 * self._backward / flops if flops and self._is_sized else self._backward / self._forward, 3)


def _size_of(node: Any) -> int:
    """Return the number of multiplications of a product, or 1 if its node does not tell."""
    left = getattr(node, "_saved_mat1_sym_sizes", None) or getattr(node, "_saved_self_sym_sizes", None)
    right = getattr(node, "_saved_mat2_sym_sizes", None)
    return int(left[0] * left[1] * right[1]) if left and right else 1


class StepCalls(Capture):
    """The calls of modules in one training step, in the order of their begins. A call is its number."""

    def __init__(self, labelled: Callable[[Any], Any]) -> None:
        super().__init__(lambda: None)
        self._labelled = labelled
        self._keys: list[Hashable] = []  # None: a call of the model itself
        self._around: list[int] = []  # the call around each
        self._begins_ns: list[int] = []
        self._ends_ns: list[int] = []
        self._elements: list[int] = []
        self._repeats: list[bool] = []  # whether the call ran in a backward
        self._running: list[int] = []
        self._numbers: list[int] = []  # of autograd's next node, at each begin and end of a call
        self._innermost: list[int] = []  # the innermost running call from that moment on
        self._runs: list[tuple[int, int]] = []  # when, in ns, the backward of a call began; OUTSIDE: of none
        self._products: dict[int, Products] = {}  # matrix products in the backward of each call
        self._backwards = 0  # running ones, which may be nested
        self.own_ns = 0  # time spent by cbtop in this step, without the guard's
        self.guard_ns = 0  # time spent by the guard, in forwards
        self.has_failed = False
        self.is_full = False  # whether some calls are missing, because there were more than MAX_CALLS

    def is_in_call_of(self, steps: object) -> bool:
        return self.steps is steps and bool(self._running)

    def begin(self, key: Hashable, module: nn.Module | None) -> int | None:
        number = len(self._keys)
        self.is_full |= number >= MAX_CALLS
        if self.is_full or (key is not None and not self._running and not self._backwards):
            return None
        self._keys.append(key)
        self._around.append(self._running[-1] if self._running else OUTSIDE)
        self._ends_ns.append(0)
        self._elements.append(0)
        self._repeats.append(self._backwards > 0)
        self._running.append(number)
        self._mark(number)
        self._begins_ns.append(clock.perf_counter_ns())
        return number

    def end(self, span: int | None, elements: int = 0) -> None:
        now_ns = clock.perf_counter_ns()
        if span is None or span not in self._running:
            return
        self._ends_ns[span] = now_ns
        self._elements[span] = elements if type(elements) is int else 0
        while self._running.pop() != span:
            pass
        self._mark(self._running[-1] if self._running else OUTSIDE)

    def start_brick(self, brick: Hashable, /) -> int | None:
        return self.begin(self._labelled(brick), None)

    def stop_brick(self, timer: int | None, elements: int, failed: bool = False) -> None:
        self.end(timer, elements)

    def failed(self, error: Exception) -> None:
        self.has_failed = True
        log_own_error(error, "a training step is not recorded")

    @property
    def innermost(self) -> Hashable:
        return self._keys[self._running[-1]] if self._running else None

    def enter_part(self, part: TrainingPart) -> None:
        """Note which part of the step the loop runs from now on."""

    def drop(self) -> None:
        """Record nothing of the step, because it does not end as a training step."""

    def end_model(self) -> None:
        """End the outermost call, because the model's call has returned."""
        if self._running:
            self.end(self._running[0])

    @property
    def count(self) -> int:
        """Number of the calls."""
        return len(self._keys)

    def _mark(self, innermost: int) -> None:
        self._numbers.append(0 if next_number is None else next_number())
        self._innermost.append(innermost)

    def backward_begins(self, roots: Iterable[Any]) -> list[Handle]:
        """Set the hooks for a backward from the tensors `roots`. Returns their handles."""
        begun_ns = clock.perf_counter_ns()
        self._backwards += 1
        handles: list[Handle] = []
        try:
            if next_number is not None and not self.has_failed:
                with without_torch_function():  # hides the look at the host's tensors from its torch functions
                    self._hook(_nodes_behind(roots), handles)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            self.failed(error)
        now_ns = clock.perf_counter_ns()
        self.own_ns += now_ns - begun_ns
        self._runs.append((now_ns, OUTSIDE))
        return handles

    def gradients_computed(self, now_ns: int) -> None:
        """Begin the wait of DistributedDataParallel for gradients. It lasts until the backward ends."""
        self._runs.append((now_ns, _SYNC))

    def backward_ended(self, handles: Iterable[Handle]) -> None:
        """End the backward, and remove its hooks."""
        now_ns = clock.perf_counter_ns()
        self._backwards -= 1
        self._runs.append((now_ns, OUTSIDE))
        for handle in handles:
            handle.remove()
        self.own_ns += clock.perf_counter_ns() - now_ns

    def _hook(self, nodes: list[tuple[int, Any]], handles: list[Handle]) -> None:
        before = None
        for number, node in nodes:
            owner = self._owner(number)
            owner = LOSS if owner == OUTSIDE else owner
            if owner >= 0:
                self._products.setdefault(owner, Products()).add(node)
            if owner != before:
                handles.append(node.register_prehook(functools.partial(self._reached, owner)))
            before = owner
        if nodes:  # what comes after the last node is not its time, such as the wait of DistributedDataParallel
            handles.append(nodes[-1][1].register_hook(self._done))

    def _owner(self, number: int) -> int:
        """Return the innermost call that made the node of that number."""
        at = bisect_right(self._numbers, number) - 1
        return self._innermost[at] if at >= 0 else OUTSIDE

    def _reached(self, owner: int, gradients: Any) -> None:
        self._runs.append((clock.perf_counter_ns(), owner))

    def _done(self, inputs: Any, outputs: Any) -> None:
        self._runs.append((clock.perf_counter_ns(), _AFTER))

    def backward_scale(self, owner: int) -> float:
        """Return the FLOP of the products in the backward of a call, as a multiple of the forward's. 0: unknown."""
        products = self._products.get(owner)
        if products is None:
            return 0.0
        work = getattr(self._keys[owner], "work", None)
        flops = work.flops(1, self._elements[owner]) if isinstance(work, Work) else None
        return products.scale(flops)

    def parts(self) -> list[Part]:
        """Return the forward, backward and recomputed calls as parts, in the order of their ends."""
        places, inside_ns = self._places(), round(noting_cost().inside_ns)
        begins_ns = [run_ns for run_ns, _ in self._runs]
        found: list[Part] = []
        for number, keys in enumerate(places):
            begin_ns = self._begins_ns[number]
            end_ns = max(begin_ns, self._ends_ns[number] - inside_ns)
            if self._repeats[number]:
                # A layer that checkpoints its own inside is not called again. Communication has no layer here.
                if not layers_of(keys) and not _is_communication(self._keys[number]):
                    keys = (*self._layers_at(bisect_right(begins_ns, begin_ns) - 1, places), *keys)
                keys = () if _is_layer(self._keys[number]) else renamed(keys, RECOMPUTE)
            if keys and self._keys[number] is not None and self._ends_ns[number]:
                found.append((keys, begin_ns, end_ns, self._elements[number]))
        found += self._backward_parts(places)
        return sorted(found, key=lambda part: (part[2], -part[1]))  # inner parts before the parts around them

    def _layers_at(self, run: int, places: Sequence[Keys]) -> Keys:
        """Return the layer whose backward ran in the run of that number."""
        owner = self._runs[run][1] if run >= 0 else OUTSIDE
        return () if owner < 0 else layers_of(places[owner])

    def _places(self) -> list[Keys]:
        """Return the place of each call, from below the step."""
        places: list[Keys] = []
        for key, around in zip(self._keys, self._around, strict=True):
            outer = () if around == OUTSIDE else places[around]
            places.append(outer if key is None else (*outer, key))
        return places

    def _backward_parts(self, places: Sequence[Keys]) -> list[Part]:
        """Return the parts of the backward: its bricks, and its layers with what they ran again."""
        again = [number for number, repeats in enumerate(self._repeats) if repeats and self._ends_ns[number]]
        outermost = [number for number in again if self._around[number] == OUTSIDE]
        cuts = [
            _Cut(self._begins_ns[number], self._ends_ns[number], _is_communication(self._keys[number]))
            for number in outermost
        ]
        of_layers: list[_Stay] = [
            (cut.begin_ns, cut.end_ns, None if cut.is_communication else layers_of(places[number]))
            for cut, number in zip(cuts, outermost, strict=True)
        ]
        no_call = {LOSS: LOSS_BACKWARD, _AFTER: BACKWARD_END, _SYNC: GRADIENT_SYNC}
        cut_begins_ns = [cut.begin_ns for cut in cuts]
        is_counted: set[int] = set()
        found: list[Part] = []
        for (begin_ns, owner), (end_ns, _) in zip(self._runs, self._runs[1:], strict=False):
            if owner == OUTSIDE:
                continue
            keys = (no_call[owner],) if owner < 0 else renamed(places[owner], BACKWARD, self.backward_scale(owner))
            layer = () if owner < 0 else layers_of(places[owner])
            inside = cuts[bisect_left(cut_begins_ns, begin_ns) : bisect_left(cut_begins_ns, end_ns)]
            waits = [cut for cut in inside if cut.is_communication]
            of_layers += [(*left, layer) for left in _around(waits, begin_ns, end_ns)]
            if keys and not _is_layer(keys[-1]):
                elements = 0 if owner < 0 or owner in is_counted else self._elements[owner]
                is_counted.add(owner)
                lefts = _around(inside, begin_ns, end_ns)
                if len(waits) < len(inside):  # a repetition interrupts a node as it begins: that is one call, not two
                    lefts = sorted(lefts, key=lambda left: left[0] - left[1])[:1]
                found += [(keys, *left, elements) for left in lefts]
        return found + _layers_from(of_layers)


_Stay = tuple[int, int, Keys | None]  # begin and end in ns, and the layer; (): no layer; None: communication


def _layers_from(ranges: list[_Stay]) -> list[Part]:
    """Return one part for each stay of the backward in a layer. Communication ends a stay."""
    found: list[Part] = []
    has_communicated = False
    for begin_ns, end_ns, layer in sorted(ranges, key=lambda one: one[:2]):
        if not layer:
            has_communicated |= layer is None
            continue
        keys = renamed(layer, BACKWARD)
        is_same, has_communicated = not has_communicated, False
        if is_same and found and found[-1][0] == keys:
            _, from_ns, until_ns, _ = found.pop()
            begin_ns, end_ns = from_ns, max(until_ns, end_ns)
        found.append((keys, begin_ns, end_ns, 0))
    return found


class _Cut(NamedTuple):
    """A call that runs in the backward: one that is repeated, or communication."""

    begin_ns: int
    end_ns: int
    is_communication: bool


def _around(inside: Sequence[_Cut], begin_ns: int, end_ns: int) -> list[tuple[int, int]]:
    """Return what is left of a range of time without the calls `inside` it.

    The time between two repeated calls belongs to the repetition.
    """
    left = []
    is_backward = True
    for cut in inside:
        if is_backward or cut.is_communication:
            left.append((begin_ns, cut.begin_ns))
        begin_ns, is_backward = cut.end_ns, cut.is_communication
    left.append((begin_ns, end_ns))
    return [(begin, end) for begin, end in left if end > begin]


def _is_communication(key: Hashable) -> bool:
    return isinstance(key, BrickDefinition) and key.category is BrickCategory.COMMUNICATION


def layers_of(keys: Keys) -> Keys:
    return tuple(key for key in keys if _is_layer(key))


def _nodes_behind(roots: Iterable[Any]) -> list[tuple[int, Any]]:
    """Return the numbered nodes of autograd behind the tensors `roots`, the highest number first.

    Returns an empty list if there are more than MAX_NODES.
    """
    waiting = [node for node in (getattr(root, "grad_fn", None) for root in roots) if node is not None]
    seen = set(waiting)
    found: list[tuple[int, Any]] = []
    while waiting:
        node = waiting.pop()
        number = node._sequence_nr()
        if number < _ACCUMULATES:
            found.append((number, node))
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                waiting.append(after)
        if len(seen) > MAX_NODES:
            return []
    found.sort(key=lambda one: -one[0])
    return found


def _is_layer(key: Hashable) -> bool:
    return isinstance(key, tuple) and key[0] is NodeKind.LAYER


@functools.lru_cache(maxsize=4096)
def renamed(keys: Keys, suffix: str, scale: float = 0.0) -> Keys:
    """Return the place of the backward, or of the recomputation, of the call at `keys`.

    `scale` is the FLOP of this pass as a multiple of the forward's, or 0 if it is unknown.
    Layers are in a stack of their own, and bricks have a name of their own. A backward is in no other brick's
    backward: they follow each other. What a layer runs again is in its backward.
    """
    if suffix == BACKWARD:
        keys = (*layers_of(keys[:-1]), *keys[-1:])
    return tuple(_backward_layer(key) if _is_layer(key) else _brick_renamed(key, suffix, scale) for key in keys)


def _backward_layer(key: Any) -> Hashable:
    stack = f"{key[2]}{BACKWARD}" if len(key) > 2 else BACKWARD.strip()
    return (NodeKind.LAYER, key[1], stack)


@functools.lru_cache(maxsize=4096)
def _brick_renamed(brick: Any, suffix: str, scale: float) -> Hashable:
    definition = BrickDefinition.of(brick) if isinstance(brick, BrickId) else brick
    if definition.category is BrickCategory.COMMUNICATION and suffix == RECOMPUTE:
        return definition  # communication while the backward runs repeats nothing
    work = definition.work if suffix == RECOMPUTE else _scaled(definition.work, scale)
    return replace(definition, name=definition.name + suffix, brick=None, work=work, budget=None, kernels=())


def _scaled(work: Any, scale: float) -> Work | None:
    """Return `scale` times the work, or None if it is unknown.

    The product for a gradient moves as many bytes as the forward's: two of the three matrices are read, and the third
    is written.
    """
    if not isinstance(work, Work) or not scale:
        return None
    return replace(
        work, **{name: scale * getattr(work, name) for name in _AMOUNTS if getattr(work, name) is not None}
    )
