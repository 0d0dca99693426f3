"""The checks of a brick with a contract file: its conditions hold, and it equals its reference."""

# Rules
# - The reference is imported at the first check, because the module with the brick may also have the reference.
# - Conditions are evaluated on arrays of NumPy, so values on a device are copied to the host.

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from cbtop.compute.contracts.own import BFLOAT16, NUMPY, Drawn, OwnContract, read_own
from cbtop.compute.errors import ContractError
from cbtop.profiler.checks import PASSED, Check, CheckOutcome, Equivalent

FLOAT32 = np.dtype(np.float32)
HALVES = ("float16", "bfloat16")


def checks_of(path: str | PathLike[str]) -> tuple[Check, ...]:
    """Return the checks that a contract file makes. Raises ContractError if the file is missing or invalid."""
    contract = read_own(Path(path))
    return EqualsReference(contract), KeepsContract(contract)


def imported(module: str, about: str = "") -> Any:
    """Return a module. Raises ContractError if it cannot be imported. The message begins with `about`."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ContractError(f"{about or module}: {error}") from error
    except ContractError:  # of a BrickDefinition in the module
        raise
    except Exception as error:  # the author's module failed, and this is what is reported
        why = f"importing {module} raises {type(error).__name__}: {error}"
        raise ContractError(f"{about or module}: {why}") from error


@cache
def resolved(name: str) -> Any:
    """Return the object with this name, `module:object`. Raises ContractError if there is none."""
    module, _, path = name.partition(":")
    if not module or not path:
        raise ContractError(f"{name!r} is no name of an object; module:object is expected")
    found = imported(module, name)
    for part in path.split("."):
        if not hasattr(found, part):
            raise ContractError(f"{name}: there is no {part!r} in {getattr(found, '__name__', module)}")
        found = getattr(found, part)
    return found


def reference_of(contract: OwnContract) -> Callable[..., Any]:
    """Return the reference of a contract. Raises ContractError unless its parameters are the contract's inputs."""
    found = resolved(contract.reference)
    if not callable(found):
        raise ContractError(f"{contract.path}: reference: {contract.reference} is no function")
    parameters = tuple(inspect.signature(found).parameters)
    if set(parameters) != set(contract.inputs):
        expected = ", ".join(contract.inputs)
        raise ContractError(
            f"{contract.path}: reference: the parameters of {contract.reference} are {', '.join(parameters)}; "
            f"those of the contract are {expected}"
        )
    function: Callable[..., Any] = found
    return function


def inputs_of(contract: OwnContract, number: int) -> dict[str, Any]:
    """Return the inputs of a case, as the brick gets them. Raises ContractError without the library or the device."""
    values = contract.values_of(number)
    if contract.arrays == NUMPY:
        return values
    library, _, device = contract.arrays.partition(":")
    try:
        module: Any = import_module(library)
    except ImportError as error:
        raise ContractError(f"{contract.path}: arrays: {error}") from error
    if device and not getattr(module, device).is_available():
        raise ContractError(f"{contract.path}: arrays: {library} has no device {device} here")
    found = {}
    for name, value in values.items():
        recipe = contract.cases[number][name]
        if isinstance(value, np.ndarray) and library == "torch":
            value = module.from_numpy(value).to(device or "cpu")
            value = value.bfloat16() if isinstance(recipe, Drawn) and recipe.dtype == BFLOAT16 else value
        elif isinstance(value, np.ndarray):
            value = module.asarray(value)
        found[name] = value
    return found


def in_order(contract: OwnContract, inputs: Mapping[str, Any]) -> list[Any]:
    """Return inputs in the order of the parameters of the reference."""
    return [inputs[name] for name in inspect.signature(reference_of(contract)).parameters]


def values_of(contract: OwnContract, inputs: Mapping[str, Any], output: Any) -> tuple[Any, ...]:
    """Return the values that the conditions of a contract are evaluated on. Raises ValueError for missing outputs."""
    outputs = _outputs(output)
    named = dict(inputs) | dict(zip(contract.outputs, outputs, strict=True))
    return tuple(on_host(named[name]) for name in contract.arguments)


def _outputs(output: Any) -> tuple[Any, ...]:
    return tuple(output) if isinstance(output, tuple | list) else (output,)


