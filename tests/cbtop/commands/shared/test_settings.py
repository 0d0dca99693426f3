"""Settings of config.toml and the environment: their precedence, and warnings about invalid ones."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from cbtop.cli import main
from cbtop.commands.shared.settings import check_values, config_file, read_config, unknown_keys
from cbtop.commands.shared.show import SETTINGS, add_show_arguments, settle_options
from cbtop.errors import UsageError

RECORDING = str(Path(__file__).parents[2] / "imperfect.cbtop")
FILE = """\
view = "bricks"
sort = "p95"
color = false
window = 20
silence = ["odd-layer"]

[preset.slow]
sort = "max µs"
filter = "ffn"
"""


def write(text: str) -> Path:
    path = config_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def settled(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_show_arguments(parser)
    options = parser.parse_args(arguments)
    settle_options(options)
    return options


def test_without_a_file_everything_has_its_default() -> None:
    options = settled()
    assert {key: getattr(options, key) for key in SETTINGS} == {
        key: setting.default for key, setting in SETTINGS.items()
    }


def test_the_file_lies_where_xdg_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert config_file() == Path(os.environ["HOME"]) / ".config" / "cbtop" / "config.toml"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert config_file() == tmp_path / "cbtop" / "config.toml"


def test_the_help_says_where_it_lies(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for home, shown in (("", "~/.config/cbtop/config.toml"), ("/100 %d", "/100 %d/cbtop/config.toml")):
        monkeypatch.setenv("XDG_CONFIG_HOME", home)
        with pytest.raises(SystemExit, match="0"):
            main(["--help"])
        assert f"[preset.NAME] in {shown}" in " ".join(capsys.readouterr().out.split())


def test_a_flag_wins_over_a_preset_over_the_environment_over_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    write(FILE)
    assert (settled().sort, settled().view, settled().window) == ("incl p95", "bricks", 20.0)
    monkeypatch.setenv("CBTOP_SORT", "min")
    assert settled().sort == "incl min"
    assert (settled("--preset", "slow").sort, settled("--preset", "slow").filter) == ("incl max", "ffn")
    assert settled("--preset", "slow", "--sort", "count").sort == "count"


def test_what_is_a_list_is_replaced_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    write(FILE)
    assert settled().silence == ["odd-layer"]
    assert settled("--silence", "stuck").silence == ["stuck"]
    monkeypatch.setenv("CBTOP_SILENCE", "stuck,warm-up")
    assert settled().silence == ["stuck", "warm-up"]


def test_no_color_counts_where_it_is_not_empty_and_a_flag_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    write("color = true\nascii = true\n")
    assert (settled().color, settled().ascii, settled("--no-ascii").ascii) == (True, True, False)
    monkeypatch.setenv("NO_COLOR", "")
    assert settled().color is True
    monkeypatch.setenv("NO_COLOR", "1")
    assert settled().color is False
    assert settled("--color").color is True


def test_an_unknown_key_is_named_with_line_and_nearest_and_the_report_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write('# mine\nvieww = "bricks"\n\n[preset.slow]\nsort = "p95"\nsrot = "p99"\n')
    assert main(["replay", RECORDING, "--headless", "--view", "layers"]) == 0
    said = capsys.readouterr()
    first, second = said.err.splitlines()
    assert first.startswith(f"cbtop: {path}, line 2: unknown key 'vieww'; did you mean view? there are view, window,")
    assert second.startswith(f"cbtop: {path}, line 6: unknown key 'srot'; did you mean sort? there are view,")
    assert "Layer 8" in said.out


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('theme = "drak"', ", line 1: theme: unknown theme 'drak'; did you mean dark? there are dark, light"),
        ("ascii = 3", ", line 1: ascii: '3' is neither true nor false"),
        ('\nsilence = "stuck"', ", line 2: silence: 'stuck' is not a list"),
        ("sort = {}", ", line 1: sort: expected a single value"),
        ("[view]\nx = 1", ", line 1: view: expected a single value"),
        ("window = 0", ", line 1: window: '0' is not between 1 and 3600 seconds"),
        ("view = x", ": Invalid value (at line 1, column 8)"),
    ],
)
def test_a_value_that_cannot_be_is_told_with_file_and_line_and_ends_with_2(
    text: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(text)
    assert main(["replay", RECORDING, "--headless"]) == 2
    assert f"cbtop: {path}{complaint}" in capsys.readouterr().err


def test_a_file_that_is_no_text_ends_with_2_and_no_traceback() -> None:
    write("").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"config\.toml"):
        settled()


def test_a_variable_that_cannot_be_meant_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CBTOP_THEME", "lihgt")
    with pytest.raises(UsageError, match="CBTOP_THEME: theme: unknown theme 'lihgt'; did you mean light"):
        settled()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("preset = 5\n", "preset is not a table [preset.NAME]"),
        ("[preset]\nsort = 'p95'\n", "'sort' is not a table [preset.NAME]"),
    ],
)
def test_a_preset_that_is_no_table_is_told(text: str, why: str) -> None:
    path = write(text)
    (told,) = unknown_keys(read_config(), SETTINGS)
    assert told == f"{path}, line {text.count(chr(10))}: {why}; it is ignored"
    check_values(read_config(), SETTINGS)


def test_a_preset_nobody_wrote_is_told_with_the_nearest() -> None:
    path = write(FILE)
    with pytest.raises(UsageError, match=f"--preset: unknown preset 'slwo'; did you mean slow.*tables of {path}"):
        settled("--preset", "slwo")


def test_doctor_says_which_file_is_read_and_what_is_wrong_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    from cbtop.commands import doctor

    def facts() -> list[tuple[str, str]]:
        return [(fact.value, fact.state) for fact in doctor._config()]

    assert facts() == [(f"none: there is no {config_file()}", "ok")]
    path = write(FILE + "x = 1\n")
    (unknown, _), (named, state) = facts()
    assert unknown.startswith(f"{path}, line 10: unknown key 'x'")
    assert (named, state) == (f"{path}, presets slow", "ok")
    write(FILE.replace("max µs", "nothing"))
    ((trouble, state),) = facts()
    assert trouble.startswith(f"{path}, line 8: sort: unknown column 'nothing'")
    assert state == "missing"
