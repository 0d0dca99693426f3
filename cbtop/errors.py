"""Errors that end a command. Each prints one line and has an exit code of its own."""


class CbtopError(Exception):
    """An error that is shown to the user. `exit_code` is the exit code of the process (listed in `cbtop.cli`)."""

    exit_code = 1


class UsageError(CbtopError):
    """An option or a file cannot be used."""

    exit_code = 2


class FailedCheckError(CbtopError):
    """A brick computes a wrong result."""

    exit_code = 4


class UntrustedError(CbtopError):
    """The recorded data cannot be trusted."""

    exit_code = 5


class NoDataError(CbtopError):
    """There is nothing to show within the time allowed."""

    exit_code = 3
