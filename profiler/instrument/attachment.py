"""Attaches to one given model, or to every model at its first call.

Rules
- An error of cbtop never reaches a model's call. It is logged in one line, and the model runs uninstrumented.
- An attachment refers to its model weakly. When the host drops the model, the attachment ends.
"""

from __future__ import annotations

import operator
import os
import threading
import weakref
from collections.abc import Callable, Collection, Hashable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from cbtop.profiler.instrument import captured_graphs, eager_stamps, unseen
from cbtop.profiler.instrument.awaited import once_imported, stop_awaiting
from cbtop.profiler.instrument.call_attribute import (
    ATTRIBUTE,
    after,
    compile_lookup,
    end,
    forget,
    is_known,
    is_supported,
    leave,
    leave_all,
    meeting,
    stand_by,
    standing,
)
from cbtop.profiler.instrument.candidates import COPIES, Candidates, why_not
from cbtop.profiler.instrument.collectives import settle_before_groups_end, wrap_collectives
from cbtop.profiler.instrument.compilations import compilations
from cbtop.profiler.instrument.compiled_steps import compile_steps
from cbtop.profiler.instrument.conditions import conditions_of
from cbtop.profiler.instrument.dynamo import is_compiling_here, keep_dynamo_out
from cbtop.profiler.instrument.eager_stamps import Timing, timing_of
from cbtop.profiler.instrument.functions import GENERATION, TimedFunctions, forget_types
from cbtop.profiler.instrument.garbage import nothing_collected
from cbtop.profiler.instrument.given_names import models_of, said_by
from cbtop.profiler.instrument.kernel_steps import KernelSteps
from cbtop.profiler.instrument.manifests import manifest_of
from cbtop.profiler.instrument.model_call import ModelCall
from cbtop.profiler.instrument.model_handle import ModelHandle
from cbtop.profiler.instrument.module_tree import (
    WeakModuleDict,
    kinds_of,
    modules_of,
    walked_once,
)
from cbtop.profiler.instrument.multiplied import types_of_float32
from cbtop.profiler.instrument.optimizers import Optimizers
from cbtop.profiler.instrument.planning import (
    Plan,
    devices_in,
    has_products,
    holds_a_stack,
    state_of,
)
from cbtop.profiler.instrument.roofs import roofs_over
from cbtop.profiler.instrument.steps import ModelSteps
from cbtop.profiler.instrument.swapping import swapped_in, swaps
from cbtop.profiler.instrument.timed_sections import CallMaker, TimedSection, plan_for
from cbtop.profiler.instrument.torch_internals import without_torch_function
from cbtop.profiler.instrument.trouble import in_words, log_once, log_own_error
from cbtop.profiler.instrument.work import adapted_in, device_of, mode_of, takes_turns
from cbtop.profiler.instrument.wrapping import follow_host, is_compiled, is_symbolic
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.messages import Manifest

# This many first layers and first matrix products check the mode (autocast and adapters) of a step, 0.2 us each.
MAX_ASKING = 2
# cbtop stops attaching to a model after the host's signal handlers have interrupted this many attempts
MOST_TRIES = 3
_lock = threading.RLock()
_attached: WeakModuleDict[Attachment] = WeakModuleDict()  # model, or module with a list of layers -> attachment


def _is_attached(module: nn.Module) -> bool:
    return module in _attached


_candidates = Candidates(_is_attached)


compile_steps()
compile_lookup()


