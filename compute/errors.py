"""What compute raises on purpose.

ComputeError
└── ModelError    a model file that cannot be read or run; the message is one line for the user
"""

from __future__ import annotations


class ComputeError(Exception):
    """Anything compute raises on purpose."""


class ModelError(ComputeError):
    """A model file is missing, damaged or outside of what this decoder runs."""
