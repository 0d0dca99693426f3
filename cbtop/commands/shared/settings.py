"""Read the user's settings from `config.toml`, its presets and the environment.

Rules
- Priority: an option, the preset of `--preset`, the environment, the file, the default.
- An unknown key is reported in a line on stderr with the nearest known one, and the program continues, because a
  newer cbtop may share the file. An invalid value is a usage error, as in an option.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbtop.commands.shared.names import unknown
from cbtop.errors import UsageError

PRESET = "preset"
# The name of an environment variable for an option is this prefix and the name of the option in capital letters.
VARIABLES = "CBTOP_"
NO_COLOR = "NO_COLOR"


@dataclass(frozen=True, slots=True)
class SettingsKey:
    """A key of `config.toml` that sets the option with the same name. `parse` is the argparse type of the option."""

    parse: Callable[[str], Any]
    default: Any = None
    is_list: bool = False


@dataclass(frozen=True, slots=True)
class Config:
    """The content of `config.toml`. If the file does not exist, `tables` is empty."""

    path: Path
    is_there: bool
    text: str
    tables: Mapping[str, Any]

    @property
    def presets(self) -> Mapping[str, Any]:
        """The tables of the presets in `config.toml`, by the name of the preset."""
        found = self.tables.get(PRESET, {})
        return found if isinstance(found, dict) else {}

    def place(self, key: str, table: str = "") -> str:
        """Return where `key` is in the settings file, such as `FILE, line 3`. If the key is not found, returns the
        name of the file alone.
        """
        inside = ""
        for number, line in enumerate(self.text.splitlines(), 1):
            if head := re.match(r"\s*\[([^\[\]]+)\]", line):
                inside = re.sub(r"[\s\"']", "", head[1])
                if inside == f"{table}.{key}".lstrip("."):
                    return f"{self.path}, line {number}"
            elif inside == table and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[=.]", line):
                return f"{self.path}, line {number}"
        return str(self.path)


def config_file() -> Path:
    """Return the path of config.toml in `$XDG_CONFIG_HOME/cbtop`, or else in `~/.config/cbtop`.

    The file may not exist.
    """
    return Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")) / "cbtop" / "config.toml"


def read_config() -> Config:
    """Read the settings file, if it exists. Raises UsageError if it cannot be read."""
    import tomllib  # imported here, because most users have no config file

    path = config_file()
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return Config(path, False, "", {})
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        return Config(path, True, text, tomllib.loads(text))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{path}: {error}") from error


def settle(options: argparse.Namespace, settings: Mapping[str, SettingsKey]) -> None:
    """Set each option that is not on the command line from the settings. Raises UsageError for an invalid value."""
    config = read_config()
    for told in unknown_keys(config, settings):
        sys.stderr.write(f"cbtop: {told}\n")
    layers = (
        _preset(config, getattr(options, PRESET, None), settings),
        _environment(settings),
        _file(config, settings),
    )
    for key, setting in settings.items():
        if getattr(options, key, None) is None:
            found = (layer[key] for layer in layers if key in layer)
            setattr(options, key, next(found, setting.default))


def unknown_keys(config: Config, settings: Mapping[str, SettingsKey]) -> Iterator[str]:
    """Yield a line about each unknown key of the settings file."""
    if not isinstance(config.tables.get(PRESET, {}), dict):
        yield f"{config.place(PRESET)}: {PRESET} is not a table [{PRESET}.NAME]; it is ignored"
    for name, table in config.presets.items():
        if not isinstance(table, dict):
            yield f"{config.place(name, PRESET)}: {name!r} is not a table [{PRESET}.NAME]; it is ignored"
    tables = {"": config.tables} | {f"{PRESET}.{name}": table for name, table in config.presets.items()}
    for table, found in tables.items():
        if isinstance(found, dict):
            known = [*settings, *(() if table else (PRESET,))]
            for key in found:
                if key not in known:
                    yield f"{config.place(key, table)}: {unknown('key', key, known)}; it is ignored"


def check_values(config: Config, settings: Mapping[str, SettingsKey]) -> None:
    """Raise UsageError if the settings file or one of its presets has an invalid value."""
    for name in (None, *(name for name, table in config.presets.items() if isinstance(table, dict))):
        _preset(config, name, settings)
    _file(config, settings)


def _file(config: Config, settings: Mapping[str, SettingsKey]) -> dict[str, Any]:
    return {
        key: _value(settings[key], value, config.place(key), key)
        for key, value in config.tables.items()
        if key in settings
    }


def _preset(config: Config, name: str | None, settings: Mapping[str, SettingsKey]) -> dict[str, Any]:
    if name is None:
        return {}
    if not isinstance(table := config.presets.get(name), dict):
        raise UsageError(f"--preset: {unknown('preset', name, config.presets)}; presets are tables of {config.path}")
    return {
        key: _value(settings[key], value, config.place(key, f"{PRESET}.{name}"), key)
        for key, value in table.items()
        if key in settings
    }


def _environment(settings: Mapping[str, SettingsKey]) -> dict[str, Any]:
    found = {}
    for key, setting in settings.items():
        if text := os.environ.get(name := VARIABLES + key.upper()):
            found[key] = _value(setting, text.split(",") if setting.is_list else text, name, key)
    if os.environ.get(NO_COLOR):
        found.setdefault("color", False)
    return found


def _value(setting: SettingsKey, value: object, place: str, key: str) -> Any:
    try:
        if not setting.is_list:
            return setting.parse(_text(value))
        if not isinstance(value, list):
            raise argparse.ArgumentTypeError(f'{value!r} is not a list, such as ["a", "b"]')
        return [setting.parse(_text(one)) for one in value]
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{place}: {key}: {error}") from error


def _text(value: object) -> str:
    """Return a value of the settings file as the text that a user would type on the command line."""
    if isinstance(value, dict | list):
        raise argparse.ArgumentTypeError("expected a single value")
    return str(value).lower() if isinstance(value, bool) else str(value)


def yes_or_no(text: str) -> bool:
    """Parse `true` or `1` as True, and `false` or `0` as False, for argparse."""
    known = {"true": True, "1": True, "false": False, "0": False}
    if text.casefold() not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return known[text.casefold()]
