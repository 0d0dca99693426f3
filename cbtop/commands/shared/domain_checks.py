"""Verify functions of libraries for `cbtop verify --domain`, and write the results as text, JSON or JUnit."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from cbtop.commands.shared.junit import junit
from cbtop.commands.shared.names import unknown
from cbtop.commands.shared.progress import ProgressLine
from cbtop.errors import FailedCheckError, UsageError
from cbtop.reports.tables import Table, table
from cbtop.units import count as counted

if TYPE_CHECKING:  # imported for types only, because Numba loads slowly
    from cbtop.compute.libraries.verification import LibraryCheck

ALL = "all"
SCHEMA = "cbtop.verify-domain/1"


def check_domain(domain: str, backend: str, line: ProgressLine) -> list[LibraryCheck]:
    """Return the results of all contracts of a domain, or of all domains. `backend` is cpu or cuda.

    Raises UsageError for an unknown domain, or if nothing could be checked, and FailedCheckError if a contract or a
    function is missing.
    """
    from cbtop.compute.errors import ContractError
    from cbtop.compute.libraries import DOMAINS, library_contract, not_implemented
    from cbtop.compute.libraries.verification import require_gpu, verify_library

    if domain not in DOMAINS and domain != ALL:
        raise UsageError(unknown("domain", domain, [*DOMAINS, ALL]))
    chosen = [(one, name) for one, names in DOMAINS.items() if domain in (one, ALL) for name in names]
    found: list[LibraryCheck] = []
    try:
        if missing := not_implemented():
            raise FailedCheckError(f"AllImplemented does not hold: {'; '.join(missing)}")
        if backend == "cuda":
            require_gpu()
        for done, (one, name) in enumerate(chosen):
            line.show(f"verifying: {name}", done / len(chosen))
            found += verify_library(one, library_contract(name), "gpu" if backend == "cuda" else "cpu")
    except ContractError as error:
        raise UsageError(str(error)) from error
    finally:
        line.clear()
    if all(check.skipped for check in found):
        raise UsageError(f"nothing of {domain} could be checked: {found[0].contract}: {found[0].skipped}")
    return found


def failed_names(checks: Sequence[LibraryCheck]) -> list[str]:
    """Return the contract, function and case of each check that failed."""
    return [
        f"{one.contract} by {_dotted(one)} ({one.result.how})"
        for one in checks
        if one.result is not None and not one.result.passed
    ]


def _dotted(check: LibraryCheck) -> str:
    return check.function.replace(":", ".")


def _text(checks: Sequence[LibraryCheck]) -> str:
    rows: Table = [("", "contract", "function", "case", "error", "allowed", "µs/call", "planted faults")]
    lines = []
    for one in checks:
        result = one.result
        if result is None:
            rows.append(("–", one.contract, _dotted(one), f"skipped: {one.skipped}", "", "", "", ""))
            continue
        error = result.not_finite or ("" if result.max_error is None else f"{result.max_error:.1e}")
        rows.append(
            (
                "✓" if result.passed else "✗", one.contract, _dotted(one), result.how,
                error, f"{result.tolerance:.1e}",
                "" if one.call_us is None else f"{one.call_us:.1f}",
                "MISSED: " + ", ".join(result.missed) if result.missed else f"{result.planted} found",
            )
        )  # fmt: skip
        if result.failed:
            lines.append(f"✗ {one.contract} {result.how}: fails {', '.join(result.failed)}")
    results = [one.result for one in checks if one.result is not None]
    skipped = len({one.contract for one in checks if one.skipped})
    passed = f"{sum(one.passed for one in results)} of {len(results)} cases pass"
    planted = f"{counted(sum(one.planted for one in results))} faults were planted"
    rest = f"; {skipped} contract{'s were' if skipped > 1 else ' was'} skipped" if skipped else ""
    return "\n".join([table(rows, left=4), *lines, "", f"{passed}; {planted}{rest}", _all_implemented()]) + "\n"


def _all_implemented() -> str:
    """Return a line about AllImplemented, which `check_domain` has checked."""
    from cbtop.compute.contracts.own import NO_BINDING
    from cbtop.compute.libraries import DOMAINS, library_contract

    bindings = [library_contract(name).bindings for names in DOMAINS.values() for name in names]
    on_gpu = sum(not one["gpu"].startswith(NO_BINDING) for one in bindings)
    return f"AllImplemented holds: {len(bindings)} contracts have a function of the CPU, {on_gpu} one of the GPU"


def _json(checks: Sequence[LibraryCheck]) -> str:
    found = [asdict(one) | {"passed": one.result.passed if one.result else None} for one in checks]
    return json.dumps({"schema": SCHEMA, "checks": found}, allow_nan=False) + "\n"


def _junit(checks: Sequence[LibraryCheck]) -> str:
    cases = []
    for one in checks:
        failures: list[str] = []
        if one.result is not None:
            failures = [*one.result.failed, *(f"does not notice {fault}" for fault in one.result.missed)]
        name = f"{one.contract} {_dotted(one)}" + (f" {one.result.how}" if one.result else "")
        cases.append((one.domain, name, failures, one.skipped, ""))
    return junit("cbtop verify", [("libraries", cases)])


DOMAIN_FORMATS: dict[str, Callable[[Sequence[LibraryCheck]], str]] = {"text": _text, "json": _json, "junit": _junit}
