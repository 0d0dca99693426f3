"""Tests of who made a kernel: Triton's functions, found by its hook and its files, and code of inductor."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.device.kernel_burst import LaunchedKernel  # noqa: E402
from cbtop.profiler.instrument import kernel_makers  # noqa: E402
from cbtop.profiler.instrument.kernel_makers import Maker, makers_of  # noqa: E402

INDUCTOR = f"inductor of torch {torch.__version__}"


class HookChain:
    """A copy of the hook class in triton/knobs.py of Triton 3.9."""

    def __init__(self) -> None:
        self.calls: list[Callable[..., None]] = []

    def add(self, function: Callable[..., None]) -> None:
        if function not in self.calls:
            self.calls.append(function)

    def remove(self, function: Callable[..., None]) -> None:
        if function in self.calls:
            self.calls.remove(function)

    def __call__(self, *arguments: object) -> None:
        for call in reversed(self.calls):
            call(*arguments)


class Triton:
    """A stand-in for Triton.

    It compiles nothing, writes the files that Triton 3.9 leaves in its cache, and calls its hook.
    """

    def __init__(self, folder: Path, hooks: Any) -> None:
        self._folder, self.runtime = folder, SimpleNamespace(kernel_load_end_hook=hooks)

    def load(self, name: str, at: str, warps: int = 4, stages: int = 3, shared: int = 0) -> dict[str, str]:
        folder = self._folder / f"{len(list(self._folder.iterdir()))}"
        folder.mkdir()
        files = {
            "ttir": f'#loc = loc({at})\n#loc8 = loc("x"(#loc))\nmodule {{\n  tt.func public @{name}(\n',
            "json": json.dumps(
                {"name": name, "num_warps": warps, "num_stages": stages, "shared": shared, "triton_version": "3.9.0"}
            ),
            "ptx": ".version 9.4\n",
            "cubin": "",
        }
        paths = {}
        for kind, text in files.items():
            path = folder / f"{name}.{kind}"
            path.write_text(text)
            paths[path.name] = str(path)
        self.runtime.kernel_load_end_hook("module", 7, name, paths, "5459")
        return paths


def kernel(name: str, threads: int = 128, shared: int = 0) -> LaunchedKernel:
    return LaunchedKernel(name, (8, 1, 1), (threads, 1, 1), 32, 0, shared)


@pytest.fixture
def triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Triton]:
    found = Triton(tmp_path, HookChain())
    monkeypatch.setitem(sys.modules, kernel_makers.KNOBS, found)
    kernel_makers.follow()
    yield found
    kernel_makers.follow_no_more()
    assert found.runtime.kernel_load_end_hook.calls == []


def test_a_triton_function_is_found_with_its_file_line_and_options(triton: Triton) -> None:
    triton.load("scale_rows", '"/a b/k.py":9:1')
    one, other = kernel("scale_rows"), kernel("other")
    assert makers_of([one, other]) == {one: Maker("Triton 3.9.0, 4 warps, 3 stages", "/a b/k.py:9")}


def test_the_launch_decides_between_functions_of_one_name(triton: Triton) -> None:
    triton.load("norm", '"a.py":9:1', warps=4, shared=512)
    triton.load("norm", '"b.py":7:1', warps=8, shared=512)
    triton.load("norm", '"c.py":5:1', warps=8, shared=1024)
    assert makers_of([one := kernel("norm", 256, 512)])[one] == ("Triton 3.9.0, 8 warps, 3 stages", "b.py:7")
    assert makers_of([one := kernel("norm", 96, 1024)])[one] == ("Triton 3.9.0, 8 warps, 3 stages", "c.py:5")
    assert makers_of([one := kernel("norm", 96, 512)])[one] == ("Triton", "one of a.py:9; b.py:7")
    assert makers_of([one := kernel("norm", 96, 9)])[one] == ("Triton", "one of a.py:9; b.py:7; c.py:5")
    triton.load("norm", '"d.py":1:1', shared=9)
    triton.load("norm", '"e.py":1:1', shared=7)
    assert makers_of([one := kernel("norm", 96, 8)])[one].source == "one of a.py:9; b.py:7; c.py:5; 2 more"


def test_variants_of_one_function_are_one_source(triton: Triton) -> None:
    for stages in (2, 3):
        triton.load("norm", '"a.py":9:1', stages=stages)
    assert makers_of([one := kernel("norm")])[one] == ("Triton", "a.py:9")


@pytest.mark.parametrize(
    ("kind", "content", "expected"),
    [
        ("json", b"{", None),
        ("json", b"[" * 100_000, None),
        ("json", b"[1]", None),
        ("json", b'{"num_warps": "4", "num_stages": true, "triton_version": 3}', Maker("Triton", "a.py:9")),
        ("ttir", b"\xff" * 100_000, Maker("Triton 3.9.0, 4 warps, 3 stages", "")),
        ("ttir", None, None),
    ],
)  # fmt: skip
def test_damaged_or_removed_files_of_triton_invent_nothing(
    triton: Triton, kind: str, content: bytes | None, expected: Maker | None
) -> None:
    path = Path(triton.load("norm", '"a.py":9:1')[f"norm.{kind}"])
    path.unlink() if content is None else path.write_bytes(content)
    assert makers_of([one := kernel("norm")]).get(one) == expected


def test_a_hook_of_the_host_stays_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    chain = HookChain()
    chain.add(lambda *arguments: seen.append(str(arguments[2])))
    found = Triton(tmp_path, chain)
    monkeypatch.setitem(sys.modules, kernel_makers.KNOBS, found)
    kernel_makers.follow()
    found.load("norm", '"a.py":9:1')
    kernel_makers.follow_no_more()
    assert (seen, len(chain.calls)) == (["norm"], 1)
    assert makers_of([kernel("norm")]) == {}


def test_a_triton_with_one_hook_is_followed_only_if_that_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Triton(tmp_path, None)
    monkeypatch.setitem(sys.modules, kernel_makers.KNOBS, found)
    kernel_makers.follow()
    found.load("norm", '"a.py":9:1')
    assert makers_of([one := kernel("norm")])[one].source == "a.py:9"
    kernel_makers.follow_no_more()
    assert found.runtime.kernel_load_end_hook is None
    found.runtime.kernel_load_end_hook = print
    kernel_makers.follow()
    kernel_makers.follow_no_more()
    assert found.runtime.kernel_load_end_hook is print


def test_no_error_reaches_triton_and_memory_is_bounded(triton: Triton, monkeypatch: pytest.MonkeyPatch) -> None:
    triton.runtime.kernel_load_end_hook(None, None, "norm", None, "")
    monkeypatch.setattr(kernel_makers, "MAX_NAMES", 3)
    monkeypatch.setattr(kernel_makers, "MAX_VARIANTS", 2)
    for number in range(5):
        triton.load(f"norm{number}", '"a.py":9:1')
        triton.load("same", f'"b.py":{number}:1')
    assert set(makers_of(map(kernel, ("norm0", "norm1", "norm4")))) == {kernel("norm4")}
    assert makers_of([one := kernel("same")])[one].source in ("one of b.py:3; b.py:4", "b.py:4")


def test_code_of_inductor_is_found_with_its_nodes_and_their_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cx3.py"
    file.write_text(
        "# kernel path: /tmp/torchinductor/ab/cab.py\n"
        "# Topologically Sorted Source Nodes: [add, pow_1], Original ATen: [aten.add, aten.pow]\n"
        "# Source node to ATen node mapping:\n"
        "#   add => add\n"
        "triton_poi_fused_add_0 = async_compile.triton('triton_poi_fused_add_0', '''\n"
        "import triton\n''', device_str='cuda')\n\n"
        "triton_red_fused_1 = async_compile.triton('triton_red_fused_1', '''\n"
    )
    modules = {"add": "layers.0", "pow_1": "layers.0.input_layernorm"}
    monkeypatch.setitem(kernel_makers.generated_code, str(file), lambda nodes: [modules[one] for one in nodes])
    monkeypatch.setitem(kernel_makers.generated_code, str(tmp_path / "gone.py"), lambda nodes: [])
    one, two, other = map(kernel, ("triton_poi_fused_add_0", "triton_red_fused_1", "triton_red_fused_2"))
    assert makers_of([one, two, other]) == {
        one: Maker(INDUCTOR, "cx3.py:5 nodes add, pow_1 of layers.0, layers.0.input_layernorm"),
        two: Maker(INDUCTOR, "cx3.py:9"),
    }


@pytest.mark.slow
def test_files_that_the_real_triton_writes_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # Without this variable, Triton 3.9 warns.
    triton = pytest.importorskip("triton", reason="triton is not installed: pip install triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = tmp_path / "real_kernel.py"
    source.write_text(
        "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef scale_rows(x, BLOCK: tl.constexpr):\n"
        "    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n    tl.store(x + at, tl.load(x + at) * 2)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    from real_kernel import scale_rows  # type: ignore[import-not-found]

    kernel_makers.follow()
    made = triton.compile(
        ASTSource(fn=scale_rows, signature={"x": "*fp32", "BLOCK": "constexpr"}, constexprs={"BLOCK": 256}),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 8},
    )
    # Triton's `_init_handles` calls the hook after it has loaded a kernel. Loading needs a GPU, so the test calls the
    # hook itself.
    triton.knobs.runtime.kernel_load_end_hook(None, None, made.name, made.metadata_group, made.hash)
    found = makers_of([one := kernel("scale_rows", 256)])
    kernel_makers.follow_no_more()
    assert found[one].source == f"{source}:6"
    assert found[one].maker.startswith(f"Triton {triton.__version__}, 8 warps, ")