class Attachment(ModelHandle):
    """The instrumentation of one model. The model is timed from `begin` to `detach`."""

    def __init__(
        self, root: nn.Module, plan: Plan, profiler: BrickProfiler, engine: str, timing: Timing | None = None
    ) -> None:
        self.profiler = profiler
        self._models = models_of(profiler)
        self._said = said_by(self._models, root, plan)
        self.model = self._said.model
        self.steps = ModelSteps(profiler, self.model, self.look_again, self.give_up)
        # `swapped_in` must not keep a freed model's steps, because the host may have switched the collector off.
        self.root = weakref.ref(root, partial(swapped_in.pop, weakref.ref(self.steps)))
        self.steps.root = self.root
        self.steps.follow_mode = self._follow_mode
        self.engine = engine
        self.is_attached = True
        self._follow(root, plan, timing)

    def _follow(self, root: nn.Module, plan: Plan, timing: Timing | None = None) -> None:
        self.stacks = plan.stacks
        self._is_timed = plan.is_timed
        if plan.parts:
            self.timing = timing_of(self.profiler, root) if timing is None else timing
        else:
            self.timing = Timing(self.profiler.parts.paths.host)
        self.steps.time_on(self.timing)
        self.steps.kernel_steps = KernelSteps(self.steps) if self.timing.by_kernels else None
        self.steps.own = self._said.as_before(plan.own)
        self._state = state_of(root)
        self._look_at_mode(root)
        self._sections = self._calls().sections(plan.sections)
        self._ask_first()
        self.steps.look_through(len(self._others))
        self._trunk = [ModelCall(module, self.steps) for module in plan.trunk if module not in _attached]

    def _calls(self) -> CallMaker:
        return CallMaker(self.steps, self._said, self._mode, is_timed_there=self.timing.is_there)

    def _ask_first(self) -> None:
        """Make the first layers and matrix products check the mode (autocast and adapters) of each step."""
        calls = [call for section in self._sections.values() for call in section.calls]
        self.steps.named = calls
        if not self._is_timed:
            return
        layers = [call for call in calls if isinstance(call.key, tuple) and call.key[1] == 0]
        for call in (*[call for call in calls if call.may_be_first][:MAX_ASKING], *layers[:MAX_ASKING]):
            call.asks = self.steps.ask
        self.steps.calls = calls

    def _look_at_mode(self, root: nn.Module) -> bool:
        """Store the current mode of `root` (see `mode_of`). Returns whether the mode has changed."""
        before = getattr(self, "_mode", None)
        self._mode = mode_of(root)
        self.steps.ask_of(device_of(root), adapted_in(root), self._mode, takes_turns=takes_turns(root))
        return self._mode != before

    def _follow_mode(self, autocast: torch.dtype | None, adapters: object) -> None:
        """Choose the bricks again for the mode (autocast and adapters) of the current step."""
        self._mode = self._mode._replace(autocast=autocast, adapters=adapters)
        for call in self.steps.calls:
            call.follow(self._mode)
        forget_types()

    def _follow_changes(self, root: nn.Module, plan: Plan, state: list[object]) -> None:
        """Start timing the new sections of `plan`, and stop timing the sections that it replaces."""
        self.stacks, self._state = plan.stacks, state
        has_new_mode = self._look_at_mode(root)
        former = self._sections
        places = {section.place for section in plan.sections if section.is_unchanged}
        with swaps.lock:
            for place, section in former.items():
                if place not in places:
                    for call in section.calls:
                        call.swap_out()
                    for module in section.modules:
                        if standing(module) is None:  # leave modules alone that are wrapped for another model
                            forget(module)
            self._sections = self._calls().sections(plan.sections, former)
            self._ask_first()
            if has_new_mode:
                for call in self.steps.calls:
                    call.follow(self._mode)
            for place, section in self._sections.items():
                if place not in places:
                    for module in section.modules:
                        leave(module)  # `begin` does the same for the modules of a new plan
                    for call in section.calls:
                        if self.steps.calls_are_in is not False:
                            call.swap_in()
        for module in (root, *plan.trunk):
            _attached.setdefault(module, self)
        self.announce(root, plan, has_same_devices=True)

    @property
    def _others(self) -> list[weakref.ref[nn.Module]]:
        return [other for section in self._sections.values() for other in section.others]

    @property
    def _is_named(self) -> bool:
        """Whether this model is the one that the process announces."""
        manifest = self._models.manifest
        return manifest is not None and manifest.steps_of == self.model

    def announce(self, root: nn.Module, plan: Plan, *, has_same_devices: bool = False) -> None:
        """Announce the model and its roofs (hardware limits), if they are new.

        A process announces one model: the largest with a cache, else the largest, and the first of equals.
        """
        manifest = manifest_of(root, plan, self.engine, self.timing, self.model)
        there = self._models.manifest
        if there is not None:
            there = replace(there, threads=manifest.threads, roofs=manifest.roofs)
        if has_same_devices and manifest == there:
            return
        rank = any([call.has_cache for call in self._trunk]), manifest.weights_bytes
        if self._is_named or rank > self._models.rank:
            self._models.rank = rank
            self._say(root, manifest)

    def _say(self, root: nn.Module, manifest: Manifest) -> None:
        """Announce the model's `manifest` and its roofs (hardware limits), if they have changed.

        Roofs depend on torch's current number of threads.
        """
        over, said_of_roofs = roofs_over(root)
        manifest = replace(manifest, threads=torch.get_num_threads(), roofs=said_of_roofs)
        if manifest != self._models.manifest:
            self._models.manifest = manifest
            self._announce(manifest)
            self.profiler.announce(conditions_of(root))
        self.steps.measured = self._say_measured
        ceilings = {name: replace(one, withdrawn=True) for name, one in self._models.ceilings.items()}
        ceilings |= {one.name: one for one in over}
        for name, ceiling in ceilings.items():
            if ceiling != self._models.ceilings.get(name):
                self.profiler.announce(ceiling)
        self._models.ceilings = ceilings

    def _say_measured(self, how: str) -> None:
        self._models.measured[self.model] = f"; {how}"
        if self._models.manifest is not None:
            self._announce(self._models.manifest)

    def _announce(self, manifest: Manifest) -> None:
        how = self._models.how_measured(manifest.steps_of)
        self.profiler.announce(replace(manifest, backend=manifest.backend + how))

    def begin(self) -> None:
        compilations.tell(self.profiler)
        stand_by()
        leave_all(self._others)
        for call in self._trunk:
            call.swap_in()
        root = self.root()
        if root is not None and self.steps.named:
            captured_graphs.look_into(self.steps, root)

    def detach(self) -> None:
        """Stop timing this model, and remove all attributes that cbtop has set.

        A step that is running is still timed to its end.
        """
        with _lock:
            if not self.is_attached:
                return
            self._leave()
            captured_graphs.look_no_more(self.steps)
            if not len(_attached):
                _functions.unwrap()
                _optimizers.leave()
                compilations.end()
                if _profiler is None:
                    end()
            self.is_attached = False
            self.timing = Timing(self.profiler.parts.paths.host)
            self.steps.time_on(self.timing)
            eager_stamps.leave(self.profiler, [other.timing.path for other in _attached.values()])

    def _leave(self) -> None:
        for call in self._trunk:
            call.remove()
        self.steps.remove()
        for module in [module for module, attachment in _attached.items() if attachment is self]:
            del _attached[module]
        for other in self._others:
            module = other()
            if module is not None and standing(module) is None:
                forget(module)
        self._sections = {}  # the timed calls have references to the path, so drop them, too

    def look_again(self) -> None:
        """Choose the bricks again if the host has replaced modules, or changed how their weights are stored.

        If only torch's number of threads has changed, announce the new number and the roofs for it.
        """
        root = self.root()
        is_as_it_was = all([call.module() is not None for call in self.steps.calls])
        if root is None:
            return
        compilations.tell(self.profiler)
        state = state_of(root)
        self._look_at_float32(root)
        may_lie_elsewhere = bool(self.timing.backend) or devices_in(state) != devices_in(self._state)
        is_as_it_was = is_as_it_was and state == self._state
        timing = self.timing
        if self.stacks and self.steps.calls and may_lie_elsewhere:
            timing = timing_of(self.profiler, root)
        if is_as_it_was and timing == self.timing:
            manifest = self._models.manifest
            if self._is_named and manifest is not None and torch.get_num_threads() != manifest.threads:
                with _lock:
                    self._say(root, manifest)
            return
        with _lock:
            known = self._known() if timing == self.timing else {}
            plan = plan_for(root, timing, known)
            if plan is not None and known:
                trunk = [call.module() for call in self._trunk]
                has_same_trunk = len(trunk) == len(plan.trunk) and all(map(operator.is_, trunk, plan.trunk))
                if has_same_trunk and self.is_attached:
                    self._follow_changes(root, plan, state)
                    return
                plan = plan_for(root, timing)
            if plan is None or not self.is_attached:  # the changed model cannot be instrumented, so keep the old plan
                self._state = state
                return
            self._leave()
            self._follow(root, plan)
            for module in (root, *plan.trunk):
                _attached.setdefault(module, self)
            self.announce(root, plan)
            self.begin()

    def _look_at_float32(self, root: nn.Module) -> None:
        """Choose the bricks again if torch's settings for float32 matrix products have changed."""
        types = types_of_float32(device_of(root))
        if types != (self._mode.products, self._mode.convolutions):
            self._mode = self._mode._replace(products=types[0], convolutions=types[1])
            for call in self.steps.calls:
                call.follow(self._mode)
            forget_types()

    def _known(self) -> dict[Hashable, TimedSection]:
        """Return the sections of the current plan that a new plan may reuse.

        Leaves out sections with freed modules, because a new module may get the id of a freed one.
        """
        return {
            place: section
            for place, section in self._sections.items()
            if section.state is not None and all([other() is not None for other in section.others])
        }

    def after_fork(self) -> None:
        self.steps.after_fork()

    def give_up(self, error: Exception) -> None:
        log_once(f"{self.model or 'the model'} is no longer shown: {in_words(error)}")
        self.detach()
        root = self.root()
        if root is not None:
            leave_alone(root)


