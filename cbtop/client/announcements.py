"""Store what a process has announced (nodes, models, settings) in the viewer's record of the process."""

from __future__ import annotations

from collections.abc import Iterator
from sys import getsizeof
from typing import assert_never

from cbtop.client.busy import BusySlices
from cbtop.client.source_record import SourceRecord
from cbtop.protocol.announcements import MAX_ANNOUNCED, MAX_COMPILATIONS, comes_to_fail
from cbtop.protocol.counter_messages import BrickCounters
from cbtop.protocol.errors import DecodeError
from cbtop.protocol.guard_messages import GuardedSteps
from cbtop.protocol.kernel_messages import HostTimes, KernelBurst
from cbtop.protocol.memory_messages import BrickMemories, TrainingMemory
from cbtop.protocol.messages import (
    Activity,
    CatalogMessage,
    Ceiling,
    CheckResult,
    Compilation,
    Dependency,
    Goodbye,
    HostHello,
    Manifest,
    Node,
    Sampling,
    TraceSummary,
    Training,
)
from cbtop.protocol.sample_messages import CpuSamples
from cbtop.protocol.serving_messages import EngineLoad, EngineSchedules, EngineTimes, EngineWorker, ServedRequest
from cbtop.protocol.structure_messages import CompiledCode, Conditions, StepAllocations, StepOperations
from cbtop.protocol.training_messages import GradientFault, GradientNorm, LossScale, TrainingTimes


def apply_announcement(record: SourceRecord, message: CatalogMessage) -> None:
    match message:
        case HostHello():
            _greet(record, message)
        case Node() if message.id > len(record.nodes):
            _add_node(record, message)
        case Node():  # The node is known, because the daemon also sends it in every keyframe.
            return
        case Dependency():
            record.dependencies[message] = None
        case Manifest():
            record.manifest = message
        case Ceiling() if message.withdrawn:
            record.ceilings.pop(message.name, None)
        case Ceiling():
            record.ceilings[message.name] = message
        case CheckResult():
            about = message.brick, message.assertion
            if comes_to_fail(message, record.checks.get(about)):
                del record.checks[about]
            record.checks[about] = message
        case TraceSummary():
            record.traces[message.trace] = message
        case Activity():
            record.activity = message
        case Sampling():
            record.sampling = message
        case Compilation():
            record.compilations[message.number % MAX_COMPILATIONS] = message
        case Training():
            record.trains = True
        case KernelBurst():
            _check_count(record, len(message.kernels), "kernels in a burst")
            record.burst = message
        case HostTimes():
            _check_count(record, len(message.bricks), "bricks in the host's times")
            record.host_times = message
        case TrainingTimes():
            record.training_times[message.phase, message.model] = message
        case GradientNorm() | GradientFault() | LossScale():
            record.gradients[type(message), message.phase, message.model] = message
        case TrainingMemory():
            record.training_memory[message.phase, message.model] = message
        case BrickMemories():
            record.brick_memory[message.phase, message.model] = message
        case GuardedSteps():
            record.guarded[message.model] = message
        case Conditions() | StepOperations() | StepAllocations() | CompiledCode():
            record.contents.take(message)
        case ServedRequest() | EngineLoad() | EngineSchedules() | EngineTimes() | EngineWorker():
            record.serving.take(message)
        case CpuSamples():
            record.cpu_samples = message
        case BrickCounters():
            record.counters = message
        case Goodbye():
            record.goodbye = message
        case _:
            assert_never(message)
    _check_numbers(record)


def _check_count(record: SourceRecord, count: int, what: str) -> None:
    if count > MAX_ANNOUNCED:
        raise DecodeError(f"{record.key}: more than {MAX_ANNOUNCED} {what}")


def _greet(record: SourceRecord, hello: HostHello) -> None:
    record.hello = hello
    if hello.rank is not None and record.busy is None:
        record.busy = BusySlices()


def _add_node(record: SourceRecord, node: Node) -> None:
    try:
        record.nodes.add(node)
    except ValueError as error:
        raise DecodeError(f"{record.key}: {error}") from error
    record.names_bytes += sum(map(getsizeof, _names_of(node)))


def _check_numbers(record: SourceRecord) -> None:
    """Raise DecodeError if a process has sent more announcements of a kind than a viewer stores."""
    kept = len(record.dependencies), len(record.ceilings), len(record.checks), len(record.traces)
    contents = len(record.contents.operations), len(record.contents.allocations)
    training = len(record.training_times), len(record.gradients), len(record.guarded)
    memory = len(record.training_memory), len(record.brick_memory)
    if max(*kept, *contents, *training, *memory) > MAX_ANNOUNCED:
        raise DecodeError(f"{record.key}: more than {MAX_ANNOUNCED} announcements of a kind")


def _names_of(node: Node) -> Iterator[str]:
    yield from (node.name, node.label, node.backend)
    if node.function.file:
        yield node.function.file
    if node.transfer:
        yield from (node.transfer.source, node.transfer.destination)
