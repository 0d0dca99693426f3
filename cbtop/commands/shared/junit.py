"""Format test cases as JUnit XML for CI systems."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.etree import ElementTree as ET

# A test case: (class, name, lines about the failure, reason for skipping, output).
#
# The lines are empty if the test passed.
Case = tuple[str, str, Sequence[str], str, str]


def junit(name: str, suites: Iterable[tuple[str, Iterable[Case]]]) -> str:
    """Return a JUnit XML document with a test suite for each name."""
    root = ET.Element("testsuites", name=name)
    for suite, cases in suites:
        _suite(root, suite, cases)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _suite(suites: ET.Element, name: str, cases: Iterable[Case]) -> None:
    suite = ET.SubElement(suites, "testsuite", name=name)
    tests = failures = left_out = 0
    for of, case, failed, skipped, output in cases:
        element = ET.SubElement(suite, "testcase", classname=of, name=case)
        tests += 1
        if failed:
            failures += 1
            ET.SubElement(element, "failure", message="; ".join(failed))
        elif skipped:
            left_out += 1
            ET.SubElement(element, "skipped", message=skipped)
        elif output:
            ET.SubElement(element, "system-out").text = output
    suite.set("tests", str(tests))
    suite.set("failures", str(failures))
    suite.set("skipped", str(left_out))