def attach(model: nn.Module, profiler: BrickProfiler | None = None) -> Attachment:
    """Attach to `model`, or return its attachment. Raises ValueError if it cannot be attached."""
    with _lock, nothing_collected():
        if not isinstance(model, nn.Module):
            raise ValueError(f"a torch.nn.Module is wanted, not {model!r:.60}")
        there = _attached.get(model)
        if there is not None and there.root() is model:
            return there
        with walked_once(model):
            return _attach(model, profiler)


def _attach(model: nn.Module, profiler: BrickProfiler | None) -> Attachment:
    why = why_not(model)
    if why:
        raise ValueError(why)
    profiler = BrickProfiler() if profiler is None else profiler
    timing = timing_of(profiler, model) if holds_a_stack(model) or has_products(model) else None
    plan = plan_for(model, timing)
    if plan is None:
        kind = type(model).__name__
        raise ValueError(f"{kind} holds no list of layers, nor two modules with weights: nothing can be shown")
    return _begin(model, plan, profiler, "torch", timing)


def attach_to_runner(model: nn.Module, profiler: BrickProfiler, engine: str, *, shows_bricks: bool) -> Attachment:
    """Attach to a model that `engine` runs through a runner. Each run is a step.

    If `shows_bricks` is False, no module is timed. Modules still name the kernels of captured graphs on CUDA.
    """
    with _lock:
        attachment: Attachment | None = _attached.get(model)
        plan = plan_for(model, timing_of(profiler, model)) or Plan()
        if attachment is None or attachment.root() is not model:
            if why_not(model) or (not shows_bricks and device_of(model) != "cuda"):
                plan = Plan(plan.stacks)
            elif not shows_bricks:
                plan = replace(plan, trunk=[], own=None, is_timed=False)
            attachment = _begin(model, plan, profiler, engine)
        else:
            attachment.engine = engine
            attachment.announce(model, plan)
        attachment.steps.is_of_runner = attachment.steps.in_python = True
        return attachment


