"""`python -m cbtop` is `cbtop`."""

from __future__ import annotations

import signal
import sys

# Until there is somebody to catch it, Ctrl-C ends us at once: who pressed it wants no traceback of an import.
_catches = signal.getsignal(signal.SIGINT) is signal.default_int_handler
if _catches:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from cbtop import cli  # noqa: E402


def main() -> int:
    """Run the command line of this process and give its exit code."""
    if _catches:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
