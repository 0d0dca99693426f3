"""Tests of the tokenizer.

It converts text to the same tokens as llama.cpp, and it converts tokens back to the same text.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.llama_peer import Llama
from cbtop.compute.errors import ComputeError, ModelError
from cbtop.compute.gguf import GgufFile
from cbtop.compute.tokenizer import BEGINS, PATTERNS, SPACE, Tokenizer, read_tokenizer

from .rewritten import rewritten
from .vocabularies import COUNT, Keys, byte_level, gemma, sentence_piece

pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'cbtop[text]'")

TEXTS = [
    "", " ", "a", "Hello world", "  two  spaces  ", "don't WE'LL it's", "1234567", "x1y22z333", "a\n\n b\r\n\tc  ",
    "l'été, über Straßen", "привет мир", "你好世界。", "👩‍👩‍👧 🇩🇪 ñ n\u0303", "<|im_start|>user\nhi<|im_end|>\n",
    "a<mine>b <mine> c", "<|im_end", "\x00\x1b[31m\x7f", "a\u00a0b\u3000c\u2028d", "$5 += ^~|<=>", "tokens " * 40,
    "<start_of_turn>user\nHi  you<end_of_turn>\n", "a" + 7 * "\n" + "   b<td> </td>",
]  # fmt: skip

VOCABULARIES: dict[str, Callable[[], Keys]] = {
    **{pre: lambda pre=pre: byte_level(pre) for pre in PATTERNS},
    "llama": sentence_piece,
    "llama without a space before": lambda: sentence_piece() | {"tokenizer.ggml.add_space_prefix": False},
    "gemma": gemma,
    "qwen2 that begins with a token": lambda: byte_level() | {"tokenizer.ggml.add_bos_token": True},
}


@pytest.fixture(scope="module", params=list(VOCABULARIES))
def path(request: pytest.FixtureRequest, model_files: dict[str, Path], tmp_path_factory: Any) -> Path:
    keys = VOCABULARIES[request.param]()
    return rewritten(model_files["qwen2"], tmp_path_factory.mktemp("words") / "model.gguf", keys)


def tokenizer_of(path: Path) -> Tokenizer:
    with GgufFile.open(path) as file:
        return read_tokenizer(file)


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return tokenizer_of(path)


@pytest.fixture(scope="module")
def llama(path: Path) -> Iterator[Llama]:
    pytest.importorskip("xllamacpp", reason="xllamacpp is not installed: pip install xllamacpp")
    found = Llama(path)
    yield found
    found.close()


def test_llama_cpp_makes_the_same_tokens_of_a_text(tokenizer: Tokenizer, llama: Llama) -> None:
    assert {text: tokenizer.encode(text) for text in TEXTS} == {text: llama.tokens_of(text) for text in TEXTS}


def test_llama_cpp_reads_the_same_bytes_and_the_same_ends_from_tokens(tokenizer: Tokenizer, llama: Llama) -> None:
    assert list(tokenizer.pieces) == [llama.piece_of(token) for token in range(COUNT)]
    assert tokenizer.ends == {token for token in range(COUNT) if llama.is_end(token)}


def test_any_text_becomes_tokens_and_the_same_text_again(tokenizer: Tokenizer, path: Path) -> None:
    with GgufFile.open(path) as file:
        is_of_bytes = file.metadata.text("tokenizer.ggml.model") == "gpt2"

    @given(st.text(max_size=60).filter(lambda text: "<" not in text))  # control tokens have no text
    @example(f"a{SPACE}b c")  # In SentencePiece, the sign that stands for a space cannot be told apart from a space.
    def check(text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text)) == (text if is_of_bytes else text.replace(SPACE, " "))

    check()


def test_a_character_split_over_several_tokens_is_shown_with_the_last(
    model_files: dict[str, Path], tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(rewritten(model_files["qwen2"], tmp_path / "model.gguf", byte_level()))
    tokens = tokenizer.encode("😀")
    stream = tokenizer.stream()
    assert len(tokens) > 1
    assert [stream.text_of(token) for token in tokens] == [""] * (len(tokens) - 1) + ["😀"]
    assert [stream.text_of(token) for token in tokens[:-1]] == [""] * (len(tokens) - 1)
    assert stream.rest() == "�"


@pytest.mark.parametrize(
    ("vocabulary", "changed", "wanted"),
    [
        (dict, {}, "has no tokenizer, so that it takes no prompt"),
        (byte_level, {"pre": "tekken\x1b"}, r"cuts words as 'tekken\x1b'; supported are default,"),
        (byte_level, {"model": "bert"}, "a tokenizer of kind 'bert'; supported are gpt2 and llama"),
        (byte_level, {"token_type": [1, 2]}, "2 elements of tokenizer.ggml.token_type for 512"),
        (byte_level, {"tokens": ["a" * 1025] * COUNT}, "a token of 1,025 characters, over the"),
        (byte_level, {"merges": ["nowhere is"]}, "has a vocabulary that is none"),
        (byte_level, {"merges": ["apart"]}, "has a vocabulary that is none"),
        (byte_level, {"eos_token_id": COUNT}, "has '512' as tokenizer.ggml.eos_token_id"),
        (sentence_piece, {"scores": [1.0]}, "1 elements of tokenizer.ggml.scores for 512 tokens"),
    ],
)
def test_what_would_make_other_tokens_is_refused_by_its_name(
    model_files: dict[str, Path], tmp_path: Path, vocabulary: Callable[[], Keys], changed: Keys, wanted: str
) -> None:
    keys = vocabulary() | {f"tokenizer.ggml.{name}": value for name, value in changed.items()}
    with pytest.raises(ModelError) as caught:
        tokenizer_of(rewritten(model_files["qwen2"], tmp_path / "model.gguf", keys))
    assert wanted in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_the_library_one_line_says_what_is_missing(
    model_files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = rewritten(model_files["qwen2"], tmp_path / "model.gguf", byte_level())
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ComputeError, match=r"not installed: pip install 'cbtop\[text\]'$"):
        tokenizer_of(path)


def test_what_is_no_unicode_text_is_refused(model_files: dict[str, Path], tmp_path: Path) -> None:
    tokenizer = tokenizer_of(rewritten(model_files["qwen2"], tmp_path / "model.gguf", byte_level()))
    with pytest.raises(ComputeError, match="is not UTF-8"):
        tokenizer.encode("\udcff")


def test_a_text_begins_with_a_token_of_its_own_where_the_vocabulary_wants_it() -> None:
    assert set(PATTERNS) > BEGINS
