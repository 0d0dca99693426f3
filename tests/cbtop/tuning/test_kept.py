"""Tests of stored results of `cbtop tune`: they are validated.

Each result is used only for its own model and machine.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cbtop.errors import CbtopError
from cbtop.tuning import kept
from cbtop.tuning.kept import KeptSetting, known_settings, settings_file, store_setting, stored_setting
from cbtop.tuning.measuring import Setting, TuningRequest
from cbtop.tuning.paired import PairedTest
from cbtop.tuning.tuner import Candidate, Try, Tuned

FASTER = PairedTest("request", 10, (200, 204, 198, 201, 199, 203), (100, 101, 99, 100, 102, 98))


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" * 4)
    return path


def found(best: Setting, *pairs: PairedTest) -> Tuned:
    tries = tuple(Try(Candidate(best, "", None), Setting(1), (pair,)) for pair in pairs)
    return Tuned(TuningRequest(8, 2), Setting(1), best, (), tries, (), None, 0.0, False)


def test_a_result_is_given_back_only_for_the_same_model_and_processors(model: Path) -> None:
    assert stored_setting(model, 2) is None
    store_setting(model, found(Setting(2, True, "f32"), FASTER), 2)
    one = stored_setting(model, 2)
    assert one is not None
    assert one.setting == Setting(2, True, "f32")
    assert (one.ratio, one.ratio_low, one.ratio_high) == (FASTER.ratio, *(FASTER.interval or ()))
    assert one.text.endswith(f"2.01 ({one.ratio_low:.2f} to {one.ratio_high:.2f}) times as fast as --threads 1")
    assert stored_setting(model, 4) is None
    model.write_bytes(b"GGUF" * 5)
    assert stored_setting(model, 2) is None


def test_what_is_found_anew_replaces_what_was_found_before(model: Path) -> None:
    store_setting(model, found(Setting(2), FASTER), 2)
    store_setting(model, found(Setting(1), PairedTest("request", 10, FASTER.b_ns, FASTER.a_ns)), 2)
    (one,) = known_settings()
    assert (one.setting, one.ratio) == (Setting(1), None)
    assert one.text.endswith(": nothing tried beside --threads 1 was faster")


def test_the_newest_are_kept(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MAX_KEPT", 2)
    for processors in (1, 2, 3):
        store_setting(model, found(Setting(1), FASTER), processors)
    assert [one.processors for one in known_settings()] == [2, 3]


def one_of(**changed: object) -> bytes:
    fields = {
        "k": "KeptSetting", "model": "m", "model_bytes": 1, "cpu": "c", "processors": 1, "threads": 1,
        "is_exact": False, "cache_type": "f16", "beside": "", "ratio": None, "ratio_low": None, "ratio_high": None,
        "measured_on": "2026-11-24",
    }  # fmt: skip
    return json.dumps({"schema": "cbtop.tuned/1", "settings": [fields | changed]}).encode()


def test_a_file_that_is_as_it_should_be_is_read() -> None:
    settings_file().parent.mkdir(parents=True)
    settings_file().write_bytes(one_of())
    assert isinstance(known_settings()[0], KeptSetting)


NO_SETTINGS = {
    "nothing": b"",
    "a list": b"[]",
    "no JSON": b"{",
    "no UTF-8": b"\xff",
    "another schema": b'{"schema": "cbtop.tuned/2", "settings": []}',
    "no list": b'{"schema": "cbtop.tuned/1", "settings": 7}',
    "no maps": b'{"schema": "cbtop.tuned/1", "settings": [7]}',
    "too large": b" " * (1 << 20) + b"{}",
    "too deep": b"[" * 100_000,
    "no threads": one_of(threads=0),
    "an unknown cache": one_of(cache_type="q4"),
    "a text for a number": one_of(threads="2"),
    "no model": one_of(model=None),
}


@pytest.mark.parametrize("text", NO_SETTINGS.values(), ids=NO_SETTINGS)
def test_a_file_that_holds_no_settings_is_one_line_and_is_written_anew(text: bytes, model: Path) -> None:
    settings_file().parent.mkdir(parents=True)
    settings_file().write_bytes(text)
    with pytest.raises(CbtopError, match=r"tuned\.json holds no settings: .*; cbtop tune writes it anew"):
        stored_setting(model, 2)
    store_setting(model, found(Setting(2), FASTER), 2)
    assert stored_setting(model, 2) is not None


def test_a_cache_that_cannot_be_written_is_one_line(model: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no directory")
    with pytest.raises(CbtopError, match=r"Not a directory|File exists"):
        store_setting(model, found(Setting(2), FASTER), 2)
