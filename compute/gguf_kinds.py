"""Recognise files that are given as a model but are something else, and tell the user what to do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from cbtop.compute.errors import ModelError

LFS_POINTER = b"version https://git-lfs."
# Names of the pieces of a large file that a tool has cut at some byte: model.gguf.part1of2, model.gguf-split-a.
_PIECE = re.compile(r"(?P<whole>.+?)(?P<suffix>\.part\d+of\d+|-split-[a-z])", re.IGNORECASE)
_SPLIT = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")
_KINDS = {  # value of `general.type` -> what the file is, and advice for the user
    "adapter": "is a LoRA adapter, not a model; merge it into its model with llama-export-lora and give the result",
    "imatrix": "is an importance matrix, with which llama-quantize quantises a model; give the model itself",
    "mmproj": "is a projector of images or sound (mmproj), not a language model; give the .gguf file of its model",
}


def refuse_beginning(path: Path, beginning: bytes) -> None:
    """Raise ModelError if the first bytes or the name of a file show that it is not a complete GGUF file."""
    if beginning.startswith(LFS_POINTER):
        raise ModelError(
            f"{path} is a Git LFS pointer, not the model itself; run `git lfs pull` in its repository, or download "
            "the model"
        )
    if match := _PIECE.fullmatch(path.name):
        pieces = re.sub(r"\d+(?=of)|[a-z]$", "*", match["suffix"], count=1, flags=re.IGNORECASE)
        whole = match["whole"]
        raise ModelError(
            f"{path} is one piece of a file that was cut; join all pieces in order, as with "
            f"`cat {whole}{pieces} > {whole.removesuffix('.gguf')}.gguf`, and give the result"
        )


def refuse_metadata(path: Path, metadata: Mapping[str, object]) -> None:
    """Raise ModelError if the metadata of a GGUF file shows that it is not a complete model."""
    count = metadata.get("split.count", 1)
    if isinstance(count, int) and count > 1:
        raise ModelError(_split(path, metadata.get("split.no"), count))
    kind = metadata.get("general.type")
    # projectors (parts of models for images) that were written before 2025 do not have `general.type`
    if kind not in _KINDS and metadata.get("general.architecture") == "clip":
        kind = "mmproj"
    if isinstance(kind, str) and kind in _KINDS:
        raise ModelError(f"{path} {_KINDS[kind]}")


def _split(path: Path, number: object, count: int) -> str:
    match = _SPLIT.fullmatch(path.name)
    first = f"{match['stem']}-00001-of-{match['count']}.gguf" if match else "FIRST.gguf"
    which = f" (number {number + 1})" if isinstance(number, int) else ""
    return (
        f"{path} is one of {count} files of a split model{which}; merge them with "
        f"`llama-gguf-split --merge {first} MODEL.gguf`, and give the result"
    )
