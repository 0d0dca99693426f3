"""Convert text to the tokens of a model and back, with the vocabulary in the model's GGUF file.

Source of the keys: ggml's docs/gguf.md. Source of their meaning: llama.cpp's src/llama-vocab.cpp.
"""

# The package `tokenizers` of Hugging Face turns text into tokens. It is configured with the lists in the model's
# file. This module turns tokens into text. Each token has a list of bytes. If a character spans several tokens, it
# appears with its last token.

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cbtop.compute.errors import ComputeError, ModelError
from cbtop.compute.gguf import GgufFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6  # numbers of the C enum llama_token_type
WITHOUT_TEXT = (UNKNOWN, CONTROL, UNUSED)
NO_TOKEN = 0xFFFFFFFF  # LLAMA_TOKEN_NULL of llama.cpp, which converters write for "no token"
SPACE = "\u2581"  # the character that SentencePiece uses for a space
# largest length of a token; in real vocabularies, the longest tokens are a few hundred spaces
MAX_TOKEN_CHARACTERS = 1_024

_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")
# Value of `tokenizer.ggml.pre` -> patterns that cut a text into words. The patterns are applied one after the other.
PATTERNS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "stablelm2": (_QWEN2,),
    "smollm": (r"\p{N}", _GPT2),
}
# Values of `tokenizer.ggml.pre`: if the file has one of these, a text begins with a special token, unless the file
# says otherwise.
BEGINS = frozenset({"llama-bpe"})
# Values of `tokenizer.ggml.pre`. If the file has one of these, a word that is itself a token becomes that token,
# whatever the merges are.
WHOLE_WORDS = frozenset({"llama-bpe"})
# Control tokens that end a text even if the file does not list them, as in llama.cpp.
ENDS = frozenset(
    {
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>",
        "<|end_of_text|>", "<|eom_id|>", "<EOT>", "_<EOT>",
    }
)  # fmt: skip


def _byte_characters() -> dict[str, int]:
    """Return a dict from the characters of a byte-level vocabulary to their bytes (GPT-2's encoder.py,
    bytes_to_unicode).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """The vocabulary of a model. `pieces` holds the bytes of each token. Control tokens have no bytes."""

    pieces: tuple[bytes, ...]
    ends: frozenset[int]
    begin: int | None
    drops_first_space: bool  # whether decoding drops the first space of a text, because encoding has added it
    _library: Library

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`. If the model has a begin token, it comes first.

        Names of control tokens in the text become control tokens. Raises ComputeError if the text is not valid
        Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ComputeError("the prompt is not UTF-8; give it as such") from error
        begin = [] if self.begin is None else [self.begin]
        return begin + list(self._library.encode(text, add_special_tokens=False).ids)

    def stream(self, before: Sequence[int] = ()) -> TextStream:
        """Return a stream that decodes tokens. The tokens in `before` precede the decoded tokens in the text."""
        stream = TextStream(self)
        for token in before:
            stream.text_of(token)
        return stream

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`, which begin a text. Bytes that are not UTF-8 become U+FFFD."""
        stream = self.stream()
        return "".join(map(stream.text_of, tokens)) + stream.rest()


