"""Tests of the setting that `cbtop run --guard=WHAT` takes."""

from __future__ import annotations

import math

import pytest

from cbtop.profiler.guard_setting import GuardSetting, guard_setting


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("log", GuardSetting()),
        ("stop", GuardSetting(stops=True)),
        ("dump", GuardSetting(dumps=True)),
        ("dump:/tmp/a b", GuardSetting(dumps=True, directory="/tmp/a b")),
        ("stop,dump:faults,abs<=1e4", GuardSetting(True, True, "faults", 1e4)),
        ("abs<=3", GuardSetting(bound=3.0)),
    ],
)
def test_a_setting_has_reactions_and_a_bound(text: str, setting: GuardSetting) -> None:
    assert guard_setting(text) == setting
    assert guard_setting("log").bound == math.inf


@pytest.mark.parametrize("text", ["", "halt", "stop,", "abs<=", "abs<=0", "abs<=-1", "abs<=nan", "abs<=inf", "abs<1"])
def test_other_settings_are_refused_with_what_was_expected(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        guard_setting(text)
