"""`%%cbtop` times a cell, shows its figures as a display, and prints nothing."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cbtop
from cbtop import BrickId, BrickProfiler
from cbtop.errors import UsageError
from cbtop.notebook import NOTHING, load_ipython_extension, unload_ipython_extension
from cbtop.profiler.recorder import RingRecorder

PAGE = Path(__file__).parents[2] / "docs/notebooks.md"
MODEL = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up_proj, self.down_proj = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down_proj(torch.relu(self.up_proj(self.norm(x))))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

model, x = Model(), torch.randn(3, 64)
"""


class FakeShell:
    """The parts of IPython's shell that the extension uses. It stores displays and magics."""

    def __init__(self, **names: Any) -> None:
        self.user_ns: dict[str, Any] = names
        self.shown: list[dict[str, str]] = []
        self.compile = SimpleNamespace(cache=lambda code: "<cell>")
        self.display_pub = SimpleNamespace(publish=lambda data: self.shown.append(data))
        self.magics_manager = SimpleNamespace(magics={"line": {}, "cell": {}})

    def register_magic_function(self, func: Any, magic_kind: str, magic_name: str) -> None:
        assert magic_kind == "line_cell"
        for kinds in self.magics_manager.magics.values():
            kinds[magic_name] = func

    def transform_cell(self, raw_cell: str) -> str:
        return raw_cell

    def transform_ast(self, node: ast.Module) -> ast.Module:
        return node


@pytest.fixture
def shell(runtime: Path) -> FakeShell:
    """Return a shell with the extension, and with a profiler that the cells use."""
    profiler = BrickProfiler(recorder=RingRecorder(directory=runtime))
    found = FakeShell(profiler=profiler, NORM=BrickId.RMS_NORM)
    load_ipython_extension(found)
    return found


def timed(shell: FakeShell, cell: str, line: str = "") -> object:
    return shell.magics_manager.magics["cell"]["cbtop"](line, cell)


STEP = """
for _ in range({times}):
    with profiler.step("{name}", tokens=1), profiler.layer(0), profiler.brick(NORM, elements=1):
        pass
"""


def test_only_the_steps_of_a_cell_are_in_its_display(shell: FakeShell) -> None:
    exec(STEP.format(times=50, name="decode"), shell.user_ns)
    assert timed(shell, STEP.format(times=7, name="decode") + "41 + 1") == 42
    assert timed(shell, STEP.format(times=3, name="decode")) is None
    first, second = shell.shown
    assert "decode: 7 steps" in first["text/plain"]
    assert "decode: 3 steps" in second["text/plain"]
    assert "RmsNorm" in first["text/html"]
    assert 'class="step"' in first["text/html"]
    assert "<script" not in first["text/html"]


def test_records_before_a_cell_are_not_counted_as_dropped(shell: FakeShell) -> None:
    exec(STEP.format(times=50, name="decode"), shell.user_ns)
    timed(shell, STEP.format(times=1, name="decode"))
    (shown,) = shell.shown
    assert "records: 3 produced = 3 received + 0 dropped\n" in shown["text/plain"] + "\n"
    assert "before the daemon looked" not in shown["text/plain"]
    assert 'class="step"' in shown["text/html"]  # nothing before the only step is missing, so it is drawn


def test_a_cell_that_has_ended_is_not_live(shell: FakeShell) -> None:
    timed(shell, STEP.format(times=7, name="decode"))
    (shown,) = shell.shown
    for text in shown.values():
        assert ": ENDED (the cell)" in text
        assert "LIVE" not in text


def test_a_phase_that_the_cell_does_not_have_is_named(shell: FakeShell) -> None:
    timed(shell, STEP.format(times=9, name="decode"), "--phase prefil")
    said = "cbtop: --phase prefil: the cell has no such steps; choose decode"
    assert shell.shown[0]["text/plain"].startswith(f"{said}\n")
    assert shell.shown[0]["text/html"].startswith(f"<p>{said}</p>")
    assert "decode: 9 steps" in shell.shown[0]["text/plain"]


def test_a_failing_cell_shows_its_figures_and_raises_its_error(shell: FakeShell) -> None:
    with pytest.raises(ZeroDivisionError):
        timed(shell, STEP.format(times=2, name="decode") + "1 / 0")
    assert "decode: 2 steps" in shell.shown[0]["text/plain"]


