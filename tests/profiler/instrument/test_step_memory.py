"""The memory of recorded training steps, by counters of a made allocator and by those of a real GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.device.kernel_burst import Keys  # noqa: E402
from cbtop.profiler.instrument import step_memory  # noqa: E402
from cbtop.profiler.instrument.brick_memory import BrickSizes  # noqa: E402
from cbtop.profiler.instrument.step_memory import MemoryCounters, RecordedMemory, StepMemory  # noqa: E402
from cbtop.protocol.memory_messages import PartMemory, TrainingMemory  # noqa: E402
from cbtop.protocol.vocabulary import TrainingPart  # noqa: E402

FORWARD, BACKWARD = TrainingPart.FORWARD, TrainingPart.BACKWARD
PART_OF: dict[Keys, TrainingPart] = {
    ("up",): FORWARD,
    ("down",): FORWARD,
    ("down backward",): BACKWARD,
    ("adam",): TrainingPart.OPTIMIZER,
}


class Allocator:
    """An allocator that reserves in blocks of 100 bytes and never returns them."""

    def __init__(self, free_bytes: int = 1_000) -> None:
        self.allocated = self.peak = self.reserved = self.retries = 0
        self.free = free_bytes

    def allocate(self, size: int) -> None:
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        while self.reserved < self.allocated:
            self.reserved, self.free = self.reserved + 100, self.free - 100

    def counters(self) -> MemoryCounters:
        return MemoryCounters(self.allocated, self.peak, self.reserved, self.retries)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocator]:
    made = Allocator()
    monkeypatch.setattr(step_memory, "counters_here", made.counters)
    monkeypatch.setattr(step_memory, "free_here", lambda: made.free)
    return made


def run(allocator: Allocator, *places: tuple[str, tuple[int, ...]]) -> StepMemory:
    """Run a step that allocates and frees memory. `places` has the sizes in each part of the step."""
    memory = StepMemory()
    for place, sizes in places:
        memory.enter((place,))
        for size in sizes:
            allocator.allocate(size)
    return memory


def said_of(*steps: StepMemory) -> TrainingMemory:
    recorded = RecordedMemory()
    for number, memory in enumerate(steps, 1):
        recorded.add(memory, PART_OF, number)
    return recorded.message("train", "", lambda place: [(), *PART_OF].index(place))


def test_a_part_has_the_most_memory_of_its_places(allocator: Allocator) -> None:
    memory = run(allocator, ("up", (120,)), ("down", (200,)), ("down backward", (80, -400)), ("adam", (30,)))
    found = said_of(memory)
    assert found.parts == (
        PartMemory(FORWARD, 320, 400),
        PartMemory(BACKWARD, 400, 400),
        PartMemory(TrainingPart.OPTIMIZER, 30, 400),
    )
    assert [*PART_OF][found.node - 1] == ("down backward",)


def test_a_peak_between_two_reads_counts_if_it_is_torchs_highest(allocator: Allocator) -> None:
    first = run(allocator, ("up", (100,)), ("down", (500, -500)), ("down backward", (-100,)))
    found = said_of(first)
    assert [part.allocated_bytes for part in found.parts] == [600, 100]
    assert found.torch_peak_bytes == 600
    # Run the same step again. torch's peak does not rise this time, so only the memory at the moments of reading is
    # known.
    again = said_of(run(allocator, ("up", (100,)), ("down", (500, -500)), ("down backward", (-100,))))
    assert [part.allocated_bytes for part in again.parts] == [100, 100]
    assert again.torch_peak_bytes == 600


def test_a_place_keeps_what_it_allocates_and_does_not_free(allocator: Allocator) -> None:
    memory = run(allocator, ("up", (120, -20)), ("down", (200,)), ("down backward", (-300,)), ("adam", ()))
    memory.end()
    sizes = memory.by_place({("up",): BrickSizes(64)})
    assert sizes == {
        ("up",): BrickSizes(64, 120, 200, 100),
        ("down",): BrickSizes(0, 300, 300, 200),
        ("down backward",): BrickSizes(0, 300, 300, -300),
        ("adam",): BrickSizes(0, 0, 300, 0),
    }


def test_a_program_that_resets_torchs_peak_is_not_disturbed(allocator: Allocator) -> None:
    run(allocator, ("up", (700, -700))).end()
    memory = StepMemory()
    memory.enter(("up",))
    allocator.allocate(100)
    allocator.peak = allocator.allocated  # torch.cuda.reset_peak_memory_stats
    memory.enter(("down",))
    allocator.allocate(150)
    found = said_of(memory)
    assert [part.allocated_bytes for part in found.parts] == [250]
    assert found.torch_peak_bytes == allocator.peak == 250


def test_memory_that_is_reserved_and_not_allocated_is_told(allocator: Allocator) -> None:
    allocator.allocate(800)
    allocator.allocate(-790)
    found = said_of(run(allocator, ("up", (240,))))
    assert found.unused_bytes == 800 - 250
    assert found.limit_bytes == 1_000


def test_the_highest_of_several_steps_is_shown_with_its_brick(allocator: Allocator) -> None:
    steps = [run(allocator, ("up", (size,)), ("down", (size, -2 * size))) for size in (10, 90, 20)]
    found = said_of(*steps)
    assert (found.steps, found.parts[0].allocated_bytes) == (3, 180)
    assert [*PART_OF][found.node - 1] == ("down",)
    # A step ends when it is added. By then the allocator has reserved 200 bytes.
    assert (found.lowest_allocated_bytes, found.lowest_reserved_bytes) == (20, 200)


def test_retries_are_counted_since_the_first_recorded_step(allocator: Allocator) -> None:
    allocator.retries = 7
    recorded = RecordedMemory()
    for number in (10, 20, 30):
        memory = run(allocator, ("up", (1, -1)))
        allocator.retries += 2
        recorded.add(memory, PART_OF, number)
    found = recorded.message("train", "", lambda place: 0)
    assert (found.retries, found.counted_steps) == (6, 21)
    allocator.retries = 1  # the program has reset the counters
    recorded.add(run(allocator, ("up", (1, -1))), PART_OF, 40)
    found = recorded.message("train", "", lambda place: 0)
    assert (found.retries, found.counted_steps) == (0, 1)


def test_counters_that_cannot_be_read_are_named_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> MemoryCounters:
        raise RuntimeError("this allocator does not count")

    monkeypatch.setattr(step_memory, "counters_here", fail)
    memory = StepMemory()
    memory.enter(("up",))
    found = said_of(memory)
    assert (found.steps, found.parts) == (0, ())
    assert found.why_unknown == "RuntimeError: this allocator does not count"


def test_without_a_recorded_step_the_memory_is_unknown() -> None:
    assert said_of() == TrainingMemory("train", "", 0, why_unknown=step_memory.NO_RECORD)


@pytest.mark.gpu
def test_torchs_counters_rise_with_a_tensor_and_keep_the_peak() -> None:
    before = step_memory.counters_here()
    tensor = torch.empty(1 << 22, dtype=torch.uint8, device="cuda")
    held = step_memory.counters_here()
    assert held.allocated_bytes - before.allocated_bytes == 1 << 22
    assert held.reserved_bytes >= held.allocated_bytes
    del tensor
    assert step_memory.counters_here().allocated_bytes == before.allocated_bytes
    assert step_memory.counters_here().torch_peak_bytes == torch.cuda.max_memory_allocated()
    assert 0 < step_memory.free_here() <= torch.cuda.mem_get_info()[1]


@pytest.mark.gpu
def test_a_place_on_a_gpu_keeps_the_bytes_of_its_tensor() -> None:
    memory = StepMemory()
    memory.enter(("up",))
    tensor = torch.empty(1 << 22, dtype=torch.uint8, device="cuda")
    memory.enter(("down backward",))
    del tensor
    memory.end()
    sizes = memory.by_place({})
    assert (sizes["up",].kept, sizes["down backward",].kept) == (1 << 22, -(1 << 22))
    assert sizes["up",].allocated == torch.cuda.memory_allocated() + (1 << 22)
    assert sizes["up",].reserved >= sizes["up",].allocated
