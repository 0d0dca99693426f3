"""Tests that a new block format needs only one file and one line in a list."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cbtop

# The source of a new block format: like Q8_0, with the scale after the weights.
OWN_FILE = '''
"""Q8_2: 32 signed bytes, then their scale."""

from dataclasses import replace

import numpy as np

from cbtop.compute.jit.compile import jit, load_half
from cbtop.compute.jit.vectors import load_signed_bytes, multiply, splat, to_floats
from cbtop.compute.quantization.base import BlockFormat, of_halves
from cbtop.compute.quantization.planes import PlaneLayout
from cbtop.compute.quantization.q8_0 import Q8_0
from cbtop.compute.quantization.rows import row_functions


def _unpack(blocks):
    return of_halves(blocks[:, 32:]) * blocks[:, :32].view(np.int8).astype(np.float32)


def _pack(blocks):
    return np.roll(Q8_0.pack(blocks), -2, axis=1)


@jit
def _sixteen(weights, row, base, part):
    scale = splat(load_half(weights, row, base + np.uint64(32)))
    return multiply(to_floats(load_signed_bytes(weights, row, base + part * np.uint64(16))), scale)


Q8_2 = BlockFormat(
    "Q8_2", 99, 32, 34, _unpack, _pack, *row_functions("q8_2", 32, 34, _sixteen), largest=Q8_0.largest,
    planes=PlaneLayout((8,), lambda blocks: blocks[:, :32], ((32, 34),), Q8_0.planes.source.replace("Q8_0", "Q8_2")),
    interleaved=replace(Q8_0.interleaved, units=((2, 1, (32,)), (4, 8, (0,)))),
)
'''
LINE = '    "Q8_2": "q8_2",\n'

# A program that prints which kernels of the new format `cbtop verify` tests, and how many of them pass. The program
# uses one case of each kernel.
VERIFIED = """
import json
from cbtop.commands.demo import DESCRIPTION
from cbtop.compute.gguf_header import SUPPORTED_TYPES
from cbtop.compute.kernels.linear_bf16 import LINEAR_BF16
from cbtop.compute.verification import REFERENCE, Variant, variants, verified
own = [one for one in variants() if one.kernel.name.startswith("q8_2_") and one.peer == REFERENCE]
firsts = {one.kernel.name: one for one in reversed([*own, Variant(LINEAR_BF16[99])])}
passed = {name for name, one in firsts.items() if verified(one, (7,)).passed}
is_listed = "NF4, Q8_2)" in DESCRIPTION and SUPPORTED_TYPES.endswith(", Q8_2")
print(json.dumps([sorted(firsts), sorted(passed), is_listed]))
"""
KERNELS = "expert_gated", "expert_linear", "gated", "linear", "qkv"


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Copy the source files of cbtop and add the new format to the copy."""
    ours = tmp_path / "cbtop"
    shutil.copytree(Path(cbtop.__file__).parent, ours, ignore=shutil.ignore_patterns("__pycache__"))
    (ours / "compute" / "quantization" / "q8_2.py").write_text(OWN_FILE)
    formats = ours / "compute" / "block_formats.py"
    before, brace, after = formats.read_text().rpartition("}")
    formats.write_text(before + LINE + brace + after)
    return tmp_path


@pytest.mark.slow
def test_a_file_and_a_line_make_a_format_that_every_kernel_multiplies(sources: Path) -> None:
    done = subprocess.run([sys.executable, "-c", VERIFIED], cwd=sources, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names, passed, is_listed = json.loads(done.stdout)
    own = {f"q8_2_{name}{end}" for name in KERNELS for end in ("", "_int8")}
    assert set(names) == own | {"q8_2_linear_bf16", "q8_2_linear_backward"}
    assert passed == names
    assert is_listed
