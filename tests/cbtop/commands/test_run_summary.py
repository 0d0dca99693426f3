"""Tests of the summary at the end of `cbtop run`: its content is right, and it does not affect the command."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

import pytest

from cbtop.commands.shared.ring_view import view_of
from cbtop.commands.shared.run_summary import WARM_UP_STEPS, SteadySource, run_summary
from cbtop.daemon.source import Source
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol.serving_messages import EngineWorker
from cbtop.protocol.training_messages import PartTime, TrainingTimes
from cbtop.protocol.vocabulary import TRAIN, BrickId
from cbtop.reports.summary import MAX_BRICKS, MAX_VERDICTS, summary
from cbtop.text import training_text
from cbtop.viewmodels.guard import GuardView
from cbtop.viewmodels.on_demand import with_parts
from tests.cbtop.made_serving import serve
from tests.cbtop.recorded import Clock, profiler_in
from tests.cbtop.samples import COMPARED
from tests.integration.hosts import CBTOP, DEADLINE_S, eventually
from tests.profiler.instrument.under_run import MODULE, TORCH, fake_torch
from tests.representatives import first_by_default

RUN = [*CBTOP, "run"]
MAX_LINES = 10
# A fake torch. Each of its steps has one layer with two bricks.
TORCH_WITH_BRICKS = (
    TORCH
    + """
import time
from cbtop import BrickId
def install(profiler):
    global step
    def step():
        return profiler.step("decode", tokens=1)
    globals()["profiler"] = profiler
instrument.install = install
def work():
    with profiler.layer(0):
        with profiler.brick(BrickId.RMS_NORM, 64): pass
        with profiler.brick(BrickId.DOWN_PROJECTION, 64): time.sleep(0.001)
def decode(steps=20):
    for _ in range(steps): forward(work)
"""
)


def run(tmp_path: Path, program: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `program` under `cbtop run` with a fake torch that imports fast. Every step is recorded."""
    command = [*RUN, "--overhead", "100%", *options, "--", sys.executable, "-c", f"import torch\n{program}"]
    with_torch = os.environ | {"PYTHONPATH": str(fake_torch(tmp_path, TORCH_WITH_BRICKS))}
    return subprocess.run(
        command, env=with_torch, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=DEADLINE_S,
        check=False,
    )  # fmt: skip


def test_a_run_ends_with_rates_bricks_and_the_next_command_on_stderr(tmp_path: Path, runtime: Path) -> None:
    done = run(tmp_path, "torch.decode()\nprint('done')\nraise SystemExit(6)")
    lines = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (6, "done\n")
    assert all(line.startswith("cbtop: ") for line in lines)
    assert len(lines) <= MAX_LINES
    assert re.match(r"cbtop: decode: [\d.,]+ tokens/s, step p50 .+, p99 .+ \(last 17 steps, .+\)$", lines[0])
    assert re.match(r"cbtop:   DownProjection +\d+\.\d % .+ a call$", lines[1])
    assert lines[2].startswith("cbtop:   RmsNorm ")
    assert lines[-1] == "cbtop: next: cbtop"
    assert not list(runtime.glob("*.end"))


