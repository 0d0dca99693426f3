"""Verify a brick that its author wrote, and lint contract files. Every check must also find planted faults."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cbtop.compute import contracts
from cbtop.compute.contracts.equations import equation_faults, lines_of
from cbtop.compute.contracts.own import OwnContract, is_of_kernel, read_own
from cbtop.compute.errors import ContractError
from cbtop.compute.own_contracts import (
    EqualsReference,
    KeepsContract,
    broken_conditions,
    imported,
    in_order,
    inputs_of,
    on_host,
    reference_of,
    resolved,
    values_of,
)
from cbtop.compute.verification import FAULTS, REFERENCE, Verified
from cbtop.profiler.checks import Check, CheckOutcome
from cbtop.profiler.definitions import BrickDefinition
from cbtop.protocol.vocabulary import BrickCategory

SUFFIXES = (".yaml", ".yml")


@contextmanager
def output_to_stderr() -> Iterator[None]:
    """While the author's code runs, send to stderr what it prints. Stdout has the result, which programs read."""
    with redirect_stdout(sys.stderr):
        yield


@dataclass(frozen=True, slots=True)
class OwnBrick:
    """A function that `BrickProfiler.timed` has wrapped, and the definition of its brick."""

    name: str  # module:function
    function: Callable[..., Any]
    definition: BrickDefinition

    @property
    def contract(self) -> OwnContract | None:
        return next((one.contract for one in self.definition.checks if isinstance(one, KeepsContract)), None)


def own_brick(name: str) -> OwnBrick:
    """Return the brick `module:function`. Raises ContractError if it is no function of a brick with checks."""
    function = resolved(name)
    definition = getattr(function, "__brick__", None)
    if not isinstance(definition, BrickDefinition):
        raise ContractError(f"{name} is not a function with @profiler.timed(BrickDefinition(…)), so it has no checks")
    if not definition.checks:
        raise ContractError(f"{name}: {definition.name} has no checks; pass checks=(…) or contract='FILE.yaml'")
    return OwnBrick(name, inspect.unwrap(function), definition)


