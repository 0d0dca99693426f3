"""Store the fastest settings found by `cbtop tune`, in one JSON file in the user's cache directory."""

# A result is stored for three things: the model, the type of processor, and the number of available processors. A
# model is identified by the name and size of its file. Reading the whole file would take more time than the setting
# saves.

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cbtop.errors import CbtopError
from cbtop.protocol.cache import bytes_of, cache_dir, replace_whole
from cbtop.protocol.codec import plain_for, reader_for
from cbtop.protocol.errors import DecodeError
from cbtop.protocol.roofs import cpu_name
from cbtop.tuning.measuring import Setting
from cbtop.tuning.tuner import Tuned

SCHEMA = "cbtop.tuned/1"
MAX_FILE_BYTES = 1 << 20
MAX_KEPT = 64  # The file contains at most this many settings. The newest remain.


@dataclass(frozen=True, slots=True)
class KeptSetting:
    """A setting of a model that was measured, with the conditions.

    `ratio` is the speed of a request relative to the setting that was used before. The ratio is None if both settings
    are equal or were not measured together. The other fields are the conditions.
    """

    model: str
    model_bytes: int
    cpu: str
    processors: int
    threads: int
    is_exact: bool
    cache_type: str
    beside: str
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    measured_on: str  # date and time of the measurement, ISO 8601

    @property
    def key(self) -> tuple[str, int, str, int]:
        return self.model, self.model_bytes, self.cpu, self.processors

    @property
    def setting(self) -> Setting:
        return Setting(self.threads, self.is_exact, self.cache_type)

    @property
    def text(self) -> str:
        """The setting as text.

        For example `--threads 2, tuned on 2026-11-24: 1.83 (1.71 to 1.95) times as fast as --threads 1`.
        """
        said = f"{self.setting.text}, tuned on {self.measured_on[:10]}"
        if self.ratio is None:
            return (
                f"{said}: nothing tried beside {self.beside} was faster" if self.setting.text == self.beside else said
            )
        interval = f"{self.ratio_low:.2f} to {self.ratio_high:.2f}"
        return f"{said}: {self.ratio:.2f} ({interval}) times as fast as {self.beside}"


_read = reader_for(KeptSetting)
_plain = plain_for(KeptSetting)


def settings_file() -> Path:
    """Return the path of the file with all stored settings."""
    return cache_dir() / "tuned.json"


def store_setting(path: Path, tuned: Tuned, processors: int) -> KeptSetting:
    """Store the result for the model at `path`. An earlier result is replaced.

    Raises CbtopError if the file cannot be written.
    """
    gain = tuned.gain
    low, high = (gain.interval if gain else None) or (None, None)
    new = KeptSetting(
        *_key(path, processors), tuned.best.threads, tuned.best.is_exact, tuned.best.cache_type, tuned.before.text,
        gain.ratio if gain else None, low, high, datetime.now().astimezone().isoformat(timespec="seconds"),
    )  # fmt: skip
    try:
        known = known_settings()
    except CbtopError:
        known = ()  # The file cannot be read, so replace it.
    found = [*(one for one in known if one.key != new.key), new][-MAX_KEPT:]
    document = {"schema": SCHEMA, "settings": [_plain(one) for one in found]}
    file = settings_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_whole(file, json.dumps(document, indent=1).encode())
    except OSError as error:
        raise CbtopError(f"{file}: {error.strerror or error}") from error
    return new


def stored_setting(path: Path, processors: int) -> KeptSetting | None:
    """Return the stored setting for the model at `path`, or None.

    The type and number of processors must match. Raises CbtopError if the file cannot be read.
    """
    wanted = _key(path, processors)
    return next((one for one in known_settings() if one.key == wanted), None)


def known_settings() -> tuple[KeptSetting, ...]:
    """Return all stored settings, the newest last. Raises CbtopError if the file cannot be read."""
    file = settings_file()
    try:
        text = bytes_of(file, MAX_FILE_BYTES)
        return () if text is None else _decoded(text)
    except OSError as error:
        raise CbtopError(f"{file}: {error.strerror or error}") from error
    except (ValueError, RecursionError, DecodeError) as error:
        # A ValueError means that the file is not valid JSON or not UTF-8.
        raise CbtopError(f"{file} holds no settings: {error}; cbtop tune writes it anew") from error


def _decoded(text: bytes) -> tuple[KeptSetting, ...]:
    document = json.loads(text)
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ValueError(f"its schema is not {SCHEMA}")
    settings = document.get("settings")
    if not isinstance(settings, list) or not all(isinstance(one, dict) for one in settings):
        raise ValueError("a list of settings was wanted")
    return tuple(map(_setting, settings[:MAX_KEPT]))


def _setting(raw: dict[str, object]) -> KeptSetting:
    found: KeptSetting = _read(raw)
    if found.cache_type not in ("f16", "f32") or found.threads < 1:
        raise ValueError("a setting is none")
    return found


def _key(path: Path, processors: int) -> tuple[str, int, str, int]:
    return path.name, path.stat().st_size, cpu_name(), processors
