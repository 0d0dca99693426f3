"""`cbtop tune`: find the fastest setting of a model on this machine from its measured bricks."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from cbtop.commands.shared.crossovers import go_by_kept_crossovers
from cbtop.commands.shared.interrupts import noted_interrupt
from cbtop.commands.shared.numbers import count
from cbtop.commands.shared.progress import ProgressLine
from cbtop.errors import UsageError
from cbtop.reports.tables import Table, table
from cbtop.tuning.kept import KeptSetting, store_setting
from cbtop.tuning.measuring import Bench, Setting, TuningRequest
from cbtop.tuning.paired import CONFIDENCE_PERCENT, PairedTest
from cbtop.tuning.tuner import BrickTuner, Tuned

DESCRIPTION = (
    "Find the setting that a model runs fastest with on this machine. The bricks of some requests (a prompt, and "
    "tokens generated after it) are recorded with the setting in use; what they take names the settings that could "
    "make a request faster, and by how much at most. Each is tried in turns with the best so far, and kept only if "
    "requests were faster beyond what chance explains."
)
EPILOG = f"""\
examples:
  cbtop tune qwen2.5-1.5b-q4_k_m.gguf
  cbtop tune model.gguf --budget 600 -p 512 -n 64        longer prompts: attention counts for more
  cbtop tune model.gguf -t 1 --exact                     from another setting than the default
  cbtop demo --model model.gguf --tuned                  with what was found; cbtop bench knows --tuned, too

