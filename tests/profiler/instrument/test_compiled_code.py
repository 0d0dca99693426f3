"""Tests of captured graphs of torch.compile: Dynamo's graphs are real, inductor and CUDA are fake."""

from __future__ import annotations

import importlib.util
import itertools
import json
import logging
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make torch")

from torch.fx.passes.split_module import split_module  # noqa: E402

from cbtop.profiler.instrument import attach, compiled_code, install, uninstall  # noqa: E402
from cbtop.profiler.instrument.capturing import captures  # noqa: E402
from cbtop.profiler.profiler import BrickProfiler  # noqa: E402
from cbtop.protocol.messages import Node  # noqa: E402
from cbtop.protocol.vocabulary import NodeKind  # noqa: E402
from tests.profiler.instrument import test_captured_graphs as played  # noqa: E402
from tests.profiler.instrument.dynamo_state import cache_hits, forget_compiled  # noqa: E402
from tests.profiler.memory import Memory  # noqa: E402

world = played.world  # a fixture
PRODUCT_NS, LOOP_NS = 20_000, 3_000
nn = torch.nn


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, rows: Any) -> Any:
        return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm()
        self.gate_proj = nn.Linear(8, 8, bias=False)
        self.act_fn = nn.SiLU()
        self.down_proj = nn.Linear(8, 8, bias=False)

    def forward(self, rows: Any) -> Any:
        return rows + self.down_proj(self.act_fn(self.gate_proj(self.input_layernorm(rows))))


