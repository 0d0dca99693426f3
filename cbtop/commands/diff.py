"""`cbtop diff`: compare two runs, by brick and layer."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cbtop.commands.shared.runs import WHERE, add_runs_arguments, runs_of
from cbtop.errors import NoDataError, UntrustedError, UsageError

DESCRIPTION = (
    "Compare two runs for each phase, brick and layer: the median and p99 of calls, the ratio with its interval, the "
    "added time a token, and tokens/s. The rows add up to the change of the whole. If two runs cannot be compared "
    "(different model, batch, KV length, machine or sampling, or lost records), the output says why."
)
EPILOG = f"""\
BASE and NEW are each {WHERE}.

examples:
  cbtop record -o base.cbtop --duration 30       the old version
  cbtop run --overhead 100% --record base.cbtop -- python bench.py    a torch program, every step
  cbtop diff base.cbtop new.cbtop
  cbtop diff base.cbtop new.cbtop --format tree  a tree: layer → brick, with sums
  cbtop diff base.cbtop 4711 --duration 20       with a process that runs now
  cbtop diff base.cbtop --save base.json         20 to 140 kB, to keep next to the code
  cbtop diff base.json new.cbtop --format markdown >> "$GITHUB_STEP_SUMMARY"
  cbtop diff base.json new.cbtop --format folded | flamegraph.pl > diff.svg
  cbtop diff base.json new.cbtop --format speedscope > diff.speedscope.json    open it at speedscope.app

Steps are compared in blocks of 4 or more. Five blocks are needed: 20 steps of a phase. In 99 of 100 comparisons of
equal runs, no change exceeds its interval. A change of 5 % in one brick of one layer is found 95 times in 100 with
240 steps or more, 7 % with 120, 10 % with 60. To let a job fail: cbtop check.

exit codes: 0 compared, 1 runtime error, 2 usage, 3 nothing recorded or too few steps, 5 not comparable, or data not
trustworthy
"""
FORMAT_NAMES = ("text", "tree", "markdown", "json", "folded", "speedscope")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("base", metavar="BASE", help=WHERE)
    parser.add_argument("new", metavar="NEW", nargs="?", help="the run to compare with BASE (not needed with --save)")
    parser.add_argument("--phase", metavar="NAME", help="only these steps: decode, prefill, … (default: all)")
    parser.add_argument("--format", choices=FORMAT_NAMES, default="text", help="format of the output (default: text)")
    parser.add_argument(
        "--save", type=Path, metavar="FILE.json",
        help="write NEW (or BASE, without NEW) to a small file, to compare later runs with it",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="overwrite that file")
    add_anyway_argument(parser)
    add_runs_arguments(parser)


def add_anyway_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option `--anyway`, which allows a comparison of runs with different conditions."""
    parser.add_argument(
        "--anyway", action="store_true",
        help="compare even if host, GPU or sampling differ or records were lost; the output says so",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    if options.new is None and options.save is None:
        raise UsageError("compare with what? cbtop diff BASE NEW; or --save FILE.json to keep BASE")
    bases = runs_of(options.base, options)
    news = runs_of(options.new, options) if options.new is not None else bases
    if options.save is not None:
        from cbtop.feeds.run_file import write_runs

        write_runs(options.save, news, overwrite=options.force)
        sys.stderr.write(f"cbtop: wrote {', '.join(run.name for run in news)} into {options.save}\n")
        if options.new is None:
            return 0
    for where, runs in ((options.base, bases), (options.new, news)):
        if len(runs) == 2:
            sys.stderr.write(f"cbtop: {where}: of its two runs the first counts: three or more are taken together\n")
    # Imported here, because numpy loads slowly.
    from cbtop.comparison.run_diff import diff_of
    from cbtop.reports.run_diff import FORMATS

    found = diff_of(bases, news, options.phase, anyway=options.anyway)
    sys.stdout.write(FORMATS[options.format](found) + "\n")
    sys.stdout.flush()
    if untrusted := found.base.untrusted or found.now.untrusted:
        raise UntrustedError(untrusted)
    if found.why_not:
        raise (NoDataError if found.is_too_little else UntrustedError)(f"not compared: {found.why_not}")
    return 0
