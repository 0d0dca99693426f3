"""Tests of the plan of a model, which lists its launches before a run: the decoder makes exactly these launches."""

from __future__ import annotations

from pathlib import Path

import pytest

from cbtop.compute.decoder import FAMILIES
from cbtop.compute.decoder.decoder import Decoder
from cbtop.compute.decoder.int8 import model_to_run
from cbtop.compute.decoder.plan import PACKAGE, planned
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import NodeKind
from tests.compute.conftest import ListRecorder

Place = tuple[str, str, str]  # (layer, brick, kernel)


def recorded(recorder: ListRecorder) -> set[Place]:
    """Return the recorded kernels, each with its brick and layer."""
    nodes = {one.id: one for one in recorder.messages if isinstance(one, Node)}
    found = set()
    for node in nodes.values():
        if node.kind is NodeKind.KERNEL:
            brick = nodes[node.parent or 0]
            outer = nodes[brick.parent or 0]
            found.add((outer.name if outer.kind is NodeKind.LAYER else "-", brick.name, node.name))
    return found


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_names_the_kernels_that_a_pass_records(
    family: str, tokens: int, model_files: dict[str, Path], recorder: ListRecorder, profiler: BrickProfiler
) -> None:
    model = model_to_run(model_files[family])
    Decoder(model, "numba", 1, profiler, model.context_length).prefill([*range(tokens)])
    found = {
        ("-" if one.layer is None else str(one.layer), one.brick, one.kernel)
        for one in planned(model_files[family], "cpu", tokens)
    }
    assert found == recorded(recorder)


def test_a_plan_says_where_each_kernel_is_written(model_files: dict[str, Path]) -> None:
    for one in planned(model_files["qwen2"], "cpu"):
        lines = (PACKAGE / one.file).read_text("utf-8").splitlines()
        assert lines[one.line - 1].startswith(("def ", "@jit")), one
    kernels = {one.kernel: one.file for one in planned(model_files["qwen2"], "cpu")}
    assert kernels["rms_norm_int8"] == "compute/kernels/rms_norm_int8.py"