def test_a_cell_that_does_not_parse_shows_nothing(shell: FakeShell) -> None:
    with pytest.raises(SyntaxError):
        timed(shell, "1 +")
    assert shell.shown == []


def test_the_text_has_layers_bricks_and_verdicts_once(shell: FakeShell) -> None:
    timed(shell, STEP.format(times=9, name="decode"))
    text = shell.shown[0]["text/plain"]
    assert text.count("Layer 0") == text.count("RmsNorm ") == 1
    assert text.count("verdicts") <= 1


def test_a_cell_chooses_its_phase_and_a_wrong_option_is_named(shell: FakeShell) -> None:
    both = STEP.format(times=9, name="decode") + STEP.format(times=2, name="prefill")
    timed(shell, both, "--phase prefill")
    assert "prefill: 2 steps" in shell.shown[0]["text/plain"]
    with pytest.raises(UsageError, match="--faze prefill is unknown; the only option is --phase NAME"):
        timed(shell, both, "--faze prefill")
    with pytest.raises(UsageError, match="expected one argument"):
        timed(shell, both, "--phase")


def test_a_statement_is_timed_and_a_cell_without_steps_says_so(
    shell: FakeShell, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shell.magics_manager.magics["line"]["cbtop"]("1 + 1") == 2
    assert shell.shown == [{"text/plain": NOTHING}]
    assert capsys.readouterr().out == ""


def test_without_a_safe_directory_the_cell_runs_and_the_reason_is_shown(
    shell: FakeShell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CBTOP_RUNTIME_DIR", str(tmp_path / "file"))
    assert timed(shell, "1 + 1") == 2
    assert shell.shown[0]["text/plain"].startswith("cbtop: nothing is recorded: ")


def test_the_extension_is_found_in_the_package_and_is_removed(shell: FakeShell) -> None:
    assert cbtop.load_ipython_extension is load_ipython_extension  # type: ignore[attr-defined]
    unload_ipython_extension(shell)
    assert shell.magics_manager.magics == {"line": {}, "cell": {}}


def test_a_model_of_a_cell_is_attached_for_this_cell_alone(shell: FakeShell) -> None:
    pytest.importorskip("torch", reason="torch is not installed: make torch")
    from cbtop.profiler.instrument import attachment

    exec(MODEL, shell.user_ns)
    with cbtop.attach(shell.user_ns["model"]) as kept:
        for _ in range(2):
            exec("other = Model()", shell.user_ns)
            timed(shell, "for _ in range(5): other(x)")
            assert attachment.attachments() == [kept]
            assert attachment.installed() is None
    assert attachment.attachments() == []
    for shown in shell.shown:
        assert "forward: 5 steps" in shown["text/plain"]
        assert "Layer 3" in shown["text/html"]


def test_a_notebook_that_is_executed_shows_a_cell_and_its_objects(runtime: Path, tmp_path: Path) -> None:
    for package in ("torch", "ipykernel", "nbclient"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install ipykernel nbclient torch")
    import nbformat
    from nbclient import NotebookClient

    cells = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    load, loop, attached = cells[:3]
    sources = [
        load,
        MODEL + "import cbtop",
        f"{loop}print('mine')\nx.shape",
        attached,
        "run.profiler.execution_graph()",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    first, _, timed_cell, *objects = notebook.cells
    assert first.outputs == []
    assert [output.text for output in timed_cell.outputs if output.output_type == "stream"] == ["mine\n"]
    (display,) = [output for output in timed_cell.outputs if output.output_type == "display_data"]
    assert "forward: 20 steps" in display.data["text/plain"]
    assert "<h2>Layers" in display.data["text/html"]
    (value,) = [output for output in timed_cell.outputs if output.output_type == "execute_result"]
    assert value.data["text/plain"] == "torch.Size([3, 64])"
    for cell in objects:
        assert "UpProjection" in cell.outputs[-1].data["text/html"]
        assert "UpProjection" in cell.outputs[-1].data["text/plain"]
        assert "object at 0x" not in cell.outputs[-1].data["text/plain"]