def cases_of(brick: OwnBrick, cases: str | None) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the arguments of each call to try, with a name for the call.

    `cases` is `module:function`, a function that yields tuples of arguments. By default, the cases come from the
    brick's contract. Raises ContractError if there are none.
    """
    if cases is not None:
        count = 0
        for count, arguments in enumerate(resolved(cases)(), 1):
            yield f"case {count}", tuple(arguments)
        if not count:
            raise ContractError(f"{cases} yields no arguments, so there is nothing to check")
        return
    if brick.contract is None:
        raise ContractError(f"{brick.name} has no contract with cases; pass --cases module:function")
    for number in range(len(brick.contract.cases)):
        yield f"case {number + 1}", tuple(in_order(brick.contract, inputs_of(brick.contract, number)))


def verify_brick(brick: OwnBrick, calls: Iterable[tuple[str, tuple[Any, ...]]]) -> list[Verified]:
    """Call the brick with the arguments of each call, evaluate its checks, and plant faults that they must find.

    `calls` are pairs of a name and arguments. A fault is missed if no call reveals it. Faults are planted only in
    calls that pass all checks.
    """
    tried = [_Tried.of(brick, how, arguments) for how, arguments in calls]
    found = {name for one in tried for name, is_found in one.planted if is_found}
    return [one.verified(brick, found) for one in tried]


@dataclass(frozen=True, slots=True)
class _Tried:
    """One call of a brick: the checks that failed, and for each planted fault, whether a check found it."""

    how: str
    failed: Sequence[str]
    outcomes: Sequence[CheckOutcome]
    planted: Sequence[tuple[str, bool]]

    @classmethod
    def of(cls, brick: OwnBrick, how: str, arguments: tuple[Any, ...]) -> _Tried:
        try:
            output = brick.function(*arguments)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the author's function failed, and this is what is reported
            return cls(how, [f"the call raises {type(error).__name__}: {error}"], [], [])
        outcomes = [_evaluated(check, output, arguments) for check in brick.definition.checks]
        failed = [
            f"{check.name}: {outcome.note}" if outcome.note else check.name
            for check, outcome in zip(brick.definition.checks, outcomes, strict=True)
            if not outcome.passed
        ]
        return cls(how, failed, outcomes, [] if failed else list(_planted(brick, arguments, output)))

    def verified(self, brick: OwnBrick, found: Collection[str]) -> Verified:
        """Return the result of this call. `found` are the faults that any call has revealed."""
        errors = [one.max_error for one in self.outcomes if one.max_error is not None]
        return Verified(
            kernel=brick.name,
            contract=brick.contract.name if brick.contract else "",
            bricks=(brick.definition.name,),
            how=self.how,
            peer=REFERENCE if errors else "",
            sizes=(),
            max_error=max(errors, default=None),
            not_finite=next((one.not_finite for one in self.outcomes if one.not_finite), ""),
            tolerance=max((one.tolerance for one in self.outcomes if one.tolerance is not None), default=0.0),
            failed=tuple(self.failed),
            planted=len(self.planted),
            missed=tuple(dict.fromkeys(name for name, _ in self.planted if name not in found)),
        )


def _evaluated(check: Check, output: Any, arguments: tuple[Any, ...]) -> CheckOutcome:
    try:
        return check.evaluate(output, arguments, {})
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the author's check or reference failed, and this is what is reported
        return CheckOutcome(False, note=f"raises {type(error).__name__}: {error}")


def _planted(brick: OwnBrick, arguments: tuple[Any, ...], output: Any) -> Iterator[tuple[str, bool]]:
    """Plant faults in the output, and the contract's faults. Yields each name, and whether a check found it."""
    contract = brick.contract
    outputs = list(output) if isinstance(output, tuple | list) else [output]
    for place, right in enumerate(outputs):
        for fault in contract.output_faults if contract else FAULTS:
            wrong = np.array(on_host(right))
            FAULTS[fault](wrong)
            if not np.array_equal(wrong, on_host(right)):  # otherwise the fault changes nothing here
                changed = [*outputs[:place], _like(wrong, right), *outputs[place + 1 :]]
                found = changed if isinstance(output, tuple | list) else changed[0]
                is_found = any(not _evaluated(check, found, arguments).passed for check in brick.definition.checks)
                yield _in_output(fault, place, len(outputs)), is_found
    if contract is None:
        return
    inputs = dict(zip(inspect.signature(reference_of(contract)).parameters, arguments, strict=True))
    yield from _planted_in_arguments(contract, inputs, output)
    values = values_of(contract, inputs, output)
    yield from contract.broken(values, values)


def _in_output(fault: str, place: int, count: int) -> str:
    return f"{fault} in output {place + 1}" if count > 1 else fault


def _like(values: Any, array: Any) -> Any:
    """Return `values` as an array of the same library, type and device as `array`."""
    if hasattr(array, "detach"):
        import torch

        return torch.from_numpy(values).to(dtype=array.dtype, device=array.device)
    if isinstance(array, np.ndarray):
        return values.astype(array.dtype)
    import cupy

    return cupy.asarray(values, array.dtype)


def _planted_in_arguments(
    contract: OwnContract, inputs: Mapping[str, Any], output: Any
) -> Iterator[tuple[str, bool]]:
    """Compute the reference with changed arguments. The checks must reject its output for the unchanged arguments."""
    reference, values = reference_of(contract), values_of(contract, inputs, output)
    checks = EqualsReference(contract), KeepsContract(contract)
    arguments = tuple(in_order(contract, inputs))
    for fault in contract.argument_faults:
        changed = dict(zip(contract.arguments, fault.of(values), strict=True))
        given = {name: _as_given(changed[name], inputs[name]) for name in contract.inputs}
        with np.errstate(all="ignore"):
            wrong = reference(*in_order(contract, given))
        if not np.array_equal(on_host(wrong), on_host(output)):
            yield fault.name, any(not _evaluated(check, wrong, arguments).passed for check in checks)


