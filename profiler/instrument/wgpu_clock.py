"""A device clock for wgpu (Vulkan, Metal, Direct3D 12). With `BrickProfiler(device_clock=WgpuClock(device))`, bricks
are timed by timestamp queries.

Rules
- A mark is a timestamp query, submitted after the caller's work, or written into the encoder of `WgpuClock.encode`.
- Timestamps are resolved in batches into a buffer. The buffer is mapped later, when the device has filled it.
- Nothing but `synchronize`, `wait` and the constructor waits for the device.
- wgpu's `map_async` is not called, because its thread waits inside wgpu, and wgpu 29 blocks `queue.submit` of all
  threads during such a wait (github.com/gfx-rs/wgpu/issues/9470). Calls of the native library poll without waiting.
- A mark has no time if its timestamp is 0, if it is not between its enqueueing and its reading on the host's clock,
  if a forked child makes it, or if MAX_BATCHES batches wait for the device.
"""

from __future__ import annotations

import itertools
import operator
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from fractions import Fraction
from typing import Any, TypeVar

from wgpu import GPUError
from wgpu.backends.wgpu_native import ffi, lib
from wgpu.backends.wgpu_native.extras import write_timestamp

from cbtop.profiler.clocks import NoTimeError, Stamp
from cbtop.profiler.device.device_time import ClockPair, DeviceTime
from cbtop.protocol import clock

TIMESTAMPS = "timestamp-query"
IN_ENCODERS = "timestamp-query-inside-encoders"  # of wgpu-native. Without it, a mark is an empty compute pass.
SLOTS = 512  # marks in a batch
MAX_BATCHES = 64
WORD = 8  # bytes of a timestamp
NAP_S = 50e-6
# The clocks are compared this often. A drift of 100 ppm changes 100 us in this time.
LOOK_NS = 1_000_000_000
FIRST_PAIRS = 8  # comparisons of the clocks by the constructor; the best one counts
COUNTER_BITS = (32, 36, 40, 48, 56, 64)  # sizes of GPUs' counters; wgpu does not tell the size


T = TypeVar("T")


_native = operator.attrgetter("_internal")  # the native library's handle of an object of wgpu


class WgpuClockError(Exception):
    """Raised if a wgpu device cannot tell times, or is lost."""


def _translated(call: Callable[[], T]) -> T:
    """Return `call()`. Raises WgpuClockError for an error of wgpu.

    The error of wgpu has a made-up traceback, which looks as if a signal handler of the host had raised it. So it is
    not the context of the new one.
    """
    try:
        return call()
    except GPUError as error:
        why = " ".join(str(error).split())
    raise WgpuClockError(why)


class WgpuMark:
    """A point in the device's work. `device_ns` is 0 until it is known. `batch` is None if no time is awaited."""

    __slots__ = ("batch", "device_ns", "host_ns", "number")

    def __init__(self, number: int, host_ns: int, batch: _Batch | None = None) -> None:
        self.number = number
        self.host_ns = host_ns  # the host's time before the mark was enqueued, or 0 if it was not
        self.device_ns = 0
        self.batch = batch


# The native library calls back into these batches, even if their clock no longer exists.
_awaited: set[_Batch] = set()