def test_quiet_prints_no_summary_and_starts_no_process_for_it(tmp_path: Path) -> None:
    program = "import glob; torch.decode(); print(glob.glob(os.environ['CBTOP_RUNTIME_DIR'] + '/*.end'))"
    done = run(tmp_path, f"import os; {program}", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


@pytest.mark.slow
def test_a_recorded_run_names_the_replay_of_its_file_as_next(tmp_path: Path) -> None:
    file = tmp_path / "run.cbtop"
    done = run(tmp_path, "torch.decode()", "--record", str(file))
    assert f"cbtop: next: cbtop replay {file}\n" in done.stderr


def test_a_run_with_a_report_alone_names_the_report_as_next(tmp_path: Path) -> None:
    report = tmp_path / "run.html"
    done = run(tmp_path, "torch.decode()", "--report", str(report))
    assert done.stderr.splitlines()[-2:] == [
        f"cbtop: next: open {report} in a browser",
        f"cbtop: report: {report}",
    ]


def test_a_run_of_which_nothing_was_instrumented_has_one_line(tmp_path: Path) -> None:
    done = run(tmp_path, "pass")
    assert done.stderr == "cbtop: nothing was instrumented: no call of a model was seen\n"


@first_by_default(("own", "of_workers", "shown"), [(200, 30, 197), (5, 100, 97)])
def test_of_several_processes_the_one_with_most_work_is_summarized(
    own: int, of_workers: int, shown: int, tmp_path: Path
) -> None:
    workers = f"""
import os
children = []
for _ in range(2):
    if not (child := os.fork()):
        torch.decode({of_workers})
        os._exit(0)
    children.append(child)
torch.decode({own})
for child in children: os.waitpid(child, 0)
"""
    lines = run(tmp_path, workers).stderr.splitlines()
    assert f"(last {shown} steps, " in lines[0]
    assert lines[-2:] == ["cbtop: 2 more processes: cbtop", "cbtop: next: cbtop"]
    assert sum("tokens/s, step p50" in line for line in lines) == 1


@pytest.mark.slow
def test_a_parent_without_steps_leaves_the_summary_to_its_first_worker(tmp_path: Path) -> None:
    worker = "import os\nif os.fork(): os.wait()\nelse:\n    torch.decode(15)\n    os._exit(0)"
    lines = run(tmp_path, worker).stderr.splitlines()
    assert "(last 12 steps, " in lines[0]
    assert not any("more process" in line for line in lines)


@first_by_default("end", ["os._exit(3)", "os.kill(os.getpid(), 9)"])
def test_a_process_that_ends_past_its_exit_handlers_has_a_summary(tmp_path: Path, end: str) -> None:
    done = run(tmp_path, f"import os; torch.decode(); {end}")
    assert done.returncode in (3, -signal.SIGKILL)
    assert "cbtop: decode: " in done.stderr


@pytest.mark.slow
def test_a_command_that_is_no_python_ends_with_one_summary(tmp_path: Path) -> None:
    script = f"{sys.executable} -c 'import torch; torch.decode()'; {sys.executable} -c 'import torch; torch.decode()'"
    with_torch = os.environ | {"PYTHONPATH": str(fake_torch(tmp_path, TORCH_WITH_BRICKS))}
    done = subprocess.run(
        [*RUN, "--", "sh", "-c", f"{script}; exit 5"], env=with_torch, capture_output=True, text=True,
        timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (5, "")
    assert "cbtop: 1 more process: cbtop\n" in done.stderr
    assert done.stderr.count("next: cbtop\n") == 1


@pytest.mark.slow
def test_the_command_waits_for_its_summary_no_longer_than_it_may(tmp_path: Path, runtime: Path) -> None:
    """The process that prints the summary is stopped, so there is no summary. The command ends on time anyway."""
    program = "import torch, time, atexit\ntorch.decode()\natexit.register(lambda: print(time.time(), flush=True))\n"
    command = [*RUN, "--", sys.executable, "-c", f"{program}print('ready', flush=True)\nimport sys; sys.stdin.read()"]
    with_torch = os.environ | {"PYTHONPATH": str(fake_torch(tmp_path, TORCH_WITH_BRICKS))}
    with subprocess.Popen(
        command, env=with_torch, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline() == b"ready\n"
        (reader,) = _who_reads(runtime)
        os.kill(reader, signal.SIGSTOP)
        try:
            process.stdin.close()
            began_s = float(process.stdout.readline())
            process.wait(DEADLINE_S)
            waited_s = time.time() - began_s
        finally:
            os.kill(reader, signal.SIGKILL)
        assert process.stderr.read() == b""
    # The command waits 0.3 s for the summary. On a busy machine, the command can take longer.
    assert 0.25 < waited_s < 3


def _who_reads(runtime: Path) -> list[int]:
    """Return the ids of processes that have the FIFO (named pipe) of a run open."""

    def readers() -> list[int]:
        (fifo,) = runtime.glob("*.end")
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if any(os.readlink(each) == str(fifo.resolve()) for each in (process / "fd").iterdir()):
                    found.append(int(process.name))
            except OSError:
                continue  # The process has ended or belongs to another user.
        return found

    found: list[int] = eventually(readers)
    return found


@pytest.mark.slow
def test_the_process_that_waits_is_no_child_and_holds_no_pipe(tmp_path: Path, runtime: Path) -> None:
    read, write = os.pipe()
    program = """
import os, sys, torch
torch.decode()
try: os.wait()
except ChildProcessError: print("no child", os.times()[2:4], flush=True)
sys.stdin.read()
"""
    with_torch = os.environ | {"PYTHONPATH": str(fake_torch(tmp_path, TORCH_WITH_BRICKS))}
    with subprocess.Popen(
        [*RUN, "--", sys.executable, "-c", program], pass_fds=[write],
        env=with_torch, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == b"no child (0.0, 0.0)\n"
        (reader,) = _who_reads(runtime)
        assert not [name for name in _open_files(reader) if name.startswith("pipe:")]
        process.stdin.close()
    os.close(read)
    os.close(write)


def _open_files(pid: int) -> list[str]:
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # The process may have closed this file meanwhile.
            found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found


def _ring(directory: Path, steps: int, first_us: int) -> Path:
    """Write the ring of a process. Its first step takes `first_us` and each later step 10 µs."""
    ticks = count(0, 10_000)
    late_ns = 0

    def clock_ns() -> int:
        return next(ticks) + late_ns

    recorder = RingRecorder(directory)
    profiler = BrickProfiler(recorder=recorder, clock_ns=clock_ns)
    for number in range(steps):
        with profiler.step("decode", tokens=1), profiler.brick(BrickId.RMS_NORM, 64):
            if number == 0:
                late_ns = first_us * 1000
    recorder.close("done")
    (path,) = directory.glob("*.ring")
    return path


def test_the_first_steps_are_left_out_of_the_steady_state(runtime: Path) -> None:
    pid = int(_ring(runtime, 20, first_us=5_000_000).name.split("-")[0])
    (rates, *_) = run_summary(str(runtime), pid, [pid], "cbtop", {})
    assert "p99 30.00 µs" in rates
    assert f"(last {20 - WARM_UP_STEPS} steps, " in rates


def test_all_steps_are_shown_if_there_are_few(runtime: Path) -> None:
    pid = int(_ring(runtime, 4, first_us=0).name.split("-")[0])
    (rates, *_) = run_summary(str(runtime), pid, [pid], "cbtop", {})
    assert "(last 4 steps, " in rates


def test_a_phase_that_ended_before_the_steady_state_is_not_shown(runtime: Path) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    for phase, steps in (("decode", 3), ("prefill", 12)):
        for _ in range(steps):
            with profiler.step(phase, tokens=4), profiler.brick(BrickId.RMS_NORM, 64):
                clock.sleep_us(1_000_000)
    profiler.close()
    (rates, *_) = run_summary(str(runtime), os.getpid(), [os.getpid()], "cbtop", {})
    assert rates.startswith("prefill: 4.00 tokens/s, ")


def test_a_worker_of_an_engine_is_shown_with_the_latencies_of_its_requests(runtime: Path) -> None:
    clock = Clock()
    engine = profiler_in(runtime, clock)
    serve(engine, clock, steps=0)
    engine.close()
    (ring,) = runtime.glob("*.ring")
    pid = int(ring.name.split("-")[0])
    for file in runtime.glob(f"{pid}-*"):
        file.rename(file.with_name(file.name.replace(f"{pid}-", "7-", 1)))
    worker = profiler_in(runtime, clock)
    worker.announce(EngineWorker(7))
    with worker.step("decode", tokens=1):
        clock.sleep_us(1_000)
    worker.close()
    lines = run_summary(str(runtime), pid, [pid], "cbtop", {})
    assert any(line.startswith("engine TTFT p50 12.00 ms, p99 80.00 ms (3 requests)") for line in lines)


@pytest.mark.slow
def test_a_failed_instrumentation_leaves_a_file_of_the_program_alone(tmp_path: Path) -> None:
    (tmp_path / ".end").write_text("the program's own")
    torch = fake_torch(tmp_path, f"{MODULE}\nimport sys; sys.modules['msgpack'] = None")
    done = subprocess.run(
        [*RUN, "--", sys.executable, "-c", "import torch; torch.nn.Module()()"], cwd=tmp_path, capture_output=True,
        env=os.environ | {"PYTHONPATH": str(torch)}, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert b"runs uninstrumented: " in done.stderr
    assert (tmp_path / ".end").read_text() == "the program's own"


def test_records_before_the_steady_state_count_as_not_looked_at(runtime: Path) -> None:
    source = SteadySource(_ring(runtime, 20, first_us=0))
    source.poll()
    state = source.state_message()
    source.close()
    assert state.produced == state.received + state.overwritten
    assert state.before_attach == state.overwritten == 2 * WARM_UP_STEPS


def test_the_summary_and_the_screen_judge_a_training_step_alike(runtime: Path) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    for number in range(400):
        begun_ns, is_recorded = clock(), number in (10, 60, 300)  # the summary covers the last 200 steps
        clock.sleep_us(50_000)
        kernels = [((BrickId.DOWN_PROJECTION,), begun_ns, begun_ns + 26_000_000, 64)] if is_recorded else None
        profiler.parts.steps.record(TRAIN, 0, begun_ns, clock(), kernels, sequences=8)
    parts = PartTime("forward", 48 * 26_000_000, 26_000_000), PartTime("no kernel", 48 * 24_000_000, 24_000_000)
    profiler.announce(TrainingTimes(TRAIN, "", 48, 48 * 50_000_000, parts, by_kernels=3))
    (ring,) = runtime.glob("*.ring")
    for kind, recorded in ((SteadySource, 1), (Source, 3)):
        source = kind(ring)
        view = view_of(source)
        source.close()
        assert view is not None
        assert view.steps is not None
        assert view.training is not None
        assert view.steps.recorded == recorded
        assert [verdict.id for verdict in view.verdicts] == ["launch-bound"]
        assert "(mean of the latest 48 steps, kernels of 3)" in training_text.parts(view, view.training)
    profiler.close()


def test_a_process_without_a_ring_that_can_be_read_has_no_summary(runtime: Path) -> None:
    (runtime / "7-1-0.ring").write_bytes(b"no ring")
    assert run_summary(str(runtime), 7, [7], "cbtop", {}) == []


@pytest.mark.parametrize(
    ("guard", "line"),
    [
        (
            GuardView("", 200, 23, 0, None),
            "guard: checked 23 of 200 steps, no fault; --overhead 100% checks nearly all",
        ),
        (GuardView("", 53, 52, 0, None), "guard: checked 52 of 53 steps, no fault"),
        (GuardView("", 200, 200, 3, None), "guard: checked 200 of 200 steps, 3 faulty"),
        (GuardView("", 1, 0, 0, None), "guard: checked 0 of 1 step, no fault; --overhead 100% checks nearly all"),
        (GuardView("", None, 23, 0, None), "guard: checked 23 steps, no fault"),
    ],
)
def test_a_summary_says_how_many_steps_the_guard_checked(guard: GuardView, line: str) -> None:
    lines = summary(with_parts(COMPARED, guard=guard), "cbtop", more_processes=3, note="a note")
    assert lines[-4:] == [line, "3 more processes: cbtop", "a note", "next: cbtop"]
    assert len(lines) == MAX_LINES


def test_a_summary_has_the_costliest_bricks_and_no_notes() -> None:
    view = COMPARED
    lines = summary(view, "cbtop", more_processes=3)
    assert len(lines) <= MAX_LINES
    costliest = sorted(view.bricks, key=lambda row: -row.total_exclusive_us)[:MAX_BRICKS]
    shown = [line.split()[0] for line in lines if line.startswith("  ")]
    assert shown == [row.name for row in costliest][: len(shown)]
    assert len(lines) == MAX_LINES
    assert sum(line.startswith(("error ", "warning ")) for line in lines) <= MAX_VERDICTS
    assert not any(line.startswith("note ") for line in lines)
    assert lines[-2:] == ["3 more processes: cbtop", "next: cbtop"]