def leave_alone(model: nn.Module) -> None:
    """Mark all modules of `model` as known, so that cbtop never attaches to them at their first call."""
    for module in modules_of(model):
        leave(module)


def installed() -> BrickProfiler | None:
    """Return the profiler for models that are attached at their first call, or None."""
    return _profiler


def _begin(
    model: nn.Module, plan: Plan, profiler: BrickProfiler, engine: str, timing: Timing | None = None
) -> Attachment:
    # The host has called a part of this model before, so cbtop has attached to that part. Detach it.
    for module in plan.trunk:
        part = _attached.get(module)
        if part is not None and (module is model or any([one is part.root() for one in plan.trunk])):
            part.detach()
    attachment = Attachment(model, plan, profiler, engine, timing)
    try:
        for module in (model, *plan.trunk):
            other = _attached.setdefault(module, attachment)
            if other is not attachment:
                other.steps.share(attachment.steps)
        if plan.parts and plan.is_timed:
            keep_dynamo_out()
            meeting.was_set = _was_set
            _functions.replace(nn.Module, "_replicate_for_data_parallel", _replicated)
            settle_before_groups_end(_functions)
            kinds = kinds_of(model)
            held = [module for module in modules_of(model) if ATTRIBUTE in module.__dict__]
            has_compiled = any([is_compiled(module) for module in (*kinds, *held)])
            if has_compiled:
                _functions.wrap_generate()  # if more functions were replaced, Dynamo would compile the model again
            else:
                _functions.wrap(kinds)
                wrap_collectives(_functions)
            _optimizers.follow(_functions, is_compiled=has_compiled)
        attachment.announce(model, plan)
        attachment.begin()
    except BaseException:  # cbtop or a signal handler raised an error, so undo everything
        attachment.detach()
        raise
    return attachment


# --- attaching to every model at its first call ---------------------------------------------------------------

_profiler: BrickProfiler | None = None
_cut_short = 0  # number of exceptions from signal handlers that have interrupted attaching


