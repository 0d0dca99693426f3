"""What is written where a terminal's encoding has no line, bar or sign of ours: one ASCII character for each."""

from __future__ import annotations

import codecs

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


codecs.register_error(ERRORS, replace)
