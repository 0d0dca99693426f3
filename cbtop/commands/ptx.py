"""`cbtop ptx`: print the PTX of a kernel. The kernel is named by the hash that the graph view shows."""

from __future__ import annotations

import argparse
import sys

from cbtop.compute.ptx_registry import PtxRegistry
from cbtop.errors import NoDataError, UsageError
from cbtop.profiler.analysis.graph.nodes import printable

DESCRIPTION = (
    "Show the PTX of a CUDA module that cbtop compiled on this machine. Its hash is in the detail of a kernel in "
    "the tree, in JSON (ptx_hash) and in the output of `cbtop ptx list`."
)
EPILOG = """\
examples:
  cbtop ptx list                        what was compiled here: hash and entries, newest first
  cbtop ptx show dc4ab6be0f3e6bd5       print it
  cbtop ptx show dc4a | less            as many digits as tell it from the others

exit codes: 0 printed, 2 usage, 3 not compiled on this machine
"""
ENTRY = ".entry "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    what.add_parser("list", help="what was compiled on this machine")
    show = what.add_parser("show", help="print one")
    show.add_argument("hash", metavar="HASH", help="in hexadecimal, or its first digits")


def run(options: argparse.Namespace) -> int:
    registry = PtxRegistry()
    hashes = registry.hashes()
    if options.what == "list":
        for one in hashes:
            ptx = registry.lookup(one)
            entries = "damaged" if ptx is None else printable(", ".join(_entries(ptx)))
            sys.stdout.write(f"{one:016x}  {entries}\n")
        if not hashes:
            raise NoDataError(
                "no CUDA kernel was compiled on this machine yet; cbtop demo --backend cuda compiles some"
            )
        return 0
    wanted = options.hash.lower().removeprefix("0x")
    if not wanted or any(digit not in "0123456789abcdef" for digit in wanted):
        raise UsageError(f"{options.hash!r} is not a hash; pass hexadecimal digits, as `cbtop ptx list` prints them")
    found = [one for one in hashes if f"{one:016x}".startswith(wanted)]
    if len(found) > 1:
        raise UsageError(f"{len(found)} hashes begin with {wanted}; pass more digits")
    text = registry.lookup(found[0]) if found else None
    if text is None:
        raise NoDataError(
            f"{wanted} was not compiled on this machine, or was deleted; `cbtop ptx list` prints the others"
        )
    sys.stdout.write(text + "\n")
    return 0


def _entries(ptx: str) -> list[str]:
    return [part.partition("(")[0].strip() for part in ptx.split(ENTRY)[1:]]
