"""A watched program computes the same and saves the same as it does without cbtop, to the bit.

Each program in `programs/` runs bare, under `cbtop run`, and under `cbtop run --overhead 100% --record FILE`. These
must be identical: the exit code, stdout, stderr except for lines that begin with `cbtop:`, and each file that the
program saves. cbtop prints no line of its own twice, and records something.

To add a program
- Write `programs/KIND_WHAT.py`. It may import `small` (in `lib/`), which fixes the seed and takes one thread.
- Print numbers with `show`, which prints every bit. Print no times, addresses or paths of the working directory.
- It takes 0.5 to 6 s, needs no network, and prints the same in each run: `python -m tests.identity.runs KIND_WHAT`.
- `make soak` runs it. Add it to `NAMES` in `programs/several_in_turn.py` if no other program in there covers its kind
  and it does not import transformers, which takes longer than all of them.
"""

from __future__ import annotations

import re

import pytest

from tests.identity.runs import PROGRAMS, differences, missing_packages, repeated_notices, run_all

pytest.importorskip("torch", reason="torch is not installed: make torch")

# The summary of a guard that found nothing. It gives no advice, because these runs record every step that they can.
NO_FAULT = re.compile(
    r"cbtop: guard: checked [\d,]+ of [\d,]+ steps?, no fault(; --overhead 100% checks nearly all)?\n"
)
BY_DEFAULT = {"several_in_turn"}  # about 10 s on a quiet machine with 2 cores


@pytest.mark.parametrize(
    "name", [name if name in BY_DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in PROGRAMS]
)
def test_a_watched_program_computes_and_saves_the_same(name: str) -> None:
    missing = missing_packages(PROGRAMS[name])
    if missing:
        pytest.skip(f"{name} needs {', '.join(missing)}: make torch")
    bare, default, every_step = run_all(PROGRAMS[name], ["bare", "default", "every step"])
    assert differences(bare, default) == []
    assert differences(bare, every_step) == []
    assert repeated_notices(default) + repeated_notices(every_step) == []
    assert every_step.is_recorded


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_guarded_program_computes_and_saves_the_same(name: str) -> None:
    if missing_packages(PROGRAMS[name]):
        pytest.skip(f"{name} needs {', '.join(missing_packages(PROGRAMS[name]))}: make torch")
    bare, guarded = run_all(PROGRAMS[name], ["bare", "guarded"])
    assert differences(bare, guarded) == []
    assert repeated_notices(guarded) == []
    alarms = [line for line in guarded.notices if "guard" in line or "output of" in line]
    assert [line for line in alarms if not NO_FAULT.fullmatch(line)] == []


def test_each_program_of_the_default_subset_exists() -> None:
    assert PROGRAMS.keys() >= BY_DEFAULT