def on_host(value: Any) -> Any:
    """Return an array of any library as a contiguous array of NumPy. Returns any other value unchanged."""
    kind = type(value)
    if kind is float or kind is int:
        return value
    if kind is np.ndarray and value.flags.c_contiguous and value.dtype.char != "e":  # float16
        return value  # the tests below would take as long as ten conditions
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float().numpy() if str(value.dtype).removeprefix("torch.") in HALVES else value.numpy()
    elif hasattr(value, "get") and hasattr(value, "dtype"):
        value = value.get()
    if not isinstance(value, np.ndarray):
        return value
    return np.ascontiguousarray(value, np.float32 if value.dtype == np.float16 else value.dtype)


@dataclass(frozen=True, slots=True)
class EqualsReference:
    """The check that the output equals the output of the contract's reference, within its tolerance."""

    contract: OwnContract

    @property
    def name(self) -> str:
        return f"equals {self.contract.reference.partition(':')[2]}"

    def evaluate(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CheckOutcome:
        return self._equivalent.evaluate(output, args, kwargs)

    def device_figures(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | CheckOutcome:
        """Return what `Equivalent.device_figures` returns."""
        return self._equivalent.device_figures(output, args, kwargs)

    def outcome_of(self, figures: Sequence[float]) -> CheckOutcome:
        """Return the outcome of these `device_figures`."""
        return self._equivalent.outcome_of(figures)

    @property
    def _equivalent(self) -> Equivalent:
        return Equivalent(reference_of(self.contract), self.contract.tolerance)


@dataclass(frozen=True, slots=True)
class KeepsContract:
    """The check that all conditions of the contract hold. The note names those that do not."""

    contract: OwnContract
    # One element after the first call. Reading a signature takes as long as evaluating 100 conditions.
    _calls: list[_CallValues] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def name(self) -> str:
        return f"contract {self.contract.name}"

    def evaluate(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CheckOutcome:
        if not self._calls:
            self._calls.append(_CallValues.of(self.contract))
        failed = broken_conditions(self.contract, self._calls[0].values(output, args, kwargs))
        return CheckOutcome(False, note="; ".join(failed)) if failed else PASSED


@dataclass(frozen=True, slots=True)
class _CallValues:
    """Finds the values of a contract's arguments among the arguments and the outputs of a call.

    `places` has the index of each value in the arguments followed by the outputs. It is valid for calls with
    `usual_arguments` arguments and without keywords. `usual_arguments` is -1 if the reference has unusual parameters.
    """

    contract: OwnContract
    signature: inspect.Signature
    places: tuple[int, ...]
    usual_arguments: int
    outputs: int

    @classmethod
    def of(cls, contract: OwnContract) -> _CallValues:
        """Raises ContractError if the reference is missing, or has other parameters."""
        signature = inspect.signature(reference_of(contract))
        names = (*signature.parameters, *contract.outputs)
        kinds = {one.kind for one in signature.parameters.values()}
        return cls(
            contract,
            signature,
            tuple(names.index(name) for name in contract.arguments),
            len(signature.parameters) if kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD} else -1,
            len(contract.outputs),
        )

    def values(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Raises TypeError if the arguments do not fit, and ValueError for missing outputs."""
        if kwargs or len(args) != self.usual_arguments:
            bound = self.signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return values_of(self.contract, bound.arguments, output)
        outputs = (output,) if type(output) is ndarray else _outputs(output)
        if len(outputs) != self.outputs:
            raise ValueError(f"{len(outputs)} outputs instead of {self.outputs}")
        given = (*args, *outputs)
        # Most values are arrays of float32. Conditions take them as they are, contiguous or not. Calls of `on_host`
        # would take as long as the conditions.
        return tuple(
            [
                value if type(value := given[place]) is ndarray and value.dtype is FLOAT32 else on_host(value)
                for place in self.places
            ]
        )


def broken_conditions(contract: OwnContract, values: Sequence[Any]) -> list[str]:
    """Return the names of the conditions that do not hold for the values of one call."""
    given = tuple(values)
    found: list[str] = []
    if contract.preconditions and (failed := contract.before.failed(given)):
        found += contract.before.names_of(failed)
    if contract.postconditions and (failed := contract.after.failed(given * 2 if contract.earlier else given)):
        found += contract.after.names_of(failed)
    return found
