"""What is written where a terminal's encoding has no line, bar or sign of ours: one ASCII character for each."""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Mapping

ERRORS = "cbtop.signs"  # the name under which Python finds it as an error handler

_ALIKE = {
    "-": "─━╌╍┄┅–—▔▁▂⎯",
    "|": "‖│┃┆┇┊┋▏▎▍▌▐▕",
    "+": "┌┐└┘├┤┬┴┼╭╮╯╰┏┓┗┛┣┫┳┻╋╷╵╴╶✓",
    "#": "█▉▊▋▃▄▅▆▇▀■",
    ".": "░·",
    ":": "▒",
    "%": "▓",
    "*": "●•",
    "@": "◆",
    "o": "○°◌",
    "^": "▲↑⇧",
    "v": "▼▾↓",
    ">": "▸▶→›≥",
    "<": "◂◀←‹≤",
    "_": "␣",
    "E": "⏎",
    "x": "×✗⇄",
    "u": "µμ",
    "!": "⚠",
    "=": "═",
    "~": "…≈±",
    "d": "Δ",
    "?": "�",
}
_DOTS = " ...:::##"  # a cell of Braille with so many dots
_BRAILLE = 0x2800
SIGNS = {ord(sign): ascii_ for ascii_, signs in _ALIKE.items() for sign in signs}
SIGNS |= {_BRAILLE + dots: _DOTS[dots.bit_count()] for dots in range(256)}


def replace(error: UnicodeError) -> tuple[str, int]:
    """The characters that cannot be written as ASCII ones of the same width; those of others' names escaped."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    met = error.object[error.start : error.end]
    return "".join(SIGNS.get(ord(one)) or one.encode("ascii", "backslashreplace").decode() for one in met), error.end


def are_wanted(
    environment: Mapping[str, str] = os.environ, *, is_utf8_mode: bool = bool(sys.flags.utf8_mode)
) -> bool:
    """Whether the terminal or the locale has no signs of ours.

    The console of Linux (TERM=linux) decodes UTF-8, but its font has 256 or 512 characters.

    The locale that the user has set may have no UTF-8, though Python writes it: in C, POSIX and one that is not
    installed it does (PEP 538, PEP 540), and puts LC_CTYPE=C.UTF-8 into the environment beside a LANG of C.

    As htop does, which asks the C library for the locale's codeset; but where none is set at all, as in a container,
    nobody has asked for ASCII, and terminals read UTF-8.
    """
    if environment.get("TERM") == "linux":
        return not environment.get("PYTHONIOENCODING")
    if not is_utf8_mode or environment.get("PYTHONUTF8") == "1" or environment.get("PYTHONIOENCODING"):
        return False  # Python goes by the locale, or by what it was told
    set_by_python = "" if environment.get("LC_ALL") else "C.UTF-8"
    ctype = environment.get("LC_CTYPE", "")
    name = environment.get("LC_ALL") or (ctype if ctype != set_by_python else "") or environment.get("LANG", "")
    codeset = name.partition(".")[2].partition("@")[0].replace("-", "").lower()
    return name in ("C", "POSIX") or codeset not in ("", "utf8")


codecs.register_error(ERRORS, replace)
