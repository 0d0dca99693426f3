"""Tests of `--backend auto`: it uses measured crossovers (sizes from which a GPU is faster).

It does not look for a GPU if the work is too small for one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cbtop.cli import main
from cbtop.commands.shared import backend
from cbtop.commands.shared.backend import settled
from cbtop.compute import places, workload
from cbtop.compute.backends import available_threads
from cbtop.compute.demo_model import TINY, write_model
from cbtop.compute.errors import ComputeError
from cbtop.compute.gpu import device
from cbtop.compute.gpu_crossovers import layer_bytes
from cbtop.compute.settings import STATIC_CROSSOVERS, WorkloadOptions, with_crossovers
from cbtop.protocol.crossovers import NEVER, Crossover, MachineCrossovers, keep_crossovers
from cbtop.protocol.roofs import cpu_name
from cbtop.protocol.vocabulary import Provenance
from cbtop.version import __version__
from tests.representatives import first_by_default

NAME = "Made 100"
Keep = Callable[..., None]


@pytest.fixture(autouse=True)
def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("cbtop.protocol.roofs.cache_dir", lambda: tmp_path)
    monkeypatch.setattr(backend, "driver_version", lambda: "580.159.04")
    with with_crossovers(STATIC_CROSSOVERS):
        yield


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model(tmp_path / "m.gguf", TINY, lambda *_: None)
    return tmp_path / "m.gguf"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets an entry whenever the code asks for a GPU. The fake GPU has enough memory."""
    found: list[str] = []

    def gpu() -> Any:
        found.append("a GPU")
        return SimpleNamespace(name=NAME, require_room=lambda size_bytes, what: found.append(f"{size_bytes} {what}"))

    monkeypatch.setattr(device, "Gpu", gpu)
    return found


def keep(decoding: int, prompts: int = NEVER, gpu: str = NAME, version: str = __version__) -> None:
    both = ("gpu_layer_bytes", decoding), ("gpu_prompt_bytes", prompts)
    found = [
        Crossover(name, value, Provenance.STATIC, "unsure at 9")
        if value == NEVER
        else Crossover(name, value, Provenance.MEASURED, gpu)
        for name, value in both
    ]
    keep_crossovers(MachineCrossovers(cpu_name(), available_threads(), version, "2026-11-24", tuple(found)))


def test_work_from_the_crossover_on_goes_to_the_gpu_and_less_never_asks_it(model: Path, asked: list[str]) -> None:
    work = layer_bytes(model)
    keep(work + 1)
    said = f"backend cpu: {work:,} of gpu_layer_bytes, from {work + 1:,} on {NAME} is quicker"
    assert settled(model) == ("cpu", said)
    assert asked == []
    keep(work)
    assert settled(model) == (
        "cuda",
        f"backend cuda: {work:,} of gpu_layer_bytes, from {work:,} on {NAME} is quicker",
    )
    assert asked == ["a GPU", f"{model.stat().st_size} the weights"]


def test_prompts_alone_go_by_their_own_crossover(model: Path, asked: list[str]) -> None:
    keep(1, 64 * layer_bytes(model))
    assert [settled(model, tokens)[0] for tokens in (63, 64)] == ["cpu", "cuda"]
    assert len(asked) == 2  # The code asked for the GPU twice, both times for the 64 tokens that select cuda.


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        ({"decoding": NEVER}, "backend cpu: the GPU was not quicker for certain (unsure at 9)"),
        ({"decoding": 1, "gpu": "Another"}, f"backend cpu: measured was Another, here is {NAME}: `cbtop calibrate`"),
        ({"decoding": 1, "version": "0.0.1"}, "is by cbtop 0.0.1"),
        (None, "backend cpu: from when on a GPU is quicker was not measured: `cbtop calibrate` does"),
    ],
    ids=["unsure", "another GPU", "another version", "nothing kept"],
)
@pytest.mark.usefixtures("asked")
def test_an_unmeasured_gpu_leaves_the_work_on_the_cpu_and_the_line_says_why(
    kept: dict[str, Any] | None, said: str, model: Path
) -> None:
    if kept is not None:
        keep(**kept)
    found, line = settled(model)
    assert found == "cpu"
    assert said in line
    assert "\n" not in line


def test_the_cpu_runs_it_and_says_so_if_the_gpu_has_no_room_or_is_gone(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> Any:
        raise ComputeError("the weights take 9.00 GB; of 2.00 GB 1.00 GB are free on Made 100")

    monkeypatch.setattr(device, "Gpu", full)
    keep(1)
    assert settled(model) == ("cpu", "backend cpu: the weights take 9.00 GB; of 2.00 GB 1.00 GB are free on Made 100")


def test_without_a_driver_nothing_is_said(model: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "driver_version", lambda: "")
    keep(1)
    assert settled(model) == ("cpu", "")
    assert asked == []


@pytest.mark.parametrize(("more", "expected"), [([], "cuda"), (["--check-contracts"], "cpu")])
@pytest.mark.usefixtures("asked")
def test_demo_runs_where_it_was_settled_and_what_a_cpu_alone_computes_there(
    more: list[str],
    expected: str,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    keep(1)
    ran: list[WorkloadOptions] = []
    monkeypatch.setattr(workload, "run", lambda options, *_: ran.append(options))
    assert main(["demo", "--serve-only", "--backend", "auto", "--model", str(model), *more]) == 0
    assert [one.backend for one in ran] == [expected]
    assert capsys.readouterr().err.count("backend cuda: ") == (expected == "cuda")


@first_by_default(("tests", "expected"), [(["-p", "8", "-n", "0"], "cpu"), (["-p", "8", "-n", "1"], "cuda")])
@pytest.mark.usefixtures("asked")
def test_bench_goes_by_prompts_where_nothing_is_decoded(
    tests: list[str], expected: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(1, 9 * layer_bytes(model))
    met: list[WorkloadOptions] = []

    def place_of(options: WorkloadOptions) -> Any:
        met.append(options)
        return places.OnCpu(replace(options, backend="cpu"))

    monkeypatch.setattr(places, "place_of", place_of)
    assert main(["bench", str(model), "--backend", "auto", "-r", "1", *tests]) == 0
    assert {one.backend for one in met} == {expected}
