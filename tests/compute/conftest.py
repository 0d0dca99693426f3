"""Fixtures for tests of compute: a tiny model of each family, a recorder, and a decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from cbtop.compute.decoder import FAMILIES
from cbtop.compute.decoder.base import Model, read_model
from cbtop.compute.decoder.decoder import Decoder
from cbtop.compute.demo_model import (
    TINY,
    TINY_GEMMA2,
    TINY_GEMMA3,
    TINY_LLAMA,
    TINY_MIXTRAL,
    TINY_PHI3,
    TINY_QWEN3,
    TINY_QWEN3MOE,
    TINY_STABLELM,
    write_model,
)
from cbtop.compute.errors import ComputeError
from cbtop.compute.gpu.device import Gpu
from cbtop.compute.kernels import layer_norm, rms_norm
from cbtop.compute.kernels.base import Kernel
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.codec import EncodedNode
from cbtop.protocol.messages import CatalogMessage
from cbtop.protocol.ring import FLAG_AMOUNTS

SHAPES = (TINY, TINY_QWEN3, TINY_QWEN3MOE, TINY_LLAMA, TINY_PHI3, TINY_GEMMA2, TINY_GEMMA3, TINY_STABLELM)


@dataclass
class ListRecorder:
    """A recorder that stores everything in lists."""

    messages: list[CatalogMessage] = field(default_factory=list)
    records: list[tuple[int, int]] = field(default_factory=list)  # (tag, elements)
    amounts: list[tuple[int, int]] = field(default_factory=list)  # (sequences, cached positions) of each step

    def record(self, tag: int, start_ns: int, end_ns: int, elements: int, /) -> None:
        if tag & FLAG_AMOUNTS:
            self.amounts.append((start_ns, end_ns))
        else:
            self.records.append((tag, elements))

    def announce(self, message: CatalogMessage, /) -> None:
        self.messages.append(message)

    def announce_nodes(self, nodes: Sequence[EncodedNode], /) -> None:
        self.messages += [node for node, _ in nodes]

    def flush(self) -> None:
        pass

    def close(self, reason: str, /) -> None:
        pass


@pytest.fixture
def recorder() -> ListRecorder:
    return ListRecorder()


@pytest.fixture
def profiler(recorder: ListRecorder) -> BrickProfiler:
    return BrickProfiler(recorder=recorder)


@pytest.fixture(scope="session")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the files of a tiny model of each family, and of a llama with experts named `mixtral`."""
    folder = tmp_path_factory.mktemp("models")
    shapes = {shape.architecture: shape for shape in SHAPES} | {"mixtral": TINY_MIXTRAL}
    files = {name: folder / f"{name}.gguf" for name in shapes}
    for name, shape in shapes.items():
        write_model(files[name], shape, lambda text, fraction: None)
    return files


@pytest.fixture(params=list(FAMILIES))
def model(request: pytest.FixtureRequest, model_files: dict[str, Path]) -> Model:
    return read_model(model_files[request.param], FAMILIES)


def in_every_family(name: str, kinds: Mapping[str, Any]) -> pytest.MarkDecorator:
    """Return a mark that parametrizes a test with the cases `kinds` and with families of models.

    `name` is the name of the parameter for the cases. Use the mark for code that does not depend on the family. By
    default, all cases run with the first family, and one case runs with each other family. Slow tests run all
    combinations.
    """
    return pytest.mark.parametrize(
        ("model", name),
        [
            pytest.param(family, kind, id=f"{family}-{said}", marks=() if turn in (0, place) else pytest.mark.slow)
            for number, family in enumerate(FAMILIES)
            for turn in [number and (number - 1) % len(kinds) + 1]
            for place, (said, kind) in enumerate(kinds.items(), 1)
        ],
        indirect=["model"],
    )


# Parametrize a test with a family of each kind, and with all families in slow tests. Use it for code that depends on
# windows, caps, experts or LayerNorm.
of_each_kind = pytest.mark.parametrize(
    "model",
    [
        family
        if family in ("qwen2", "gemma2", "qwen3moe", "stablelm")
        else pytest.param(family, marks=pytest.mark.slow)
        for family in FAMILIES
    ],
    indirect=True,
)

# Parametrize a test with the first family, and with all families in slow tests. Use it for code that does not depend
# on the model.
of_one_family = pytest.mark.parametrize(
    "model",
    [
        family if number == 0 else pytest.param(family, marks=pytest.mark.slow)
        for number, family in enumerate(FAMILIES)
    ],
    indirect=True,
)


@dataclass(frozen=True)
class Norms:
    """The kind of norm that a model uses: its brick, and the module and the name of its kernel."""

    brick: str
    module: Any
    name: str
    behind_sum: str  # name of the brick of a norm that follows a residual addition

    @classmethod
    def of(cls, model: Model) -> Norms:
        if model.final_norm.bias is not None:
            return cls("LayerNorm", layer_norm, "LAYER_NORM", "LayerNorm")
        return cls("RmsNorm", rms_norm, "RMS_NORM", "AddRmsNorm (fused)")

    @property
    def kernel(self) -> Kernel:
        kernel: Kernel = getattr(self.module, self.name)
        return kernel

    def plant(self, monkeypatch: pytest.MonkeyPatch, implementation: Callable[..., None]) -> None:
        """Replace the implementation of the norm's kernel, to plant a fault."""
        monkeypatch.setattr(self.module, self.name, replace(self.kernel, implementation=implementation))


@pytest.fixture
def decoder_for(profiler: BrickProfiler) -> Callable[[Model, int], Decoder]:
    """Return a function that creates a decoder for a model and a number of threads."""
    return lambda model, threads: Decoder(model, "numba", threads, profiler, model.context_length)


@pytest.fixture(scope="session")
def gpu() -> Gpu:
    """Return the first GPU. Skip the test if there is no usable GPU."""
    try:
        return Gpu()
    except ComputeError as error:
        pytest.skip(str(error))
