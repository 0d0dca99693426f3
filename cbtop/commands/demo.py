"""`cbtop demo`: decode a model in a separate process, and watch that process like any other."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from cbtop import units
from cbtop.commands.shared.backend import AUTO, WITH_AUTO, settled
from cbtop.commands.shared.choose import judge_as_asked
from cbtop.commands.shared.crossovers import go_by_kept_crossovers
from cbtop.commands.shared.interrupts import noted_interrupt
from cbtop.commands.shared.numbers import count, part, temperature, whole
from cbtop.commands.shared.progress import ProgressLine
from cbtop.commands.shared.ranks import FirstRank, job_of, run_ranks
from cbtop.commands.shared.show import (
    add_show_arguments,
    check_phase,
    is_headless,
    print_report,
    require_passed_checks,
    settle_options,
    show_on_screen,
    shows_window,
    window_s,
)
from cbtop.commands.shared.tuned import add_tuned_argument, tuned_setting
from cbtop.compute.block_formats import FORMAT_MODULES
from cbtop.compute.settings import GREEDY, GUARD_REACTIONS, SPLITS, RankOptions, TokenSampling, WorkloadOptions
from cbtop.errors import CbtopError, FailedCheckError, NoDataError, UsageError
from cbtop.feeds.feed import Feed, FeedEnd
from cbtop.profiler.traces import TRACED_EVERY_STEPS, TRACES
from cbtop.protocol.vocabulary import SourceStatus
from cbtop.reports import HTML, TIMELINE
from cbtop.viewmodels.source import SourceSummary, SourceView

if TYPE_CHECKING:
    from cbtop.profiler.profiler import BrickProfiler

DESCRIPTION = (
    "Decode a GGUF model (qwen2, qwen3, qwen3moe, llama, phi3, gemma2, gemma3 and stablelm families; "
    f"{', '.join(FORMAT_MODULES)}), or a safetensors model (llama, mistral, qwen2, "
    "qwen3), on the CPU or a GPU in a process of its own, and show it. "
    "Without --model, a small random one is written once into the cache. With --train, fine-tune it instead."
)
EPILOG = """\
examples:
  cbtop demo                                    on screen, until you quit
  cbtop demo --model qwen2.5-1.5b-q4_k_m.gguf   your own model
  cbtop demo --model qwen2.5-1.5b-q4_k_m.gguf --prompt "Once upon a time"
                                                what it goes on with, as one of the views
  cbtop demo --headless --steps 50              50 decode steps, then a report: for CI
  cbtop demo --headless --steps 50 --trace all --view trace
                                                what the model computed: MLT-01 to MLT-05
  cbtop demo --check                            a whole gate, as `cbtop check` is for CI
  cbtop demo --train                            train adapters (LoRA) instead: forward, backward, optimizer
  cbtop demo --train --headless --steps 30      30 training steps, then a report; the loss is on the last line
  cbtop demo --backend cuda --gpus 2            half of the layers on each of two GPUs; `m` merges the two
  cbtop demo --serve-only                       only the workload; watch it with `cbtop`
