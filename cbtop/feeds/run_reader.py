"""Read the runs in a recording. A run is a process's last state, and its records in blocks of steps."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from cbtop.client.source_record import SourceRecord
from cbtop.comparison.memory_peaks import MemoryPeak, PhaseMemory, peaks_of, peaks_together
from cbtop.comparison.phase_rates import IN_STEPS, SAMPLES, STEPS, TOKENS, PhaseRates, ShownRates, phase_rates
from cbtop.comparison.runs import Run, StepGroup, TooShort, kernels_of, part_of
from cbtop.comparison.step_blocks import LEAST_STEPS, StepBlocks
from cbtop.comparison.training_parts import TrainingParts
from cbtop.errors import NoDataError, UntrustedError, UsageError
from cbtop.feeds.feed import FeedSnapshot, gpus_of
from cbtop.feeds.replay import ReplayFeed
from cbtop.feeds.run_contents import contents_of
from cbtop.feeds.run_file import is_run_file, read_runs
from cbtop.profiler.analysis.graph.nodes import display_name
from cbtop.profiler.analysis.stats import sane
from cbtop.protocol.codec import sanitise
from cbtop.protocol.device_messages import Device, DeviceSample
from cbtop.protocol.errors import DecodeError, RecordingError, VersionError
from cbtop.protocol.memory_messages import TrainingMemory
from cbtop.protocol.messages import (
    Heartbeat,
    RecordBatch,
    SourceCatalog,
    SourceState,
)
from cbtop.protocol.record_batch import RecordTally, unpack
from cbtop.protocol.recording import FrameKind, RecordingReader
from cbtop.protocol.training_messages import TrainingTimes
from cbtop.protocol.vocabulary import DeviceKind, NodeKind, SourceStatus
from cbtop.viewmodels.selection import shown, shown_phase
from cbtop.viewmodels.snapshot import surroundings_of
from cbtop.viewmodels.stall import StallKind, stall_view
from cbtop.viewmodels.training_memory import of_step


@dataclass(slots=True)
class _Read:
    """What is collected of one process while a recording is read.

    `gpus` and `host` are device samples with their times. `ran` is the last heartbeat with the process live.
    """

    seen: FeedSnapshot
    blocks: StepBlocks
    tally: RecordTally
    first_ns: int | None = None
    last_ns: int = 0
    gpus: list[tuple[int, Device]] = field(default_factory=list)
    host: list[tuple[int, Device]] = field(default_factory=list)
    ran: tuple[int, SourceState] | None = None
    training: TrainingParts = field(default_factory=TrainingParts)
    memory: dict[tuple[str, str], Mapping[str, MemoryPeak]] = field(default_factory=dict)  # by phase and model

    def while_it_ran(self, samples: Sequence[tuple[int, Device]]) -> list[Device]:
        """Return the device samples from while steps were recorded. An idle device may have a different clock."""
        return [one for at_ns, one in samples if (self.first_ns or 0) <= at_ns <= self.last_ns]

    @property
    def record(self) -> SourceRecord:
        return self.seen.record


def saved_runs(path: Path, source: str | None) -> list[Run]:
    """Return the runs in a file of runs, or the run of the process `source` in a recording.

    Raises the same errors as `only_run`, and UsageError for a file of runs that is not valid.
    """
    return read_runs(path) if is_run_file(path) else [only_run(path, source)]


def only_run(path: Path, source: str | None) -> Run:
    """Return the only run of a recording. If it has several runs, return the run that `source` names.

    Raises UsageError if the file is not a recording, or if it has several processes and `source` names none. Raises
    NoDataError if no process has recorded two steps, and UntrustedError if the contents do not fit in memory.
    """
    try:
        found = runs_in(path, [source] if source else [])
    except (RecordingError, VersionError) as error:
        raise UsageError(str(error)) from error
    except DecodeError as error:
        raise UntrustedError(f"{path}: {error}") from error
    if not found:
        which = f" by --source {source}" if source else ""
        raise NoDataError(f"{path.name}: no process{which} has recorded two steps in it")
    if len(found) > 1:
        known = ", ".join(f"{run.surroundings.pid} ({os.path.basename(run.surroundings.program)})" for run in found)
        raise UsageError(f"{path.name}: several processes; choose one with --source: {known}")
    return found[0]


def runs_in(path: Path, selected: Sequence[str] = ()) -> list[Run]:
    """Return the runs in the recording at `path`, one for each process with recorded steps.

    `selected` limits the processes. Records count as lost if they were lost on the way, or are from before the
    recording. Raises RecordingError or VersionError, and DecodeError if the contents do not fit in memory.
    """
    with ReplayFeed(path, selected=selected) as feed:
        feed.seek(feed.duration_s)
        read = {
            key: _Read(seen, StepBlocks(seen.record.nodes), RecordTally())
            for key, seen in feed.seen().items()
            if len(seen.record.nodes)
        }
        damage = f"{sanitise(path.name)}: {feed.status()}" if feed.damage else ""
    reader = RecordingReader(path)
    try:
        refused = _read(reader, read)
        damaged, is_cut = reader.damaged + refused, not reader.is_closed
    finally:
        reader.close()
    name = sanitise(path.name)
    if damaged and not damage:
        damage = f"{name} has damaged frames, {damaged}: what they held is missing"
    known = [one for one in read.values() if one.blocks.steps or one.tally.dropped]
    return [_run(name, one, damage, is_cut=is_cut) for one in known]


def _read(reader: RecordingReader, read: dict[str, _Read]) -> int:
    """Read the recording, and add the data of each process to `read`. Returns how many frames cannot be decoded."""
    refused = 0
    for frame in reader.frames(wanted=(FrameKind.RECORDS, FrameKind.LIVE)):
        try:
            for message in frame.messages():
                if isinstance(message, RecordBatch) and (source := read.get(message.source)):
                    _take(source, message)
                elif isinstance(message, SourceCatalog) and (source := read.get(message.source)):
                    for said in message.messages:
                        if isinstance(said, TrainingTimes):
                            source.training.take(said, source.blocks.steps)
                        elif isinstance(said, TrainingMemory):
                            key = said.phase, said.model
                            source.memory[key] = peaks_together([source.memory.get(key, {}), peaks_of(said)])
                elif isinstance(message, DeviceSample):
                    for each in read.values():
                        _take_sample(each, message)
                elif isinstance(message, Heartbeat):
                    for state in message.sources:
                        if state.state is SourceStatus.LIVE and (source := read.get(state.source)):
                            source.ran = message.monotonic_ns, state
        except DecodeError:
            refused += 1
    return refused


def _take(source: _Read, message: RecordBatch) -> None:
    batch = unpack(message)
    known = source.tally.take(message)
    fit = sane(batch, len(source.record.nodes))
    fit[:known] = False
    batch = batch.only(fit)
    calls = batch.calls()
    if len(calls.node):
        began_ns = int(calls.start_ns.min())
        source.first_ns = began_ns if source.first_ns is None else min(source.first_ns, began_ns)
        source.last_ns = max(source.last_ns, int(calls.end_ns.max()))
    source.blocks.take(batch)


def _take_sample(source: _Read, sample: DeviceSample) -> None:
    hello = source.record.hello
    if hello is None or hello.pid_namespace != sample.pid_namespace:
        return
    for device in sample.devices:
        if device.kind is DeviceKind.CPU:
            source.host.append((sample.monotonic_ns, device))
        elif any((one.pid, one.process_start) == (hello.pid, hello.process_start) for one in device.processes):
            source.gpus.append((sample.monotonic_ns, device))


def _usual(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _stall(name: str, source: _Read) -> str:
    """Return a text if a process was stalled when it or the recording ended, else "".

    No step contains this stall, so no other figure shows it.
    """
    record, how = source.record, "is"
    if record.state is None or record.state.state is not SourceStatus.LIVE:
        # The process recorded steps after its last live heartbeat, so it was not stalled at its end.
        if source.ran is None or source.last_ns >= source.ran[0]:
            return ""
        record, how = replace(record, state=source.ran[1]), "was gone when it had been"
    found = stall_view(record)
    if found is None or found.word not in (StallKind.STALLED, StallKind.SUSPENDED):
        return ""
    place = f" in {' → '.join(found.place)}" if found.place else ""
    return (
        f"{name}: the process {how} {found.word} for {found.age_s:.0f} s{place}, which is in no figure of its steps"
    )


def _rates(source: _Read) -> tuple[PhaseRates, ...]:
    """Return the rates of each phase. If the recording contains all steps of the process, these are the steps on the
    screen.
    """
    record, began_ns = source.record, source.blocks.rates.began_ns
    found, headline = shown(record, window=False), shown_phase(record, None)
    on_screen = {
        steps.phase: ShownRates(
            {
                TOKENS: steps.tokens_per_sec,
                STEPS: steps.steps_per_sec,
                SAMPLES: steps.samples_per_sec,
                IN_STEPS: steps.tokens_per_sec_in_steps,
            },
            steps.phase == headline,
        )
        for steps in found.phases
    }
    # If the daemon counted steps from before the recording, its rates cover more than the recording.
    is_whole = began_ns is not None and found.time_range is not None and found.time_range.begin_ns >= began_ns
    return phase_rates(source.blocks.rates, record.nodes, on_screen, is_shown_whole=is_whole)


def _memory(source: _Read) -> tuple[PhaseMemory, ...]:
    """Return the peak memory of each phase with training steps."""
    steps = [node for node in source.record.nodes.nodes if node.kind is NodeKind.STEP]
    found = {display_name(node): of_step(source.memory, node) for node in steps}
    return tuple(PhaseMemory(phase, peaks) for phase, peaks in found.items() if peaks)


def _run(name: str, source: _Read, damage: str, *, is_cut: bool) -> Run:
    record, table = source.record, source.record.nodes
    parts: list[StepGroup] = []
    too_short: list[TooShort] = []
    for work, blocks in source.blocks.blocks().items():
        part = part_of(table, work, blocks)
        if part is None:
            needed = LEAST_STEPS * max(1, record.sample_every)
            steps, time_us = source.blocks.count_of(work), source.blocks.time_us_of(work)
            amounts = (work.tokens, work.sequences)
            too_short.append(TooShort(display_name(table[work.step]), steps, needed, time_us, amounts))
        else:
            step = table[work.step]
            parts.append(replace(part, training=source.training.medians(step.name, step.label)))
    by_index = sorted({(one.index, one.uuid, one.name) for _, one in source.gpus})
    gpus = [of_name for _, _, of_name in by_index]
    hello, state, tally = record.hello, record.state, source.tally
    faulty = state is not None and state.state is SourceStatus.FAULTY
    lost = tally.dropped + tally.missed
    return Run(
        name=name,
        key=record.key,
        # The last sample may be from after the end of the process, so prefer samples from before it.
        surroundings=surroundings_of(record, gpus or gpus_of(source.seen)),
        gpu_clock_mhz=_usual(one.clock_mhz for one in source.while_it_ran(source.gpus)),
        host_busy_percent=_usual(one.utilization_percent for one in source.while_it_ran(source.host)),
        clock_resolution_us=hello.clock_resolution_ns / 1e3 if hello and hello.clock_resolution_ns else None,
        covers_s=(source.last_ns - (source.first_ns or source.last_ns)) / 1e9,
        parts=tuple(parts),
        too_short=tuple(too_short),
        rates=_rates(source),
        memory=_memory(source),
        kernels=kernels_of(table),
        lost=lost,
        seen=lost + tally.taken,
        untrusted=f"{name} is not to be trusted: {state.reason}"
        if faulty and state
        else damage or _stall(name, source),
        is_cut=is_cut,
        is_gone=state is not None and state.state is SourceStatus.GONE,
        failed_checks=tuple(
            f"{check.brick}: {check.assertion}" for check in record.checks.values() if not check.passed
        ),
        contents=contents_of(record, source.blocks.counts.phases()),
    )
