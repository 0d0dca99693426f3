"""Replace each line, bar or other sign by one ASCII character, for terminals with encodings that lack these signs."""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Mapping

ERRORS = "cbtop.ascii_signs"  # Python calls the error handler of this name for characters that it cannot encode.

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
    ">": "▸▹▶→›≥",
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
_DOTS = " ...:::##"  # The ASCII characters for a Braille cell with 0 to 8 dots, in this order.
_BRAILLE = 0x2800
SIGNS = {ord(sign): ascii_ for ascii_, signs in _ALIKE.items() for sign in signs}
SIGNS |= {_BRAILLE + dots: _DOTS[dots.bit_count()] for dots in range(256)}


def replace(error: UnicodeError) -> tuple[str, int]:
    """Return the ASCII replacements of the characters that cannot be encoded. A character without a replacement is
    escaped.
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    met = error.object[error.start : error.end]
    return "".join(SIGNS.get(ord(one)) or one.encode("ascii", "backslashreplace").decode() for one in met), error.end


def are_wanted(
    environment: Mapping[str, str] = os.environ, *, is_utf8_mode: bool = bool(sys.flags.utf8_mode)
) -> bool:
    """Whether the terminal or the locale lacks our characters.

    The console of Linux (TERM=linux) decodes UTF-8, but its font has only 256 or 512 characters.

    The user's locale may lack UTF-8 although Python writes it. If the locale is C, POSIX or not installed, Python
    uses UTF-8 (PEP 538, PEP 540), and sets LC_CTYPE=C.UTF-8 even if LANG=C.

    Like htop, we ask the C library for the codeset of the locale. The exception is a missing locale, as in a
    container: we write UTF-8, because terminals read it and the user has not requested ASCII.
    """
    if environment.get("TERM") == "linux":
        return not environment.get("PYTHONIOENCODING")
    if not is_utf8_mode or environment.get("PYTHONUTF8") == "1" or environment.get("PYTHONIOENCODING"):
        # Python already encodes text as the locale or an explicit setting requires. If that encoding lacks a sign,
        # replace the sign in any case.
        return False
    set_by_python = "" if environment.get("LC_ALL") else "C.UTF-8"
    ctype = environment.get("LC_CTYPE", "")
    name = environment.get("LC_ALL") or (ctype if ctype != set_by_python else "") or environment.get("LANG", "")
    codeset = name.partition(".")[2].partition("@")[0].replace("-", "").lower()
    return name in ("C", "POSIX") or codeset not in ("", "utf8")


codecs.register_error(ERRORS, replace)
