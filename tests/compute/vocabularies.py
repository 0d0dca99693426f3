"""Makes the keys of small vocabularies in the form that converters of models write.

The vocabularies are learned from a few lines of text.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from cbtop.compute.tokenizer import SPACE, _byte_characters

COUNT = 512  # number of tokens of the tiny models
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
LEARNED = [
    "The weights of a model are read once a token, and that is what decoding costs: bytes from memory.",
    "l'été à la forêt, 12345 arbres; über Straßen läuft er, don't we'll I'M IT'S 2026-11-23, x+=1 <= y^2 | $5",
    "    if x:\n        return {'a': 1}\r\n\r\n\t\tend   \n  привет мир, 你好世界。",
]
NAMED = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<mine>"]
Keys = dict[str, Any]


def _learned(trainer: Any, tokenizer: Any) -> list[str]:
    tokenizer.train_from_iterator(LEARNED * 3, trainer)
    by_number = {number: token for token, number in tokenizer.get_vocab().items()}
    return [by_number[number] for number in range(len(by_number))]


@functools.cache
def byte_level(pre: str = "qwen2") -> Keys:
    """Return a vocabulary of 256 bytes, merges and four named tokens."""
    import tokenizers  # Import tokenizers here, because only some tests need this package.

    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(_byte_characters())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=COUNT - len(NAMED), initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    tokens = [*_learned(trainer, trained), *NAMED]
    unused = [f"[PAD{at}]" for at in range(len(tokens), COUNT)]
    kinds = [NORMAL] * (len(tokens) - 4) + [CONTROL] * 3 + [USER_DEFINED] + [UNUSED] * len(unused)
    end = len(tokens) - len(NAMED)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens + unused,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in json.loads(trained.to_str())["model"]["merges"]],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": end,
        "tokenizer.ggml.eos_token_id": end,
    }


@functools.cache
def sentence_piece() -> Keys:
    """Return a vocabulary of pieces with scores, the 256 bytes, and special tokens."""
    import tokenizers  # Import tokenizers here, because only some tests need this package.

    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(replacement=SPACE)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=COUNT - len(special), show_progress=False)
    pieces = _learned(trainer, trained)
    pieces += [f"[PAD{at}]" for at in range(len(special) + len(pieces), COUNT)]
    tokens = [*special, *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(special) + [-float(at) for at in range(len(pieces))],
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


@functools.cache
def gemma() -> Keys:
    """Return the vocabulary of `sentence_piece` with additional runs of characters and names.

    One of the new tokens has a wrong type.
    """
    keys = sentence_piece()
    own = {
        "<start_of_turn>": CONTROL, "<end_of_turn>": USER_DEFINED, "\n\n": USER_DEFINED, "\n\n\n": USER_DEFINED,
        "  ": USER_DEFINED, "   ": USER_DEFINED, "<td>": USER_DEFINED,
    }  # fmt: skip
    kept = COUNT - len(own)
    return keys | {
        "tokenizer.ggml.tokens": [*keys["tokenizer.ggml.tokens"][:kept], *own],
        "tokenizer.ggml.token_type": [*keys["tokenizer.ggml.token_type"][:kept], *own.values()],
        "tokenizer.ggml.add_space_prefix": False,
    }
