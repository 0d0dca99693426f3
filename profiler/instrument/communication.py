"""Times the communication that a training step on a CPU waits for (exposed communication).

Rules
- Two times count: the launch of a collective, because gloo copies tensors in it, and the wait for a `Work` or for the
  tensor of a functional collective.
- DistributedDataParallel (DDP) sends gradients in C++ during the backward. It waits for them in a callback at the
  end, which autograd's engine calls after the last node. A hook on the first node queues a callback of cbtop before
  DDP's callback. The time from cbtop's callback to the end of the backward is DDP's wait. It includes copying the
  gradients back.
- The overlap of communication and computation comes from DDP's own times. It begins when the last gradient of the
  first bucket is ready, because DDP then sends the bucket. It ends with the last gradient. This is a maximum, because
  communication may pause.
- Hooks and callbacks return None, so the gradients are bit for bit the same.
"""

from __future__ import annotations

import functools
import sys
from _thread import get_ident
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.compiler import is_dynamo_compiling

from cbtop.profiler.instrument.generation import Function
from cbtop.profiler.instrument.module_tree import dictionary_of, modules_of
from cbtop.profiler.instrument.training import ThreadTraining, training_here
from cbtop.profiler.instrument.trouble import log_own_error
from cbtop.protocol import clock
from cbtop.protocol.vocabulary import TrainingPart

if TYPE_CHECKING:
    from cbtop.profiler.instrument.timed_model import TimedModel

C10D = "torch.distributed.distributed_c10d"
DDP = "torch.nn.parallel.distributed"
MAX_LOOKS = 12  # number of steps in which the buckets are read; DDP reports them in its first ten steps
ASYNCHRONOUS = "torch does not report when an asynchronous collective ends"
COMPILED = "the backward runs in compiled autograd"
NO_BUCKETS = "DistributedDataParallel does not report which gradients it sends first"


