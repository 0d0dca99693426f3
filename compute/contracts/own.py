"""The contract file of a brick that its author wrote: its terms, its reference, and inputs to try it with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cbtop.compute.contracts.reader import TERMS, TermsReader, document_of
from cbtop.compute.contracts.terms import Terms
from cbtop.compute.errors import ContractError

KEYS = (*TERMS, "outputs", "reference", "cases", "arrays", "bindings", "through")
# A contract of cbtop's own kernels has this key. Their inputs and references are in Python.
OF_KERNEL = "performance"
DTYPES = (
    "float16", "float32", "float64", "bfloat16", "complex64", "complex128", "int8", "int32", "int64", "uint8",
)  # fmt: skip
BFLOAT16 = "bfloat16"  # NumPy has no such type: the values are drawn in float32
# the libraries of the arrays that a brick gets, each with a device if it has several
NUMPY, ARRAYS = "numpy", ("numpy", "torch", "torch:cuda", "cupy")
BINDINGS, NO_BINDING = ("cpu", "gpu"), "none: "
MAX_VALUES = 1 << 24  # limit for the values of an input
MAX_FILE_BYTES = 1 << 20


def _sparse(values: Any) -> Any:
    """Return the values with about one element of eight, and zeros. The last element of a row is never zero."""
    places = np.arange(values.size).reshape(values.shape)
    is_last = places % values.shape[-1] == values.shape[-1] - 1
    return np.where((places * 2_654_435_761 % 4096 < 512) | is_last, values, 0)


# the forms of matrices that a case can ask for, each with a function of drawn values
FORMS: dict[str, Callable[[Any], Any]] = {
    "symmetric": lambda values: (values + values.T) / 2,
    "positive definite": lambda values: values @ values.T + len(values) * np.eye(len(values)),
    "lower triangular": lambda values: np.tril(values) + len(values) * np.eye(len(values)),
    "sparse": _sparse,
}


@dataclass(frozen=True, slots=True)
class Drawn:
    """An input that is drawn at random: an array of this shape.

    The values are standard normal, or uniform from `low` to `high`. They are then given a form of FORMS, if any.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    low: float | None = None
    high: float | None = None
    form: str = ""

    def values(self, random: np.random.Generator) -> Any:
        """Return the array: of `shape` and `dtype`, but float32 for bfloat16."""
        values = self._plain(random)
        return FORMS[self.form](values).astype(values.dtype) if self.form else values

    def _plain(self, random: np.random.Generator) -> Any:
        dtype = np.dtype("float32" if self.dtype == BFLOAT16 else self.dtype)
        if dtype.kind == "c":
            return (random.standard_normal(self.shape) + 1j * random.standard_normal(self.shape)).astype(dtype)
        if self.low is None or self.high is None:
            return random.standard_normal(self.shape).astype(dtype)
        if dtype.kind in "iu":
            return random.integers(round(self.low), round(self.high), self.shape, endpoint=True).astype(dtype)
        return random.uniform(self.low, self.high, self.shape).astype(dtype)


@dataclass(frozen=True, slots=True)
class OwnContract(Terms):
    """A contract of a brick. `outputs` are the arguments that the brick returns, in this order.

    `reference` is `module:function`, a slow function with the same meaning. Each of the `cases` has a value for every
    input. `arrays` is the library of the arrays in the cases, one of ARRAYS.

    The contract of a library's function has `bindings`: `module:function` for each of BINDINGS. A text that begins
    with NO_BINDING has the reason why it is missing. `through` is `module:function`, which is called with the bound
    function and the inputs, and returns the outputs. Without it, the bound function gets the inputs.
    """

    path: Path
    outputs: tuple[str, ...]
    reference: str
    cases: tuple[Mapping[str, Drawn | float], ...]
    arrays: str
    bindings: Mapping[str, str] = field(default_factory=dict)
    through: str = ""

    @property
    def inputs(self) -> tuple[str, ...]:
        """The arguments that a call gets, in the order of the contract."""
        return tuple(name for name in self.arguments if name not in self.outputs)

    def values_of(self, number: int) -> dict[str, Any]:
        """Return the inputs of a case, as arrays of NumPy and numbers. They are the same at every call."""
        random = np.random.default_rng([number, len(self.arguments)])
        case = self.cases[number]
        return {name: one.values(random) if isinstance(one, Drawn) else one for name, one in case.items()}


