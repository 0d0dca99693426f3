"""`cbtop bench`: tokens/s of a model, with the same options and output as llama-bench (llama.cpp)."""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbtop.commands.shared import paired_bench, paired_sides
from cbtop.commands.shared.backend import AUTO, WITH_AUTO, settled
from cbtop.commands.shared.crossovers import go_by_kept_crossovers
from cbtop.commands.shared.numbers import count
from cbtop.commands.shared.progress import ProgressLine
from cbtop.commands.shared.tuned import add_tuned_argument, tuned_setting
from cbtop.compute.settings import WorkloadOptions
from cbtop.errors import UsageError
from cbtop.tuning.measuring import Test, took_ns
from cbtop.tuning.paired import CONFIDENCE_PERCENT, mean_and_deviation, with_deviation

if TYPE_CHECKING:  # imported for types only, because Numba loads slowly
    from cbtop.compute.decoder.base import Model

DESCRIPTION = (
    "Measure how many tokens a second a model takes in (pp, a prompt from an empty cache) and gives out (tg, one "
    "after another from an empty cache), by the wall's clock, with nothing recorded. Options and columns are "
    "those of llama-bench, so that the two can be laid side by side. Without a model, the demo's. With --paired, two "
    "settings, revisions or commands are measured in turns and compared."
)
EPILOG = f"""\
examples:
  cbtop bench qwen2.5-1.5b-q4_k_m.gguf
  cbtop bench model.gguf -p 128,512 -n 64 -r 5 -t 1,2
  cbtop bench model.gguf --backend cuda
  cbtop bench model.gguf -o json | jq '.[] | {{n_prompt, n_gen, avg_ts}}'
  cbtop bench model.gguf --paired 'set:-t 1' 'set:-t 2'
  cbtop bench model.gguf --paired set: set:--exact -r 20
  cbtop bench --paired git:main git:HEAD -p 128 -n 64
  cbtop bench --paired 'run:llama-bench -m model.gguf -r 1 -o json' 'run:cbtop bench model.gguf -r 1 -o json'

Each test runs once before it is measured. t/s is the mean of the repetitions, ± their standard deviation, n/a of one.
A machine that does something else meanwhile shows it in the latter.

--paired A B: two runs, and more so two machines, differ by some percent without a cause. So both sides take turns in
one job (A B, B A, A B, …), -r rounds of them (default: {paired_bench.DEFAULT_ROUNDS}). Printed are both, the ratio
of their tokens/s, the interval in which it lies ({CONFIDENCE_PERCENT} %, of all tests together) and whether that is
more than noise. Ctrl-C leaves the rounds that are over.
{paired_sides.GRAMMAR}
"""
EXACT = "products take activations as they are, not rounded to int8: slower"
REPETITIONS = 5
LEFT = (0, 3)  # indices of the left-aligned columns of the table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", type=Path, metavar="MODEL.gguf", help="default: the demo's, 82 MB")
    parser.add_argument("-p", "--n-prompt", type=_numbers, default=[512], metavar="N,…", help="default: 512; 0: none")
    parser.add_argument("-n", "--n-gen", type=_numbers, default=[128], metavar="N,…", help="default: 128; 0: none")
    parser.add_argument("-r", "--repetitions", type=count, metavar="N", help=f"default: {REPETITIONS}")
    parser.add_argument("-t", "--threads", type=_threads, metavar="N,…", help="default: all processors but one")
    parser.add_argument(
        "--backend", choices=WITH_AUTO, default="cpu",
        help="this processor, the first NVIDIA GPU, or auto, whichever `cbtop calibrate` found to be quicker, at "
        "decoding where -n is not 0 (default: cpu)",
    )  # fmt: skip
    parser.add_argument("-o", "--output", choices=tuple(OUTPUTS), default="md", help="default: %(default)s")
    parser.add_argument("--exact", action="store_true", help=EXACT)
    parser.add_argument(
        "--kv-cache", choices=("f16", "f32"), default="f16", help="numbers of the KV cache (default: %(default)s)"
    )
    add_tuned_argument(parser)
    parser.add_argument(
        "--paired", nargs=2, type=paired_sides.side, metavar=("A", "B"),
        help="measure two sides in turns and compare them: set:OPTIONS, git:REVISION or run:COMMAND (see below)",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Result:
    """The result of one speed test of a model, with the time of each repetition."""

    test: Test
    threads: int
    backend: str
    cache_type: str
    begun: str  # time in UTC when the speed test started, ISO 8601
    samples_ns: list[int]

    @property
    def samples_ts(self) -> list[float]:
        return [1e9 * self.test.tokens / each for each in self.samples_ns]


def run(options: argparse.Namespace) -> int:
    if options.tuned:
        found = tuned_setting(options, options.model)
        options.threads, options.exact, options.kv_cache = [found.threads], found.is_exact, found.cache_type
    if options.paired:
        return paired_bench.run(options)
    line = ProgressLine(sys.stderr)
    line.show("loading kernels")
    from cbtop.compute.backends import available_threads, cpu_backend
    from cbtop.compute.demo_model import demo_model
    from cbtop.compute.errors import ComputeError
    from cbtop.compute.places import place_of

    if options.threads and options.backend != "cpu":
        raise UsageError("-t is of a CPU: leave it away, or take --backend cpu")
    tests = paired_bench.asked_tests(options)
    try:
        path = options.model or demo_model(line.show)
        if options.backend == AUTO:
            decodes = any(test.n_gen for test in tests)
            options.backend, why = settled(path, None if decodes else max(test.n_prompt for test in tests))
            if why:
                line.clear()
                sys.stderr.write(f"{why}\n")
        is_on_cpu = options.backend == "cpu"
        threads = (options.threads or [max(1, available_threads() - 1)]) if is_on_cpu else [1]
        go_by_kept_crossovers(line)
        line.show("reading the model")
        model = place_of(_asked(options, max(threads))).model(path)
        longest = max(tests, key=lambda test: test.tokens)
        if longest.tokens > model.context_length:
            raise UsageError(f"{longest.name} does not fit the model's context of {model.context_length} tokens")
        if is_on_cpu:
            # Raise an error before the first measurement if there are too many threads.
            cpu_backend(max(threads))
        asked = [(each, test) for each in threads for test in tests]
        measured = _measured(model, asked, options, line)
        for part in OUTPUTS[options.output](path, model, measured):
            line.clear()
            sys.stdout.write(part)
            sys.stdout.flush()  # Write each result immediately, because measuring the next one takes seconds.
    except ComputeError as error:
        raise UsageError(str(error)) from error
    finally:
        line.clear()
    return 0


def _measured(
    model: Model, asked: Sequence[tuple[int, Test]], options: argparse.Namespace, line: ProgressLine
) -> Iterator[_Result]:
    from cbtop.compute.places import place_of
    from cbtop.profiler.profiler import BrickProfiler

    repetitions = options.repetitions or REPETITIONS
    decoder, threads = None, 0
    done, runs = 0, len(asked) * (1 + repetitions)
    for wanted, test in asked:
        if decoder is None or wanted != threads:
            threads = wanted
            line.show("compiling kernels")
            context = max(test.tokens for _, test in asked)
            decoder = place_of(_asked(options, threads)).decoder(model, BrickProfiler(enabled=False), context)
        begun, samples_ns = datetime.now(UTC).isoformat(timespec="seconds"), []
        for _ in range(1 + repetitions):
            line.show(f"measuring: {test.name}, {threads} thread{'s' * (threads > 1)}", done / runs)
            samples_ns.append(took_ns(decoder, test))
            done += 1
        yield _Result(test, threads, decoder.backend, options.kv_cache, begun, samples_ns[1:])


def _asked(options: argparse.Namespace, threads: int) -> WorkloadOptions:
    return WorkloadOptions(
        threads=threads, is_exact=options.exact, cache_type=options.kv_cache, backend=options.backend
    )


def _fields(path: Path, model: Model, result: _Result) -> dict[str, Any]:
    """Return the result of a speed test as a dictionary. If llama-bench has the same field, the key is the same as in
    llama-bench.
    """
    ns, ns_deviation = mean_and_deviation(result.samples_ns)
    rate, rate_deviation = mean_and_deviation(result.samples_ts)
    return {
        "backends": result.backend,
        "model_filename": str(path),
        "model_type": _model_type(model),
        "model_size": model.weights_bytes,
        "model_n_params": model.parameters,
        "n_threads": result.threads,
        "type_k": result.cache_type,
        "type_v": result.cache_type,
        "n_prompt": result.test.n_prompt,
        "n_gen": result.test.n_gen,
        "test_time": result.begun,
        "avg_ns": round(ns),
        "stddev_ns": None if ns_deviation is None else round(ns_deviation),
        "avg_ts": rate,
        "stddev_ts": rate_deviation,
    }


def _model_type(model: Model) -> str:
    return f"{model.architecture} {_scaled(model.parameters, 1000, ('', 'K', 'M', 'B'))} {model.quantization}"


def _scaled(value: float, step: int, units: Sequence[str]) -> str:
    at = 0
    while value >= step and at + 1 < len(units):
        value, at = value / step, at + 1
    return f"{value:.2f} {units[at]}".strip()


_Results = Iterator[_Result]


def _markdown(path: Path, model: Model, results: _Results) -> Iterator[str]:
    """Yield each row of the Markdown table as soon as its test is measured."""
    head = ("model", "size", "params", "backend", "threads", "test", "t/s")
    size = _scaled(model.weights_bytes, 1024, ("B", "KiB", "MiB", "GiB"))
    facts = (_model_type(model), size, _scaled(model.parameters, 1000, ("", "K", "M", "B")))
    widest = (*facts, "numba-avx512vnni-omp×99", "", "pp99999", "99999.99 ± 9999.99")
    widths = [max(map(len, pair)) for pair in zip(head, widest, strict=True)]
    yield _row(head, widths)
    yield _row(["-" * (width - 1) + ("-" if at in LEFT else ":") for at, width in enumerate(widths)], widths)
    for result in results:
        rate = with_deviation(result.samples_ts, 2)
        yield _row((*facts, result.backend, str(result.threads), result.test.name, rate), widths)


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        cell.ljust(width) if at in LEFT else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return f"| {' | '.join(padded)} |\n"


def _json(path: Path, model: Model, results: _Results) -> Iterator[str]:
    found = [
        _fields(path, model, result) | {"samples_ns": result.samples_ns, "samples_ts": result.samples_ts}
        for result in results
    ]
    yield json.dumps(found, indent=2) + "\n"


def _csv(path: Path, model: Model, results: _Results) -> Iterator[str]:
    for number, result in enumerate(results):
        fields, text = _fields(path, model, result), io.StringIO()
        writer = csv.DictWriter(text, fields, quoting=csv.QUOTE_ALL, lineterminator="\n")
        if not number:
            writer.writeheader()
        writer.writerow(fields)
        yield text.getvalue()


OUTPUTS: dict[str, Callable[[Path, Model, _Results], Iterator[str]]] = {
    "md": _markdown,
    "json": _json,
    "csv": _csv,
}


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) < 1 << 24 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a comma list of whole numbers")
    return list(dict.fromkeys(map(int, parts)))


def _threads(text: str) -> list[int]:
    found = _numbers(text)
    if 0 in found:
        raise argparse.ArgumentTypeError("0 threads compute nothing")
    return found
