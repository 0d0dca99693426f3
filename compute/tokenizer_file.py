"""Read the tokenizer of a safetensors model: the file `tokenizer.json` in its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cbtop.compute.errors import ModelError
from cbtop.compute.tokenizer import (
    BYTE,
    CONTROL,
    ENDS,
    UNUSED,
    USER_DEFINED,
    Tokenizer,
    byte_pieces,
    imported_library,
    space_pieces,
)

NAME, CONFIGURATIONS = "tokenizer.json", ("generation_config.json", "config.json")
NORMAL = 1  # LLAMA_TOKEN_TYPE_NORMAL


def read_tokenizer_file(folder: Path, vocabulary: int) -> Tokenizer:
    """Return the tokenizer in a model's folder. The model has `vocabulary` tokens.

    Raises ModelError if the folder has none, or if it is damaged or too large for the model. Raises ComputeError if
    the package `tokenizers` is not installed.
    """
    path = folder / NAME
    if not path.is_file():
        raise ModelError(
            f"{path} does not exist, so that the model takes no prompt; download it, or leave the prompt away"
        )
    library = imported_library()
    try:
        tokenizer = library.Tokenizer.from_file(str(path))
        document = json.loads(path.read_text(encoding="utf-8"))
        added = {one["id"]: bool(one["special"]) for one in document.get("added_tokens") or []}
        is_of_bytes = "ByteLevel" in json.dumps(document.get("decoder"))
        ids = tokenizer.get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises plain Exception if its input is invalid
        raise ModelError(f"{path} is damaged ({str(error)[:200]!r}); download it again") from error
    if max(ids.values(), default=0) >= vocabulary:
        raise ModelError(f"{path} has more tokens than the model's {vocabulary:,}; download the whole folder again")
    tokens, types = [""] * vocabulary, [UNUSED] * vocabulary
    for token, at in ids.items():
        is_byte = not is_of_bytes and len(token) == 6 and token.startswith("<0x")
        tokens[at], types[at] = token, BYTE if is_byte else NORMAL
        if at in added:
            types[at] = CONTROL if added[at] or token in ENDS else USER_DEFINED
    pieces = byte_pieces(tokens, types) if is_of_bytes else space_pieces(tokens, types)
    plain, whole = (tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
    ends = _ends(folder) | {at for token, at in ids.items() if token in ENDS}
    return Tokenizer(
        tuple(pieces),
        frozenset(end for end in ends if end < vocabulary),
        whole[0] if len(whole) > len(plain) and whole[0] != plain[0] else None,
        not is_of_bytes and bool(plain) and pieces[plain[0]].startswith(b" "),
        tokenizer,
    )


def _ends(folder: Path) -> set[int]:
    """Return the end tokens in the first configuration that names some."""
    for name in CONFIGURATIONS:
        try:
            value: Any = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
        except FileNotFoundError:
            continue
        except (OSError, ValueError, AttributeError) as error:
            raise ModelError(f"{folder / name} cannot be read ({error}); download it again") from error
        found = {one for one in (value if isinstance(value, list) else [value]) if type(one) is int and one >= 0}
        if found:
            return found
    return set()
