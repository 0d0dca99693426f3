"""Format failed checks as SARIF 2.1.0 (OASIS standard), which code hosts show next to the lines concerned."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from cbtop.version import __version__

VERSION = "2.1.0"
SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
BASE = "%SRCROOT%"  # placeholder that hosts replace with the root of the checkout


@dataclass(frozen=True, slots=True)
class SarifRule:
    """A rule that is checked, and the place that defines it: a file of the checkout and its line, from 1."""

    id: str
    means: str
    file: str
    line: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure of a rule, with a message. `level` is `error`, `warning` or `note`."""

    rule: SarifRule
    message: str
    level: str = "error"


def sarif(rules: Sequence[SarifRule], failures: Sequence[Failure]) -> str:
    """Return a SARIF log of one run, with every rule and a result for each failure."""
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
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": quote(failure.rule.file), "uriBaseId": BASE},
                        "region": {"startLine": failure.rule.line},
                    }
                }
            ],
        }
        for failure in failures
    ]
    run = {"tool": {"driver": driver}, "results": results}
    return json.dumps({"$schema": SCHEMA, "version": VERSION, "runs": [run]}) + "\n"
