"""Tests of the GitHub workflow in docs/gate.md: it uses our action correctly.

The tests in tests/ci run the action.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from cbtop.version import __version__

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/gate.md"


class _Strict(yaml.SafeLoader):
    """A YAML loader that rejects duplicate keys and reads `on` as a string, as GitHub does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value]
        assert len(set(keys)) == len(keys), f"twice in {node.start_mark}: {keys}"
        return super().construct_mapping(node, deep)


_Strict.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in known if tag != "tag:yaml.org,2002:bool"]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def steps() -> list[dict[str, Any]]:
    """Return the steps of the workflow's only job. Check that the workflow has only keys that GitHub knows."""
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (text,) = [block for block in blocks if "runs-on:" in block]
    workflow = yaml.load(text, _Strict)
    assert (set(workflow), workflow["on"]) == ({"name", "on", "jobs"}, "pull_request")
    (job,) = workflow["jobs"].values()
    assert (set(job), job["runs-on"]) == ({"runs-on", "steps"}, "ubuntu-latest")
    found: list[dict[str, Any]] = job["steps"]
    assert all(set(step) in ({"uses"}, {"uses", "with"}, {"run"}) for step in found)
    return found


def test_the_workflow_gives_the_action_inputs_that_it_has() -> None:
    _, python, _, gate = steps()
    assert (python["uses"], python["with"]["python-version"]) == ("actions/setup-python@v5", "3.12")
    assert gate["uses"] == f"OWNER/cbtop@v{__version__}"
    inputs = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))["inputs"]
    required = {name for name, one in inputs.items() if one.get("required")}
    assert required <= set(gate["with"]) <= set(inputs)


def test_the_page_explains_every_input_of_the_action() -> None:
    text = PAGE.read_text(encoding="utf-8")
    (table,) = re.findall(r"\| input \|.*?\n\n", text, re.DOTALL)
    inputs = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))["inputs"]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == list(inputs)
