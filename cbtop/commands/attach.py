"""`cbtop attach`: show the torch models of a Python process that already runs."""

from __future__ import annotations

import argparse
import sys

from cbtop.commands import top
from cbtop.commands.run import DEFAULT_OVERHEAD, allowed_percent
from cbtop.commands.shared.choose import add_merge_argument
from cbtop.commands.shared.show import (
    add_show_arguments,
    positive_seconds,
    settle_options,
)

DESCRIPTION = (
    "Attach to process PID, a Python process with torch that was started without cbtop, and show its models from "
    "their next call on. No code is edited. When this viewer ends, the process runs on as before."
)
EPILOG = """\
examples:
  cbtop attach 4242                        open the screen; `q` detaches
  cbtop attach 4242 --headless --once      print one report, then detach
  cbtop attach 4242 --overhead 1%          with less overhead

The process must be yours, run CPython 3.11 to 3.13 on Linux for x86-64, and have NumPy. The kernel must let cbtop
trace it (ptrace): if ptrace_scope is 1, `sudo sysctl kernel.yama.ptrace_scope=0` allows it; a container needs
--cap-add SYS_PTRACE. Its main thread is stopped for milliseconds, to start a thread of cbtop there. That
thread begins when the main thread next runs Python code, and ends with this viewer, however it ends. It is a thread
of the system even if gevent has replaced threads. If attaching is not safe, cbtop refuses in one line.
Not shown: models that are called without `torch.nn.Module.__call__`, children that the process forks, engines that
must be followed from their start (vLLM, SGLang: start them by `cbtop run`).

exit codes: as `cbtop`; 1 if the process cannot be attached
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "pid", type=_pid, metavar="PID", help="the process; `cbtop --view devices` lists what is busy"
    )
    parser.add_argument(
        "--overhead", default=DEFAULT_OVERHEAD, metavar="PERCENT",
        help=f"the most by which the steps of its models may slow down (default: {DEFAULT_OVERHEAD}%)",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=positive_seconds, default=10.0, metavar="SEC",
        help="seconds to wait until the process runs Python code, and then for data (default: 10)",
    )  # fmt: skip
    top.add_length_arguments(parser)
    add_show_arguments(parser)
    add_merge_argument(parser)
    parser.set_defaults(connect=[], server_key=None, key=None)


def run(options: argparse.Namespace) -> int:
    overhead_percent = allowed_percent(options.overhead, None)
    settle_options(options)
    # Imported here, because `cbtop attach --help` does not need them.
    from cbtop.commands.shared.attachable import attachable
    from cbtop.commands.shared.outside_attachment import OutsideAttachment

    options.source = [str(options.pid)]
    process = attachable(options.pid)
    with OutsideAttachment(process, overhead_percent, options.timeout) as attached:
        sys.stderr.write(
            f"cbtop: attached to process {options.pid}; it was stopped for {attached.stopped_ms:.1f} ms\n"
        )
        return top.watch_live(options)


def _pid(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 1 << 22):
        raise argparse.ArgumentTypeError(f"{text!r} is not a process id")
    return int(text)
