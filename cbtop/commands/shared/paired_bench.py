"""`cbtop bench --paired`: run two sides A and B in turns. Print the speed of B as a multiple of the speed of A."""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cbtop.commands.shared.crossovers import go_by_kept_crossovers
from cbtop.commands.shared.interrupts import noted_interrupt
from cbtop.commands.shared.paired_sides import (
    COMMAND,
    SETTINGS,
    WHOLE,
    Side,
    processes,
    setting,
    turns_of_settings,
)
from cbtop.commands.shared.progress import ProgressLine
from cbtop.errors import CbtopError, UsageError
from cbtop.reports.tables import Table
from cbtop.tuning.measuring import Bench, InterruptedTurnError, Setting, Test
from cbtop.tuning.paired import (
    CONFIDENCE_PERCENT,
    SIDES,
    PairedTest,
    Round,
    Turn,
    in_turns,
    mean_and_deviation,
    pairs_of,
    with_deviation,
)
from cbtop.units import count as counted

DEFAULT_ROUNDS = 10
INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class ComparisonOutcome:
    """The result of comparing two sides A and B.

    `sides` are the texts of A and B on the command line. `model` is "" for commands. `rounds` is the requested number
    of rounds.
    """

    kind: str
    sides: tuple[str, str]
    model: str
    rounds: int
    pairs: Sequence[PairedTest]

    @property
    def measured(self) -> int:
        return len(self.pairs[0].a_ns)


class _Measured:
    """The complete rounds. If the measurement is interrupted, these rounds remain available."""

    def __init__(self, line: ProgressLine, rounds: int) -> None:
        self.rounds: list[Round] = []
        self._line = line
        self._wanted = rounds

    def measure(self, pairs: Sequence[tuple[Turn, Turn]], should_stop: Callable[[], bool]) -> None:
        """Warm up both sides, then measure them until `should_stop` returns true.

        A second Ctrl-C also ends the measurement.
        """
        try:
            for turns in pairs:
                for name, turn in zip(SIDES, turns, strict=True):
                    self._line.show(f"warming up: {name}")
                    turn()
            for one in in_turns(pairs, self._wanted, self._show):
                self.rounds.append(one)
                if should_stop():
                    return
        except (InterruptedTurnError, KeyboardInterrupt):
            pass  # The measurement was interrupted. The round that is not complete does not count.

    def _show(self, number: int, side: int) -> None:
        done = (number + side / 2) / self._wanted
        self._line.show(f"measuring: round {number + 1} of {self._wanted}, {SIDES[side]}", done)


def run(options: argparse.Namespace) -> int:
    """Measure the sides of `options.paired` and print the outcome. Returns 130 if Ctrl-C ended the measurement."""
    sides: Sequence[Side] = options.paired
    if sides[0].kind != sides[1].kind:
        raise UsageError(f"--paired: A is {sides[0].kind}:, B is {sides[1].kind}:; both are to be of one kind")
    line = ProgressLine(sys.stderr)
    measured = _Measured(line, options.repetitions or DEFAULT_ROUNDS)
    try:
        compared = _settings if sides[0].kind == SETTINGS else _processes
        outcome = compared(options, sides, measured, line)
    finally:
        line.clear()
    if outcome is None:
        return INTERRUPTED
    sys.stdout.write(OUTPUTS[options.output](outcome))
    return 0 if outcome.measured == outcome.rounds else INTERRUPTED


