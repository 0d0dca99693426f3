"""Read the file of a contract strictly: a wrong key or a wrong value is an error that names the key."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

import yaml

from cbtop.compute.contracts.expressions import Expression, ExpressionError, parsed
from cbtop.compute.contracts.terms import ArgumentChange, Condition
from cbtop.compute.errors import ContractError

# The keys that every contract has.
TERMS = ("equations", "arguments", "tolerance", "preconditions", "postconditions", "falsification")
# libyaml reads the contracts in 0.03 s, and PyYAML's loader in Python in 0.3 s. PyYAML may have been built without
# libyaml.
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _UniqueKeys(LOADER):  # type: ignore[misc]
    """A loader that refuses a key that is there twice. YAML itself would silently take the last value."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        found: set[str] = set()
        for key, _ in node.value:
            if isinstance(key.value, str):
                if key.value in found:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} twice", key.start_mark)
                found.add(key.value)
        return super().construct_mapping(node, deep)


def document_of(file: str, text: str) -> Any:
    """Return the YAML document in `text`. Raises ContractError, which names `file`."""
    try:
        return yaml.load(text, _UniqueKeys)
    except yaml.YAMLError as error:
        raise ContractError(f"{file} is not YAML: {' '.join(str(error).split())}") from error


class TermsReader:
    """Reads the parts of one contract's file. Errors are ContractError, and name the file and the wrong key."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._arguments: tuple[str, ...] = ()

    def fields(self, name: str, said: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of `Terms`. `said` has the keys TERMS, and `name` is the name of the contract."""
        self._arguments = self.texts("arguments", said["arguments"])
        faults = self.mapping("falsification", said["falsification"], ("outputs", "arguments"))
        return {
            "name": name,
            "equations": self.text("equations", said["equations"]),
            "arguments": self._arguments,
            "tolerance": self.number("tolerance", said["tolerance"]),
            "preconditions": self._conditions("precondition", said["preconditions"]),
            "postconditions": self._conditions("postcondition", said["postconditions"], after=True),
            "output_faults": self.texts("falsification.outputs", faults["outputs"]),
            "argument_faults": tuple(
                self._change(f"falsification.arguments: {fault}", fault, changes)
                for fault, changes in self.pairs("falsification.arguments", faults["arguments"])
            ),
        }

    def _conditions(self, kind: str, found: Any, *, after: bool = False) -> tuple[Condition, ...]:
        conditions = []
        for text, changes in self.pairs(f"{kind}s", found):
            name = f"{kind} {text}"
            conditions.append(Condition(name, self._expression(name, text, after), self._change(name, name, changes)))
        return tuple(conditions)

    def _change(self, key: str, name: str, found: Any) -> ArgumentChange:
        values = {}
        for argument, value in self.pairs(key, found):
            if argument not in self._arguments:
                raise self.wrong(key, f"changes {argument!r}; arguments are {', '.join(self._arguments)}")
            values[self._arguments.index(argument)] = self._expression(f"{key}: {argument}", str(value))
        return ArgumentChange(name, values)

    def _expression(self, key: str, text: str, after: bool = False) -> Expression:
        try:
            expression = parsed(text, self._arguments)
        except ExpressionError as error:
            raise self.wrong(key, str(error)) from error
        if expression.earlier and not after:
            raise self.wrong(key, "asks for old values, which only a postcondition has")
        return expression

    def mapping(self, key: str, found: Any, wanted: tuple[str, ...]) -> dict[str, Any]:
        said = dict(self.pairs(key, found))
        if unknown := [name for name in said if name not in wanted]:
            meant = "".join(f"did you mean {name}? " for name in get_close_matches(unknown[0], wanted, n=1))
            raise self.wrong(key, f"{unknown[0]!r} is not a key; {meant}keys are {', '.join(wanted)}")
        if missing := [name for name in wanted if name not in said]:
            raise self.wrong(key, f"has no {missing[0]!r}")
        return said

    def pairs(self, key: str, found: Any) -> tuple[tuple[str, Any], ...]:
        if not isinstance(found, dict) or not all([isinstance(name, str) for name in found]):
            raise self.wrong(key, f"is {found!r:.60}; texts with what they are to (`a: b`) are wanted")
        return tuple(found.items())

    def texts(self, key: str, found: Any) -> tuple[str, ...]:
        if not isinstance(found, list) or not all([isinstance(one, str) for one in found]):
            raise self.wrong(key, f"is {found!r:.60}; a list of texts is wanted")
        return tuple(found)

    def text(self, key: str, found: Any) -> str:
        if not isinstance(found, str) or not found.strip():
            raise self.wrong(key, f"is {found!r:.60}; a text is wanted")
        return found.strip()

    def number(self, key: str, found: Any) -> float:
        if not isinstance(found, int | float) or isinstance(found, bool) or not 0 <= found < float("inf"):
            raise self.wrong(key, f"is {found!r:.60}; a number from 0 is wanted (YAML reads 1.0e-5, and not 1e-5)")
        return float(found)

    def wrong(self, key: str, what: str) -> ContractError:
        return ContractError(f"{self._file}: {key}: {what}")
