"""Run `cbtop` as `python -m cbtop`."""

# Python has already loaded `_signal`, the C part of `signal`. Any other import here would delay `cbtop run`.
import _signal
import sys

# Let Ctrl-C end the process at once while modules are imported. Otherwise Python would print a traceback from the
# middle of an import.
_catches = _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
if _catches:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)


def main() -> int:
    """Run the command line of this process and return its exit code."""
    if sys.argv[1:2] == ["run"] and sys.stdout is not None:
        from cbtop.commands import run

        if launch := run.plain(sys.argv[2:]):
            return run.become(*launch)
    from cbtop import cli

    if _catches:
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
