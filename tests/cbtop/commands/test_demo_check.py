"""A complete `cbtop demo --check` with seven processes. Their clocks are fake, so the result is known."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from cbtop.cli import main
from cbtop.commands import demo
from cbtop.compute.demo_model import TINY, write_model

# A demo process that knows how many demo processes were started before it. Its bricks become slower from process 7
# on, or only in process 7.
WORKLOAD = """
import sys
from pathlib import Path
from cbtop import BrickCategory, BrickDefinition, BrickProfiler, TokenBudget

turns, odd = Path(sys.argv[1]), sys.argv[2]
turns.write_text(turns.read_text() + "x")
is_judged = len(turns.read_text()) in ((7,) if odd == "slower once" else (7, 8))
now_ns = 1_000_000
profiler = BrickProfiler(clock_ns=lambda: now_ns)
down = "DownProjection"
if odd == "over a budget":
    down = BrickDefinition(down, BrickCategory.FFN, budget=TokenBudget(1))
for step in range(40):
    grown = 1 + step / 10 if is_judged and odd == "drifts" else 1
    with profiler.step("decode", tokens=1):
        for layer in range(4):
            with profiler.layer(layer):
                for brick, us in (("RmsNorm", 10), ("Attention", 40), (down, 80)):
                    is_planted = is_judged and odd.startswith("slower") and (layer, brick) == (2, "Attention")
                    with profiler.brick(brick):
                        now_ns += round(us * 1000 * grown * (1.2 if is_planted else 1 + 0.01 * ((step * 7) % 5)))
    now_ns += 20_000
profiler.close("done")
"""


@pytest.mark.parametrize(
    ("odd", "runs", "code", "said"),
    [
        pytest.param("no", 7, 0, "", marks=pytest.mark.slow),
        # each run measures its own roof, so this budget is shown but not judged
        pytest.param("over a budget", 7, 0, "", marks=pytest.mark.slow),
        ("slower", 8, 4, "broken [Attention in Layer 2]: decode: Attention in Layer 2: 1.1"),
        # Not in the default run, because test_default_gate.py tests that one slow process is not enough.
        pytest.param("slower once", 8, 0, "", marks=pytest.mark.slow),
        # Not in the default run, because test_check.py tests exit code 5.
        pytest.param("drifts", 7, 5, "only a change of ", marks=pytest.mark.slow),
    ],
)
def test_six_runs_give_scatter_the_seventh_is_judged_and_another_confirms(
    runtime: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    odd: str,
    runs: int,
    code: int,
    said: str,
) -> None:
    turns = tmp_path / "turns"
    turns.write_text("")
    monkeypatch.setattr(demo, "_command", lambda _: [sys.executable, "-c", WORKLOAD, str(turns), odd])
    assert main(["demo", "--check"]) == code
    assert turns.read_text() == "x" * runs
    out, err = capfd.readouterr()
    assert said in err
    assert ("another run checks whether that persists" in err) == (runs == 8)
    assert ("or run longer: cbtop demo --check --steps N" in err) == (code == 5)
    assert bool(re.search(r"all \d hold", out)) == (odd in {"no", "over a budget"})
    assert ("only in one of two runs" in out) == (odd == "slower once")


def test_what_serves_only_judges_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--check", "--serve-only"]) == 2
    assert "leave out --serve-only" in capsys.readouterr().err


# Python imports this file when it starts. It gives the profiler a fake clock, which advances with each reading. The
# first brick of process 7 takes thirty readings, and each other brick takes one.
CUSTOMIZED = """
import os, sys
from pathlib import Path

if "--serve-only" in sys.orig_argv:
    from itertools import count
    from cbtop.profiler.profiler import BrickProfiler

    turns = Path(os.environ["TURNS"])
    turns.write_text(turns.read_text() + "x")
    is_slow = len(turns.read_text()) >= 7 and os.environ["PLANTED"]
    ticks = count(1_000_000, 1_000)
    BrickProfiler.__init__.__kwdefaults__["clock_ns"] = ticks.__next__
    if is_slow:
        from cbtop.compute.brick import ComputeBrick

        run = ComputeBrick.__call__

        def ran(self, elements, *calls):
            usual = self.implementations
            if self.definition.name == "Embedding":
                self.implementations = [lambda *given, of=of: [of(*given), *map(next, [ticks] * 30)] for of in usual]
            run(self, elements, *calls)
            self.implementations = usual

        ComputeBrick.__call__ = ran
"""


@pytest.mark.slow
@pytest.mark.parametrize(("planted", "code", "said"), [("", 0, ""), ("yes", 4, "broken [Embedding]")])
def test_the_demo_itself_is_judged(
    runtime: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    planted: str,
    code: int,
    said: str,
) -> None:
    (tmp_path / "sitecustomize.py").write_text(CUSTOMIZED)
    turns = tmp_path / "turns"
    turns.write_text("")
    for name, value in (("TURNS", str(turns)), ("PLANTED", planted)):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    tiny = tmp_path / "tiny.gguf"
    write_model(tiny, TINY, lambda *_: None)
    assert main(["demo", "--check", "--steps", "40", "--model", str(tiny), "--guard", "off"]) == code
    assert turns.read_text() == "x" * (8 if planted else 7)
    assert said in capfd.readouterr().err
