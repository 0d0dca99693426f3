"""The text that the demo trains on.

Each byte of the text is the number of a token, because every model has these tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

# The text is the beginning of "Alice's Adventures in Wonderland" (Lewis Carroll, 1865).
TEXT = """\
Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or \
twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it, "and what \
is the use of a book," thought Alice "without pictures or conversations?"

So she was considering in her own mind (as well as she could, for the hot day made her feel very sleepy and stupid), \
whether the pleasure of making a daisy-chain would be worth the trouble of getting up and picking the daisies, when \
suddenly a White Rabbit with pink eyes ran close by her.
"""


def batches(tokens: int, vocabulary: int, seed: int) -> Iterator[list[int]]:
    """Yield parts of the text, one after another without end. Each part begins at a random position.

    A part has one token more than `tokens`, because its last token is only a target.
    """
    numbers, rng = np.frombuffer(TEXT.encode(), np.uint8).astype(np.int64) % vocabulary, np.random.default_rng(seed)
    while True:
        first = int(rng.integers(len(numbers) - tokens))
        yield numbers[first : first + tokens + 1].tolist()