"""
POLL_MS = 100
# Number of steps of `cbtop demo --check`. It is enough to detect +5 % on one brick of one layer (docs/gate.md).
CHECKED_STEPS = 300
STOP_S = 5.0
STDERR = 2  # The model's text is written to this file descriptor (stderr) if stdout is used for a report.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--model", type=Path, metavar="FILE.gguf",
        help="the model, or a folder with config.json and .safetensors files (default: a random one, 82 MB)",
    )  # fmt: skip
    group.add_argument(
        "--prompt", type=_prompt, metavar="TEXT",
        help="go on from TEXT as it stands, without a chat template, to the end of the text or of the context: what "
        "is written is a view on screen, and goes to stderr with --headless (needs cbtop[text])",
    )  # fmt: skip
    group.add_argument(
        "--train", action="store_true",
        help="train adapters of queries and values (LoRA) on a short text, with all weights of the model frozen, "
        "instead of decoding: on the CPU, 64 tokens a step, or --context",
    )  # fmt: skip
    group.add_argument(
        "--steps", type=count, metavar="N", help="stop after N decode or training steps (default: until stopped)"
    )
    group.add_argument(
        "--threads", type=count, metavar="N", help="CPU threads (default: all but one, which is left to the screen)"
    )
    group.add_argument(
        "--backend", choices=WITH_AUTO, default="cpu",
        help="what computes: this processor, the first NVIDIA GPU (needs cbtop[cuda]), or auto, whichever "
        "`cbtop calibrate` found to decode sooner (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--gpus", type=count, metavar="N", default=1,
        help="with --backend cuda: share the model out among the first N GPUs, a process for each, which exchange "
        "what they compute through NCCL (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--split", choices=SPLITS, default="layers",
        help="with --gpus: what is shared out. layers: each GPU has some, and they work one after the other "
        "(pipeline parallel); heads: each has some heads of every layer and columns of its feed-forward network, and "
        "they work at the same time and add up twice a layer (tensor parallel) (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--context", type=count, metavar="N",
        help="tokens in a sequence, at most those that the model was trained for (default: these, to 2048)",
    )  # fmt: skip
    group.add_argument(
        "--exact", action="store_true", help="products take activations as they are, not rounded to int8: slower"
    )
    group.add_argument(
        "--kv-cache", choices=("f16", "f32"), default="f16", help="numbers of the KV cache (default: %(default)s)"
    )
    add_tuned_argument(group)
    _add_sampling_arguments(group)
    _add_watching_arguments(group)
    group.add_argument(
        "--check", action="store_true",
        help=f"run a whole gate, as cbtop check does for CI: seven runs of --steps (default: {CHECKED_STEPS}), of "
        "which six tell how runs scatter and the last is judged",
    )  # fmt: skip
    group.add_argument("--serve-only", action="store_true", help="run only the workload, show nothing")
    # --parent is the id of a parent process. The workload ends when that process ends.
    group.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    add_show_arguments(parser)


def _add_sampling_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the options for drawing the next token from the model's probabilities."""
    group.add_argument(
        "--temperature", type=temperature, metavar="T", default=GREEDY.temperature,
        help="draw tokens at this temperature (default: 0, the likeliest each time)",
    )  # fmt: skip
    group.add_argument(
        "--top-k", type=whole, metavar="K", default=GREEDY.top_k,
        help="from the K likeliest (default: %(default)s; 0: all)",
    )  # fmt: skip
    group.add_argument(
        "--top-p", type=part, metavar="P", default=GREEDY.top_p,
        help="and of these from those that have P of their probability together (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--seed", type=whole, metavar="N", default=GREEDY.seed,
        help="the same seed draws the same tokens (default: %(default)s)",
    )  # fmt: skip


