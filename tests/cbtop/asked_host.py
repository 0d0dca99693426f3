"""A stand-in for a process that records its kernels on request. A thread answers the requests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from cbtop.profiler.definitions import BrickDefinition, KernelDefinition
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol.kernel_messages import KernelBurst, KernelTimes
from cbtop.protocol.requests import Answer, Request, State, request_of
from cbtop.protocol.vocabulary import BrickId, NodeKind

GEMM = KernelDefinition(
    "nvjet_tst_64x8",
    "cuda, by CUPTI",
    grid=(4, 6, 1),
    block=(384, 1, 1),
    shared_memory_bytes=164308,
    static_shared_memory_bytes=0,
    registers=168,
)
NORM = KernelDefinition(
    "vectorized_layer_norm_kernel<BFloat16, float, true, and_many_more_template_arguments_of_it>",
    "cuda, by CUPTI",
    grid=(1, 1, 1),
    block=(32, 4, 1),
    shared_memory_bytes=24,
    static_shared_memory_bytes=16,
    registers=27,
)


class Host:
    """A process with a recorder, and a thread that checks for requests, as a real program does in each step."""

    def __init__(self, directory: Path, answer: Callable[[Host, Request], None]) -> None:
        self._directory = directory
        self.recorder = RingRecorder(directory)
        self.profiler = BrickProfiler(recorder=self.recorder)
        self._answer = answer
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.step = (NodeKind.STEP, "decode")
        self.bricks = [BrickDefinition.of(BrickId.DOWN_PROJECTION), BrickDefinition.of(BrickId.RMS_NORM)]
        with self.profiler.step("decode", 1):
            for layer in range(2):
                with self.profiler.layer(layer):
                    for brick in self.bricks:
                        with self.profiler.brick(brick):
                            pass
        self.recorder.answer(Answer(0, State.LISTENING).word())

    @property
    def ring(self) -> Path:
        return next(path for path in self._directory.glob("*.ring"))

    def __enter__(self) -> Host:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
        self.profiler.close()

    def _look(self) -> None:
        seen = 0
        while not self._is_over.wait(0.01):
            word = self.recorder.asked
            if word not in (seen, 0):
                seen = word
                request = request_of(word)
                assert request is not None
                self._answer(self, request)

    def wait_for(self, event: threading.Event) -> None:
        """Wait until `event` is set or the test is over."""
        while not (event.wait(0.01) or self._is_over.is_set()):
            pass

    def say(self, number: int, state: State, steps: int = 0) -> None:
        self.recorder.answer(Answer(number, state, steps).word())

    def kernels(self, number: int, steps: int, lost: int = 0) -> None:
        """Report the kernels of `steps` steps, as cbtop does after it has recorded kernels for some steps."""
        root = self.profiler._path.position.scope
        found = []
        for layer in range(2):
            for brick, kernel in zip(self.bricks, (GEMM, NORM), strict=True):
                scope = root
                for key in (self.step, (NodeKind.LAYER, layer), brick, kernel):
                    scope = scope.children.get(key) or self.profiler._scopes.define(scope, key)
                mean_ns = 1000.0 * (1 + layer)
                made = (
                    {} if kernel is GEMM else {"maker": "Triton 3.9.0, 4 warps, 3 stages", "source": "/a/norms.py:41"}
                )
                found.append(KernelTimes(scope.node, steps, 2 * steps, mean_ns, 100.0, 900, 2500, **made))
        burst = KernelBurst(
            number, steps, tuple(found), unplaced=4, lost=lost, multiprocessors=132, architecture="sm_90"
        )
        self.profiler.announce(burst)


def answers(host: Host, request: Request) -> None:
    host.say(request.number, State.RUNNING)
    host.kernels(request.number, request.steps)
    host.say(request.number, State.DONE, request.steps)