def _settings(
    options: argparse.Namespace, sides: Sequence[Side], measured: _Measured, line: ProgressLine
) -> ComparisonOutcome | None:
    line.show("loading kernels")
    from cbtop.compute.backends import available_threads, cpu_backend
    from cbtop.compute.demo_model import demo_model
    from cbtop.compute.errors import ComputeError

    tests = asked_tests(options)
    threads = _threads(options)
    otherwise = Setting(threads or max(1, available_threads() - 1), options.exact, options.kv_cache)
    a, b = (setting(one.what, otherwise) for one in sides)
    try:
        cpu_backend(max(a.threads, b.threads))
        path = options.model or demo_model(line.show)
        go_by_kept_crossovers(line)
        line.show("reading the model")
        bench = Bench(path, max(test.tokens for test in tests))
        limit = bench.model(a).context_length
        if bench.context > limit:
            raise UsageError(f"a test of {bench.context} tokens does not fit the model's context of {limit} tokens")
        with noted_interrupt() as is_interrupted:
            measured.measure(turns_of_settings(bench, (a, b), tests, is_interrupted), is_interrupted)
    except ComputeError as error:
        raise UsageError(str(error)) from error
    tokens = {test.name: test.tokens for test in tests}
    return _outcome(SETTINGS, (a.text, b.text), str(path), measured, options, tokens)


def _processes(
    options: argparse.Namespace, sides: Sequence[Side], measured: _Measured, line: ProgressLine
) -> ComparisonOutcome | None:
    kind = sides[0].kind
    if kind == COMMAND and (options.model or options.threads or options.exact):
        raise UsageError("a command says itself what it runs: leave MODEL, -t and --exact to it")
    line.show("warming up")
    seen: dict[str, dict[str, int | None]] = {name: {} for name in SIDES}
    arguments = [] if kind == COMMAND else _arguments(options, line)
    with processes(sides, arguments) as found, noted_interrupt() as is_interrupted:

        def turn_of(side: int) -> Turn:
            def turn() -> Mapping[str, int]:
                tests = found[side].turn(is_interrupted)
                known = seen[SIDES[side]]
                tokens = {name: of for name, (of, _) in tests.items()}
                if known and tokens != known:
                    raise CbtopError(f"{found[side].title} prints other tests than before: {', '.join(tokens)}")
                known |= tokens
                other = seen[SIDES[1 - side]]
                if other and other != known:
                    raise CbtopError(
                        f"A measures {', '.join(seen['A'])}, B {', '.join(seen['B'])}; they are to be the same"
                    )
                return {name: took_ns for name, (_, took_ns) in tests.items()}

            return turn

        measured.measure([(turn_of(0), turn_of(1))], is_interrupted)
    words = sides[0].what, sides[1].what
    return _outcome(kind, words, "" if kind == COMMAND else str(arguments[0]), measured, options, seen["A"])


def _arguments(options: argparse.Namespace, line: ProgressLine) -> list[str]:
    """Return the arguments of `cbtop bench` for a git revision, without default values, which an older revision may
    not know.
    """
    from cbtop.compute.demo_model import demo_model

    asked_tests(options)
    path = options.model or demo_model(line.show)
    found = [str(path.resolve()), "-r", "1", "-o", "json"]
    found += ["-p", ",".join(map(str, options.n_prompt)), "-n", ",".join(map(str, options.n_gen))]
    if threads := _threads(options):
        found += ["-t", str(threads)]
    if options.exact:
        found.append("--exact")
    if options.kv_cache != "f16":
        found += ["--kv-cache", options.kv_cache]
    return found


def asked_tests(options: argparse.Namespace) -> list[Test]:
    """Return the tests of the options -p and -n. Raises UsageError if there are none."""
    tests = [Test(prompt, 0) for prompt in options.n_prompt if prompt]
    tests += [Test(0, tokens) for tokens in options.n_gen if tokens]
    if not tests:
        raise UsageError("-p 0 -n 0 leaves nothing to measure")
    return tests


def _threads(options: argparse.Namespace) -> int | None:
    if options.threads and len(options.threads) > 1:
        raise UsageError("--paired compares two sides: give -t one number, or 'set:-t 1' 'set:-t 2'")
    return options.threads[0] if options.threads else None