def _add_watching_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the options for traces and checks while the model computes."""
    group.add_argument(
        "--trace", type=_traces, metavar="NAMES", default=(),
        help=f"trace one decode step in {TRACED_EVERY_STEPS}: a comma list of {', '.join(TRACES)}, or all "
        "(default: none)",
    )  # fmt: skip
    group.add_argument(
        "--check-contracts", action="store_true",
        help="check at every call what each kernel's contract says must hold before and after it; slower",
    )  # fmt: skip
    group.add_argument(
        "--guard", choices=(*GUARD_REACTIONS, "off"), default="log",
        help="what to do when a brick computes a NaN, an infinity, too large a number or not what its reference "
        "does: stop (exit code 4), log a failed check, or fallback to float64 (default: %(default)s)",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    if options.check and options.serve_only:
        raise UsageError("--check runs the workload itself and judges it; leave out --serve-only")
    if options.gpus > 1 and (options.backend != "cuda" or options.check):
        raise UsageError(f"--gpus {options.gpus}: it goes with --backend cuda, and without --check")
    if options.split != "layers" and options.gpus == 1 and options.parent is None:
        raise UsageError(f"--split {options.split}: it says what --gpus N shares out; give --gpus 2 or more")
    if options.train:
        _require_training_options(options)
    if options.tuned:
        found = tuned_setting(options, options.model)
        options.threads, options.exact, options.kv_cache = found.threads, found.is_exact, found.cache_type
    if options.serve_only:
        return serve(options)
    settle_options(options)
    if options.check:
        from cbtop.commands.check import gate_of_demo  # imported here, because it loads numpy and the comparison

        options.steps = options.steps or CHECKED_STEPS
        return gate_of_demo(_command(options), options.format)
    headless = is_headless(options)
    # Output of the workload would disturb the screen. Store the output, and show it if the workload fails.
    with (
        tempfile.TemporaryFile("w+") as said,
        tempfile.TemporaryFile("w+", encoding="utf-8") as written,
        _workload(options, STDERR if headless else written, None if headless else said) as process,
        DemoFeed(process, said, window_s(options)) as feed,
    ):
        judge_as_asked(feed, options)
        if headless:
            return _print_when_done(feed, process, options)
        if options.prompt is None:
            return show_on_screen(feed, options)
        program = _Prompted(process, written)
        try:
            return show_on_screen(feed, options, program=program)
        finally:
            _write("\n".join(program.written()) + "\n")


def _require_training_options(options: argparse.Namespace) -> None:
    """Raise UsageError if an option was given that has no meaning for training."""
    if options.backend == "cuda":
        raise UsageError("--train: training runs on the CPU only; leave out --backend cuda")
    options_of_decoding = {
        "--prompt": options.prompt is not None,
        "--trace": bool(options.trace),
        "--tuned": options.tuned,
        "--check": options.check,
    }
    if given := [name for name, is_given in options_of_decoding.items() if is_given]:
        raise UsageError(f"{' and '.join(given)}: for decoding; leave out with --train")


def serve(options: argparse.Namespace) -> int:
    """Run the demo's workload in this process until its steps are done or the workload is stopped."""
    if options.gpus > 1:
        return _serve_ranks(options)
    from cbtop.profiler.profiler import BrickProfiler
    from cbtop.protocol.messages import Activity

    profiler = BrickProfiler()
    profiler.announce(Activity("starting"))
    first_rank = FirstRank.of(os.environ)
    stopped_by = _stopping_signals(options)
    # Normally the first rank stops the others. If it cannot, SIGTERM must end this rank.
    if first_rank and first_rank.number:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    line = ProgressLine(sys.stderr)

    def progress(what: str, done: float | None) -> None:
        if stopped_by:
            raise SystemExit(128 + stopped_by[0])
        profiler.announce(Activity(what, done))
        line.show(what, done)

    def is_told_to() -> bool:
        return bool(stopped_by) or _is_left(options)

    def should_stop() -> bool:
        return bool(int(first_rank.said(lambda: b"%d" % is_told_to()))) if first_rank else is_told_to()

    # Imported here, because Numba loads slowly. By now, viewers see that the process is starting.
    from cbtop.compute.errors import ComputeError, GuardError, LossError, NoTokenError
    from cbtop.compute.workload import run as run_workload

    go_by_kept_crossovers(line)
    held: object = None
    try:
        workload = _workload_options(options, first_rank, progress, line)
        if options.train:
            _train(workload, profiler, should_stop, progress, line)
        else:
            held = run_workload(workload, profiler, should_stop, progress, _write)
    except GuardError as error:
        line.clear()
        profiler.close("stopped by the guard")
        raise FailedCheckError(str(error)) from error
    except (LossError, NoTokenError) as error:
        # Catch these errors only during the run. A warm-up ignores NoTokenError.
        line.clear()
        profiler.close(str(error).partition(";")[0])
        raise FailedCheckError(str(error)) from error
    except ComputeError as error:
        line.clear()
        profiler.close("the model cannot be run")
        raise UsageError(str(error)) from error
    profiler.close("stopped" if should_stop() else "done")
    del held
    return 128 + stopped_by[0] if stopped_by and options.parent is None else 0


def _train(
    workload: WorkloadOptions,
    profiler: BrickProfiler,
    should_stop: Callable[[], bool],
    progress: Callable[[str, float | None], None],
    line: ProgressLine,
) -> None:
    """Train the demo's model. The progress line shows the current loss. The last line of the output shows the losses
    of the first and the last step.
    """
    from cbtop.compute.training.workload import run

    losses: list[float] = []
    of = "" if workload.steps is None else f" of {units.count(workload.steps)}"

    def report(done: int, loss: float) -> None:
        losses[1:] = [loss]
        line.show(
            f"train: step {units.count(done)}{of}, loss {loss:.2f}", done / workload.steps if workload.steps else None
        )

    run(workload, profiler, should_stop, progress, report)
    line.clear()
    if losses:
        sys.stderr.write(f"loss {losses[0]:.2f} at the first step, {losses[-1]:.2f} at the last\n")
        sys.stderr.flush()