class TextStream:
    """Decodes tokens to text one by one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._pieces = tokenizer.pieces
        self._drops_space = tokenizer.drops_first_space
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def text_of(self, token: int) -> str:
        """Return the characters that `token` completes."""
        piece = self._pieces[token]
        if self._drops_space and piece:
            piece, self._drops_space = piece.removeprefix(b" "), False
        return self._characters.decode(piece)

    def rest(self) -> str:
        """Return the replacement character if the text ended inside a character, otherwise ""."""
        return self._characters.decode(b"", final=True)


def read_tokenizer(file: GgufFile) -> Tokenizer:
    """Return the tokenizer of an open file.

    Raises ModelError if the file has no tokenizer, or if it is damaged or not supported. Raises ComputeError if the
    package `tokenizers` is not installed.
    """
    if not file.metadata.has_key("tokenizer.ggml.tokens"):
        raise ModelError(
            f"{file.path} has no tokenizer, so that it takes no prompt; give a model converted with its "
            "vocabulary, or leave the prompt away"
        )
    kind = file.metadata.text("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ModelError(
            f"{file.path} has a tokenizer of kind {kind[:60]!r}; supported are gpt2 and llama: leave the prompt away"
        )
    tokenizers = imported_library()
    tokens = file.metadata.texts("tokenizer.ggml.tokens")
    said = _numbers(file, "tokenizer.ggml.token_type", len(tokens), [1] * len(tokens))
    types = [CONTROL if token in ENDS else kind for token, kind in zip(tokens, said, strict=True)]
    if longest := next((token for token in tokens if len(token) > MAX_TOKEN_CHARACTERS), None):
        raise _damaged(file, f"a token of {len(longest):,} characters, over the limit of {MAX_TOKEN_CHARACTERS:,}")
    try:
        if kind == "gpt2":
            library, begins, pieces = *_byte_level(file, tokens, tokenizers), byte_pieces(tokens, types)
        else:
            library, begins, pieces = *_sentence_piece(file, tokens, types, tokenizers), space_pieces(tokens, types)
        for name, numbers in (("add_special_tokens", (UNKNOWN, CONTROL)), ("add_tokens", (USER_DEFINED,))):
            added = [token for token, number in zip(tokens, types, strict=True) if number in numbers and token]
            special = name == "add_special_tokens"
            getattr(library, name)([tokenizers.AddedToken(one, normalized=False, special=special) for one in added])
    except ModelError:
        raise
    except Exception as error:  # the library raises plain Exception if its input is invalid
        raise _damaged(file, f"a vocabulary that is none ({str(error)[:200]!r})") from error
    begin = _token(file, "bos", len(tokens), 1 if kind == "llama" else None)
    ends = {_token(file, name, len(tokens), 2 if kind == "llama" and name == "eos" else None)
            for name in ("eos", "eot", "eom")}  # fmt: skip
    ends |= {at for at, token in enumerate(tokens) if token in ENDS}
    return Tokenizer(
        tuple(pieces),
        frozenset(end for end in ends if end is not None),
        begin if file.metadata.flag("tokenizer.ggml.add_bos_token", begins) else None,
        kind == "llama" and file.metadata.flag("tokenizer.ggml.add_space_prefix", True),
        library,
    )


def imported_library() -> Any:
    """Return the package `tokenizers`. Raises ComputeError if it is not installed."""
    try:
        # It is imported here, because it takes 40 ms to load and 12 MB to install, and only prompts need it.
        import tokenizers
    except ImportError as error:
        raise ComputeError(
            "a prompt wants the package tokenizers, which is not installed: pip install 'cbtop[text]'"
        ) from error
    return tokenizers


def _byte_level(file: GgufFile, tokens: list[str], tokenizers: Any) -> tuple[Library, bool]:
    """Return a tokenizer for a vocabulary of bytes, and whether texts begin with a special token.

    Each byte is represented by a character, and the tokenizer merges these characters.
    """
    pre = file.metadata.text("tokenizer.ggml.pre", "default")
    if pre not in PATTERNS:
        raise ModelError(
            f"{file.path} cuts words as {pre[:60]!r}; supported are {', '.join(PATTERNS)}: leave the prompt away"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in file.metadata.texts("tokenizer.ggml.merges")]
    vocabulary = {token: at for at, token in enumerate(tokens)}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges, ignore_merges=pre in WHOLE_WORDS))
    cut = [tokenizers.pre_tokenizers.Split(tokenizers.Regex(one), "isolated") for one in PATTERNS[pre]]
    library.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [*cut, tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return library, pre in BEGINS


def _sentence_piece(
    file: GgufFile, tokens: list[str], types: Sequence[float], tokenizers: Any
) -> tuple[Library, bool]:
    """Return a tokenizer for a vocabulary of characters, and whether texts begin with a special token.

    If several merges are possible, the result with the highest score is merged first. Characters without a token
    become bytes.
    """
    scores = _numbers(file, "tokenizer.ggml.scores", len(tokens), None)
    vocabulary = {token: at for at, token in enumerate(tokens)}
    merges = [
        (-scores[at], vocabulary[token[:cut]], vocabulary[token[cut:]], token[:cut], token[cut:])
        for token, at in vocabulary.items()
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    model = tokenizers.models.BPE(
        vocabulary,
        [merge[3:] for merge in sorted(merges)],
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    library = tokenizers.Tokenizer(model)
    spaces = tokenizers.normalizers.Replace(" ", SPACE)
    if file.metadata.flag("tokenizer.ggml.add_space_prefix", True):
        spaces = tokenizers.normalizers.Sequence([tokenizers.normalizers.Prepend(SPACE), spaces])
    library.normalizer = spaces
    return library, True


def byte_pieces(tokens: list[str], types: Sequence[float]) -> list[bytes]:
    """Return the bytes of each token. Each character of the vocabulary represents a byte."""
    bytes_of = _byte_characters()
    pieces = []
    for token, kind in zip(tokens, types, strict=True):
        if kind in WITHOUT_TEXT:
            pieces.append(b"")
        elif kind != USER_DEFINED and all(character in bytes_of for character in token):
            pieces.append(bytes(bytes_of[character] for character in token))
        else:
            pieces.append(token.encode())
    return pieces


def space_pieces(tokens: list[str], types: Sequence[float]) -> list[bytes]:
    """Return the bytes of each token of a vocabulary with SentencePiece's character for a space."""
    pieces = []
    for token, kind in zip(tokens, types, strict=True):
        byte = re.fullmatch("<0x([0-9A-F]{2})>", token) if kind == BYTE else None
        text = b"" if kind in WITHOUT_TEXT else token.replace(SPACE, " ").encode()
        pieces.append(bytes.fromhex(byte[1]) if byte else text)
    return pieces


def _numbers(file: GgufFile, key: str, count: int, default: Sequence[float] | None) -> Sequence[float]:
    """Return the numbers that the file has under `key`, one for each of `count` tokens.

    If the file does not have the key, returns `default`.
    """
    if default is not None and not file.metadata.has_key(key):
        return default
    numbers = file.metadata.numbers(key)
    if len(numbers) != count:
        raise _damaged(file, f"{len(numbers):,} elements of {key} for {count:,} tokens")
    return numbers


def _token(file: GgufFile, name: str, count: int, default: int | None) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    if not file.metadata.has_key(key):
        return default if default is None or default < count else None
    if file.metadata.has_integer(key, NO_TOKEN):
        return None
    return file.metadata.integer(key, count - 1, least=0)


def _damaged(file: GgufFile, what: str) -> ModelError:
    return ModelError(f"{file.path} has {what}: its tokenizer is damaged; download or convert it again")
