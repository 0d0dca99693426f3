"""The processors that a model can run on: the CPU or a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from cbtop.compute.errors import ComputeError

if TYPE_CHECKING:
    from cbtop.compute.brick import Profiler
    from cbtop.compute.decoder.base import Model
    from cbtop.compute.decoder.decoder import Decoder
    from cbtop.compute.decoder.ranks import Rank
    from cbtop.compute.gpu.device import Gpu
    from cbtop.compute.gpu_ceilings import Progress
    from cbtop.compute.settings import RankOptions, WorkloadOptions
    from cbtop.protocol.messages import Ceiling


class ComputeTarget(Protocol):
    """A processor (CPU or GPU) that a model runs on. `threads` is the number of CPU threads that compute, or None on
    a GPU.
    """

    label: str
    threads: int | None
    guard: str | None

    def model(self, path: Path) -> Model: ...

    def decoder(self, model: Model, profiler: Profiler, context: int) -> Decoder: ...

    def ceilings(self, model: Model, progress: Progress) -> Iterable[Ceiling]: ...


def place_of(options: WorkloadOptions) -> ComputeTarget:
    """Return the processor that the options name. Raises ComputeError if the processor does not exist."""
    if options.backend == "cuda":
        return OnGpu(options)
    return OnCpu(options)


class OnCpu:
    """Runs a model on CPU threads."""

    def __init__(self, options: WorkloadOptions) -> None:
        from cbtop.compute.backends import cpu_backend

        backend = cpu_backend(options.threads)
        self.label = backend.label
        self.threads: int | None = backend.threads
        self.guard = options.guard
        self._options, self._threads = options, backend.threads

    def model(self, path: Path) -> Model:
        """Read the model at `path`.

        The products with its weights are as fast as this processor allows, or exact if the options require exact
        products.
        """
        from cbtop.compute.decoder.int8 import model_to_run

        return model_to_run(path, is_exact=self._options.is_exact)

    def decoder(self, model: Model, profiler: Profiler, context: int) -> Decoder:
        """Return a decoder with the user's settings."""
        from cbtop.compute.decoder.decoder import Decoder
        from cbtop.compute.settings import DecoderSettings

        how = self._options
        settings = DecoderSettings(how.cache_type, how.sampling, how.check_contracts)
        return Decoder(model, self.label, self._threads, profiler, context, settings)

    def ceilings(self, model: Model, progress: Progress) -> Iterable[Ceiling]:
        """Measure the roofs of this machine's memory and cores."""
        from cbtop.compute.ceilings import measure_ceilings

        return measure_ceilings(self._threads, model.weights_bytes)


class OnGpu:
    """Runs a model on the first GPU that this process may use, or on the GPU with the rank's number.

    Raises ComputeError if this GPU does not exist, or if an option needs a CPU.
    """

    def __init__(self, options: WorkloadOptions) -> None:
        from cbtop.compute.decoder.ranks import ALONE
        from cbtop.compute.gpu.device import Gpu

        unsupported = {"--trace": options.trace, "--check-contracts": options.check_contracts}
        if named := [name for name, value in unsupported.items() if value]:
            raise ComputeError(f"{' and '.join(named)}: for what a CPU computes alone; take --backend cpu")
        self._options = options
        self._gpu = Gpu(0 if options.rank is None else options.rank.number)
        self._rank = ALONE if options.rank is None else _joined(self._gpu, options.rank)
        self.label = self._gpu.label
        self.threads: int | None = None
        self.guard: str | None = None  # guards run only on a CPU, because a guard would copy the input of each brick

    def model(self, path: Path) -> Model:
        """Read the model at `path` and put its weights on the GPU. A rank gets only its part of the model."""
        from cbtop.compute.decoder import FAMILIES
        from cbtop.compute.decoder.base import read_model
        from cbtop.compute.decoder.on_gpu import model_on
        from cbtop.compute.decoder.ranks import part_of

        part = part_of(read_model(path, FAMILIES), self._rank)
        return model_on(self._gpu, part, is_exact=self._options.is_exact, rank=self._rank)

    def decoder(self, model: Model, profiler: Profiler, context: int) -> Decoder:
        """Return a decoder with the user's settings."""
        from cbtop.compute.decoder.on_gpu import GpuDecoder

        how = self._options
        return GpuDecoder(self._gpu, model, profiler, context, how.cache_type, how.sampling, rank=self._rank)

    def ceilings(self, model: Model, progress: Progress) -> Iterable[Ceiling]:
        """Measure the roofs of this GPU's memory and multiprocessors."""
        from cbtop.compute.gpu_ceilings import measure_gpus

        for roofs, _ in measure_gpus(progress, self._gpu.device.id):
            yield from roofs.ceilings


def _joined(gpu: Gpu, options: RankOptions) -> Rank:
    """Return this process's rank. Waits until all ranks have joined."""
    from cbtop.compute.decoder.ranks import Rank
    from cbtop.compute.gpu.nccl import NcclLink, new_id

    unique_id = options.of_first(lambda: new_id(gpu))
    link = NcclLink(gpu, options.number, options.count, unique_id)
    return Rank(options.number, options.count, link, options.split)
