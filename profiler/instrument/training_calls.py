"""Times the calls of modules in a recorded training step, forward and backward, on the host's clock.

Autograd numbers its nodes during the forward. It runs the backward in the reverse order, in the thread that called
`backward`. For each call, cbtop stores which numbers the call's nodes have. Before the backward, it sorts the nodes
by number, and sets a hook on each node that belongs to another call than the node before. When the hook runs, the
backward of the earlier call has ended.

Rules
- A node belongs to the innermost call that made it. Nodes outside of the model's calls belong to the loss.
- A node with recomputed inputs (non-reentrant checkpoints) only looks up its inputs until the recomputation. This
  time belongs to no brick.
- A node that adds a gradient to a weight runs right after the node that computed the gradient. Both belong to the
  same call.
- A call of a module during the backward is a recomputation (gradient checkpointing).
- A backward has one matrix product for each operand that needs a gradient. Its FLOP are the FLOP of these products.
- The hooks return None and are removed after the backward, so the gradients are bit for bit the same.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from cbtop.profiler.definitions import BrickDefinition, OwningKey, OwnOperations, own_operations
from cbtop.profiler.instrument.brick_memory import BrickSizes, bytes_of, sizes_of_outputs
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
# The keys from the step down to a part, its begin and end in ns, and its elements.
Part = tuple[Keys, int, int, int]
Handle = Any  # the handle of a hook, with a method `remove`

MAX_NODES = 100_000  # the backward of a larger graph is not split into bricks
#: Returns the number that the next node of this thread will get. None: torch has no such function.
next_number: Callable[[], int] | None = getattr(torch._C._autograd, "_get_sequence_nr", None)
_ACCUMULATES = 1 << 63  # nodes with this number or a higher one add a gradient to a weight
# Used instead of a call's number. OUTSIDE: outside of calls. LOSS: nodes that no call of the model made. _AFTER: the
# end of a backward after its last node. _SYNC: DistributedDataParallel waits for gradients, also after the last node.
OUTSIDE, LOSS, _AFTER, _SYNC = -1, -2, -3, -4
# The bricks for parts of a backward that belong to no call of the model.
LOSS_BACKWARD = BrickDefinition(f"Loss{BACKWARD}", BrickCategory.OTHER, backend="torch")
BACKWARD_END = BrickDefinition("BackwardEnd", BrickCategory.OTHER, backend="torch", label="after the last node")
GRADIENT_SYNC = BrickDefinition("GradientSync", BrickCategory.COMMUNICATION, backend="torch", label="other ranks")


_AMOUNTS = "flops_per_call", "flops_per_element", "bytes_per_call", "bytes_per_element"  # fields of `Work`
#: Name of a product's node -> its operands that may need a gradient, as indices into the node's `next_functions`.
_OPERANDS = {
    "AddmmBackward0": (1, 2),
    "MmBackward0": (0, 1),
    "LinearBackward0": (0, 1),
    "ConvolutionBackward0": (0, 1),
}


class Products:
    """Counts the multiplications of one call's matrix products, forward and backward.

    The gradient of an operand is a product with as many FLOP as the forward's. Frozen operands have no gradient.
    """

    __slots__ = ("_backward", "_forward", "_is_sized")

    def __init__(self) -> None:
        self._forward = self._backward = 0  # number of multiplications
        self._is_sized = True

    def add(self, node: Any) -> None:
        """Count a node of autograd if it belongs to a matrix product."""
        operands = _OPERANDS.get(node.name())
        if operands is not None:
            after = node.next_functions
            size = _size_of(node)
            self._is_sized &= size > 1
            self._forward += size
            self._backward += size * sum(after[at][0] is not None for at in operands)

    def scale(self, flops: float | None) -> float:
        """Return the FLOP of the backward, divided by the FLOP of the forward, `flops`. Returns 0 without a product.

        If `flops` is unknown, the forward's products are counted by their nodes in autograd. Products with only
        frozen operands have no node, so they are left out.
        """
        if not self._forward:
            return 0.0
        return round(2 * self._backward / flops if flops and self._is_sized else self._backward / self._forward, 3)


def _size_of(node: Any) -> int:
    """Return the number of multiplications of a matrix product, or 1 if its node does not store the sizes."""
    left = getattr(node, "_saved_mat1_sym_sizes", None) or getattr(node, "_saved_self_sym_sizes", None)
    right = getattr(node, "_saved_mat2_sym_sizes", None)
    return int(left[0] * left[1] * right[1]) if left and right else 1


class StepCalls(Capture):
    """The calls of modules in one training step, in the order of their begins. A call is identified by its index."""

    def __init__(self, labelled: Callable[[Any], Any]) -> None:
        super().__init__(lambda: None)
        self._labelled = labelled
        self._keys: list[Hashable] = []  # the brick or layer of each call; None: the model itself
        # For a call of a model: the operations that it runs outside of its modules.
        self._owns: list[OwnOperations | None] = []
        self._around: list[int] = []  # for each call: the innermost call that contains it
        self._begins_ns: list[int] = []
        self._ends_ns: list[int] = []
        self._elements: list[int] = []
        self._repeats: list[bool] = []  # call -> whether it ran during a backward
        self._output_bytes: dict[int, int] = {}  # call -> bytes of the tensors that it has returned
        self._running: list[int] = []
        # the number that autograd's next node would get, at each begin and end of a call
        self._numbers: list[int] = []
        self._innermost: list[int] = []  # the innermost running call, at each begin and end of a call
        # (time in ns, call). A backward began to run the nodes of this call then. The call may be OUTSIDE, LOSS, ….
        self._runs: list[tuple[int, int]] = []
        self._products: dict[int, Products] = {}  # call -> the matrix products in its backward
        self._backwards = 0  # number of running backwards, which may be nested
        self.own_ns = 0  # ns that cbtop spent in this step, without the guard
        self.guard_ns = 0  # ns that the guard spent in the forward passes of this step
        self.has_failed = False
        self.is_full = False  # True if there were more than MAX_CALLS calls, so some are missing

    def is_in_call_of(self, steps: object) -> bool:
        return self.steps is steps and bool(self._running)

    def begin(self, key: Hashable, module: nn.Module | None) -> int | None:
        number = len(self._keys)
        self.is_full |= number >= MAX_CALLS
        if self.is_full or (key is not None and not self._running and not self._backwards):
            return None
        self._keys.append(key)
        self._owns.append(self.model_own if key is None and not self._backwards else None)
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
        """Enter a part of the step. Does nothing here, but a subclass may override it."""

    def drop(self) -> None:
        """Discard the records of this step, which does not end as a training step."""

    def end_model(self) -> None:
        """End the call of the model, which has returned."""
        if self._running:
            self.end(self._running[0])

    @property
    def count(self) -> int:
        """Number of calls."""
        return len(self._keys)

    def _mark(self, innermost: int) -> None:
        self._numbers.append(0 if next_number is None else next_number())
        self._innermost.append(innermost)

    def backward_begins(self, roots: Iterable[Any]) -> list[Handle]:
        """Begin a backward from the tensors `roots`. Sets hooks, and returns their handles."""
        begun_ns = clock.perf_counter_ns()
        self._backwards += 1
        handles: list[Handle] = []
        try:
            if next_number is not None and not self.has_failed:
                with without_torch_function():  # hides cbtop's reads from the host's `__torch_function__`
                    self._hook(_nodes_behind(roots), handles)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            self.failed(error)
        now_ns = clock.perf_counter_ns()
        self.own_ns += now_ns - begun_ns
        self._runs.append((now_ns, OUTSIDE))
        return handles

    def gradients_computed(self, now_ns: int) -> None:
        """Begin DistributedDataParallel's wait for gradients, which lasts until the backward ends."""
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
            at = bisect_right(self._numbers, number) - 1
            owner = self._innermost[at] if at >= 0 else OUTSIDE  # the innermost call that has made this node
            owner = LOSS if owner == OUTSIDE else owner
            if owner >= 0:
                self._products.setdefault(owner, Products()).add(node)
            if owner != before:
                handles.append(node.register_prehook(functools.partial(self._reached, owner)))
            before = owner
        # The time after the last nodes, such as a wait for gradients, is not the time of these nodes.
        if nodes:
            ends = _last_nodes(nodes[-1][1])
            unfinished = list(range(len(ends)))
            handles += [
                node.register_hook(functools.partial(_node_ended, unfinished, self._nodes_ended)) for node in ends
            ]

    def _reached(self, owner: int, gradients: Any) -> None:
        self._runs.append((clock.perf_counter_ns(), owner))

    def _nodes_ended(self) -> None:
        """The last node of a backward pass has run."""
        self._runs.append((clock.perf_counter_ns(), _AFTER))

    def backward_scale(self, owner: int) -> float:
        """Return the FLOP of the backward of call `owner`, divided by the FLOP of its forward. 0 if unknown."""
        products = self._products.get(owner)
        if products is None:
            return 0.0
        work = getattr(self._keys[owner], "work", None)
        flops = work.flops(1, self._elements[owner]) if isinstance(work, Work) else None
        return products.scale(flops)

    def returned(self, span: Any, result: Any) -> None:
        """Note the size of the tensors that a call returns."""
        if span is not None:
            with without_torch_function():  # hides cbtop's calls from the host's `__torch_function__`
                self._output_bytes[span] = bytes_of(result)

    def outputs(self) -> dict[Keys, BrickSizes]:
        """Return the sizes of what each brick's calls returned in the forward."""
        return sizes_of_outputs(self._output_bytes, self._places(), self._keys, self._repeats)

    def parts(self) -> list[Part]:
        """Return all calls (forward, backward, recomputations) as parts, sorted by their ends."""
        places, inside_ns = self._places(), round(noting_cost().inside_ns)
        begins_ns = [run_ns for run_ns, _ in self._runs]
        found: list[Part] = []
        for number, keys in enumerate(places):
            begin_ns = self._begins_ns[number]
            end_ns = max(begin_ns, self._ends_ns[number] - inside_ns)
            if self._repeats[number]:
                # A layer that checkpoints its own parts is not called again in the backward. So use the layer that is
                # in its backward. Communication gets no layer here.
                if not layers_of(keys) and not _is_communication(self._keys[number]):
                    run = bisect_right(begins_ns, begin_ns) - 1  # its backward has this index in `_runs`
                    owner = self._runs[run][1] if run >= 0 else OUTSIDE
                    keys = (*(() if owner < 0 else layers_of(places[owner])), *keys)
                keys = () if _is_layer(self._keys[number]) else renamed(keys, RECOMPUTE)
            if keys and self._keys[number] is not None and self._ends_ns[number]:
                found.append((keys, begin_ns, end_ns, self._elements[number]))
        found += _model_parts(self._owns, self._around, self._begins_ns, self._ends_ns)
        found += self._backward_parts(places)
        # Sorted by their ends, parts come before the parts that contain them.
        return sorted(found, key=lambda part: (part[2], -part[1]))

    def _places(self) -> list[Keys]:
        """Return, for each call, the keys that lead from the step down to it."""
        places: list[Keys] = []
        for key, around in zip(self._keys, self._around, strict=True):
            outer = () if around == OUTSIDE else places[around]
            places.append(outer if key is None else (*outer, key))
        return places

    def _backward_parts(self, places: Sequence[Keys]) -> list[Part]:
        """Return the bricks and layers of the backward as parts.

        Calls that a layer recomputes belong to the layer.
        """
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
            if owner < 0:
                keys: Keys = (no_call[owner],)
            else:
                own = self._owns[owner]
                keys = renamed((own,) if own else places[owner], BACKWARD, self.backward_scale(owner))
            layer = () if owner < 0 else layers_of(places[owner])
            inside = cuts[bisect_left(cut_begins_ns, begin_ns) : bisect_left(cut_begins_ns, end_ns)]
            waits = [cut for cut in inside if cut.is_communication]
            of_layers += [(*left, layer) for left in _around(waits, begin_ns, end_ns)]
            if keys and not _is_layer(keys[-1]):
                elements = 0 if owner < 0 or owner in is_counted else self._elements[owner]
                is_counted.add(owner)
                lefts = _around(inside, begin_ns, end_ns)
                # A recomputation splits the time of the node into ranges. Only the longest one counts.
                if len(waits) < len(inside):
                    lefts = sorted(lefts, key=lambda left: left[0] - left[1])[:1]
                found += [(keys, *left, elements) for left in lefts]
        return found + _layers_from(of_layers)