What is tried: the number of threads, products of int8 or of exact activations (weights are laid out as either needs
them), and the type of the KV cache. The last two change what is computed in its last digits; it is said where one is
kept. A try gets an equal part of what is left of --budget. One that has no time for five rounds, or could gain less
than 3 %, is left out, and the reason said. Intervals hold with {CONFIDENCE_PERCENT} %, for all tries together; a
machine that does something else meanwhile makes them wide. What is found is kept in the cache, for this model on such
a processor, unless no setting was told from another. Ctrl-C leaves what was measured, and keeps nothing.
"""
SCHEMA = "cbtop.tune/1"
BUDGET_S = 120
MAX_SHARES = 6  # The text names at most this many bricks.
INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", type=Path, metavar="MODEL.gguf", help="default: the demo's, 82 MB")
    parser.add_argument(
        "--budget", type=count, default=BUDGET_S, metavar="SECONDS",
        help="measure for so long at most; loading and compiling come on top (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("-p", "--n-prompt", type=count, default=128, metavar="N", help="default: %(default)s")
    parser.add_argument("-n", "--n-gen", type=count, default=32, metavar="N", help="default: %(default)s")
    group = parser.add_argument_group("the setting in use, to begin with")
    group.add_argument("-t", "--threads", type=count, metavar="N", help="default: all processors but one")
    group.add_argument("--exact", action="store_true", help="products take activations as they are, not as int8")
    group.add_argument("--kv-cache", choices=("f16", "f32"), default="f16", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    line = ProgressLine(sys.stderr)
    line.show("loading kernels")
    from cbtop.compute.backends import available_threads, cpu_backend
    from cbtop.compute.demo_model import demo_model
    from cbtop.compute.errors import ComputeError

    request = TuningRequest(options.n_prompt, options.n_gen)
    setting = Setting(options.threads or max(1, available_threads() - 1), options.exact, options.kv_cache)
    try:
        cpu_backend(setting.threads)
        path = options.model or demo_model(line.show)
        go_by_kept_crossovers(line)
        line.show("reading the model")
        bench = Bench(path, request.tokens)
        limit = bench.model(setting).context_length
        if request.tokens > limit:
            raise UsageError(
                f"{request.tokens} tokens do not fit the model's context of {limit}: give less to -p or -n"
            )
        with noted_interrupt() as is_interrupted:
            tuner = BrickTuner(bench, setting, request, progress=line.show, should_stop=is_interrupted)
            tuned = tuner.tune(options.budget)
    except ComputeError as error:
        raise UsageError(str(error)) from error
    finally:
        line.clear()
    kept = None
    if tuned.has_told and not tuned.was_interrupted:
        kept = store_setting(path, tuned, available_threads())
    sys.stdout.write((_json if options.json else _text)(path, tuned, kept))
    return INTERRUPTED if tuned.was_interrupted else 0


def _text(path: Path, tuned: Tuned, kept: KeptSetting | None) -> str:
    request = tuned.request
    lines = [f"{path.name}: requests of {request.n_prompt} tokens, and {request.n_gen} generated after them"]
    if tuned.shares:
        rest = 1 - sum(share.part for share in tuned.shares)
        largest = [f"{share.brick} {100 * share.part:.1f} %" for share in tuned.shares[:MAX_SHARES]]
        others = sum(share.part for share in tuned.shares[MAX_SHARES:])
        largest += [f"other bricks {100 * others:.1f} %"] if others else []
        lines += [f"with {tuned.before.text}: {', '.join(largest)}, between bricks {100 * rest:.1f} %", ""]
    if tuned.tries:
        rows: Table = [("tried", "beside", "request", f"{CONFIDENCE_PERCENT} % interval", "prefill", "decode", "")]
        for one in tuned.tries:
            rates = {pair.name: f"{pair.ratio:.3f}" for pair in one.pairs}
            outcome = "kept" if one.is_kept else one.request.verdict.replace("B is slower", "slower")
            if rounds := one.rounds_to_tell:
                outcome += f": about {rounds} rounds would tell 3 %"
            rows.append(
                (
                    one.candidate.setting.text,
                    one.beside.text,
                    f"{one.request.ratio:.3f}",
                    _interval(one.request),
                    rates["prefill"],
                    rates["decode"],
                    outcome,
                )
            )
        lines += [table(rows, left=2), ""]
        lines += [
            f"{one.candidate.setting.text}: {_why(one.candidate.why, one.candidate.limit)}" for one in tuned.tries
        ]
    lines += [f"not tried: {one.what}: {one.why}" for one in tuned.untried]
    lines += ["", *_outcome(tuned)]
    if tuned.load_percent >= 1:
        lines.append(f"other processes used {tuned.load_percent:.0f} % of the processors meanwhile")
    if tuned.was_interrupted:
        lines.append("it was interrupted: nothing is kept")
    elif kept is None:
        lines.append("no setting was told from another: nothing is kept")
    else:
        lines.append("kept: cbtop demo --tuned and cbtop bench --tuned take it")
    return "\n".join(lines) + "\n"


def _why(why: str, limit: float | None) -> str:
    return why if limit is None else f"{why}, which allows {limit:.2f} times as fast at most"


def _outcome(tuned: Tuned) -> list[str]:
    if tuned.best == tuned.before:
        return [f"best: {tuned.best.text}, as before"]
    numbers = [one.candidate.numbers for one in tuned.tries if one.is_kept and one.candidate.numbers]
    said = f"; its last digits differ: {', '.join(numbers)}" if numbers else ""
    gain = tuned.gain
    if gain is None:
        return [f"best: {tuned.best.text}{said}; no time was left to measure it beside {tuned.before.text}"]
    how = f"{gain.ratio:.2f} ({_interval(gain)}) times as fast as {tuned.before.text}"
    return [f"best: {tuned.best.text}, {how}{said}"]


def _interval(pair: PairedTest) -> str:
    return "n/a" if pair.interval is None else f"{pair.interval[0]:.3f} to {pair.interval[1]:.3f}"


def _json(path: Path, tuned: Tuned, kept: KeptSetting | None) -> str:
    gain = tuned.gain
    document = {
        "schema": SCHEMA,
        "model_filename": str(path),
        "n_prompt": tuned.request.n_prompt,
        "n_gen": tuned.request.n_gen,
        "confidence_percent": CONFIDENCE_PERCENT,
        "before": _setting(tuned.before),
        "best": _setting(tuned.best),
        "gain": None if gain is None else _pair(gain),
        "bricks": [
            {"brick": one.brick, "part": one.part, "us": one.us, "is_parallel": one.is_parallel}
            for one in tuned.shares
        ],
        "tried": [
            {
                "setting": _setting(one.candidate.setting),
                "beside": _setting(one.beside),
                "why": one.candidate.why,
                "limit": one.candidate.limit,
                "numbers": one.candidate.numbers or None,
                "is_kept": one.is_kept,
                "rounds_to_tell": one.rounds_to_tell,
                **{pair.name: _pair(pair) for pair in one.pairs},
            }
            for one in tuned.tries
        ],
        "not_tried": [{"what": one.what, "why": one.why} for one in tuned.untried],
        "load_percent": tuned.load_percent,
        "is_interrupted": tuned.was_interrupted,
        "is_kept": kept is not None,
        "provenance": {"derived": ["tried[].limit", "tried[].rounds_to_tell"]},
    }
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def _setting(setting: Setting) -> dict[str, Any]:
    return {"threads": setting.threads, "is_exact": setting.is_exact, "kv_cache": setting.cache_type}


def _pair(pair: PairedTest) -> dict[str, Any]:
    low, high = pair.interval or (None, None)
    return {
        "ratio": pair.ratio,
        "ratio_low": low,
        "ratio_high": high,
        "is_beyond_noise": pair.is_beyond_noise,
        "before_samples_ns": pair.a_ns,
        "samples_ns": pair.b_ns,
    }
