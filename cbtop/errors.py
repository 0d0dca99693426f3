"""Errors that end a command. Each error prints one line and has its own exit code."""


class CbtopError(Exception):
    """An error that is shown to the user.

    `exit_code` is the exit code of the process. The docstring of `cbtop.cli` lists the codes.
    """

    exit_code = 1


class UsageError(CbtopError):
    """An option or a file of the user cannot be used."""

    exit_code = 2


class FailedCheckError(CbtopError):
    """A brick computes a wrong result, so a check has failed."""

    exit_code = 4


class UntrustedError(CbtopError):
    """The recorded data cannot be trusted, for example because records were lost."""

    exit_code = 5


class NoDataError(CbtopError):
    """No data to show has arrived within the allowed time."""

    exit_code = 3
