"""The contracts of kernels, one YAML file per operation. A contract states what the operation computes, the
conditions of a call, and how to break these conditions."""

# All facts about a contract are in its YAML file and nowhere else. Kernels read their tolerance from the file. `cbtop
# verify` and the tests read the faults to plant. Runs with `--check-contracts` read the conditions.

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cbtop.compute.contracts.reader import TERMS, TermsReader, document_of
from cbtop.compute.contracts.terms import Condition, Terms
from cbtop.compute.errors import ContractError

__all__ = ["WEIGHTS", "Condition", "Contract", "Performance", "all_names", "contract", "file_of", "read"]

FOLDER = Path(__file__).parent
# The roof of kernels that read weights: the bandwidth over a working set as large as the model's weights.
WEIGHTS = "weights_read"


@dataclass(frozen=True, slots=True)
class Performance:
    """The speed of a kernel: the share of a roof (peak rate) that it reached when it was measured.

    `roof` is the name of a ceiling (see `ceilings`). Kernels that read weights have the roof WEIGHTS, and only their
    bricks get time budgets.

    A call is a regression if it takes `regression` times as long as was measured.
    """

    roof: str
    fraction: float
    where: str
    when: str
    regression: float


@dataclass(frozen=True, slots=True)
class Contract(Terms):
    """The contract of one of cbtop's own kernels."""

    performance: Performance

    def line_of(self, text: str) -> int:
        """Return the number of the first line of the contract's file that contains `text`, or 1 if no line does."""
        lines = file_of(self.name).read_text(encoding="utf-8").splitlines()
        return next((number for number, line in enumerate(lines, 1) if text in line), 1)


def file_of(name: str) -> Path:
    return FOLDER / f"{name}.yaml"


def all_names() -> tuple[str, ...]:
    """Return the names of all contract files."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


@cache
def contract(name: str) -> Contract:
    """Return the contract in NAME.yaml. Raises ContractError if the file is missing or invalid."""
    path = file_of(name)
    try:
        return read(name, path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ContractError(f"{path}: {error.strerror}; each kernel has a contract") from error


def read(name: str, text: str) -> Contract:
    """Return the contract in `text`. Raises ContractError, which names the file and the wrong key."""
    file = f"contracts/{name}.yaml"
    reader = TermsReader(file)
    said = reader.mapping("the file", document_of(file, text), (*TERMS, "performance"))
    performance = _performance(reader, said.pop("performance"))
    return Contract(**reader.fields(name, said), performance=performance)


def _performance(reader: TermsReader, found: Any) -> Performance:
    said = reader.mapping("performance", found, ("roof", "fraction", "where", "when", "regression"))
    return Performance(
        reader.text("performance.roof", said["roof"]),
        reader.number("performance.fraction", said["fraction"]),
        reader.text("performance.where", said["where"]),
        str(said["when"]),
        reader.number("performance.regression", said["regression"]),
    )