class _Batch:
    """A query set and its two buffers. `resolve`, then `begin_reading`, and `ticks` when `read_ns` is set."""

    def __init__(self, device: Any, now_ns: Callable[[], int]) -> None:
        self.queries = device.create_query_set(type="timestamp", count=SLOTS)
        self._resolved = device.create_buffer(size=WORD * SLOTS, usage="QUERY_RESOLVE|COPY_SRC")
        self._mapped = device.create_buffer(size=WORD * SLOTS, usage="MAP_READ|COPY_DST")
        self.read_ns = 0  # the host's time when the device had filled the buffer
        self._words: memoryview | None = None

        @ffi.callback("void(WGPUMapAsyncStatus, WGPUStringView, void *, void *)")  # type: ignore[untyped-decorator]
        def mapped(status: int, _text: object, _first: object, _second: object) -> None:
            # Copy here, because reading later ends the process if the host has destroyed the device in between.
            if status == lib.WGPUMapAsyncStatus_Success:
                buffer, size = _native(self._mapped), WORD * self._count
                words = ffi.buffer(lib.wgpuBufferGetConstMappedRange(buffer, 0, size), size)
                self._words = memoryview(bytes(words)).cast("Q")
                lib.wgpuBufferUnmap(buffer)
            self.read_ns = now_ns()
            _awaited.discard(self)

        self._callback = mapped
        self.clear()

    def drop_marks(self) -> None:
        """Let no mark wait for its time any longer."""
        for mark in self.marks.values():
            mark.batch = None

    def clear(self) -> None:
        """Prepare for new marks."""
        self.marks: dict[int, WgpuMark] = {}
        self.slots = itertools.count()  # its `next` is atomic, so a signal handler that interrupts gets another slot
        self.read_ns, self._words = 0, None

    def resolve(self, encoder: Any) -> None:
        """Copy the timestamps into the buffer that the host reads, as commands in `encoder`."""
        encoder.resolve_query_set(self.queries, 0, self._count, self._resolved, 0)
        encoder.copy_buffer_to_buffer(self._resolved, 0, self._mapped, 0, WORD * self._count)

    def begin_reading(self) -> None:
        """Let a later poll set `read_ns`. The resolving commands must be submitted before."""
        _awaited.add(self)
        info = ffi.new("WGPUBufferMapCallbackInfo *")
        info.mode, info.callback = lib.WGPUCallbackMode_AllowProcessEvents, self._callback
        lib.wgpuBufferMapAsync(_native(self._mapped), lib.WGPUMapMode_Read, 0, WORD * self._count, info[0])

    def ticks(self) -> dict[int, int]:
        """Return the timestamp of each slot. Empty if the device was lost."""
        return {slot: self._words[slot] for slot in self.marks} if self._words else {}

    @property
    def _count(self) -> int:
        return max(self.marks) + 1


class _Counter:
    """The device's counter of ticks of `tick_ns` ns each."""

    def __init__(self, tick_ns: Fraction) -> None:
        self.tick_ns = tick_ns
        self._last = self._wrapped = 0

    def ns(self, tick: int) -> int:
        """Convert a timestamp to ns. A counter that has wrapped goes on counting."""
        if tick < self._last and self._last - tick > self._last // 2:
            self._wrapped += next(1 << bits for bits in COUNTER_BITS if self._last < 1 << bits)
        self._last = tick
        return (tick + self._wrapped) * self.tick_ns.numerator // self.tick_ns.denominator


class _Encoding:
    """An encoder of `WgpuClock.encode`, and the batches with marks in it."""

    def __init__(self, owner: WgpuClock, encoder: Any) -> None:
        self.owner = owner
        self.encoder = encoder
        self.batches: list[_Batch] = []


_encoding: ContextVar[_Encoding | None] = ContextVar("cbtop_wgpu_encoding", default=None)


