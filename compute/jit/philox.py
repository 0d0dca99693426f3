"""Random numbers that depend only on a counter and a key, so they are the same on every machine, thread and
backend.
"""

# Philox4x32-10: Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC11, section 5.

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.jit.compile import jit

ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)  # constants of Philox that are added to the key in each round


@jit
def philox(a: Any, b: Any, c: Any, d: Any, key: Any, other_key: Any) -> Any:
    """Return four random words of 32 bits, each in a uint64.

    The words depend on the counter (four words of 32 bits) and on the key (two words).
    """
    for _ in range(ROUNDS):
        first, second = _MULTIPLIERS[0] * a, _MULTIPLIERS[1] * c
        a, b, c, d = (second >> _WORD) ^ b ^ key, second & _LOW, (first >> _WORD) ^ d ^ other_key, first & _LOW
        key, other_key = (key + _WEYL[0]) & _LOW, (other_key + _WEYL[1]) & _LOW
    return a, b, c, d


@jit
def uniform(position: Any, sequence: Any, seed: Any) -> Any:
    """Return the random number at index `position` of a sequence: a float64 in [0, 1), a multiple of 2^-53.

    `seed` and `sequence` identify the sequence. All arguments are uint64.
    """
    high, low, _, _ = philox(
        position & _LOW, position >> _WORD, sequence & _LOW, sequence >> _WORD, seed & _LOW, seed >> _WORD
    )
    return np.float64((high << np.uint64(21)) | (low >> np.uint64(11))) * 2.0**-53