def read_own(path: Path) -> OwnContract:
    """Return the contract in the file at `path`. Raises ContractError, which names the file and the wrong key."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ContractError(f"{path} is larger than {MAX_FILE_BYTES:,} bytes, so it is no contract")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ContractError(f"{path}: {why}") from error
    reader = TermsReader(str(path))
    document = document_of(str(path), text)
    if isinstance(document, dict):
        document = {"arrays": NUMPY, "bindings": {}, "through": ""} | document
    said = reader.mapping("the file", document, KEYS)
    terms = reader.fields(path.stem, {key: said[key] for key in TERMS})
    outputs = reader.texts("outputs", said["outputs"])
    if unknown := [name for name in outputs if name not in terms["arguments"]]:
        raise reader.wrong("outputs", f"{unknown[0]!r} is not one of the arguments")
    if not outputs:
        raise reader.wrong("outputs", "is empty; name what the brick returns")
    reference = reader.text("reference", said["reference"])
    if not all(reference.partition(":")):
        raise reader.wrong("reference", f"is {reference!r}; module:function is expected")
    if said["arrays"] not in ARRAYS:
        raise reader.wrong("arrays", f"is {said['arrays']!r}; {', '.join(ARRAYS)} are known")
    inputs = [name for name in terms["arguments"] if name not in outputs]
    cases = tuple(_cases(reader, said["cases"], inputs))
    drawn = [value for case in cases for value in case.values() if isinstance(value, Drawn)]
    if said["arrays"] == NUMPY and any(one.dtype == BFLOAT16 for one in drawn):
        raise reader.wrong("arrays", f"is numpy, which has no {BFLOAT16}; torch has it")
    return OwnContract(
        **terms, path=path, outputs=outputs, reference=reference, cases=cases, arrays=said["arrays"],
        bindings=_bindings(reader, said["bindings"]), through=said["through"],
    )  # fmt: skip


def is_of_kernel(path: Path) -> bool:
    """Return whether the file is a contract of one of cbtop's own kernels. Raises ContractError if it is not YAML."""
    document = document_of(str(path), path.read_text(encoding="utf-8"))
    return isinstance(document, dict) and OF_KERNEL in document


def _bindings(reader: TermsReader, found: Any) -> dict[str, str]:
    if not found:
        return {}
    said = reader.mapping("bindings", found, BINDINGS)
    for key, value in said.items():
        text = reader.text(f"bindings.{key}", value)
        if not text.startswith(NO_BINDING) and not all(text.partition(":")):
            raise reader.wrong(f"bindings.{key}", f"is {text!r}; module:function is expected, or {NO_BINDING}REASON")
    return said


def _cases(reader: TermsReader, found: Any, inputs: list[str]) -> Iterator[dict[str, Drawn | float]]:
    if not isinstance(found, list) or not found:
        raise reader.wrong(
            "cases", f"is {found!r:.60}; a list of cases is expected, each with a value for every input"
        )
    for number, case in enumerate(found):
        key = f"cases: case {number + 1}"
        said = reader.mapping(key, case, tuple(inputs))
        yield {name: _value(reader, f"{key}: {name}", value) for name, value in said.items()}


def _value(reader: TermsReader, key: str, found: Any) -> Drawn | float:
    if isinstance(found, int | float):
        return found
    if isinstance(found, list):
        return Drawn(_shape(reader, key, found))
    given = dict(reader.pairs(key, found))
    bounds = {"low": 0.0, "high": 1.0} if "form" not in given else {"low": None, "high": None}
    said = reader.mapping(
        key, {"dtype": "float32", "form": ""} | bounds | given, ("shape", "dtype", "low", "high", "form")
    )
    if said["dtype"] not in DTYPES:
        raise reader.wrong(key, f"has the dtype {said['dtype']!r}; dtypes are {', '.join(DTYPES)}")
    shape = _shape(reader, key, said["shape"])
    if said["form"] and (said["form"] not in FORMS or len(shape) != 2):
        raise reader.wrong(key, f"has the form {said['form']!r}; forms of matrices are {', '.join(FORMS)}")
    low, high = (
        None if said[name] is None else _bound(reader, f"{key}: {name}", said[name]) for name in ("low", "high")
    )
    return Drawn(shape, said["dtype"], low, high, said["form"])


def _shape(reader: TermsReader, key: str, found: Any) -> tuple[int, ...]:
    is_shape = isinstance(found, list) and all([type(one) is int and one > 0 for one in found])
    if not is_shape or np.prod(found, dtype=object) > MAX_VALUES:
        raise reader.wrong(key, f"is {found!r:.60}; a number, or a shape such as [3, 64] is expected")
    return tuple(found)


def _bound(reader: TermsReader, key: str, found: Any) -> float:
    if isinstance(found, bool) or not isinstance(found, int | float) or not abs(found) < 1e18:
        raise reader.wrong(key, f"is {found!r:.60}; a number is expected")
    return float(found)
