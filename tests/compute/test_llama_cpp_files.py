"""Tests of files of every type that llama.cpp's quantiser writes: each runs or is rejected with correct advice.

The types of matrices that the quantiser chose for four shapes are in llama_cpp_types.json. The key "" has the type of
all other matrices. It was recorded with `llama_model_quantize` of the llama.cpp in llama-cpp-cffi 0.4.42 without an
importance matrix, for every `LlamaFileType` of gguf that is accepted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from cbtop.compute import demo_model
from cbtop.compute.decoder import FAMILIES
from cbtop.compute.decoder.base import Model, read_model
from cbtop.compute.decoder.decoder import Decoder
from cbtop.compute.decoder.reference import forward_reference
from cbtop.compute.demo_model import ModelShape, write_model
from cbtop.compute.errors import ModelError
from cbtop.compute.quantization import FORMATS
from cbtop.compute.quantization.base import BlockFormat
from cbtop.compute.quantization.floats import F32
from tests.representatives import each_value_once, first_by_default

# The models are smaller than their names say: they have fewer layers and columns. Their columns can be divided by the
# same block lengths.
SHAPES = {
    "0.5B": ModelShape("qwen2", 224, 7, 1, 512, 3, 512, 64),
    "135M": ModelShape("llama", 288, 9, 3, 768, 3, 512, 64),
    "wide GQA": ModelShape("llama", 512, 16, 2, 768, 3, 512, 64, tied=False),
    "70B": ModelShape("llama", 512, 8, 1, 1792, 3, 512, 64, tied=False),
}
CHOSEN: dict[str, dict[str, dict[str, str]]] = json.loads(
    Path(__file__).with_name("llama_cpp_types.json").read_text()
)
KNOWN = {one.name: one for one in FORMATS.values()}
PROMPT = [3, 141, 59, 26, 5]

Write = Callable[[str, str], Path]


def runs(shape: str, file_type: str) -> bool:
    return set(CHOSEN[shape][file_type].values()) <= KNOWN.keys()


def format_of(name: str) -> BlockFormat:
    """Return the block format with this name.

    If cbtop does not know the name, return a format of the same size that writes zeros.
    """
    if name in KNOWN:
        return KNOWN[name]
    code = GGMLQuantizationType[name]
    elements, size = GGML_QUANT_SIZES[code]

    def zeros(blocks: np.ndarray) -> np.ndarray:
        return np.zeros((len(blocks), size), np.uint8)

    return replace(F32, name=name, code=code.value, block_elements=elements, block_bytes=size, pack=zeros)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return a function that writes a model file with the given shape and file type."""
    tensors: Any = demo_model.tensors_of

    def written(shape: str, file_type: str) -> Path:
        chosen = CHOSEN[shape][file_type]

        def of_types(sizes: ModelShape) -> Iterator[Any]:
            for tensor in tensors(sizes):
                name = chosen.get(tensor.name.removesuffix(".weight"), chosen[""])
                yield replace(tensor, format=format_of(name)) if len(tensor.shape) == 2 else tensor

        monkeypatch.setattr(demo_model, "tensors_of", of_types)
        write_model(tmp_path / "model.gguf", SHAPES[shape], lambda *_: None)
        return tmp_path / "model.gguf"

    return written


FILES = [(shape, file_type) for shape, files in CHOSEN.items() for file_type in files]


# By default, test a selection of the files that has every shape and every file type once.
RUNNING = each_value_once(one for one in FILES if runs(*one))
REFUSED = each_value_once(one for one in FILES if not runs(*one))


@pytest.mark.parametrize(("shape", "file_type"), RUNNING)
def test_a_file_of_llama_cpp_decodes_to_what_its_weights_mean(
    shape: str, file_type: str, write: Write, decoder_for: Callable[[Model, int], Decoder]
) -> None:
    model = read_model(write(shape, file_type), FAMILIES)
    decoder = decoder_for(model, 1)
    sequence = [*PROMPT, decoder.prefill(PROMPT)]
    decoder.decode(sequence[-1])
    expected = forward_reference(model, sequence)[-1]
    assert np.abs(decoder.logits - expected).max() < 1e-3 * np.abs(expected).max()


@first_by_default(("shape", "file_type"), REFUSED, 2)
def test_the_refusal_of_a_file_advises_files_of_the_same_model_that_run(
    shape: str, file_type: str, write: Write
) -> None:
    with pytest.raises(ModelError) as refused:
        read_model(write(shape, file_type), FAMILIES)
    met = re.search(r"is of type (\w+); supported are .*: use a (.*) file of the model, or make", str(refused.value))
    assert met is not None
    assert met[1] in CHOSEN[shape][file_type].values()
    advised = re.split(r", | or ", met[2])
    assert len(advised) > 1
    assert all(runs(shape, name) for name in advised)


def test_what_does_not_run_is_of_formats_that_no_shape_falls_back_to() -> None:
    missing = {
        name for files in CHOSEN.values() for types in files.values() for name in types.values()
    } - KNOWN.keys()
    assert missing == {"IQ3_S", "IQ3_XXS", "TQ1_0"}