def install(profiler: BrickProfiler) -> None:
    """Attach each model at its first call from now on."""
    global _profiler, _cut_short
    if not is_supported():
        log_once(f"torch {torch.__version__} does not call {ATTRIBUTE}: its models are not shown")
        return
    _profiler, _cut_short = profiler, 0
    meeting.first_call, meeting.was_set = _first_call, _was_set
    stand_by()
    once_imported(GENERATION, _functions.wrap_generate)


def uninstall(kept: Collection[Attachment] = ()) -> None:
    """Stop attaching models, and detach all attached models except those in `kept`."""
    global _profiler
    _profiler = meeting.first_call = None
    stop_awaiting(GENERATION if kept else "")
    for attachment in set(attachments()) - set(kept):
        attachment.detach()
    if not kept:
        end()
    _candidates.clear()
    with _lock:
        if not len(_attached):  # no model is attached any longer: all were detached or freed
            _functions.unwrap()
            _optimizers.leave()
            compilations.end()
            captured_graphs.end()


def attachments() -> list[Attachment]:
    """Return the attachments of all models that are alive."""
    with _lock:
        return list(dict.fromkeys(_attached.values()))


def _first_call(module: nn.Module) -> Any:
    """Return a replacement for the first call of `module`. The replacement attaches to `module` if it is a model."""
    return after(_look_before_call, module)


def _look_before_call(module: nn.Module) -> None:
    if not (is_compiling_here() or torch.jit.is_tracing() or is_symbolic()):
        _look_first_at(module)


def _met_generating(model: object) -> None:
    """Attach to `model` before its `generate` runs, because `generate` may first call only the model's encoder."""
    if _profiler is None or not issubclass(type(model), nn.Module) or is_known(model):
        return
    if not (is_compiling_here() or torch.jit.is_tracing() or is_symbolic()):
        _look_first_at(cast(nn.Module, model))


_functions = TimedFunctions(_met_generating)
_optimizers = Optimizers(lambda: [attachment.steps for attachment in attachments()])


def _look_first_at(module: nn.Module) -> None:
    try:
        with without_torch_function():  # hides cbtop's calls from the host's `__torch_function__`
            _look_at(module)
    except BaseException as error:  # noqa: BLE001 - an error of cbtop must not reach the host
        try:
            if not isinstance(error, Exception):
                raise
            log_own_error(error, f"{type(module).__name__} is not shown")
        except BaseException as raised:  # a signal handler of the host raised this error, or the stack is full
            if not isinstance(raised, RecursionError):
                _was_cut_short(module)
            raise
        leave_alone(module)


def _was_cut_short(module: nn.Module) -> None:
    """Count an exception that a signal handler raised while cbtop was attaching to `module`.

    The next call of `module` tries again. After MOST_TRIES exceptions, cbtop gives up.
    """
    global _cut_short
    _cut_short += 1
    if _cut_short >= MOST_TRIES and not is_known(module):
        why = f"the program's signal handlers cut attaching short {_cut_short} times"
        log_once(f"{type(module).__name__} is not shown: {why}")
        leave_alone(module)


def _was_set(module: nn.Module) -> None:
    """Adapt to a value that the host has set as `_compiled_call_impl` of `module`, as `Module.compile` does."""
    try:
        follow_host(module)
        if _profiler is not None and module not in _attached and holds_a_stack(module):
            _look_at(module)
    except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
        log_own_error(error, f"{type(module).__name__} is not shown")


def _replicated(original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Stop showing models that `nn.DataParallel` copies at each call. Wraps `_replicate_for_data_parallel`."""

    def replicate(self: nn.Module) -> nn.Module:
        replica = original(self)
        try:
            leave(replica)
            attachment = _attached.get(self)
            if attachment is not None:
                attachment.give_up(ValueError(COPIES))
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            log_own_error(error, f"{type(self).__name__} is not shown")
        return replica

    return replicate


def _look_at(module: nn.Module) -> None:
    with _lock:
        shall = _profiler is not None and _candidates.is_model(module)
        if shall:
            with walked_once(module):
                if any([issubclass(type(one), LazyModuleMixin) for one in kinds_of(module)]):
                    return  # the weights have no shapes before this first call, so attach at the next call
                attachment = attach(module, _profiler)
                attachment.steps.guard_by(attachment.profiler.parts.guard)
                if not is_known(module):
                    attachment.begin()
        elif shall is not None:
            unseen.note_call(module)
            leave(module)


def _after_fork() -> None:
    """In a forked child, make a new lock, because the parent may have held the old one."""
    global _lock
    _lock = threading.RLock()
    for attachment in attachments():
        attachment.after_fork()


os.register_at_fork(after_in_child=_after_fork)
