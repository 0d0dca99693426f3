"""The tokenizer of a safetensors model encodes and decodes as transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cbtop.cli import main
from cbtop.compute.errors import ModelError
from cbtop.compute.tokenizer_file import read_tokenizer_file
from tests.compute.safetensors_models import saved

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

TEXTS = ["the cat sat on the mat and the dog ate the hat", "a naïve café, 3 × 4 = 12", "tabs\tand\nlines 🙂"]
VOCABULARY = 400


def write(folder: Path, kind: str) -> Any:
    """Write a small tokenizer.json: of bytes as GPT-2's, or with spaces as Llama 2's. Return it in transformers."""
    if kind == "bytes":
        library = tokenizers.Tokenizer(tokenizers.models.BPE())
        library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = tokenizers.decoders.ByteLevel()
        alphabet, special = tokenizers.pre_tokenizers.ByteLevel.alphabet(), ["<|endoftext|>"]
    else:
        library = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        library.normalizer = tokenizers.normalizers.Sequence(
            [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
        )
        decoders = tokenizers.decoders
        library.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        alphabet, special = [], ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY - 20, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(TEXTS[:1] * 3, trainer)
    document = json.loads(library.to_str())
    document["added_tokens"] = [one for one in document["added_tokens"] if not one["content"].startswith("<0x")]
    if kind == "spaces":
        document["post_processor"] = json.loads(
            tokenizers.processors.TemplateProcessing(
                single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
            ).__getstate__()
        )
    (folder / "tokenizer.json").write_text(json.dumps(document))
    end = "<|endoftext|>" if kind == "bytes" else "</s>"
    (folder / "config.json").write_text(json.dumps({"eos_token_id": library.token_to_id(end)}))
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))


@pytest.mark.parametrize("kind", ["bytes", "spaces"])
def test_texts_become_the_tokens_of_transformers_and_come_back(kind: str, tmp_path: Path) -> None:
    theirs, ours = write(tmp_path, kind), read_tokenizer_file(tmp_path, VOCABULARY)
    for text in TEXTS:
        tokens = ours.encode(text)
        assert tokens == theirs.encode(text)
        assert ours.decode(tokens) == text
    assert len(ours.pieces) == VOCABULARY
    assert (ours.begin is None) == (kind == "bytes")
    assert ours.ends == frozenset({0 if kind == "bytes" else 2})


def test_a_folder_without_a_tokenizer_or_with_a_wrong_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json does not exist, so that the model takes no prompt"):
        read_tokenizer_file(tmp_path, VOCABULARY)
    write(tmp_path, "bytes")
    with pytest.raises(ModelError, match="has more tokens than the model's 100"):
        read_tokenizer_file(tmp_path, 100)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json is damaged"):
        read_tokenizer_file(tmp_path, VOCABULARY)


@pytest.mark.slow
def test_the_demo_goes_on_with_a_prompt_of_a_safetensors_model(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "bytes")
    saved(tmp_path, "Llama", vocab_size=VOCABULARY)
    options = ["--prompt", "the cat", "--headless", "--steps", "4", "--threads", "1"]
    assert main(["demo", "--model", str(tmp_path), *options]) == 0
    assert "the cat" in capfd.readouterr().err
