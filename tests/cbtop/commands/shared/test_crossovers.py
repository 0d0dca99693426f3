"""Tests of how commands choose a backend: by crossovers (sizes from which a GPU is faster) measured on this machine.

One line reports the choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cbtop.cli import main
from cbtop.commands.shared.crossovers import use_kept_crossovers
from cbtop.compute import verification, workload
from cbtop.compute.backends import available_threads
from cbtop.compute.decoder import int8, plan
from cbtop.compute.decoder.decoder import Decoder
from cbtop.compute.demo_model import TINY, write_model
from cbtop.compute.errors import ComputeError
from cbtop.compute.places import OnCpu
from cbtop.compute.settings import STATIC_CROSSOVERS, Crossovers, crossovers, use_crossovers, with_crossovers
from cbtop.compute.verification import Variant
from cbtop.protocol.crossovers import Crossover, MachineCrossovers, keep_crossovers
from cbtop.protocol.roofs import cpu_name
from cbtop.protocol.vocabulary import Provenance
from cbtop.version import __version__

THREADS = available_threads()
FOUND = Crossover("product_bytes", 65_536, Provenance.MEASURED, "", 12.0, 9.0, 3.0)
UNSURE = Crossover("attention_products", 99, Provenance.STATIC, "unsure at 3,670,016")
UNKNOWN = Crossover("of another kind", 5, Provenance.MEASURED)
HERE = MachineCrossovers(cpu_name(), THREADS, __version__, "2026-11-24T08:00:00+01:00", (FOUND, UNSURE, UNKNOWN))
LINE = f"crossovers measured on 2026-11-24 with {THREADS} threads: product_bytes 65,536"
IN_EFFECT = Crossovers(product_bytes=65_536, measured=frozenset({"product_bytes"}))


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # Move the files of measured values to a temporary folder. The cache of compiled kernels stays where it is.
    monkeypatch.setattr("cbtop.protocol.roofs.cache_dir", lambda: tmp_path)
    with with_crossovers(STATIC_CROSSOVERS):
        yield tmp_path / "crossovers.json"


def test_measured_crossovers_are_in_effect_and_unsure_ones_are_the_default() -> None:
    keep_crossovers(HERE)
    assert use_kept_crossovers() == LINE
    assert crossovers() == IN_EFFECT


def test_the_defaults_are_in_effect_without_a_line_if_nothing_was_measured() -> None:
    assert use_kept_crossovers() == ""
    keep_crossovers(replace(HERE, crossovers=(UNSURE,)))
    assert use_kept_crossovers() == ""
    assert crossovers() == STATIC_CROSSOVERS


@pytest.mark.parametrize(
    ("kept", "reason"),
    [
        (replace(HERE, device="Another"), "is of Another"),
        (replace(HERE, threads=THREADS + 1), f"is of {cpu_name()}, {THREADS + 1} threads; this is"),
        (replace(HERE, version="0.0.1"), "is by cbtop 0.0.1"),
        (None, "holds no crossovers"),
    ],
    ids=["machine", "processors", "version", "damaged"],
)
def test_an_unusable_file_is_named_in_one_line_and_the_defaults_are_used(
    kept: MachineCrossovers | None, reason: str, file: Path
) -> None:
    file.write_text("{")
    if kept is not None:
        keep_crossovers(kept)
    use_crossovers(Crossovers(1, 1, 1))
    (line,) = use_kept_crossovers().splitlines()
    assert line.startswith(f"crossovers are static: {file} {reason}")
    assert line.endswith("; `cbtop calibrate` measures them")
    assert crossovers() == STATIC_CROSSOVERS


@pytest.mark.parametrize("command", ["demo", "bench", "verify"])
def test_what_starts_a_decoder_goes_by_it(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keep_crossovers(HERE)
    met: list[Crossovers] = []

    def variants() -> Iterator[Variant]:
        met.append(crossovers())
        yield from ()

    make = OnCpu.decoder

    def made(*arguments: Any) -> Decoder:
        met.append(crossovers())
        return make(*arguments)

    monkeypatch.setattr(verification, "variants", variants)
    monkeypatch.setattr(OnCpu, "decoder", made)
    monkeypatch.setattr(workload, "run", lambda *_: met.append(crossovers()))
    model = tmp_path / "tiny.gguf"
    write_model(model, TINY, lambda *_: None)
    options = {"demo": ["--serve-only"], "bench": [str(model), "-p", "1", "-n", "0", "-r", "1", "-t", "1"]}
    assert main([command, *options.get(command, [])]) == 0
    assert met == [IN_EFFECT]
    said = capsys.readouterr()
    assert said.err.splitlines().count(LINE) == 1
    assert LINE not in said.out


@pytest.mark.parametrize(
    "asked",
    [
        ["demo", "--serve-only", "--model"],
        ["bench", "-p", "1"],
        ["bench", "-p", "1", "--paired", "set:", "set:--exact"],
        ["tune", "-p", "1"],
        ["map"],
    ],
    ids=["demo", "bench", "paired", "tune", "map"],
)
def test_how_a_models_weights_lie_goes_by_it(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keep_crossovers(replace(HERE, crossovers=(Crossover("exact_bytes", 7, Provenance.MEASURED),)))
    met: list[int] = []

    def exact_bytes() -> int:
        met.append(crossovers().exact_bytes)
        raise ComputeError("that is all")

    monkeypatch.setattr(int8, "exact_bytes", exact_bytes)
    monkeypatch.setattr(plan, "exact_bytes", exact_bytes)
    model = tmp_path / "tiny.gguf"
    write_model(model, TINY, lambda *_: None)
    assert main([*asked, str(model)]) == 2
    assert met == [7]
    assert capsys.readouterr().err.count("exact_bytes 7") == 1