class WgpuClock:
    """The clock for `BrickProfiler(device_clock=WgpuClock(device))`.

    `device` is a `wgpu.GPUDevice` with the feature `timestamp-query`. The constructor waits for its work. Raises
    WgpuClockError without the feature, or if the timestamps are not times.
    """

    stamp_cost_ns: int | None = None  # the time that a mark takes on the device is not measured

    def __init__(self, device: Any, now_ns: Callable[[], int] = clock.perf_counter_ns) -> None:
        if TIMESTAMPS not in device.features:
            adapter = device.adapter
            way_out = (
                f"request the device with required_features=[{TIMESTAMPS!r}]"
                if TIMESTAMPS in adapter.features
                else "its adapter has none either, so leave out device_clock and time bricks by the host"
            )
            raise WgpuClockError(f"this device of {adapter.info.device!r} has no {TIMESTAMPS}: {way_out}")
        self._device = device
        self._now_ns = now_ns
        self._in_encoders = IN_ENCODERS in device.features
        self.counter = _Counter(Fraction(lib.wgpuQueueGetTimestampPeriod(_native(device.queue))))
        self._process = os.getpid()
        self._turn = threading.RLock()
        self._numbers = itertools.count()
        self._time = DeviceTime()
        self._looked_ns = 0
        self._round_trip_ns: int | None = None
        self._all = 0  # batches that exist
        self._free: list[_Batch] = []
        self._open: _Batch | None = None
        self._in_flight: list[_Batch] = []
        self._probe: _Batch | None = None  # the batch in flight that compares the clocks
        self._compare_first()

    # --- marks ------------------------------------------------------------------------------------------------------

    def mark(self) -> WgpuMark:
        """Enqueue a mark after the work that was submitted, and return it. Does not wait."""
        if os.getpid() != self._process:
            return WgpuMark(0, 0)
        mark = WgpuMark(next(self._numbers), self._now_ns())
        with self._turn:
            return _translated(lambda: self._enqueue(mark))

    @contextmanager
    def encode(self) -> Iterator[Any]:
        """Open a command encoder for several bricks, and submit it at the end: `with clock.encode() as encoder:`.

        Marks in this context are written into the encoder, so the device does not wait for the host between bricks.
        Each pass must begin and end inside one brick. After an exception, nothing is submitted.
        """
        encoder = self._device.create_command_encoder()
        encoding = _Encoding(self, encoder)
        token = _encoding.set(encoding)
        try:
            yield encoder
        except BaseException:
            with self._turn:
                for batch in encoding.batches:
                    self._release(batch)
            raise
        finally:
            _encoding.reset(token)
        with self._turn:
            if encoding.batches:
                encoding.batches[-1].resolve(encoder)
            self._submit(encoder, encoding.batches)

    def _enqueue(self, mark: WgpuMark) -> WgpuMark:
        encoding = _encoding.get()
        if encoding is not None and encoding.owner is self:
            return self._mark_in(encoding, mark)
        if self._open is None:
            self._open = self._new_batch()
        batch = self._open
        if batch is None:
            return mark
        encoder = self._device.create_command_encoder()
        self._write(batch, mark, encoder)
        if mark.batch is not None:
            self._device.queue.submit([encoder.finish()])
        if len(batch.marks) >= SLOTS:
            self._close_open()
        return mark

    def _mark_in(self, encoding: _Encoding, mark: WgpuMark) -> WgpuMark:
        last = encoding.batches[-1] if encoding.batches else None
        if last is None or len(last.marks) >= SLOTS:
            batch = self._new_batch()
            if batch is None:
                return mark
            if last is not None:
                last.resolve(encoding.encoder)
            encoding.batches.append(batch)
        return self._write(encoding.batches[-1], mark, encoding.encoder)

    def _write(self, batch: _Batch, mark: WgpuMark, encoder: Any) -> WgpuMark:
        slot = next(batch.slots)
        if slot >= SLOTS:
            return mark
        if self._in_encoders:
            write_timestamp(encoder, batch.queries, slot)
        else:
            encoder.begin_compute_pass(
                timestamp_writes={"query_set": batch.queries, "end_of_pass_write_index": slot}
            ).end()
        mark.batch = batch
        batch.marks[slot] = mark
        return mark

    # --- reading ----------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until the device has reached all marks that were submitted."""
        if os.getpid() != self._process:
            return
        with self._turn:
            _translated(self._close_open)
            awaited = list(self._in_flight)
        while any([batch in self._in_flight for batch in awaited]):
            self._collect()
            time.sleep(NAP_S)
        self.look()

    def time_ns(self, mark: object, /) -> int:
        """Return when `mark` was reached, on the host's monotonic clock. Raises NoTimeError if it has no time."""
        assert isinstance(mark, WgpuMark)
        if not mark.device_ns:
            raise NoTimeError("a mark that the device has not reached")
        return self._time.host_ns(mark.device_ns)

    def is_reached(self, mark: object, /) -> bool:
        """Return whether the device has reached `mark` or will never reach it. Starts reading its batch."""
        assert isinstance(mark, WgpuMark)
        if mark.batch is None or os.getpid() != self._process:
            return True
        with self._turn:
            if mark.batch is self._open:
                _translated(self._close_open)
        self._collect()
        return mark.batch is None

    def wait(self, mark: object, limit_ns: int, /) -> None:
        """Wait at most `limit_ns` for the device to reach `mark`."""
        until_ns = self._now_ns() + limit_ns
        while not self.is_reached(mark) and self._now_ns() < until_ns:
            time.sleep(NAP_S)

    def stamp(self, mark: object, /) -> Stamp | None:
        """Return the stamp of `mark`, or None if a forked child has made it. A wgpu device has one queue, 0."""
        assert isinstance(mark, WgpuMark)
        return Stamp(mark.host_ns, mark.device_ns, 0, mark.number) if mark.host_ns else None

    @property
    def idle_lag_ns(self) -> int | None:
        """An upper bound of the time in ns from enqueueing a mark until an idle device reaches it.

        It is the shortest measured time from enqueueing a mark until the host knew that it was reached.
        """
        return self._round_trip_ns

    # --- the clocks of device and host ------------------------------------------------------------------------------

    @property
    def error_ns(self) -> int:
        """The possible error of `time_ns` in ns, in both directions, for a mark reached now."""
        assert self._time.last is not None
        return self._time.error_ns(self._now_ns() - self._time.last.offset_ns)

    def host_ns(self, device_ns: int, /) -> tuple[int, int]:
        """Return the host's time when the device's clock showed `device_ns`, and the possible error, in ns."""
        return self._time.host_ns(device_ns), self._time.error_ns(device_ns)

    def look(self) -> None:
        """Enqueue a comparison of both clocks, unless this was done a second ago. Does not wait."""
        if os.getpid() != self._process:
            return
        with self._turn:
            if self._probe is not None or self._now_ns() - self._looked_ns < LOOK_NS:
                return
            self._looked_ns = self._now_ns()
            _translated(self._begin_comparison)

    def close(self) -> None:
        """Release everything that this clock holds on the device. Later marks have no time."""
        if os.getpid() != self._process:
            return
        with self._turn:
            for batch in [*self._in_flight, *([] if self._open is None else [self._open])]:
                batch.drop_marks()
            self._in_flight, self._free, self._open, self._probe = [], [], None, None
            self._all = MAX_BATCHES

    def _compare_first(self) -> None:
        """Compare the clocks several times, and keep the best comparison. The first one may compile a shader."""
        best: ClockPair | None = None
        for _ in range(FIRST_PAIRS):
            self._time = DeviceTime()
            self._begin_comparison()
            while self._in_flight:
                self._collect()
            pair = self._time.last
            if pair is not None and (best is None or pair.error_ns < best.error_ns):
                best = pair
        if best is None:
            name = self._device.adapter.info.device
            raise WgpuClockError(f"the driver of {name!r} stores zeros as timestamps: leave out device_clock")
        self._time = DeviceTime()
        self._time.add(best)
        self._looked_ns = self._now_ns()

    def _begin_comparison(self) -> None:
        batch = self._new_batch()
        if batch is None:
            return
        encoder = self._device.create_command_encoder()
        self._write(batch, WgpuMark(next(self._numbers), self._now_ns()), encoder)
        batch.resolve(encoder)
        self._probe = batch
        self._submit(encoder, [batch])

    def _compare(self, host_ns: int, device_ns: int, read_ns: int) -> None:
        """Add a pair of readings if it is more exact than the known pairs, or contradicts them."""
        took_ns = read_ns - host_ns
        pair = ClockPair(device_ns, host_ns + took_ns // 2, took_ns // 2 + 1)
        if self._round_trip_ns is None or took_ns < self._round_trip_ns:
            self._round_trip_ns = took_ns
        if self._time.last is not None:
            known_ns = self._time.error_ns(device_ns)
            is_wrong = abs(self._time.host_ns(device_ns) - pair.host_ns) > known_ns + pair.error_ns
            if pair.error_ns > known_ns and not is_wrong:
                return
        self._time.add(pair)

    # --- batches ----------------------------------------------------------------------------------------------------

    def _new_batch(self) -> _Batch | None:
        if self._free:
            return self._free.pop()
        if self._all >= MAX_BATCHES:
            return None
        self._all += 1
        return _Batch(self._device, self._now_ns)

    def _close_open(self) -> None:
        batch, self._open = self._open, None
        if batch is None:
            return
        if not batch.marks:
            self._release(batch)
            return
        encoder = self._device.create_command_encoder()
        batch.resolve(encoder)
        self._submit(encoder, [batch])

    def _submit(self, encoder: Any, batches: list[_Batch]) -> None:
        """Submit `encoder`, which resolves `batches`, and begin to read them."""
        self._device.queue.submit([encoder.finish()])
        for batch in batches:
            batch.begin_reading()
            self._in_flight.append(batch)

    def _collect(self) -> None:
        """Give their times to the marks of all batches that the device has filled. Does not wait for the device."""
        with self._turn:
            if not self._in_flight:
                return
            lib.wgpuDevicePoll(_native(self._device), False, ffi.NULL)
            for batch in [batch for batch in self._in_flight if batch.read_ns]:
                self._in_flight.remove(batch)
                self._read(batch)
                self._release(batch)

    def _read(self, batch: _Batch) -> None:
        is_probe = batch is self._probe
        for slot, tick in sorted(batch.ticks().items()):
            if not tick:
                continue
            mark, device_ns = batch.marks[slot], self.counter.ns(tick)
            if is_probe:
                self._compare(mark.host_ns, device_ns, batch.read_ns)
                continue
            host_ns, error_ns = self.host_ns(device_ns)
            if mark.host_ns - error_ns <= host_ns <= batch.read_ns + error_ns:
                mark.device_ns = device_ns

    def _release(self, batch: _Batch) -> None:
        batch.drop_marks()
        if batch is self._probe:
            self._probe = None
        batch.clear()
        self._free.append(batch)
