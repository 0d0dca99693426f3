"""Links between ranks without a GPU: for threads of this process, or for processes connected by named pipes."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np

from cbtop.compute.decoder.ranks import Rank, RankLink

DEADLINE_S = 60.0  # deadline in s; only a deadlock takes longer


class Broadcasting(ABC):
    """A link between ranks that broadcasts by sending to each rank in turn."""

    def __init__(self, number: int, count: int) -> None:
        self.number, self._count = number, count

    @abstractmethod
    def send(self, array: Any, to: int) -> None:
        """Send the array, as `Link.send` does."""

    @abstractmethod
    def recv(self, array: Any, sender: int) -> None:
        """Receive into the array, as `Link.recv` does."""

    def broadcast(self, array: Any, sender: int) -> None:
        if self.number != sender:
            self.recv(array, sender)
            return
        for other in range(self._count):
            if other != sender:
                self.send(array, other)

    def all_reduce(self, array: Any) -> None:
        """Add up the arrays of all ranks in the order of the ranks, so that all ranks get exactly the same sum."""
        own = np.array(array)
        for sender in range(self._count):
            part = own.copy()
            self.broadcast(part, sender)
            array[...] = part if sender == 0 else array + part


class ThreadLink(Broadcasting):
    """A link to ranks that are threads of this process."""

    def __init__(self, number: int, count: int, queues: defaultdict[tuple[int, int], Queue[Any]]) -> None:
        super().__init__(number, count)
        self._queues = queues

    def send(self, array: Any, to: int) -> None:
        self._queues[self.number, to].put(np.array(array))

    def recv(self, array: Any, sender: int) -> None:
        array[...] = self._queues[sender, self.number].get(timeout=DEADLINE_S)


class PipeLink(Broadcasting):
    """A link to ranks that are processes. Their named pipes are in `folder`."""

    def __init__(self, number: int, count: int, folder: Path) -> None:
        super().__init__(number, count)
        self._pipes: dict[tuple[int, int], int] = {}
        for pair in sorted((one, other) for one in range(count) for other in range(count) if one != other):
            # All ranks open the pipes in the same order. In different orders, ranks could wait for each other
            # forever.
            if number in pair:
                path = folder / f"{pair[0]}-{pair[1]}"
                with suppress(FileExistsError):
                    os.mkfifo(path)
                self._pipes[pair] = os.open(path, os.O_WRONLY if pair[0] == number else os.O_RDONLY)

    def send(self, array: Any, to: int) -> None:
        os.write(self._pipes[self.number, to], array.tobytes())

    def recv(self, array: Any, sender: int) -> None:
        found = b""
        while len(found) < array.nbytes:
            more = os.read(self._pipes[sender, self.number], array.nbytes - len(found))
            if not more:
                raise EOFError(f"rank {sender} has ended")
            found += more
        array[...] = np.frombuffer(found, array.dtype).reshape(array.shape)


def together(count: int, run: Callable[[Rank], Any]) -> list[Any]:
    """Call `run` in `count` ranks, one thread each. Returns the results."""
    queues: defaultdict[tuple[int, int], Queue[Any]] = defaultdict(Queue)
    for one in range(count):
        for other in range(count):
            queues[one, other] = Queue()

    def of(number: int) -> Any:
        link: RankLink = ThreadLink(number, count, queues)
        return run(Rank(number, count, link))

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(of, range(count)))