def _as_given(value: Any, given: Any) -> Any:
    return _like(value, given) if isinstance(value, np.ndarray) and hasattr(given, "dtype") else value


def contract_files(folder: Path) -> list[Path]:
    """Return the contract files below a folder, or the file itself."""
    if folder.is_file():
        return [folder]
    return sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())


@output_to_stderr()
def bound_contracts(modules: Iterable[str]) -> set[Path]:
    """Return the contract files of the functions in `modules` that `BrickProfiler.timed` has wrapped.

    Functions in classes of a module count, too. Raises ContractError if a module cannot be imported.
    """
    found: set[Path] = set()
    for name in modules:
        try:
            module = imported(name)
        except SystemExit as error:
            raise ContractError(f"{name}: importing it calls sys.exit({error.code!r})") from error
        classes = [one for one in vars(module).values() if isinstance(one, type)]
        for one in (member for holder in (module, *classes) for member in vars(holder).values()):
            definition = getattr(one, "__brick__", None)
            checks = definition.checks if isinstance(definition, BrickDefinition) else ()
            found |= {check.contract.path.resolve() for check in checks if isinstance(check, KeepsContract)}
    return found


@output_to_stderr()
def lint(path: Path) -> list[str]:
    """Return the faults of a contract file: unreadable parts, missing bindings, and what no case falsifies."""
    try:
        if is_of_kernel(path):
            of_kernel = contracts.read(path.stem, path.read_text(encoding="utf-8"))
            return _lint_equations(path, of_kernel.arguments, ())  # `cbtop verify` falsifies these contracts
        contract = read_own(path)
        if faults := _lint_equations(path, contract.arguments, contract.outputs):
            return faults
        reference_of(contract)
    except (ContractError, OSError, UnicodeDecodeError) as error:
        return [str(error).removeprefix(f"{path}: ")]
    except SystemExit as error:
        return [f"reference: importing its module calls sys.exit({error.code!r})"]
    unknown = [f"falsification.outputs: {name!r} is unknown" for name in contract.output_faults if name not in FAULTS]
    if unknown:
        return [f"{unknown[0]}; faults are {', '.join(FAULTS)}"]
    return list(dict.fromkeys(_lint_cases(contract)))


def _lint_equations(path: Path, arguments: Sequence[str], outputs: Sequence[str]) -> list[str]:
    """Return the equations that do not parse. Other contracts of the folder are functions in them."""
    others = [file.stem for file in contract_files(path.parent)]
    faults = equation_faults(lines_of(path.read_text(encoding="utf-8")), arguments, outputs, others)
    return [f"equations: {fault}" for fault in faults]


def _lint_cases(contract: OwnContract) -> list[str]:
    """Return what the cases show: conditions that do not hold. If all hold, the faults that no case reveals."""
    count = len(contract.outputs)
    unseen = {_in_output(fault, place, count) for fault in contract.output_faults for place in range(count)}
    unseen |= {one.name for one in contract.conditions}
    unseen |= {one.name for one in contract.argument_faults}
    brick = OwnBrick(
        contract.reference,
        reference_of(contract),
        BrickDefinition(
            contract.name, BrickCategory.OTHER, checks=(EqualsReference(contract), KeepsContract(contract))
        ),
    )
    faults: list[str] = []
    for number in range(len(contract.cases)):
        try:
            inputs = inputs_of(contract, number)
            output = brick.function(*in_order(contract, inputs))
            failed = broken_conditions(contract, values_of(contract, inputs, output))
        except ContractError as error:
            faults.append(str(error).removeprefix(f"{contract.path}: "))
            continue
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the author's reference failed, and this is what is reported
            faults.append(f"case {number + 1}: the reference raises {type(error).__name__}: {error}")
            continue
        faults += [f"case {number + 1}: {name} does not hold" for name in failed]
        if not failed:
            found = list(_planted(brick, tuple(in_order(contract, inputs)), output))
            unseen -= {name for name, is_found in found if is_found}
    # A case that failed may have revealed the rest.
    return faults or [f"{name}: no case falsifies it" for name in sorted(unseen)]
