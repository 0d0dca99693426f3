"""Collects the memory of the bricks in recorded training steps, and announces it rarely.

Rules
- The sizes of a brick's outputs come from shapes and types. They are no measurement: a tensor may share its memory
  with another one, or be freed at once.
- A peak or a change of allocated memory is measured, by torch's allocator on a GPU (step_memory.py).
- The memory of bricks hardly changes from step to step. So it is announced after 1, 2, 4, 8, … recorded steps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from cbtop.profiler.definitions import own_operations
from cbtop.profiler.device.kernel_burst import Keys
from cbtop.protocol.memory_messages import MAX_BRICK_MEMORIES, BrickMemories, BrickMemory


class BrickSizes(NamedTuple):
    """Sizes in bytes, as in BrickMemory."""

    outputs: int = 0
    allocated: int = 0
    reserved: int = 0
    kept: int = 0


def bytes_of(result: Any) -> int:
    """Return the size of a tensor, or of all tensors in a tuple or list. Tensors of other classes count as 0, because
    their code is the host's. Call it under `without_torch_function`, or modes of the host see it.
    """
    if type(result) is Tensor:
        return int(result.numel()) * int(result.element_size())
    if type(result) in (tuple, list):
        return sum([bytes_of(one) for one in result])
    return 0


def sizes_of_outputs(
    output_bytes: Mapping[int, int], places: Sequence[Keys], keys: Sequence[Hashable], repeats: Sequence[bool]
) -> dict[Keys, BrickSizes]:
    """Return the bytes of the tensors that each brick's calls returned in the forward.

    `output_bytes` has the bytes by the index of the call. For each call, `places` has the keys from the step down to
    it, `keys` its own key, and `repeats` whether it ran during a backward. Modules with children are left out,
    because they often return what a child has returned.
    """
    found: dict[Keys, BrickSizes] = {}
    for number, size in output_bytes.items():
        key = keys[number]
        # Only the key of a layer is a tuple.
        if size and not repeats[number] and not isinstance(key, tuple) and own_operations(key) is None:
            place = places[number]
            found[place] = BrickSizes(found.get(place, BrickSizes()).outputs + size)
    return found


class RecordedBricks:
    """The memory of the bricks in the newest recorded step of each phase."""

    def __init__(self, *, is_measured: bool) -> None:
        self._is_measured = is_measured
        self._newest: dict[str, Mapping[Keys, BrickSizes]] = {}
        self._recorded: dict[str, int] = {}  # phase -> number of its recorded steps
        self._told: dict[str, int] = {}  # phase -> this number at the latest announcement

    def add(self, phase: str, sizes: Mapping[Keys, BrickSizes]) -> None:
        """Add a recorded step that has ended."""
        self._newest[phase] = sizes
        self._recorded[phase] = self._recorded.get(phase, 0) + 1

    def message(self, phase: str, model: str, node_of: Callable[[Keys], int]) -> BrickMemories | None:
        """Return the message about the bricks, or None if it is not due. `node_of` returns the node of a place."""
        recorded, told = self._recorded.get(phase, 0), self._told.get(phase, 0)
        if recorded < max(1, 2 * told):
            return None
        self._told[phase] = recorded
        places = sorted(self._newest[phase].items(), key=lambda one: (one[1].allocated, one[1].outputs), reverse=True)
        found = [(node_of(place), sizes) for place, sizes in places[:MAX_BRICK_MEMORIES]]
        bricks = tuple(BrickMemory(node, *sizes) for node, sizes in found if node > 0)
        return BrickMemories(phase, model, bricks, self._is_measured)