def _model_parts(
    owns: Sequence[OwnOperations | None], around: Sequence[int], begins_ns: Sequence[int], ends_ns: Sequence[int]
) -> list[Part]:
    """Return when models run their own operations: the time in a model's call outside of the calls of its modules.

    Each argument has one entry for each call of the step. In `owns`, the entry of a model's call is the brick of its
    own operations.
    """
    found: list[Part] = []
    at_ns: dict[int, int] = {}  # the end of the last call inside each call of a model
    for number, (own, outer) in enumerate(zip(owns, around, strict=True)):
        of_outer = owns[outer] if outer in at_ns else None
        if of_outer is not None:
            if begins_ns[number] > at_ns[outer]:
                found.append(((of_outer,), at_ns[outer], begins_ns[number], 0))
            at_ns[outer] = max(at_ns[outer], ends_ns[number])
        if own is not None and outer == OUTSIDE and ends_ns[number]:
            at_ns[number] = begins_ns[number]
    return found + [
        ((owns[number],), from_ns, ends_ns[number], 0)
        for number, from_ns in at_ns.items()
        if ends_ns[number] > from_ns
    ]


# Begin in ns, end in ns, and the layer; () means no layer, and None communication.
_Stay = tuple[int, int, Keys | None]


def _layers_from(ranges: list[_Stay]) -> list[Part]:
    """Return the layers of the backward as parts. A part is a range of time in one layer.

    Communication in between divides it into two.
    """
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
    """A recomputation or communication during a backward."""

    begin_ns: int
    end_ns: int
    is_communication: bool


