"""`cbtop ptx`: analyse PTX, list the PTX that was compiled on this machine, and print it by its hash."""

from __future__ import annotations

import argparse
import errno
import os
import select
import stat
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

from cbtop.commands.shared.launches import launch, launches_of, require_entries
from cbtop.commands.shared.sarif import Failure, SarifRule, sarif
from cbtop.compute.ptx_registry import PtxRegistry
from cbtop.errors import FailedCheckError, NoDataError, UsageError
from cbtop.profiler.analysis.graph.nodes import printable
from cbtop.profiler.analysis.machine_code.examination import Toolbox, examined
from cbtop.profiler.analysis.machine_code.resources import ARCHITECTURE
from cbtop.profiler.analysis.machine_code.waste import WASTES
from cbtop.profiler.analysis.ptx.lints import LINTS, findings
from cbtop.profiler.analysis.ptx.lints.base import LintSeverity
from cbtop.profiler.analysis.ptx.model import PtxError
from cbtop.profiler.analysis.ptx.parser import MAX_BYTES, parse
from cbtop.profiler.analysis.ptx.summary import summary_of
from cbtop.reports.ptx import PtxFile, ptx_json, ptx_text
from cbtop.units import counted

DESCRIPTION = (
    "Analyse PTX without a GPU: the entries of a module and its errors, with their lines. Or show the PTX of a CUDA "
    "module that cbtop compiled on this machine. Its hash is in the detail of a kernel in the tree, in JSON "
    "(ptx_hash) and in the output of `cbtop ptx list`."
)
EPILOG = """\
examples:
  cbtop ptx kernel.ptx                  entries and errors of correctness
  cbtop ptx kernel.ptx --bugs           also likely errors
  cbtop ptx kernel.ptx --launch 256     also whether blocks of 256 threads fit the kernel
  cbtop ptx kernel.ptx --launch 256 --launch scan=32x8   another block for the entry scan
  cbtop ptx kernel.ptx --arch sm_80     registers, spills and occupancy on another GPU
  cbtop ptx ~/.triton/cache --strict    every PTX of a folder, with advice
  cbtop ptx dc4ab6be0f3e6bd5            the same for a module that was compiled here
  cbtop ptx kernel.ptx --format sarif > ptx.sarif
  cbtop ptx list                        what was compiled here: hash and entries, newest first
  cbtop ptx show dc4ab6be0f3e6bd5       print it
  cbtop ptx show dc4a | less            as many digits as tell it from the others

exit codes: 0 printed and no error found, 2 usage, no such file, or no PTX (in a folder: one of the files; the others
are analysed), 3 not compiled on this machine, 4 an error of correctness was found (also if 2 applies)
"""
ENTRY = ".entry "
SUFFIX = ".ptx"
LIST, SHOW = "list", "show"
MAX_FILES = 10_000
MAX_WAIT_S = 10.0  # for the next data of a pipe
LEVELS = {LintSeverity.CORRECTNESS: "error", LintSeverity.LIKELY: "warning", LintSeverity.ADVICE: "note"}
FORMATS = ("text", "json", "sarif")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", metavar="FILE|DIR|HASH|list|show", help="PTX to analyse: a file, a folder, or a hash (see below)"
    )
    parser.add_argument("hash", nargs="?", metavar="HASH", help="with show: in hexadecimal, or its first digits")
    parser.add_argument(
        "--arch",
        type=_architecture,
        metavar="ARCH",
        help="assemble for this GPU, as sm_90a (default: the PTX's target)",
    )
    parser.add_argument("--bugs", action="store_true", help="also report likely errors")
    parser.add_argument("--strict", action="store_true", help="report everything: likely errors and advice")
    parser.add_argument(
        "--launch", type=launch, action="append", default=[], metavar="[NAME=]X[xY[xZ]]",
        help="threads of a block: also check whether the entries, or the entry NAME, allow it, and which threads do "
        "what (may be repeated)",
    )  # fmt: skip
    parser.add_argument("--verbose", action="store_true", help="also print how to repair each finding")
    parser.add_argument("--format", choices=FORMATS, default="text", help="what to print (default: %(default)s)")
    parser.add_argument(
        "--json", action="store_const", const="json", dest="format", default=argparse.SUPPRESS,
        help="the same as --format json",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    if options.hash is not None and options.what != SHOW:
        raise UsageError(f"cbtop ptx takes one FILE, DIR or HASH; {options.hash!r} is one too many")
    if options.what == LIST:
        return _list()
    if options.what == SHOW:
        if options.hash is None:
            raise UsageError("cbtop ptx show needs a HASH, as `cbtop ptx list` prints them")
        sys.stdout.write(_text_of(options.hash) + "\n")
        return 0
    severities = list(LintSeverity)[: 3 if options.strict else 2 if options.bugs else 1]
    toolbox = Toolbox.of_this_machine()
    files, unusable = _analysed_files(options, severities, toolbox)
    if not files and len(unusable) == 1:
        raise unusable[0]
    require_entries(options.launch, [entry.name for file in files for entry in file.entries])
    if files:
        sys.stdout.write(_written(files, options) + "\n")
        sys.stdout.flush()
    for error in unusable:
        sys.stderr.write(f"cbtop: {printable(str(error))}\n")
    errors = [one for file in files for one in file.findings if one.lint.severity is LintSeverity.CORRECTNESS]
    if errors:
        raise FailedCheckError(f"{counted(len(errors), 'error')} of correctness in the PTX")
    return UsageError.exit_code if unusable else 0


def _analysed_files(
    options: argparse.Namespace, severities: list[LintSeverity], toolbox: Toolbox
) -> tuple[list[PtxFile], list[UsageError]]:
    """Return the analysis of each PTX file, and an error for each file that cannot be read or parsed."""
    files, unusable = [], []
    for name, read in _texts(options.what):
        try:
            files.append(_analysed(name, read(), severities, options, toolbox))
        except UsageError as error:
            unusable.append(error)
    return files, unusable


def _architecture(text: str) -> str:
    if not ARCHITECTURE.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not an architecture such as sm_90 or sm_90a")
    return text


def _written(files: list[PtxFile], options: argparse.Namespace) -> str:
    if options.format == "sarif":
        lints = {lint.id: lint.what for lint in LINTS}
        means = lints | {name: what for name, what in WASTES.items() if name not in lints}
        rules = [SarifRule(name, what, "", 1) for name, what in means.items()]
        return sarif(rules, [one for file in files for one in _failures(file)]).rstrip("\n")
    return ptx_json(files) if options.format == "json" else ptx_text(files, verbose=options.verbose)


def _failures(file: PtxFile) -> Iterator[Failure]:
    """Yield the problems and the waste in a PTX file, for SARIF.

    A failure has its line in the PTX, or the kernel's entry line. With debug lines in the PTX, it has its line in the
    source and refers to the PTX.
    """
    for one in file.findings:
        message = f"{one.function}: {one.message}. To repair: {one.lint.fix}."
        yield _failure(file, (one.lint.id, one.lint.what), message, one.lint.severity, one.line, one.source)
    for entry in file.entries:
        for waste in file.machine_code.entries[entry.name].waste:
            what = f"{'possibly ' * waste.is_possible}{waste.what}; {waste.impact}"
            message = f"{entry.name}: {what}. To repair: {waste.fix}."
            source = file.module.source_of(entry.name, waste.line)
            rule = waste.id, WASTES[waste.id]
            yield _failure(file, rule, message, LintSeverity.ADVICE, waste.line or entry.line, source)


def _failure(
    file: PtxFile, rule: tuple[str, str], message: str, severity: LintSeverity, line: int,
    source: tuple[str, int] | None,
) -> Failure:  # fmt: skip
    ptx = _relative(file.name), line
    place = ptx if source is None else (_relative(source[0]), source[1])
    return Failure(SarifRule(*rule, *place), message, LEVELS[severity], None if source is None else ptx)


def _relative(path: str) -> str:
    """Return the path relative to the working directory if the file is inside it, else the absolute path."""
    relative = os.path.relpath(path)
    return relative if not relative.startswith(os.pardir) else str(Path(path).absolute())


def _analysed(
    name: str, text: str, severities: list[LintSeverity], options: argparse.Namespace, toolbox: Toolbox
) -> PtxFile:
    try:
        module = parse(text)
        launches = launches_of(module, options.launch)
        return PtxFile(
            name,
            module,
            [summary_of(module, entry, launches.get(entry.name)) for entry in module.entries],
            findings(module, severities, launches),
            examined(text.encode(), module, options.arch or module.target, toolbox, launches),
        )
    except PtxError as error:
        raise UsageError(f"{printable(name)}: {printable(str(error))}") from error


def _texts(what: str) -> list[tuple[str, Callable[[], str]]]:
    """For each PTX that the command's argument names, return its name and a function that reads its text."""
    path = Path(what)
    if path.is_dir():
        paths = sorted(one for one in path.rglob(f"*{SUFFIX}") if one.is_file())
        if not paths:
            raise UsageError(f"{what} contains no *{SUFFIX} file")
        if len(paths) > MAX_FILES:
            raise UsageError(f"{what} contains {len(paths)} *{SUFFIX} files; pass a folder with at most {MAX_FILES}")
        return [(str(one), partial(_read, one)) for one in paths]
    if path.exists() or not _is_hash(what):
        return [(what, partial(_read, path))]
    return [(what, partial(_text_of, what))]


def _read(path: Path) -> str:
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            content = _whole(file)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    if len(content) > MAX_BYTES:
        raise UsageError(f"{path}: more than {MAX_BYTES >> 20} MiB")
    return content.rstrip(b"\0").decode("utf-8", "replace")


def _without_waiting(path: str, flags: int) -> int:
    """Open a file without waiting. A FIFO without a writer would block otherwise."""
    return os.open(path, flags | os.O_NONBLOCK)


def _whole(file: BinaryIO) -> bytes:
    """Return the content of a file. At most one byte more than the limit is read. A pipe must send something at least
    every MAX_WAIT_S.
    """
    if not stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
        return file.read(MAX_BYTES + 1)
    content = b""
    while len(content) <= MAX_BYTES:
        ready, _, _ = select.select([file], [], [], MAX_WAIT_S)
        part = os.read(file.fileno(), 1 << 16) if ready else None
        if part is None:
            raise TimeoutError(errno.ETIMEDOUT, f"no data for {MAX_WAIT_S:g} s")
        if not part:
            break
        content += part
    return content


def _is_hash(text: str) -> bool:
    digits = text.lower().removeprefix("0x")
    return bool(digits) and all(digit in "0123456789abcdef" for digit in digits)


def _list() -> int:
    registry = PtxRegistry()
    hashes = registry.hashes()
    for one in hashes:
        ptx = registry.lookup(one)
        entries = "damaged" if ptx is None else printable(", ".join(_entries(ptx)))
        sys.stdout.write(f"{one:016x}  {entries}\n")
    if not hashes:
        raise NoDataError("no CUDA kernel was compiled on this machine yet; cbtop demo --backend cuda compiles some")
    return 0


def _text_of(digits: str) -> str:
    """Return the stored PTX with a hash that begins with these digits. Exactly one must match."""
    if not _is_hash(digits):
        raise UsageError(f"{digits!r} is not a hash; pass hexadecimal digits, as `cbtop ptx list` prints them")
    registry = PtxRegistry()
    wanted = digits.lower().removeprefix("0x")
    matches = [one for one in registry.hashes() if f"{one:016x}".startswith(wanted)]
    if len(matches) > 1:
        raise UsageError(f"{len(matches)} hashes begin with {wanted}; pass more digits")
    text = registry.lookup(matches[0]) if matches else None
    if text is None:
        raise NoDataError(
            f"{wanted} was not compiled on this machine, or was deleted; `cbtop ptx list` prints the others"
        )
    return text


def _entries(ptx: str) -> list[str]:
    return [part.partition("(")[0].strip() for part in ptx.split(ENTRY)[1:]]