def _workload_options(
    options: argparse.Namespace,
    first_rank: FirstRank | None,
    progress: Callable[[str, float | None], None],
    line: ProgressLine,
) -> WorkloadOptions:
    """Return the workload's options, with `cpu` or `cuda` for the backend `auto`.

    The choice needs a model, so without `--model` the random one is written into the cache, while `progress` is
    called. The reason for the choice goes to stderr, after the progress `line` is cleared.
    """
    from cbtop.compute.demo_model import demo_model  # imported here, because it loads numpy

    model, backend = options.model, options.backend
    if backend == AUTO and options.train:
        backend = "cpu"
    if backend == AUTO:
        model = model or demo_model(progress)
        needs_cpu = options.trace or options.check_contracts
        backend, why = ("cpu", "") if needs_cpu else settled(model)
        if why:
            line.clear()
            sys.stderr.write(f"{why}\n")
            sys.stderr.flush()
    rank = None
    if first_rank is not None:
        rank = RankOptions(first_rank.number, first_rank.count, first_rank.said, options.split)
    return WorkloadOptions(
        model=model,
        steps=options.steps,
        threads=options.threads,
        context=options.context,
        cache_type=options.kv_cache,
        is_exact=options.exact,
        trace=options.trace,
        sampling=TokenSampling(options.temperature, options.top_k, options.top_p, options.seed),
        check_contracts=options.check_contracts,
        guard=None if options.guard == "off" else options.guard,
        prompt=options.prompt,
        backend=backend,
        rank=rank,
    )


def _stopping_signals(options: argparse.Namespace) -> list[int]:
    """Install handlers that append each stopping signal to the returned list.

    A watched workload ignores Ctrl-C, because the terminal also sends it to the watching process.
    """
    stopped_by: list[int] = []
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        ours = options.parent is None or number != signal.SIGINT
        signal.signal(number, (lambda number, _frame: stopped_by.append(number)) if ours else signal.SIG_IGN)
    return stopped_by


def _is_left(options: argparse.Namespace) -> bool:
    """Return whether this workload's parent process has ended."""
    return options.parent is not None and os.getppid() != options.parent


def _serve_ranks(options: argparse.Namespace) -> int:
    """Start one process of the demo's workload for each GPU and wait for them.

    This process computes nothing itself.
    """
    stopped_by = _stopping_signals(options)
    alone = argparse.Namespace(**vars(options) | {"gpus": 1})
    run_ranks(options.gpus, _command(alone), lambda: bool(stopped_by) or _is_left(options))
    return 128 + stopped_by[0] if stopped_by and options.parent is None else 0


class DemoFeed(Feed):
    """A feed that shows only the workload of the demo, and no other processes."""

    def __init__(self, process: subprocess.Popen[bytes], said: IO[str], window_s: float) -> None:
        super().__init__(window_s=window_s)
        self._process = process
        self._said = said

    def sources(self) -> tuple[SourceSummary, ...]:
        """Return the views of the demo's workload (all of its ranks), without other processes."""
        own, job, seen = self.links.key_of(self._process.pid), job_of(self._process.pid), self.seen()
        hellos = {key: one.record.hello for key, one in seen.items()}
        return tuple(
            source
            for source in super().sources()
            if source.key == own or ((hello := hellos[source.key]) is not None and hello.job == job)
        )

    @property
    def starting(self) -> str:
        is_running = self._process.poll() is None
        return f"the demo's workload (pid {self._process.pid})" if is_running and not self.sources() else ""

    def finished(self) -> FeedEnd | None:
        """Return the exit code and last message of a failed workload, else None."""
        if not (self._process.poll() or 0) > 0:
            return None
        self._said.seek(0)
        words = self._said.read().strip().splitlines()
        return FeedEnd(
            self._process.returncode, words[-1].removeprefix("cbtop: ") if words else "the workload failed"
        )


