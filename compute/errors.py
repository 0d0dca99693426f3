"""What compute raises on purpose.

ComputeError
├── ContractError    a kernel's contract that cannot be read; the message names the file and what is wrong in it
└── ModelError       a model file that cannot be read or run; the message is one line for the user
"""

from __future__ import annotations


class ComputeError(Exception):
    """Anything compute raises on purpose."""


class ContractError(ComputeError):
    """The contract of a kernel is missing, or is not what a contract has to be."""


class ModelError(ComputeError):
    """A model file is missing, damaged or outside of what this decoder runs."""
