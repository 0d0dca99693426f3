"""Tests of occupancy: the result equals NVIDIA's own computation.

Each suggested change is the smallest that helps.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.profiler.analysis.machine_code.occupancy import (
    BARRIERS,
    BLOCKS,
    LIMITS,
    REGISTERS,
    SHARED,
    WARPS,
    BlockShape,
    capability_of,
    occupancy_of,
)
from cbtop.profiler.analysis.machine_code.tools import Tool, tools

HERE = Path(__file__).parent
ARCHITECTURES = [f"sm_{major}{minor}" for major, minor in LIMITS]
NUMBER_OF_CASES = 20_000


def blocks_on_sm(architecture: str, block: BlockShape) -> int:
    occupancy = occupancy_of(architecture, block)
    assert occupancy is not None
    return occupancy.blocks


def test_blocks_of_480_kernels_are_those_of_the_nvidia_header() -> None:
    with (HERE / "data" / "occupancy.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["architecture"] for row in rows} == set(ARCHITECTURES)
    for row in rows:
        block = BlockShape(*(int(row[name]) for name in ("threads", "registers", "shared_bytes", "barriers")))
        assert blocks_on_sm(row["architecture"], block) == int(row["blocks"]), row


@pytest.mark.slow
def test_blocks_are_those_that_the_installed_header_computes(tmp_path: Path) -> None:
    header = next((one for one in map(_header, tools("ptxas")) if one.is_file()), None)
    compiler = shutil.which("g++")
    if header is None or compiler is None:
        pytest.skip("no cuda_occupancy.h next to a ptxas, or no g++")
    program = tmp_path / "nvidia"
    subprocess.run([compiler, "-I", header.parent, HERE / "nvidia_occupancy.cpp", "-o", program], check=True)
    random = Random(45)
    cases = [
        (capability, _block(random, LIMITS[capability].shared_bytes - LIMITS[capability].reserved_shared_bytes))
        for capability in random.choices([one for one in LIMITS if one != (10, 3)], k=NUMBER_OF_CASES)
    ]  # Compute capability 10.3 is left out, because CUDA 13.0 and 13.5 disagree on its barriers.
    lines = "\n".join(_line(*one) for one in cases)
    printed = subprocess.run([program], input=lines, capture_output=True, text=True, check=True).stdout.split()
    ours = [blocks_on_sm(f"sm_{major}{minor}", block) for (major, minor), block in cases]
    assert ours == list(map(int, printed))


def _header(tool: Tool) -> Path:
    return Path(tool.path).parent.parent / "include" / "cuda_occupancy.h"


def _block(random: Random, most_shared: int) -> BlockShape:
    shared = random.choice([0, random.randint(0, 20_000), random.randint(0, most_shared)])
    return BlockShape(
        random.randint(1, 1024), random.randint(1, 255), shared, random.choice([1, random.randint(0, 16)])
    )


def _line(capability: tuple[int, int], block: BlockShape) -> str:
    limits = LIMITS[capability]
    numbers = (*capability, limits.warps, limits.shared_bytes, limits.reserved_shared_bytes)
    return " ".join(map(str, (*numbers, block.threads, block.registers, block.shared_bytes, block.barriers)))


BLOCK = st.builds(
    BlockShape,
    threads=st.integers(1, 1024),
    registers=st.integers(1, 255),
    shared_bytes=st.integers(0, 100_000),
    barriers=st.integers(0, 16),
)


@given(st.sampled_from(ARCHITECTURES), BLOCK)
def test_a_gain_is_the_smallest_saving_that_gives_more_blocks(architecture: str, block: BlockShape) -> None:
    now = occupancy_of(architecture, block)
    assert now is not None
    for resource in (REGISTERS, SHARED):
        most = block.registers - 1 if resource == REGISTERS else block.shared_bytes
        step = 1 if resource == REGISTERS else max(most // 50, 1)
        savings = [
            number
            for number in range(1, most + 1, step)
            if blocks_on_sm(architecture, _less(block, resource, number)) > now.blocks
        ]
        if now.gain is not None and now.gain.resource == resource:
            amount = -now.gain.amount
            assert blocks_on_sm(architecture, _less(block, resource, amount)) == now.gain.blocks > now.blocks
            assert blocks_on_sm(architecture, _less(block, resource, amount - 1)) == now.blocks
        elif now.gain is None:
            assert not savings


def _less(block: BlockShape, resource: str, amount: int) -> BlockShape:
    registers, shared = (amount, 0) if resource == REGISTERS else (0, amount)
    return BlockShape(block.threads, block.registers - registers, block.shared_bytes - shared, block.barriers)


@given(st.sampled_from(ARCHITECTURES), BLOCK)
def test_a_loss_is_the_smallest_addition_that_costs_a_block(architecture: str, block: BlockShape) -> None:
    now = occupancy_of(architecture, block)
    assert now is not None
    by_registers = [
        (more, blocks_on_sm(architecture, _less(block, REGISTERS, -more))) for more in range(1, 256 - block.registers)
    ]
    expected = next(((more, blocks) for more, blocks in by_registers if blocks < now.blocks), None)
    assert (None if now.loss is None else (now.loss.amount, now.loss.blocks)) == expected


@pytest.mark.parametrize(
    ("architecture", "block", "blocks", "limiters"),
    [
        ("sm_90", BlockShape(256, 24, 0), 8, (WARPS,)),
        ("sm_90", BlockShape(32, 16, 0), 32, (BLOCKS,)),
        ("sm_90", BlockShape(256, 64, 0), 4, (REGISTERS,)),
        # Each thread has 8 more registers, so only three of four blocks fit.
        ("sm_90", BlockShape(256, 72, 0), 3, (REGISTERS,)),
        ("sm_90", BlockShape(128, 32, 100_000), 2, (SHARED,)),
        ("sm_90", BlockShape(128, 32, 0, barriers=16), 4, (BARRIERS,)),
        # Barriers limit the number of blocks only from compute capability 9.0 on.
        ("sm_80", BlockShape(128, 32, 0, barriers=16), 16, (WARPS, REGISTERS)),
        ("sm_90", BlockShape(1024, 65, 0), 0, (REGISTERS,)),
        ("sm_90", BlockShape(1025, 32, 0), 0, (WARPS,)),
        ("sm_90", BlockShape(128, 32, 232_449), 0, (SHARED,)),
        ("sm_90a", BlockShape(128, 32, 232_448), 1, (SHARED,)),
    ],
)
def test_limiters_are_the_resources_that_run_out(
    architecture: str, block: BlockShape, blocks: int, limiters: tuple[str, ...]
) -> None:
    occupancy = occupancy_of(architecture, block)
    assert occupancy is not None
    assert (occupancy.blocks, occupancy.limiters) == (blocks, limiters)
    assert occupancy.warps == blocks * -(-block.threads // 32)


def test_limits_that_are_not_known_give_no_occupancy() -> None:
    assert occupancy_of("sm_107", BlockShape(128, 32, 0)) is None
    assert occupancy_of("gfx942", BlockShape(128, 32, 0)) is None


@pytest.mark.parametrize("block", [BlockShape(0, 32, 0), BlockShape(32, 0, 0)])
def test_a_block_without_threads_or_registers_is_an_error(block: BlockShape) -> None:
    with pytest.raises(ValueError, match="expected 1 or more"):
        occupancy_of("sm_90", block)


def test_a_compute_capability_is_read_from_an_architecture() -> None:
    texts = ("sm_90", "sm_90a", "sm_120f", "sm_103", "sm_9", "sm_90x", "compute_90", "", "sm_٩٠")
    assert [capability_of(one) for one in texts] == [(9, 0), (9, 0), (12, 0), (10, 3), *[None] * 5]