def _around(inside: Sequence[_Cut], begin_ns: int, end_ns: int) -> list[tuple[int, int]]:
    """Return the time from `begin_ns` to `end_ns` without the calls `inside`, as ranges.

    The time between two recomputed calls belongs to the recomputation, so it is left out.
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
    """Return (number, node) for autograd's nodes that `roots` were computed from, the highest number first.

    Returns [] if there are more than MAX_NODES.
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


def _node_ended(unfinished: list[int], all_ended: Callable[[], None], inputs: Any, outputs: Any) -> None:
    """Note that one of the last nodes has run. `unfinished` has one entry for each of them that has not."""
    unfinished.pop()
    if not unfinished:
        all_ended()


def _last_nodes(node: Any) -> list[Any]:
    """Return the nodes that run last if `node` has the lowest number: `node` itself, and the nodes that add its
    gradients to weights.
    """
    after = dict.fromkeys(after for after, _ in node.next_functions if after is not None)
    return [node, *(each for each in after if hasattr(each, "variable"))]


def _is_layer(key: Hashable) -> bool:
    return isinstance(key, tuple) and key[0] is NodeKind.LAYER


def renamed(keys: Keys, suffix: str, scale: float = 0.0) -> Keys:
    """Return the keys for the backward or the recomputation of the call with these `keys`.

    `scale` is the FLOP of this pass divided by the FLOP of the forward, or 0 if unknown. Layers get a separate stack,
    and bricks a separate name. The backwards of bricks follow each other, so they are not nested. Recomputed calls
    are inside the backward of their layer.
    """
    # Layers with equal keys may have different own operations, so these are an argument, too.
    return _renamed(keys, suffix, scale, tuple([key.own for key in keys if isinstance(key, OwningKey)]))


