"""Format failed checks as SARIF 2.1.0 (OASIS standard), which code hosts show next to the lines concerned."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from cbtop.version import __version__

VERSION = "2.1.0"
SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
BASE = "%SRCROOT%"  # Code hosts replace this placeholder by the root of the checkout.


@dataclass(frozen=True, slots=True)
class SarifRule:
    """A rule of a SARIF log. The rule is defined at a line (counted from 1) of a file in the checkout."""

    id: str
    means: str
    file: str
    line: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure of a rule, with a message.

    `level` is `error`, `warning` or `note`. If a rule was checked in generated code such as PTX, the failure may be
    at a line of source code. `derived_from` is then the file and line in the generated code.
    """

    rule: SarifRule
    message: str
    level: str = "error"
    derived_from: tuple[str, int] | None = None


def _location(file: str, line: int) -> dict[str, object]:
    base = {} if file.startswith("/") else {"uriBaseId": BASE}
    uri = f"file://{quote(file)}" if file.startswith("/") else quote(file)
    return {"physicalLocation": {"artifactLocation": {"uri": uri, **base}, "region": {"startLine": line}}}


def sarif(rules: Sequence[SarifRule], failures: Sequence[Failure]) -> str:
    """Return a SARIF log of one run. The log has every rule, and one result for each failure."""
    places = {rule.id: place for place, rule in enumerate(rules)}
    driver = {
        "name": "cbtop",
        "version": __version__,
        "rules": [{"id": rule.id, "shortDescription": {"text": rule.means}} for rule in rules],
    }
    results = [
        {
            "ruleId": failure.rule.id,
            "ruleIndex": places[failure.rule.id],
            "level": failure.level,
            "message": {"text": failure.message},
            "locations": [_location(failure.rule.file, failure.rule.line)],
            **({"relatedLocations": [_location(*failure.derived_from)]} if failure.derived_from else {}),
        }
        for failure in failures
    ]
    run = {"tool": {"driver": driver}, "results": results}
    return json.dumps({"$schema": SCHEMA, "version": VERSION, "runs": [run]}) + "\n"