def _outcome(
    kind: str,
    sides: tuple[str, str],
    model: str,
    measured: _Measured,
    options: argparse.Namespace,
    tokens: Mapping[str, int | None],
) -> ComparisonOutcome | None:
    pairs = pairs_of(measured.rounds, tokens)
    return ComparisonOutcome(kind, sides, model, options.repetitions or DEFAULT_ROUNDS, pairs) if pairs else None


def _fields(outcome: ComparisonOutcome, pair: PairedTest) -> dict[str, Any]:
    """Return the JSON fields of a pair of tests, one of each side. If llama-bench has the same field, the key is the
    same as in llama-bench.
    """
    low, high = pair.interval or (None, None)
    found: dict[str, Any] = {
        "kind": outcome.kind,
        "model_filename": outcome.model or None,
        "test": pair.name,
        "n_tokens": pair.tokens,
        "rounds": outcome.measured,
        "rounds_asked": outcome.rounds,
        "ratio": pair.ratio,
        "ratio_low": low,
        "ratio_high": high,
        "confidence_percent": CONFIDENCE_PERCENT,
        "is_beyond_noise": pair.is_beyond_noise,
    }
    for side, name in enumerate(("a", "b")):
        found[f"{name}_is"] = outcome.sides[side]
        found[f"{name}_avg_ns"], found[f"{name}_stddev_ns"] = mean_and_deviation(pair.sides_ns[side])
        rates = mean_and_deviation(pair.rates(side)) if pair.tokens else (None, None)
        found[f"{name}_avg_ts"], found[f"{name}_stddev_ts"] = rates
    return found


def _markdown(outcome: ComparisonOutcome) -> str:
    rows: Table = [("test", "A", "B", "", "B/A", f"{CONFIDENCE_PERCENT} % interval", "")]
    for pair in outcome.pairs:
        interval = "n/a" if pair.interval is None else f"{pair.interval[0]:.3f} to {pair.interval[1]:.3f}"
        sides = [_figure(pair, side) for side in (0, 1)]
        rows.append((pair.name, *sides, "t/s" if pair.tokens else "s", f"{pair.ratio:.3f}", interval, pair.verdict))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    left = (0, 3, 6)  # indices of the left-aligned columns of the table
    # In Markdown, two spaces at the end of a line make a line break.
    lines = [f"A: {outcome.sides[0]}  ", f"B: {outcome.sides[1]}", ""]
    for number, row in enumerate(rows):
        cells = [
            cell.ljust(width) if at in left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(f"| {' | '.join(cells)} |")
        if not number:
            dashes = ["-" * (width + 1) + ("-" if at in left else ":") for at, width in enumerate(widths)]
            lines.append(f"|{'|'.join(dashes)}|")
    rounds = counted(outcome.measured)
    stopped = f" of {counted(outcome.rounds)}: it was interrupted" if outcome.measured < outcome.rounds else ""
    speed = "B/A is of speed: above 1, B is faster"
    lines += ["", f"{rounds} round{'s' * (outcome.measured != 1)}{stopped}, in turns A B, B A; {speed}"]
    return "\n".join(lines) + "\n"


def _figure(pair: PairedTest, side: int) -> str:
    if pair.name == WHOLE and pair.tokens is None:
        return with_deviation([each / 1e9 for each in pair.sides_ns[side]], 3)
    return with_deviation(pair.rates(side), 2)


def _json(outcome: ComparisonOutcome) -> str:
    found = [
        _fields(outcome, pair) | {"a_samples_ns": pair.a_ns, "b_samples_ns": pair.b_ns} for pair in outcome.pairs
    ]
    return json.dumps(found, indent=2) + "\n"


def _csv(outcome: ComparisonOutcome) -> str:
    text = io.StringIO()
    found = [_fields(outcome, pair) for pair in outcome.pairs]
    writer = csv.DictWriter(text, found[0], quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    return text.getvalue()


OUTPUTS: dict[str, Callable[[ComparisonOutcome], str]] = {"md": _markdown, "json": _json, "csv": _csv}
