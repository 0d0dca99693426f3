"""`cbtop tune` prints and stores the best settings, and other commands use them."""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from cbtop.cli import main
from cbtop.commands import demo
from cbtop.compute import backends
from cbtop.compute.demo_model import TINY, write_model
from cbtop.errors import UsageError
from cbtop.tuning.kept import stored_setting
from cbtop.tuning.measuring import Bench, Setting, TuningRequest
from cbtop.tuning.tuner import BrickTuner
from tests.cbtop.tuning.test_tuner import SHARES


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_model(path, TINY, lambda *_: None)
    return str(path)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Setting]:
    """Simulate requests whose duration depends only on the settings.

    With two threads, a request takes half of the time. With exact products, it takes twice the time. The bricks are
    simulated, too, because on a busy machine a single brick can take the whole time of a request.
    """
    ran: list[Setting] = []

    def request_ns(
        self: Bench, setting: Setting, request: TuningRequest, should_stop: Callable[[], bool] = lambda: False
    ) -> tuple[int, int]:
        ran.append(setting)
        took_ns = int(2e7 * (0.5 if setting.threads == 2 else 1.0) * (2.0 if setting.is_exact else 1.0))
        return took_ns, took_ns + len(ran)

    monkeypatch.setattr(Bench, "request_ns", request_ns)
    monkeypatch.setattr(BrickTuner, "shares", lambda _: SHARES)
    monkeypatch.setattr(backends, "available_threads", lambda: 2)
    return ran


def test_what_is_best_is_said_with_its_interval_kept_and_taken_by_bench(
    tiny: str, made: list[Setting], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", tiny, "-t", "1", "-p", "16", "-n", "4", "--budget", "3600"]) == 0
    said = capsys.readouterr().out
    assert "tiny.gguf: requests of 16 tokens, and 4 generated after them" in said
    assert "\nbest: --threads 2, 2.00 (2.000 to 2.000) times as fast as --threads 1\n" in said
    assert "\nkept: cbtop demo --tuned and cbtop bench --tuned take it\n" in said
    row = next(line for line in said.splitlines() if line.startswith("--threads 2 --exact"))
    assert row.split()[-1] == "slower"
    assert "not tried: batch: the decoder runs one sequence at a time\n" in said
    kept = stored_setting(Path(tiny), 2)
    assert kept is not None
    assert kept.setting == Setting(2)
    assert main(["bench", tiny, "--tuned", "-p", "8", "-n", "0", "-r", "1", "-o", "json"]) == 0
    heard = capsys.readouterr()
    assert json.loads(heard.out)[0]["n_threads"] == 2
    assert heard.err.startswith("--threads 2, tuned on 20")


def test_json_has_every_try_with_its_samples(
    tiny: str, made: list[Setting], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", tiny, "-t", "2", "-p", "16", "-n", "4", "--budget", "3600", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "cbtop.tune/1"
    assert found["before"] == found["best"] == {"threads": 2, "is_exact": False, "kv_cache": "f16"}
    assert (found["gain"], found["is_kept"], found["is_interrupted"]) == (None, True, False)
    assert found["bricks"][0]["part"] > 0
    one = next(one for one in found["tried"] if one["setting"]["threads"] == 1)
    assert (one["is_kept"], one["request"]["is_beyond_noise"], one["limit"]) == (False, True, None)
    assert one["request"]["ratio"] == pytest.approx(0.5, rel=1e-4)
    assert len(one["decode"]["samples_ns"]) == len(one["decode"]["before_samples_ns"]) >= 5
    assert {"what", "why"} == set(found["not_tried"][0])


def test_a_too_small_budget_keeps_nothing_and_says_how_much_is_needed(
    tiny: str, made: list[Setting], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bench, "request_ns", lambda *_: (10**9, 10**9))
    assert main(["tune", tiny, "-t", "1", "-p", "16", "-n", "4", "--budget", "1"]) == 0
    said = capsys.readouterr().out
    assert (
        "not tried: --threads 2: 5 rounds take 12 s or more, and 0 s are left for it: give a larger --budget\n"
        in said
    )
    assert "\nno setting was told from another: nothing is kept\n" in said
    assert stored_setting(Path(tiny), 2) is None


def test_ctrl_c_prints_what_was_measured_and_keeps_nothing(
    tiny: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = TuningRequest.run

    def pressed(self: TuningRequest, *arguments: object) -> tuple[int, int]:
        os.kill(os.getpid(), signal.SIGINT)
        return run(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(TuningRequest, "run", pressed)
    assert main(["tune", tiny, "-t", "1", "-p", "16", "-n", "4"]) == 130
    said = capsys.readouterr().out
    assert "\nbest: --threads 1, as before\n" in said
    # A warning about other processes may be printed before this line.
    assert said.endswith("\nit was interrupted: nothing is kept\n")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["-p", "60", "-n", "5"], "65 tokens do not fit the model's context of 64: give less to -p or -n"),
        (["-t", "4000", "-p", "8"], "4000 threads: this process may use"),
    ],
)
def test_what_cannot_be_tuned_is_said_before_anything_is_measured(
    tiny: str, arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", tiny, *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert complaint in said.err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "nothing is kept for tiny.gguf on this processor: cbtop tune"),
        (["-t", "1"], "--tuned says threads, --exact and --kv-cache: leave it or them away"),
    ],
)
def test_tuned_without_anything_kept_or_beside_its_options_is_one_line(
    tiny: str, arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", tiny, "--tuned", *arguments]) == 2
    assert complaint in capsys.readouterr().err


def test_the_demo_runs_its_workload_with_what_was_found(
    tiny: str, made: list[Setting], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["tune", tiny, "-t", "1", "--exact", "-p", "16", "-n", "4", "--budget", "3600"]) == 0

    def asked(options: argparse.Namespace, *_: object) -> None:
        raise UsageError(f"{options.threads} {options.exact} {options.kv_cache}")

    monkeypatch.setattr(demo, "_workload", asked)
    with pytest.raises(UsageError, match="2 False f16"):
        main(["demo", "--debug", "--model", tiny, "--tuned", "--headless"])
