"""The announcements of a process that serves requests: the requests, the engine's load, and the engine's times."""

from __future__ import annotations

from dataclasses import dataclass, field

from cbtop.protocol.serving_messages import (
    MAX_LOADS,
    MAX_SERVED,
    EngineLoad,
    EngineSchedules,
    EngineTimes,
    EngineWorker,
    ServedRequest,
    ServingMessage,
)


@dataclass(slots=True)
class AnnouncedServing:
    """The newest requests, loads and engine times. The key of a request or load is its number modulo the size of its
    dictionary.
    """

    requests: dict[int, ServedRequest] = field(default_factory=dict)
    loads: dict[int, EngineLoad] = field(default_factory=dict)
    times: EngineTimes | None = None
    schedules: EngineSchedules | None = None
    # process id of the engine, if this process is a worker that runs its model
    engine_pid: int | None = None

    def take(self, message: ServingMessage) -> None:
        """Store the announcement. It replaces an earlier one with the same key."""
        match message:
            case ServedRequest():
                self.requests[message.number % MAX_SERVED] = message
            case EngineLoad():
                self.loads[message.number % MAX_LOADS] = message
            case EngineTimes():
                self.times = message
            case EngineSchedules():
                self.schedules = message
            case EngineWorker():
                self.engine_pid = message.engine_pid

    @property
    def is_engine(self) -> bool:
        """Whether this process has reported an engine's requests or times."""
        return bool(self.requests or self.loads or self.times)

    def __len__(self) -> int:
        """Return the number of entries in all announcements."""
        return len(self.requests) + len(self.loads) + self._of_steps()

    def _of_steps(self) -> int:
        times, schedules = self.times, self.schedules
        return (1 + len(times.parts) if times else 0) + (1 + len(schedules.queues) if schedules else 0)
