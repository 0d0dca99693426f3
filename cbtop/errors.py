"""Errors that end a command with one line and an exit code of their own."""


class CbtopError(Exception):
    """An error for the user; `exit_code` as in `cbtop.cli`."""

    exit_code = 1


class UsageError(CbtopError):
    """Options or files that cannot be used."""

    exit_code = 2


class FailedCheckError(CbtopError):
    """A brick computes a wrong result."""

    exit_code = 4


class UntrustedError(CbtopError):
    """The recorded data cannot be trusted."""

    exit_code = 5


class NoDataError(CbtopError):
    """Nothing to show within the time allowed."""

    exit_code = 3