@contextmanager
def _workload(
    options: argparse.Namespace, stdout: IO[str] | int, stderr: IO[str] | None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run the demo's workload as a child process. The workload is stopped in every case when the `with` block
    ends.
    """
    if options.prompt is None:
        stdout = subprocess.DEVNULL
    command = _command(options)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr)
    try:
        yield process
    finally:
        _stop(process)


def _command(options: argparse.Namespace) -> list[str]:
    """Return the command line that starts the demo's workload."""
    command = [sys.executable, "-m", "cbtop", "demo", "--serve-only", "--parent", str(os.getpid())]
    for name in ("model", "steps", "threads", "context"):
        if (value := getattr(options, name)) is not None:
            command += [f"--{name}", str(value)]
    if options.gpus > 1:
        command += ["--gpus", str(options.gpus)]
    command += ["--split", options.split]
    command += ["--backend", options.backend, "--guard", options.guard, "--kv-cache", options.kv_cache]
    command += ["--temperature", str(options.temperature)]
    command += ["--top-k", str(options.top_k), "--top-p", str(options.top_p), "--seed", str(options.seed)]
    if options.train:
        command.append("--train")
    if options.exact:
        command += ["--exact"]
    if options.trace:
        command += ["--trace", ",".join(options.trace)]
    if options.check_contracts:
        command.append("--check-contracts")
    if options.prompt is not None:
        command.append(f"--prompt={options.prompt}")
    return command


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:  # The workload did not end in time, because it is suspended or busy compiling.
        process.kill()
        process.wait()


def _print_when_done(feed: DemoFeed, process: subprocess.Popen[bytes], options: argparse.Namespace) -> int:
    line = ProgressLine(sys.stderr)
    feed.follow_records(options.view == TIMELINE or options.format == HTML)
    with noted_interrupt() as is_interrupted:
        while process.poll() is None and not is_interrupted():
            feed.poll(POLL_MS)
            # Show the number of steps as progress. A model with a prompt shows its text, and training shows its loss.
            if options.prompt is None and not options.train:
                _show_steps(line, feed.view(), options.steps)
        interrupted = is_interrupted()
    if interrupted:  # The user pressed Ctrl-C. Stop the workload and print what was measured until now.
        _stop(process)
    line.clear()
    if process.returncode and not interrupted and process.returncode > 0:
        return process.returncode  # The workload has already printed why it failed.
    views = [view for view in _last_views(feed) if view.has_data]
    if not views:
        if interrupted:
            return 130
        if process.returncode < 0:
            raise CbtopError(f"the workload was killed by {_signal_name(process)} before its first step")
        raise NoDataError("the workload ended before its first step")
    check_phase(views, options)
    window = shows_window(options, by_default=False)
    shown = [feed.view(view.key, options.phase, window=window) for view in views]
    print_report([view for view in shown if view is not None], options)
    if process.returncode < 0 and not interrupted:
        raise CbtopError(f"the workload was killed by {_signal_name(process)}; shown is what it had recorded")
    if interrupted:
        return 130
    require_passed_checks(views)
    return 0


def _signal_name(process: subprocess.Popen[bytes]) -> str:
    number = -process.returncode
    return f"signal {number} ({signal.strsignal(number)})"


def _last_views(feed: DemoFeed) -> list[SourceView]:
    """Read all remaining records of the ended workload. Then return its views, one for each rank in order."""
    deadline_s = time.monotonic() + STOP_S

    def views() -> list[SourceView]:
        found = [feed.view(source.key) for source in feed.sources()]
        return sorted((one for one in found if one is not None), key=lambda view: view.rank or 0)

    found = views()
    while (not found or any(view.state is SourceStatus.LIVE for view in found)) and time.monotonic() < deadline_s:
        feed.poll(POLL_MS)
        found = views()
    return found


def _show_steps(line: ProgressLine, view: SourceView | None, steps: int | None) -> None:
    if view and not view.activity and view.steps:
        wanted = f" of {units.count(steps)}" if steps else ""
        line.show(
            f"{view.steps.phase}: step {units.count(view.steps.count)}{wanted}",
            view.steps.count / steps if steps else None,
        )


class _Prompted:
    """The text that the demo's model generates from a prompt. The screen shows it like the output of a program."""

    def __init__(self, process: subprocess.Popen[bytes], written: IO[str]) -> None:
        self._process = process
        self._written = written
        self._size = 0
        self._lines: Sequence[str] = ()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def written(self) -> Sequence[str]:
        size = os.fstat(self._written.fileno()).st_size
        if size != self._size:
            text = os.pread(self._written.fileno(), size, 0).decode(errors="replace")
            self._size, self._lines = size, text.rstrip("\n").split("\n")
        return self._lines

    def interrupt(self) -> None:
        self._process.terminate()

    def resize(self, columns: int, rows: int) -> None:
        """Do nothing when the screen is resized, because the screen itself wraps the text."""


def _write(text: str) -> None:
    """Print a piece of the model's text immediately, without control characters."""
    sys.stdout.write("".join(map(_shown, text)))
    sys.stdout.flush()


def _shown(character: str) -> str:
    # Keep all kinds of spaces, and the joiners in emoji and scripts, which Python counts as unprintable.
    is_kept = character.isprintable() or character in "\n\t\u200c\u200d" or unicodedata.category(character) == "Zs"
    return character if is_kept else "\ufffd"


def _prompt(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("it is not UTF-8") from None
    return text


def _traces(text: str) -> tuple[str, ...]:
    names = tuple(TRACES) if text == "all" else tuple(text.split(","))
    if unknown := [name for name in names if name not in TRACES]:
        raise argparse.ArgumentTypeError(f"no trace {unknown[0]!r}; there are {', '.join(TRACES)}, or all")
    return names