@functools.lru_cache(maxsize=4096)
def _renamed(keys: Keys, suffix: str, scale: float, owns: Keys) -> Keys:
    if suffix == BACKWARD:
        keys = (*layers_of(keys[:-1]), *keys[-1:])
    return tuple(_backward_layer(key) if _is_layer(key) else _brick_renamed(key, suffix, scale) for key in keys)


def _backward_layer(key: Any) -> Hashable:
    stack = f"{key[2]}{BACKWARD}" if len(key) > 2 else BACKWARD.strip()
    own = own_operations(key)
    return OwningKey.of((NodeKind.LAYER, key[1], stack), None if own is None else _brick_renamed(own, BACKWARD, 0.0))


@functools.lru_cache(maxsize=4096)
def _brick_renamed(brick: Any, suffix: str, scale: float) -> Any:
    definition = BrickDefinition.of(brick) if isinstance(brick, BrickId) else brick
    if definition.category is BrickCategory.COMMUNICATION and suffix == RECOMPUTE:
        return definition  # communication during a backward is not a recomputation
    work = definition.work if suffix == RECOMPUTE else _scaled(definition.work, scale)
    return replace(definition, name=definition.name + suffix, brick=None, work=work, budget=None, kernels=())


def _scaled(work: Any, scale: float) -> Work | None:
    """Return `work` multiplied by `scale` for a backward or a recomputation. None if either is unknown.

    The bytes are multiplied, too. A product for a gradient reads two of the same three matrices and writes the third.
    """
    if not isinstance(work, Work) or not scale:
        return None
    return replace(
        work, **{name: scale * getattr(work, name) for name in _AMOUNTS if getattr(work, name) is not None}
    )
