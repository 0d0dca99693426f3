"""Tests of `cbtop demo`: it decodes a model in a separate process, and watches this process like any other."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cbtop.commands import demo
from cbtop.compute import demo_model
from cbtop.compute.demo_model import TINY, TINY_LLAMA, write_model
from cbtop.compute.guard import GUARD_BRICK
from cbtop.feeds.feed import Feed
from tests.compute.rewritten import rewritten
from tests.compute.vocabularies import byte_level
from tests.integration.hosts import CBTOP, DEADLINE_S, SEEING, cbtop, cbtop_apart, eventually, wait_until_seen

DECODED_BRICKS = {
    "Embedding", "RmsNorm", "QkvProjection", "RopeEmbedding", "Attention (fused)",
    "OutputProjection", "GateUpActivation (fused)", "DownProjection", "LmHead", "Sampling",
    "AddRmsNorm (fused)", "ResidualAdd", "KvWrite",
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    shapes = {"qwen2": TINY, "llama": TINY_LLAMA}
    for name, shape in shapes.items():
        write_model(folder / f"{name}.gguf", shape, lambda *_: None)
    return {name: folder / f"{name}.gguf" for name in shapes}


@pytest.mark.parametrize("family", ["qwen2", pytest.param("llama", marks=pytest.mark.slow)])
def test_headless_decodes_the_steps_asked_for_and_reports_every_brick(models: dict[str, Path], family: str) -> None:
    done = cbtop("demo", "--model", str(models[family]), "--headless", "--steps", "100", "--format", "json")
    assert done.returncode == 0, done.stderr
    (source,) = json.loads(done.stdout)["sources"]
    assert (source["state"], source["architecture"], source["phase"]) == ("ended", family, "decode")
    assert (source["steps"]["count"], source["steps"]["tokens"]) == (100, 100)
    # The guard's own brick runs only now and then, so it is left out.
    bricks = [row for row in source["bricks"] if row["name"] != GUARD_BRICK]
    assert {row["name"] for row in bricks} == DECODED_BRICKS
    assert all(row["checks_passed"] and not row["checks_failed"] for row in bricks)
    # The model restarts with a prefill when its context of 64 positions is full.
    assert {phase["phase"] for phase in source["phases"]} == {"prefill", "decode"}
    assert {row["provenance"] for row in source["roofline"]["ceilings"]} == {"measured"}
    assert {row["kind"] for row in source["graph"]} == {"layer", "brick", "kernel"}
    books, loss = source["books"], source["loss"]
    assert books["wall_us"] == pytest.approx(books["bricks_us"] + books["gaps_us"] + books["unattributed_us"])
    assert sum(row["total_exclusive_us"] for row in source["bricks"]) == pytest.approx(books["bricks_us"])
    assert (loss["dropped"], loss["produced"]) == (0, loss["received"])


TRAINED_BRICKS = {
    *(f"{name} backward" for name in (
        "RmsNorm", "QkvProjection", "Lora", "RopeEmbedding", "Attention (fused)", "OutputProjection",
        "GateUpActivation (fused)", "DownProjection", "LmHead", "AddRmsNorm (fused)", "Loss",
    )),
    "DataWait", "Lora", "Loss", "Optimizer", "ZeroGrad",
}  # fmt: skip


@pytest.mark.slow  # tests/compute/test_training.py tests it without processes
def test_headless_trains_the_steps_asked_for_and_the_loss_falls(models: dict[str, Path]) -> None:
    asked = "--headless", "--train", "--steps", "40", "--format", "json"
    done = cbtop_apart("demo", "--model", str(models["qwen2"]), *asked)
    assert done.returncode == 0, done.stderr
    (source,) = json.loads(done.stdout)["sources"]
    assert (source["state"], source["phase"]) == ("ended", "train")
    assert {phase["phase"] for phase in source["phases"]} == {"train"}
    assert source["steps"]["count"] == 40
    assert {row["name"] for row in source["bricks"]} == DECODED_BRICKS - {"Sampling"} | TRAINED_BRICKS
    assert all(not row["checks_failed"] for row in source["bricks"])
    books, loss = source["books"], source["loss"]
    assert books["wall_us"] == pytest.approx(books["bricks_us"] + books["gaps_us"] + books["unattributed_us"])
    assert (loss["dropped"], loss["produced"]) == (0, loss["received"])
    said = re.search(r"loss ([\d.]+) at the first step, ([\d.]+) at the last", done.stderr)
    assert said
    assert float(said[2]) < float(said[1])


@pytest.fixture(scope="module")
def speaking(models: dict[str, Path]) -> Path:
    """Write the tiny model qwen2 with a vocabulary, so that it can print text."""
    pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'cbtop[text]'")
    path = models["qwen2"].with_name("speaking.gguf")
    return rewritten(models["qwen2"], path, byte_level())


@pytest.mark.slow
def test_a_prompt_is_gone_on_from_once_beside_a_report_that_stays_whole(
    speaking: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ("demo", "--model", str(speaking), "--headless", "--steps", "5", "--prompt=-Hi\x1b[2Jthere")
    done = cbtop(*command, "--format", "json")
    workload = capfd.readouterr()  # The workload is a separate process that writes to the same output as this one.
    assert done.returncode == 0, done.stderr
    (source,) = json.loads(done.stdout)["sources"]
    assert source["steps"]["count"] == 5
    assert workload.out == ""
    assert "\n-Hi�[2Jthere" in workload.err
    assert "\x1b" not in workload.err


# The default run skips this test, because test_tokenizer.py tests the message, and a test below tests one line of a
# workload.
@pytest.mark.slow
def test_a_prompt_for_a_model_without_a_tokenizer_is_one_line_that_says_so(
    models: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    done = cbtop("demo", "--model", str(models["qwen2"]), "--headless", "--steps", "5", "--prompt", "Hi")
    assert done.returncode == 2
    said = [line for line in capfd.readouterr().err.splitlines() if not line.endswith("…")]
    assert len(said) == 1
    assert "has no tokenizer, so that it takes no prompt; give a model converted with its vocabulary" in said[0]


# The default run skips this test, because test_contract_checks.py tests the conditions, and a test below violates
# one.
@pytest.mark.slow
def test_with_check_contracts_every_condition_is_a_check(models: dict[str, Path]) -> None:
    command = ("demo", "--model", str(models["llama"]), "--headless", "--steps", "3", "--check-contracts")
    done = cbtop(*command, "--format", "json")
    assert done.returncode == 0, done.stderr
    (source,) = json.loads(done.stdout)["sources"]
    checked = {(check["brick"], check["assertion"]): check["passed"] for check in source["checks"]}
    # A check is None if the guard has not sampled its brick in its limited time.
    assert False not in checked.values()
    assert all(passed for (_, assertion), passed in checked.items() if "condition" in assertion)
    assert {brick for brick, assertion in checked if assertion.startswith("precondition")} == DECODED_BRICKS
    assert {brick for brick, assertion in checked if assertion.startswith("postcondition")} == DECODED_BRICKS


@pytest.mark.slow  # test_watching.py tests the exit code
def test_a_contract_that_is_violated_is_a_verdict_in_json_and_exit_code_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Make the biases of keys and values too large for float16, so that a condition fails.
    monkeypatch.setattr(demo_model, "BIAS_DEVIATION", 1e6)
    demo_model.write_model(tmp_path / "model.gguf", TINY, lambda *_: None)
    command = ("demo", "--model", str(tmp_path / "model.gguf"), "--headless", "--steps", "3", "--check-contracts")
    done = cbtop(*command, "--format", "json")
    assert done.returncode == 4, done.stderr
    (source,) = json.loads(done.stdout)["sources"]
    failed = {(check["brick"], check["assertion"]) for check in source["checks"] if not check["passed"]}
    assert ("KvWrite", "postcondition finite(v_cache[:, start : start + rows(v)])") in failed
    assert "failed-checks" in {verdict["id"] for verdict in source["verdicts"]}


@pytest.mark.slow  # The default run skips this test, because test_tree.py tests the form, with a simulated graph.
def test_the_tree_of_a_real_run_has_the_agreed_form(models: dict[str, Path]) -> None:
    done = cbtop("demo", "--model", str(models["llama"]), "--headless", "--steps", "3", "--view", "tree")
    lines = done.stdout.splitlines()
    first = lines.index("Execution Graph")
    assert lines[first + 1].startswith("├── Embedding  ")
    assert lines[first + 3] == "├── Layer 0"
    assert lines[first + 4].startswith("│   ├── RmsNorm  ")
    assert lines[first + 4].endswith("µs (256 elem)")
    assert lines[first + 5].startswith("│   │   └── rms_norm_int8  numba")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        # The default run skips this case, because test_terminal.py tests a missing file.
        pytest.param(None, "does not exist", marks=pytest.mark.slow),
        (b"GGUF\x03\0\0\0", ""),
        # The default run skips this case, because test_gguf.py tests an empty file.
        pytest.param(b"", "empty", marks=pytest.mark.slow),
        pytest.param(b"PK\x03\x04 not a model", "not a GGUF", marks=pytest.mark.slow),
    ],
)
def test_a_bad_model_is_one_clear_line_and_exit_code_2(
    tmp_path: Path, content: bytes | None, complaint: str, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("PYTHONWARNINGS", "error")  # Warnings become errors in the process of the workload.
    path = tmp_path / "bad.gguf"
    if content is not None:
        path.write_bytes(content)
    before = sorted(tmp_path.iterdir())
    done = cbtop("demo", "--model", str(path), "--headless", "--steps", "1")
    workload = capfd.readouterr()  # The workload is a separate process that writes to the same output as this one.
    assert (done.returncode, done.stdout + workload.out) == (2, "")
    said = [line for line in (done.stderr + workload.err).splitlines() if not line.endswith("…")]
    assert len(said) == 1
    assert said[0].startswith("cbtop: ")
    assert complaint in said[0].lower().replace("gguf", "GGUF")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.slow  # The default run skips this test, because test_terminal.py also stops a workload.
def test_serve_only_runs_the_workload_alone_and_stops_when_told(models: dict[str, Path]) -> None:
    command = [*CBTOP, "demo", "--serve-only", "--model", str(models["qwen2"])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process, Feed() as feed:
        eventually(lambda: (feed.poll(20), (v := feed.view()) and v.steps and v.steps.count > 20)[1])
        view = feed.view()
        assert view is not None
        assert (view.pid, view.state, view.activity) == (process.pid, "live", "")
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 143
        eventually(lambda: (feed.poll(20), (v := feed.view()) and v.state == "ended")[1])
        assert process.stdout
        assert process.stdout.read() == b""


@pytest.mark.slow
def test_a_workload_does_not_outlive_who_watches_it(models: dict[str, Path]) -> None:
    command = [*CBTOP, "demo", "--headless", "--model", str(models["qwen2"])]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as watcher, Feed() as feed:
        eventually(lambda: (feed.poll(20), (v := feed.view()) and v.steps and v.steps.count > 20)[1])
        watcher.kill()
        watcher.wait()
        eventually(lambda: (feed.poll(20), (v := feed.view()) and v.state == "ended")[1])


# The default run skips this test, because test_gguf.py tests that weights do not change with the file.
@pytest.mark.slow
def test_a_model_that_is_cut_short_while_it_runs_runs_on(models: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(models["qwen2"].read_bytes())
    command = [sys.executable, "-c", SEEING, "demo", "--headless", "--model", str(path), "--view", "bricks"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watcher:
        wait_until_seen(watcher)
        os.truncate(path, 0)
        wait_until_seen(watcher)
        watcher.send_signal(signal.SIGINT)
        out, _ = watcher.communicate(timeout=DEADLINE_S)
    assert (watcher.returncode, "DownProjection" in out) == (130, True)


@pytest.mark.slow
def test_a_workload_that_is_killed_before_its_first_step_says_by_what(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = demo._print_when_done

    def kill_and_watch(feed: demo.DemoFeed, process: subprocess.Popen[bytes], options: argparse.Namespace) -> int:
        process.kill()
        return watch(feed, process, options)

    monkeypatch.setattr(demo, "_print_when_done", kill_and_watch)
    done = cbtop("demo", "--headless", "--model", str(models["qwen2"]))
    assert done.returncode == 1
    assert done.stderr == "cbtop: the workload was killed by signal 9 (Killed) before its first step\n"


# The default run skips this test, because test_watching.py tests Ctrl-C, and a test above ends a workload with its
# viewer.
@pytest.mark.slow
def test_ctrl_c_prints_what_was_measured_so_far_and_leaves_no_process(models: dict[str, Path]) -> None:
    command = [
        sys.executable,
        "-c",
        SEEING,
        "demo",
        "--headless",
        "--model",
        str(models["qwen2"]),
        "--view",
        "bricks",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as watcher:
        wait_until_seen(watcher)
        watcher.send_signal(signal.SIGINT)
        out, _ = watcher.communicate(timeout=DEADLINE_S)
    assert watcher.returncode == 130
    assert b"DownProjection" in out
