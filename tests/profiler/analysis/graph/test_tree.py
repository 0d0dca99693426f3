"""Tests of the tree of the execution graph, by the requirements F121 to F127 of cbtop's predecessor."""

from __future__ import annotations

from cbtop.profiler.analysis.graph.execution_graph import ExecutionGraph
from cbtop.profiler.analysis.graph.nodes import AsyncTask, Brick, Function, KernelLaunch, Layer, Step, Transfer
from cbtop.profiler.analysis.graph.tree import label, to_ascii_tree, to_tree_node
from cbtop.protocol.vocabulary import BrickId


def one_layer() -> ExecutionGraph:
    graph = ExecutionGraph()
    graph.push_scope(Layer(0))
    graph.record_brick(BrickId.QKV_PROJECTION, 200_000, elements=4096)
    graph.record_kernel("batched_gemv", grid=(32, 1, 1), block=(256, 1, 1), shared_memory_bytes=4096)
    graph.pop_scope()
    return graph


def two_layers() -> ExecutionGraph:
    graph = ExecutionGraph()
    for index in (0, 1):
        graph.push_scope(Layer(index))
        graph.record_brick(BrickId.RMS_NORM, 50_000, elements=4096)
        graph.record_kernel("rmsnorm_kernel", grid=(16, 1, 1), block=(256, 1, 1), shared_memory_bytes=1024)
        graph.record_brick(BrickId.QKV_PROJECTION, 200_000, elements=4096)
        graph.pop_scope()
    return graph


def test_f121_the_tree_node_holds_layer_brick_and_kernel_in_order() -> None:
    root = to_tree_node(one_layer())
    assert root.label == "Layer 0"
    (brick,) = root.children
    assert brick.label == "QkvProjection  200.0µs (4096 elem)"
    assert [child.label for child in brick.children] == ["batched_gemv  <<<32,256,1>>> smem=4096B"]


def test_f122_several_roots_stand_under_a_synthetic_one() -> None:
    root = to_tree_node(two_layers())
    assert root.label == "Execution Graph"
    assert [child.label for child in root.children] == ["Layer 0", "Layer 1"]


def test_f123_an_empty_graph_is_one_label() -> None:
    root = to_tree_node(ExecutionGraph())
    assert (root.label, root.children) == ("Empty Graph", ())


def test_f124_the_text_shows_the_hierarchy() -> None:
    lines = to_ascii_tree(one_layer()).splitlines()
    assert [len(line) - len(line.lstrip("└─ │├")) for line in lines] == [0, 4, 8]


def test_f125_several_roots_are_drawn_with_connectors() -> None:
    assert to_ascii_tree(two_layers()) == (
        "Execution Graph\n"
        "├── Layer 0\n"
        "│   ├── RmsNorm  50.0µs (4096 elem)\n"
        "│   │   └── rmsnorm_kernel  <<<16,256,1>>> smem=1024B\n"
        "│   └── QkvProjection  200.0µs (4096 elem)\n"
        "└── Layer 1\n"
        "    ├── RmsNorm  50.0µs (4096 elem)\n"
        "    │   └── rmsnorm_kernel  <<<16,256,1>>> smem=1024B\n"
        "    └── QkvProjection  200.0µs (4096 elem)"
    )


def test_f126_an_empty_graph_says_so() -> None:
    assert to_ascii_tree(ExecutionGraph()) == "(empty graph)"


def test_f127_the_exact_snapshot() -> None:
    assert to_ascii_tree(one_layer()) == (
        "Layer 0\n└── QkvProjection  200.0µs (4096 elem)\n    └── batched_gemv  <<<32,256,1>>> smem=4096B"
    )


def test_the_other_nodes_print_as_the_predecessor_did() -> None:
    assert label(Function("forward", file="model.py", line=12)) == "forward (model.py:12)"
    assert label(Function("forward")) == "forward"
    assert label(Transfer("host", "gpu0", 4096, "H2D")) == "H2D: host → gpu0  4096B"
    assert label(Transfer("gpu0", "host", 8, "D2H", 1500)) == "D2H: gpu0 → host  8B 1.5µs"
    assert label(AsyncTask("fetch", 4, 3, 2000)) == "fetch  polls:4 yields:3 2.0µs (25% eff)"


def test_a_cpu_kernel_prints_its_name_and_backend() -> None:
    assert label(KernelLaunch("q4_k_matvec", backend="numba-omp×2")) == "q4_k_matvec  numba-omp×2"


def test_a_label_follows_the_name_and_changes_nothing_if_it_is_empty() -> None:
    assert label(Brick("QkvProjection", 200_000, 4096, label="q_proj")) == "QkvProjection q_proj  200.0µs (4096 elem)"
    assert label(Layer(3, "encoder")) == "Layer 3 (encoder)"
    assert label(Step("decode", "draft")) == "draft decode"
    assert (label(Layer(3)), label(Step("decode"))) == ("Layer 3", "decode")