def exposed(kind_of: Callable[[Any, str], str], *, waits: bool) -> Callable[[Function], Function]:
    """Return a wrapper for a function that communicates. The time of its calls counts as exposed communication.

    `kind_of` returns the name of the collective. It gets the first argument of the call, and the name of the running
    function of torch.distributed, or "". `waits` says that the function waits for a collective that was launched
    earlier.
    """

    def wrap(original: Function) -> Function:
        @functools.wraps(original)
        def wait(waited: Any, /, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():
                return original(waited, *args, **kwargs)
            begun = _begin(waited, kind_of, waits)
            try:
                return original(waited, *args, **kwargs)
            finally:
                if begun is not None:
                    _end(*begun)

        return wait

    return wrap


def _begin(waited: Any, kind_of: Callable[[Any, str], str], waits: bool) -> tuple[ThreadTraining, str, int] | None:
    """Begin a wait for communication. Returns None outside of training steps, and inside another wait."""
    try:
        here = training_here()
        part = here.clock.is_in
        if here.clock.begun_ns is None or part is TrainingPart.COMMUNICATION:
            return None
        running = _running_function()
        if waits and not running:
            here.communication.unknown = ASYNCHRONOUS
        kind = kind_of(waited, running)
        kind = kind if part is None else f"{kind}, {part}"
        now_ns = clock.perf_counter_ns()
        here.clock.begin(TrainingPart.COMMUNICATION, now_ns)
    except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
        log_own_error(error, "some waits for communication are not shown")
        return None
    return here, kind, now_ns


def _end(here: ThreadTraining, kind: str, begun_ns: int) -> None:
    try:
        now_ns = clock.perf_counter_ns()
        here.clock.end(now_ns)
        here.communication.waited(kind, now_ns - begun_ns)
    except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
        log_own_error(error, "some waits for communication are not shown")


def _running_function() -> str:
    """Return the name of the torch.distributed function that called the wrapped function, or "" if the program called
    it.

    If it did, it waits directly after the launch, so no computation runs in between.
    """
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("cbtop."):
        frame = frame.f_back
    return frame.f_code.co_name if frame.f_globals.get("__name__") == C10D else ""


class Replicas:
    """The instances of DistributedDataParallel in the models of this process."""

    def __init__(self, models: Callable[[], list[TimedModel]]) -> None:
        self._models = models
        self._known: WeakKeyDictionary[TimedModel, list[_Replica]] = WeakKeyDictionary()

    def begin(self, here: ThreadTraining, roots: Callable[[], Iterable[Any]]) -> GradientSync | None:
        """Begin a backward from the tensors that `roots` returns. Returns None if it averages no gradients."""
        try:
            return self._begin(here, roots)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            log_own_error(error, "the wait for gradients is not shown")
        return None

    def _begin(self, here: ThreadTraining, roots: Callable[[], Iterable[Any]]) -> GradientSync | None:
        c10d: Any = sys.modules.get(C10D)
        if c10d is None or not hasattr(c10d, "ProcessGroup") or not c10d.is_initialized():
            return None
        syncing = [replica for replica in self._replicas() if replica.syncs()]
        if not syncing:
            return None
        nodes = [node for node in (getattr(root, "grad_fn", None) for root in roots()) if node is not None]
        if not nodes:
            here.communication.unknown = COMPILED
            return None
        first = max(nodes, key=lambda node: node._sequence_nr())  # autograd begins the backward with this node
        return GradientSync(here, first, syncing)

    def _replicas(self) -> Iterator[_Replica]:
        for model in self._models():
            known = self._known.get(model)
            if known is None:
                root, kind = model.root(), sys.modules[DDP].DistributedDataParallel
                found = [] if root is None else [one for one in modules_of(root) if isinstance(one, kind)]
                known = self._known[model] = [_Replica(one) for one in found]
            yield from known


class _Replica:
    """One instance of DistributedDataParallel."""

    def __init__(self, module: Any) -> None:
        self._module = ref(module)
        self._looks = 0
        # Indices of the parameters in the first bucket of gradients. [] if there is only one bucket.
        self._first: list[int] | None = None

    def syncs(self) -> bool:
        """Return whether the backward that follows the latest forward averages the gradients of all ranks."""
        module = self._module()
        fields = {} if module is None else dictionary_of(module)
        return bool(fields.get("require_forward_param_sync")) and not fields.get("_use_python_reducer")

    def overlapped_ns(self) -> int | None:
        """Return the time in ns that the latest backward ran after its first bucket had been sent. None if
        unknown.
        """
        module = self._module()
        if module is None:
            return None
        if self._first is None and self._looks < MAX_LOOKS:
            self._looks += 1
            data = dictionary_of(module)["logger"]._get_ddp_logging_data()
            self._first = _first_bucket(data.strs_map, data.ints_map)
        if not self._first:
            return None if self._first is None else 0
        # Time in ns when each gradient was ready.
        ready_ns: list[int] = dictionary_of(module)["reducer"].get_backward_stats()
        return max(0, max(ready_ns) - max(ready_ns[number] for number in self._first))


def _first_bucket(texts: dict[str, str], numbers: dict[str, int]) -> list[int] | None:
    """Return the indices of the parameters in the bucket that is sent first.

    Returns [] if there is only one bucket, and None if the buckets are unknown.
    """
    buckets = texts.get("rebuilt_per_bucket_param_indices", "").split(",")
    if numbers.get("has_rebuilt_buckets") and buckets != [""]:
        return [int(number) for number in buckets[0].split()] if len(buckets) > 1 else []
    keeps_buckets = numbers.get("find_unused_parameters")
    return [] if keeps_buckets and "," not in texts.get("bucket_sizes", ",") else None


class GradientSync:
    """One backward in which DistributedDataParallel averages gradients."""

    def __init__(self, here: ThreadTraining, first: Any, replicas: list[_Replica]) -> None:
        self._here, self._replicas, self._thread = here, replicas, get_ident()
        self._part = here.clock.is_in
        self._begun_ns: int | None = None  # time in ns when the last gradient was computed
        self._hook = first.register_prehook(self._begins)

    def _begins(self, gradients: Any) -> None:
        try:
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._computed)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            log_own_error(error, "the wait for gradients is not shown")

    def _computed(self) -> None:
        """Begin the wait for gradients. autograd has run the last node."""
        try:
            if get_ident() == self._thread and self._begun_ns is None:
                now_ns = clock.perf_counter_ns()
                self._here.clock.begin(TrainingPart.COMMUNICATION, now_ns)
                self._begun_ns = now_ns
                if self._here.calls is not None:
                    self._here.calls.gradients_computed(now_ns)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            log_own_error(error, "the wait for gradients is not shown")

    def ended(self) -> None:
        """End the wait for gradients. The backward has returned."""
        try:
            self._end()
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            log_own_error(error, "the wait for gradients is not shown")

    def _end(self) -> None:
        now_ns = clock.perf_counter_ns()
        self._hook.remove()
        if self._begun_ns is None:
            return
        self._here.clock.end(now_ns)
        communication = self._here.communication
        communication.waited(f"GradientSync, {self._part}", now_ns - self._begun_ns)
        overlapped = [replica.overlapped_ns() for replica in self._replicas]
        known = [one for one in overlapped if one is not None]
        if len(known) < len(overlapped):
            communication.unknown = NO_BUCKETS
        communication.overlapped_ns += max(known, default=0)
