"""Errors that end a command with one line and an exit code of their own."""


class CbtopError(Exception):
    """Something the user should read; `exit_code` as in `cbtop.cli`."""

    exit_code = 1


class UsageError(CbtopError):
    """Options or files that cannot be used."""

    exit_code = 2


class FailedCheckError(CbtopError):
    """A brick computes something else than it should."""

    exit_code = 4


class UntrustedError(CbtopError):
    """What was recorded cannot be trusted."""

    exit_code = 5


class NoDataError(CbtopError):
    """Nothing to show within the time allowed."""

    exit_code = 3
