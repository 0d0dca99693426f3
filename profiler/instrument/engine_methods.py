"""Compare the methods of an engine's classes with the methods that cbtop uses."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

from cbtop.profiler.instrument.trouble import log_once

Methods = Mapping[str, tuple[str, ...]]  # a method -> its first parameters after `self`
Contract = Mapping[tuple[str, str], Methods]  # module and class -> the methods that cbtop uses


def unlike(found: Mapping[str, list[str]], methods: Methods) -> list[str]:
    """Return the methods that are not in `found`, or have other first parameters there. `found` includes `self`."""
    return [
        name for name, expected in methods.items() if found.get(name, [])[: 1 + len(expected)] != ["self", *expected]
    ]


def differences(owner: Any, methods: Methods) -> list[str]:
    """Return the methods that `owner`, a class, lacks or defines with unexpected first parameters."""
    found = {}
    for name in methods:
        try:
            found[name] = list(inspect.signature(vars(owner)[name]).parameters)
        except (KeyError, TypeError, ValueError):
            continue
    return unlike(found, methods)


def owners_of(contract: Contract, package: str, seen_in: tuple[str, ...], lost: str) -> dict[tuple[str, str], Any]:
    """Return the imported classes of `contract`. Return {} if one of them differs, and log one line.

    The line names the `package`, the versions that the contract was compared with, and the figures that are `lost`.
    """
    owners = {key: getattr(sys.modules.get(key[0]), key[1], None) for key in contract}
    for key, owner in owners.items():
        if other := differences(owner, contract[key]):
            log_once(f"this {package} has no {key[1]}.{' or '.join(other)} as in {', '.join(seen_in)}: {lost}")
            return {}
    return owners
