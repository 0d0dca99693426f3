"""`cbtop contracts lint`: check contract files without running the bricks that they describe."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from cbtop.commands.shared.contract_lines import lint_sarif
from cbtop.errors import FailedCheckError, UsageError
from cbtop.units import counted

DESCRIPTION = (
    "Check contract files of bricks. All keys are there, all expressions and equations parse, and each output has an "
    "equation; the reference is found, and its parameters are the inputs; in every case the conditions hold for the "
    "reference; and for each condition and each fault there is a case in which the fault is found. Only the "
    "reference is called, and not the brick. With --bricks, each contract also has a brick."
)
EPILOG = """\
examples:
  cbtop contracts lint contracts/               every .yaml file in a folder
  cbtop contracts lint rms_norm.yaml softmax.yaml
  cbtop contracts lint contracts/ --bricks my_norms    and each has a brick in my_norms.py
  cbtop contracts lint contracts/ --format json
  cbtop contracts lint contracts/ --format sarif    for code hosts: each fault next to its line

A module of a reference is found from the working directory. `cbtop verify module:function` runs a brick itself.

exit codes: 0 no fault, 1 runtime error, 2 usage or no contract file, 4 a file has a fault
"""
SCHEMA = "cbtop.contracts-lint/1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("lint",), help="what to do")
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="a folder, or a file")
    parser.add_argument(
        "--bricks", action="append", default=[], metavar="MODULE",
        help="a contract that no brick of this module has is a fault; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--format", choices=("text", "json", "sarif"), default="text", help="of what is printed (default: text)"
    )


def run(options: argparse.Namespace) -> int:
    # Imported here, because Numba loads slowly.
    from cbtop.compute.errors import ContractError
    from cbtop.compute.own_bricks import bound_contracts, contract_files, lint

    files: list[Path] = []
    for folder in options.folders:
        if not folder.exists():
            raise UsageError(f"{folder}: No such file or directory")
        if not (found := contract_files(folder)):
            raise UsageError(f"{folder} has no contract file; their names end with .yaml")
        files += found
    files = list(dict.fromkeys(files))  # a file may also be in one of the folders
    sys.path.insert(0, os.getcwd())  # references are modules of the user
    faults = {str(path): lint(path) for path in files}
    if options.bricks:
        try:
            bound = bound_contracts(options.bricks)
        except ContractError as error:
            raise UsageError(f"--bricks {error}") from error
        for file in files:
            if file.resolve() not in bound:
                faults[str(file)].append(f"no brick of {', '.join(options.bricks)} has this contract")
    if options.format == "json":
        sys.stdout.write(json.dumps({"schema": SCHEMA, "files": faults}) + "\n")
    elif options.format == "sarif":
        sys.stdout.write(lint_sarif(faults))
    else:
        for path, wrong in faults.items():
            sys.stdout.write(f"{'✗' if wrong else '✓'} {path}\n" + "".join(f"  {fault}\n" for fault in wrong))
    sys.stdout.flush()
    failed = [path for path, wrong in faults.items() if wrong]
    if failed:
        raise FailedCheckError(f"{len(failed)} of {counted(len(files), 'contract')} failed: {', '.join(failed[:3])}")
    return 0
