"""Notes the calls of modules in a step while CUPTI records its kernels. A launch belongs to the innermost call.

cbtop sets an external id before each call, and removes the id after the call. CUPTI stores this id with each launch.
Most of the cost of a recorded step is this work, so a call that has been seen before makes no objects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from cbtop.profiler.device.kernel_burst import Keys
from cbtop.profiler.instrument.capturing import MAX_CALLS, Capture, CapturedCall, keys_inside, place

if TYPE_CHECKING:
    from torch import nn

    from cbtop.profiler.instrument.kernel_bursts import KernelRecording

MAX_PLACES = 100_000  # if more places of calls are known, all are forgotten when the next step begins


class CallPlace:
    """One call of a step. The same call in later steps has the same place.

    `keys` lead to the call from the step, which is left out. `number` is the position of the call's kernels in
    `CallPlaces.where`, counted from 1.
    """

    __slots__ = ("inside", "key", "keys", "module", "number")

    def __init__(self, key: Hashable, keys: Keys, number: int) -> None:
        self.key = key
        self.keys = keys
        self.number = number
        # The called module. None if the call has ended, so that a module that the host drops is freed.
        self.module: nn.Module | None = None
        self.inside: dict[Hashable, CallPlace] = {}


class CallPlaces:
    """The places of all calls that have been seen.

    `where` has the place of the kernels of each call: the keys of their layer and brick.
    """

    def __init__(self) -> None:
        self.root = CallPlace(None, (), 0)
        self.where: list[Keys] = []

    def add(self, around: CallPlace, key: Hashable, own: Any, step: Hashable) -> CallPlace:
        """Add and return the place of a call with this `key`, inside the call `around`.

        `own` is the brick for operations of the model itself, and `step` the key of the step.
        """
        keys = keys_inside((step, *around.keys), key)
        self.where.append(place(keys, own)[1:])
        found = CallPlace(key, keys[1:], len(self.where))
        around.inside[own if key is None else key] = found
        return found


class PlacedCalls(Capture):
    """Notes the calls of one step. `elements` counts the elements of each call, unless it is None."""

    def __init__(
        self,
        recording: KernelRecording,
        labelled: Callable[[Any], Any],
        elements: Counter[Keys] | None = None,
        places: CallPlaces | None = None,
    ) -> None:
        super().__init__(lambda: None)
        self.recording = recording
        self._labelled = labelled
        self._elements = elements
        self._places = CallPlaces() if places is None else places
        self._calls: Any = self.open  # the calls that have begun and not ended, outermost first
        self._window = recording.window
        self._window.begin_step(recording.step, self._places.where)

    def begin(self, key: Hashable, module: nn.Module | None) -> Any:
        """Begin a call. Returns its place, or None if the call is not noted."""
        calls = self._calls
        if calls:
            around, own = calls[-1], None
        elif key is None:
            around, own = self._places.root, self.model_own
        else:
            return None
        if self._count >= MAX_CALLS:
            return None
        self._count += 1
        found = around.inside.get(own if key is None else key)
        if found is None:
            own = self.model_own if key is None else None
            found = self._places.add(around, key, own, self.recording.step)
        found.module = module
        calls.append(found)
        self._window.enter_call(found.number)
        return found

    def end(self, span: Any, elements: Any = 0) -> None:
        """End the call `span`, which `begin` returned, and all calls inside it that have not ended.

        `elements` is not an integer if the number of elements is unknown.
        """
        calls = self._calls
        if span is None or span not in calls:
            return
        if self._elements is not None and span.key is not None and isinstance(elements, int):
            self._elements[span.keys] += elements
        is_last = False
        while not is_last:
            ended = calls.pop()
            ended.module = None
            is_last = ended is span
            self._window.leave()

    def replayed(self, spans: Sequence[CapturedCall], around: Keys = ()) -> None:
        """Add the elements of the calls `spans`. A clone of a captured graph has replayed them inside the calls
        `around`.
        """
        if self._elements is not None:
            for span in spans:
                keys = keys_inside(around, span.key)
                if span.elements:
                    self._elements[place(keys, span.own)] += span.elements
                self.replayed(span.inside, keys)

    def start_brick(self, brick: Hashable, /) -> Any:
        return self.begin(self._labelled(brick), None)

    def failed(self, error: Exception) -> None:
        self.recording.bursts.refuse(error)