class CallingLayer(Layer):
    """A layer with its own `__call__`, as in transformers 5.17."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


class Model(nn.Module):
    def __init__(self, layers: int = 3, kind: type[nn.Module] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(layers))
        self.norm = RMSNorm()

    def forward(self, rows: Any) -> Any:
        for layer in self.layers:
            rows = layer(rows)
        return self.norm(rows)


class Inductor:
    """A fake inductor, the compiler of torch.compile.

    Products become library calls, and all operations between two products become one loop. Runs are captured as a
    graph.
    """

    def __init__(self, world: played.World, directory: Path) -> None:
        self.world = world
        self.directory = directory
        self.compiled = 0
        # A function that may reorder the compiled lines. A line is (whether it is a product, names of its graph
        # nodes).
        self.lines: Callable[[Any], Any] = list
        self.module: Any = ModuleType(compiled_code.COMPILER)
        self.module.compile_fx = self.compile_fx
        self.loaded: list[Any] = []

    def backend(self, model: Any, inputs: Any) -> Any:
        """Compile a graph. This is a backend for `torch.compile`."""
        return self.module.compile_fx(model, inputs, config_patches={"triton.cudagraphs": True})

    def compile_fx(self, model_: Any, inputs: Any, config_patches: Any = None) -> Any:
        if config_patches:
            return self.module.compile_fx(model_, inputs)
        self.compiled += 1
        nodes = [node for node in model_.graph.nodes if node.op.startswith("call_")]
        groups = itertools.groupby(nodes, key=lambda node: getattr(node.target, "__name__", "") == "linear")
        code = self._load(self.lines((is_product, [node.name for node in group]) for is_product, group in groups))
        graphs: list[Any] = []
        calls = itertools.count()

        def run(*args: Any) -> Any:
            if next(calls) == 1 and self.world.captured is None:
                first, graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
                first.capture_begin()
                first.capture_end()
                graph.capture_begin()
                code.partition_0([])
                graph.capture_end()
                graphs.append(graph)
            elif self.world.captured is not None:
                code.partition_0([])
            for graph in graphs:
                graph.replay()
            return model_(*args)

        return run

    def _load(self, lines: list[tuple[bool, list[str]]]) -> Any:
        text = ["def partition_0(args):"]
        for is_product, names in lines:
            text.append(f"    # Topologically Sorted Source Nodes: [{', '.join(names)}], Original ATen: [aten.mul]")
            text.append("    extern_kernels.mm(args, out=None)" if is_product else "    triton_poi_fused_0.run(args)")
            text.append("    buf0 = None; del buf0")
        path = self.directory / f"code{self.compiled}.py"
        path.write_text("\n".join(text))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        code: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(code)
        launch = self.world.kernel

        class Kernels:
            def mm(self, args: Any, out: Any) -> None:
                launch(PRODUCT_NS)

            def run(self, args: Any) -> None:
                launch(LOOP_NS)

        code.extern_kernels = code.triton_poi_fused_0 = Kernels()
        self.loaded.append(code)
        return code


@pytest.fixture
def inductor(world: played.World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Inductor]:
    from torch._inductor.codecache import PyCodeCache

    forget_compiled()
    found = Inductor(world, tmp_path)
    monkeypatch.setitem(sys.modules, compiled_code.COMPILER, found.module)
    monkeypatch.setattr(PyCodeCache, "modules", found.loaded)
    yield found
    world.pass_time(10_000_000)
    uninstall()
    assert found.module.compile_fx == found.compile_fx
    assert sys.gettrace() is None
    forget_compiled()


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def profiler(memory: Memory) -> BrickProfiler:
    return BrickProfiler(recorder=memory, sample_every=2)


def bricks(memory: Memory) -> dict[str, set[str]]:
    """Return the names of bricks in layers, and of bricks outside layers."""
    nodes = {said.id: said for said in memory.said if isinstance(said, Node)}
    found: dict[str, set[str]] = {"in layers": set(), "outside": set()}
    for node in nodes.values():
        if node.kind is NodeKind.BRICK:
            inside = node.parent is not None and nodes[node.parent].kind is NodeKind.LAYER
            found["in layers" if inside else "outside"].add(f"{node.name} {node.label}".strip())
    return found


def run(called: Any, world: played.World, profiler: BrickProfiler, times: int = 8) -> list[Any]:
    found = []
    with torch.no_grad():
        for _ in range(times):
            found.append(called(torch.ones(1, 4, 8)))
            world.pass_time(10_000_000)
    profiler.finalize()
    return found


IN_LAYERS = {"GateProjection gate_proj", "Activation act_fn", "DownProjection down_proj"}
OUTSIDE = {"Fused: ResidualAdd, RmsNorm input_layernorm", "Fused: ResidualAdd, RmsNorm norm"}


@pytest.mark.parametrize("kind", [Layer, CallingLayer])
def test_kernels_of_a_compiled_model_are_its_bricks_and_fused_ones_name_all(
    kind: type[Any], inductor: Inductor, world: played.World, profiler: BrickProfiler, memory: Memory
) -> None:
    model = Model(kind=kind)
    bare = run(torch.compile(model, backend=inductor.backend), world, BrickProfiler())
    forget_compiled()
    attach(model, profiler)
    ours = run(torch.compile(model, backend=inductor.backend), world, profiler)
    assert all(torch.equal(a, b) for a, b in zip(bare, ours, strict=True))
    assert inductor.compiled == 2
    assert bricks(memory) == {"in layers": IN_LAYERS | {"RmsNorm input_layernorm"}, "outside": OUTSIDE}
    steps = played.steps_in(memory)
    assert len(steps) > 2
    for _, tokens, _, inside in steps[-2:]:
        assert tokens == 0  # The input may be tokens or embeddings, so the number of tokens is unknown (0).
        product, loop = PRODUCT_NS, LOOP_NS
        assert inside["layer"] == pytest.approx([2 * (loop + product), *[loop + 2 * product] * 2], abs=9)
        assert inside["GateProjection"] == pytest.approx([PRODUCT_NS] * 3, abs=3)
        assert inside["Fused: ResidualAdd, RmsNorm"] == pytest.approx([LOOP_NS] * 3, abs=3)
    work = {said.name: said.work for said in memory.said if isinstance(said, Node) and said.kind is NodeKind.BRICK}
    assert work["GateProjection"].flops_per_element
    assert not work["Fused: ResidualAdd, RmsNorm"].flops_per_element


@pytest.mark.slow
def test_a_model_compiled_before_its_first_call_is_named_if_all_are_attached(
    inductor: Inductor, world: played.World, profiler: BrickProfiler, memory: Memory
) -> None:
    install(profiler)
    run(torch.compile(Model(), backend=inductor.backend), world, profiler)
    assert bricks(memory) == {"in layers": IN_LAYERS | {"RmsNorm input_layernorm"}, "outside": OUTSIDE}


@pytest.mark.slow
def test_code_moved_out_of_its_layer_is_outside_and_each_layer_stays_whole(
    inductor: Inductor, world: played.World, profiler: BrickProfiler, memory: Memory
) -> None:
    def moved(lines: Any) -> list[tuple[bool, list[str]]]:
        kept = list(lines)
        # Move the line of the first layer's activation to the end.
        return [*(line for line in kept if line is not kept[2]), kept[2]]

    inductor.lines = moved
    model = Model()
    attach(model, profiler)
    run(torch.compile(model, backend=inductor.backend), world, profiler)
    assert "Activation act_fn" in bricks(memory)["outside"]
    for *_, inside in played.steps_in(memory)[-2:]:
        assert len(inside["layer"]) == 3
        assert len(inside["Activation"]) == 3


@pytest.mark.slow
def test_a_graph_captured_around_a_compiled_model_has_its_bricks(
    inductor: Inductor, world: played.World, profiler: BrickProfiler, memory: Memory
) -> None:
    model = Model()
    attach(model, profiler)
    compiled = torch.compile(model, backend=inductor.backend)
    rows = torch.ones(1, 1, 8)
    with torch.no_grad():
        compiled(rows)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        compiled(rows)
        graph.capture_end()
    for _ in range(8):
        graph.replay()
        world.pass_time(10_000_000)
    profiler.finalize()
    assert bricks(memory) == {"in layers": IN_LAYERS | {"RmsNorm input_layernorm"}, "outside": OUTSIDE}
    assert [name for name, *_ in played.steps_in(memory)[-2:]] == ["decode"] * 2


def test_layers_compiled_one_by_one_are_named_if_their_calls_are_captured(
    inductor: Inductor, world: played.World, profiler: BrickProfiler, memory: Memory
) -> None:
    model = Model()
    attach(model, profiler)
    for layer in model.layers:
        layer.compile(backend=inductor.backend)
    rows = torch.ones(1, 1, 8)
    with torch.no_grad():
        model(rows)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        model(rows)
        graph.capture_end()
    for _ in range(8):
        graph.replay()
        world.pass_time(10_000_000)
    profiler.finalize()
    assert inductor.compiled == 1
    found = bricks(memory)
    assert found["in layers"] == IN_LAYERS | {"RmsNorm input_layernorm", "ResidualAdd"}
    for *_, inside in played.steps_in(memory)[-2:]:
        assert len(inside["layer"]) == len(inside["ResidualAdd"]) == 3


@pytest.mark.slow
def test_elements_are_counted_by_the_token_if_one_dimension_varies() -> None:
    found: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        found.append(compiled_code.GraphOrigins.of(graph.graph).elements["layers.0.gate_proj"])
        return graph.forward

    model = Model()
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend, dynamic=False)(torch.ones(3, 8))
        torch._dynamo.reset()
        rows = torch.ones(3, 8)
        torch._dynamo.mark_dynamic(rows, 0)
        torch.compile(model, backend=backend)(rows)
    torch._dynamo.reset()
    assert found == [24, -8]


def test_equal_pieces_that_share_their_code_have_their_own_layers(
    inductor: Inductor, world: played.World, profiler: BrickProfiler, memory: Memory
) -> None:
    """An inference engine splits the graph of a model into pieces. The engine compiles equal pieces only once."""
    model = Model()
    attach(model, profiler)
    pieces, known = compiled_code.Pieces(), []

    def piece_of(node: Any) -> int:
        around = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
        layers = [int(found[1]) for path in around if (found := re.search(r"layers\W+(\d)", path))]
        return layers[0] if layers else 3

    def backend(graph: Any, inputs: Any) -> Any:
        split = split_module(graph, None, piece_of)
        for number, (name, piece) in enumerate(list(split.named_children())):

            def compiled(piece: Any = piece, is_new: bool = number in (0, 3)) -> Any:
                if is_new:
                    known.append(inductor.module.compile_fx(piece, inputs))
                return known[-1]

            delattr(split, name)
            setattr(split, name, pieces.compiled(compiled, piece))
        return split.forward

    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        graph.capture_begin()
        torch.compile(model, backend=backend)(torch.ones(1, 1, 8))
        graph.capture_end()
    for _ in range(8):
        graph.replay()
        world.pass_time(10_000_000)
    profiler.finalize()
    assert inductor.compiled == 2
    for *_, inside in played.steps_in(memory)[-2:]:
        assert len(inside["layer"]) == 3
        assert inside["GateProjection"] == pytest.approx([PRODUCT_NS] * 3, abs=3)
        assert inside["DownProjection"] == pytest.approx([PRODUCT_NS] * 3, abs=3)


def test_a_graph_of_each_layer_is_left_alone_and_that_is_said(
    inductor: Inductor, world: played.World, profiler: BrickProfiler, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    attach(model, profiler)
    for layer in model.layers:
        layer.compile(backend=inductor.backend)
    with caplog.at_level(logging.WARNING, "cbtop"):
        run(model, world, profiler)
    assert "layers one by one" in caplog.text
    assert world.replayed
    assert not [name for name in bricks(memory)["in layers"] if name.startswith("GateProjection")]


def test_code_that_was_compiled_before_is_not_named_and_that_is_said(
    inductor: Inductor, world: played.World, profiler: BrickProfiler, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    compiled = torch.compile(model, backend=inductor.backend)
    with torch.no_grad():
        compiled(torch.ones(1, 4, 8))
    attach(model, profiler)
    with caplog.at_level(logging.WARNING, "cbtop"):
        run(compiled, world, profiler)
    assert inductor.compiled == 1
    assert caplog.text.count("in which no call of a model was seen") == 1
    assert bricks(memory) == {"in layers": set(), "outside": set()}


def test_who_traces_the_thread_keeps_to_it(
    inductor: Inductor, world: played.World, profiler: BrickProfiler, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    attach(model, profiler)
    compiled = torch.compile(model, backend=inductor.backend)
    called: list[str] = []

    def trace(frame: Any, event: str, argument: Any) -> None:
        called.append(frame.f_code.co_name)

    with torch.no_grad():
        compiled(torch.ones(1, 4, 8))
    with caplog.at_level(logging.WARNING, "cbtop"):
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            run(compiled, world, profiler)
            assert sys.gettrace() is trace
        finally:
            sys.settrace(before)
    assert "partition_0" in called
    assert "traces the thread" in caplog.text
    assert bricks(memory) == {"in layers": set(), "outside": set()}


def test_an_error_of_compiled_code_reaches_the_host_and_tracing_stops(
    inductor: Inductor, world: played.World, profiler: BrickProfiler
) -> None:
    model = Model()
    attach(model, profiler)
    compiled = torch.compile(model, backend=inductor.backend)
    with torch.no_grad():
        compiled(torch.ones(1, 4, 8))
        inductor.loaded[0].extern_kernels = None
        with pytest.raises(AttributeError, match="mm"):
            compiled(torch.ones(1, 4, 8))
    captures.clear()  # as after `torch.cuda.graph`
    run(torch.compile(Model(), backend="eager"), world, profiler, times=1)
    assert sys.gettrace() is None


def test_an_inductor_that_tells_nothing_is_said_and_left_as_it_is(
    inductor: Inductor, profiler: BrickProfiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch._inductor.codecache import PyCodeCache

    monkeypatch.delattr(PyCodeCache, "modules")
    with caplog.at_level(logging.WARNING, "cbtop"):
        attach(Model(), profiler)
    assert "does not tell what it compiles" in caplog.text
    assert inductor.module.compile_fx == inductor.compile_fx


def test_inductor_is_as_it_was_once_nothing_is_attached(inductor: Inductor, profiler: BrickProfiler) -> None:
    attachment = attach(Model(), profiler)
    assert inductor.module.compile_fx != inductor.compile_fx
    attachment.detach()
    assert inductor.module.compile_fx == inductor.compile_fx


def test_the_import_of_inductor_is_awaited_only_while_something_is_attached(
    inductor: Inductor, profiler: BrickProfiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, compiled_code.COMPILER)
    before = list(sys.meta_path)
    attachment = attach(Model(), profiler)
    assert len(sys.meta_path) == len(before) + 3  # inductor's, Triton's, and that of NVRTC
    attachment.detach()
    assert sys.meta_path == before


def test_what_inductor_said_on_an_h100_names_all_kernels_of_a_llamas_layer(profiler: BrickProfiler) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: make torch")
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    # The model is on the meta device. On a CPU, cbtop would record its modules instead of compiled code.
    model = transformers.LlamaForCausalLM(config).to("meta")
    said = json.loads((Path(__file__).parent / "inductor-h100.json").read_text())
    nodes = [
        SimpleNamespace(
            op="call_function",
            name=name,
            target=operation,
            args=(),
            meta={
                "nn_module_stack": {path: (path, kind) for path, kind in modules},
                "stack_trace": "\n".join(f'  File "/a/file.py", line 1, in {called}' for called in functions),
            },
        )
        for name, operation, modules, functions in said["nodes"]
    ]
    lines, ran = ["def partition_0(args):"], []
    for at, (names, launch) in enumerate(said["launches"]):
        lines.append(f"    # Topologically Sorted Source Nodes: [{', '.join(names)}], Original ATen: [aten.mul]")
        lines.append(f"    {launch}{'.run' if launch.startswith('triton') else ''}(buf0)")
        ran.append(compiled_code.Ran("", len(lines), [at], [at + 1]))
    compiled = compiled_code.GraphOrigins.of(SimpleNamespace(nodes=nodes))
    attachment = attach(model, profiler)
    naming = compiled_code.Naming(compiled, attachment.steps.calls, model, [model.model.layers[1]])
    (layer,) = compiled_code.spans_of(ran, lines, naming, set(), 1)
    attachment.detach()
    assert layer.key == (NodeKind.LAYER, 1)
    assert [(span.key.name, span.key.label) for span in layer.inside] == [
        ("RmsNorm", "input_layernorm"),
        ("QkvProjection", "q_proj"),
        ("QkvProjection", "k_proj"),
        ("QkvProjection", "v_proj"),
        ("RopeEmbedding", ""),  # two kernels
        ("Attention (fused)", "sdpa"),
        ("OutputProjection", "o_proj"),
        ("Fused: ResidualAdd, RmsNorm", "post_attention_layernorm"),
        ("GateProjection", "gate_proj"),
        ("UpProjection", "up_proj"),
        ("Activation", "act_fn"),
        ("DownProjection", "down_proj"),
        ("ResidualAdd", ""),
    ]
    assert [span.begin for span in layer.inside[1:]] == [span.end for span in layer.inside[:-1]]
    assert (layer.begin, layer.end) == ([0], [len(said["launches"])])


@pytest.mark.parametrize(
    ("of_one", "lies_in"),
    [
        ([None, 0, None, 0, None, 1, None], [None, 0, 0, 0, None, 1, None]),
        ([0, 0, 1, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1, 1]),
        ([0, 0, 1, 1, None, 0, 1], [0, 0, 1, 1, None, None, None]),
        ([0, 1, 0, 1], [0, 1, None, None]),
        ([], []),
    ],
)
def test_a_layer_lies_together_and_what_is_far_from_it_outside(
    of_one: list[int | None], lies_in: list[int | None]
) -> None:
    kernels: Any = [SimpleNamespace(layer=layer) for layer in of_one]
    assert compiled_code._layers(kernels) == lies_in


HAS_COMPILER = shutil.which("g++") or shutil.which("clang++")


@pytest.mark.slow
@pytest.mark.skipif(not HAS_COMPILER, reason="inductor writes C++")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # warnings of torch
def test_generated_or_cached_inductor_code_names_its_nodes(
    world: played.World, profiler: BrickProfiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = Model()
    attachment = attach(model, profiler)
    for _ in range(2):
        forget_compiled()
        compiled_code._compiled.clear()
        with torch.no_grad():
            torch.compile(model)(torch.ones(1, 4, 8))
        ((file, compiled),) = compiled_code._compiled.items()
        lines = Path(file).read_text().splitlines()
        ran = [
            compiled_code.Ran(file, at, [at], [at + 1])
            for at, line in enumerate(lines, start=1)
            if line.lstrip().startswith("extern_kernels.")
        ]
        naming = compiled_code.Naming(compiled, attachment.steps.calls, model)
        found = compiled_code.spans_of(ran, lines, naming, set(), 1)
        assert [span.key[1] for span in found] == [0, 1, 2]  # All layers are found, in order.
        products = ["GateProjection", "DownProjection"]
        assert [[inner.key.name for inner in span.inside] for span in found] == [products] * 3
        assert [inner.elements for span in found for inner in span.inside] == [4 * 8] * 6
    assert cache_hits()
    forget_compiled()
