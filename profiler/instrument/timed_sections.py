"""Makes the plan of a model, and the wrappers that time its modules, section by section."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from cbtop.profiler.definitions import BrickDefinition
from cbtop.profiler.instrument.given_names import Said, key_in, said_at
from cbtop.profiler.instrument.planning import Plan, Product, Section, TimedModule, plan_of
from cbtop.profiler.instrument.work import mode_of
from cbtop.profiler.instrument.wrapping import BrickCall, KeyIn, SizedCall

if TYPE_CHECKING:
    from torch import nn

    from cbtop.profiler.instrument.eager_stamps import Timing
    from cbtop.profiler.instrument.multiplied import Mode
    from cbtop.profiler.instrument.steps import ModelSteps


@dataclass(slots=True)
class TimedSection:
    """A section of the plan (a layer, or everything outside of layers), and the wrappers that time its modules.
    References to modules are weak.
    """

    state: list[object] | None
    visited: set[int]
    calls: list[BrickCall]
    others: list[weakref.ref[nn.Module]]  # weak references to all modules of this section

    @property
    def modules(self) -> list[nn.Module]:
        """The modules of this section that have not been freed."""
        return [module for module in (other() for other in self.others) if module is not None]


def plan_for(
    root: nn.Module, timing: Timing | None, known: Mapping[Hashable, TimedSection] | None = None
) -> Plan | None:
    """Return the plan of `root` in its current mode. `timing` is the method of timing (None: the host). See
    `plan_of`.
    """
    is_there, by_kernels = (False, False) if timing is None else (timing.is_there, timing.by_kernels)
    return plan_of(root, is_timed_there=is_there, by_kernels=by_kernels, known=known, mode=mode_of(root))


class CallMaker:
    """Makes the wrappers for the plan of a model in its current mode."""

    def __init__(self, steps: ModelSteps, said: Said, mode: Mode, *, is_timed_there: bool) -> None:
        self._steps = steps
        self._said = said
        self._mode = mode
        self._is_timed_there = is_timed_there
        # Id of a `Product` -> its brick. Similar layers have the same brick.
        self._made: dict[int, tuple[Hashable, KeyIn]] = {}

    def sections(
        self, sections: list[Section], former: Mapping[Hashable, TimedSection] = MappingProxyType({})
    ) -> dict[Hashable, TimedSection]:
        """Return the sections of the plan with their wrappers, by place. Unchanged sections are taken from
        `former`.
        """
        return {
            section.place: former[section.place] if section.is_unchanged else self._timed(section)
            for section in sections
        }

    def _timed(self, section: Section) -> TimedSection:
        calls = [self._call(part) for part in section.parts]
        others = [*map(weakref.ref, section.others), *[call.module for call in calls]]
        return TimedSection(section.state, section.visited, calls, others)

    def _call(self, part: TimedModule) -> BrickCall:
        _, module, key, product, place = part
        if product is None:
            brick = said_at(place, key) if isinstance(key, BrickDefinition) else key
            return BrickCall(module, self._said.definitions.setdefault(brick, key), self._steps)
        made = self._made.get(id(product))
        if made is None:
            made = self._made[id(product)] = self._key_of(part, product)
        key, in_other_modes = made
        if product.axes:
            call: BrickCall = SizedCall(module, key, self._steps, in_other_modes, product.axes)
            call.follow(self._mode)
        else:
            call = BrickCall(module, key, self._steps, in_other_modes, self._mode)
        call.may_be_first = product.may_be_first
        return call

    def _key_of(self, part: TimedModule, product: Product) -> tuple[Hashable, KeyIn]:
        """Return the brick of `part`, and a function that returns this brick in a different mode."""
        key, place = part.key, part.place
        if isinstance(key, BrickDefinition):
            key = self._said.definitions.setdefault(said_at(place, key), key)
        return key, functools.partial(key_in, self._said, product, place, key, self._is_timed_there)
