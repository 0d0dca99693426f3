"""Measure how long reading the keys of a model with a large vocabulary takes, with our reader and with the package
`gguf`.

The file has no tensors. It has 151,936 tokens and 280,147 merges, of a few letters each, as many as a Qwen model.

Our reader skips the texts when it opens a file, and checks that they are within the file. In a second step, they
become strings of Python, as a tokenizer takes them. The peer makes an array of each string when it opens a file. It
gets a file with a thirtieth of the texts, because all of them take it half a minute.
"""

from __future__ import annotations

import random
import struct
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.base import Figure, Ratio, interleaved_cpu_ns
from cbtop.compute.gguf import GgufFile
from cbtop.compute.gguf_header import ARRAY, MAGIC, STRING, VERSIONS, aligned

COUNTS = {"tokenizer.ggml.tokens": 151_936, "tokenizer.ggml.merges": 280_147}
PEER_SHARE = 30
ROUNDS = 9
SEED = 1


def run() -> list[Figure]:
    from gguf import GGUFReader

    with tempfile.TemporaryDirectory(prefix="cbtop-bench-") as folder:
        whole, part = Path(folder, "whole.gguf"), Path(folder, "part.gguf")
        _write(whole, 1)
        _write(part, PEER_SHARE)
        calls: dict[str, Callable[[], object]] = {
            "opened": lambda: GgufFile.open(whole).__exit__(None, None, None),
            "opened, and all texts": partial(_texts, whole),
            "a thirtieth of it": partial(_texts, part),
            "peer": lambda: GGUFReader(part),
        }
        found = interleaved_cpu_ns(calls, 1, ROUNDS)
    whole_ms, texts_ms, part_ms = (min(found[name]) / 1e6 for name in list(calls)[:3])
    ratio = Ratio.of(found["a thirtieth of it"], found["peer"])
    return [
        Figure("opened", whole_ms, "ms"),
        Figure("opened, and all texts", texts_ms, "ms"),
        Figure("a thirtieth of it", part_ms, "ms", "gguf.GGUFReader", ratio),
    ]


def _texts(path: Path) -> None:
    with GgufFile.open(path) as file:
        for key in COUNTS:
            file.metadata.texts(key)


def _write(path: Path, share: int) -> None:
    random_text = random.Random(SEED)
    parts = [MAGIC, struct.pack("<IQQ", VERSIONS[-1], 0, len(COUNTS))]
    for key, count in COUNTS.items():
        parts += struct.pack("<Q", len(key)), key.encode(), struct.pack("<IIQ", ARRAY, STRING, count // share)
        for _ in range(count // share):
            text = "".join(random_text.choices("abcdefgh Ġ", k=random_text.randint(3, 10))).encode()
            parts += struct.pack("<Q", len(text)), text
    content = b"".join(parts)
    path.write_bytes(content.ljust(aligned(len(content)), b"\0"))
