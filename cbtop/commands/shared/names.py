"""Check options whose value must be one of several names, and suggest the nearest name."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

# as in `cbtop.protocol.recording.SUFFIX`; importing that would load msgpack
RECORDING_SUFFIX = ".cbtop"
MAX_FILES = 10_000  # at most this many files of a folder are looked at
FILE_CUTOFF = 0.75  # names of recordings are long and alike, so only a typing error counts


def one_of(what: str, names: Iterable[str]) -> Callable[[str], str]:
    """Return an argparse type for an option that must be one of `names`.

    `what` is the noun for such a value in error messages, such as `view`.
    """
    known = tuple(names)

    def name(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(unknown(what, text, known))
        return text

    return name


def unknown(what: str, text: str, known: Iterable[str], other_names: Mapping[str, str] | None = None) -> str:
    """Return an error text such as `unknown view 'brick'; did you mean bricks? there are bricks, layers`.

    `other_names` maps other accepted spellings to names.
    """
    names = tuple(known)
    meant = {name.casefold(): name for name in names} | dict(other_names or {})
    found = nearest(text.casefold(), meant)
    hint = f"did you mean {meant[found]}? " if found else ""
    return f"unknown {what} {text!r}; {hint}there are {', '.join(names) or 'none'}"


def file_hint(word: str) -> str:
    """Return an error text if the word that should be a command is probably a file, else "".

    It probably is if a file has this name, or if a recording in the file's folder has nearly this name.
    """
    path = Path(word)
    if path.is_file():
        is_program = path.suffix == ".py"
        way = f"cbtop run -- python {word}` watches it" if is_program else f"cbtop replay {word}` shows a recording"
        return f"{word} is not a command, but a file; `{way}"
    found = nearest_recording(path)
    return f"{word}: No such file or directory; did you mean {found}?" if found else ""


def nearest_recording(path: Path) -> str:
    """Return the recording in the folder of `path` with the nearest name, or "" if no name is near."""
    try:
        names = [one.name for one in islice(path.parent.iterdir(), MAX_FILES) if one.suffix == RECORDING_SUFFIX]
    except OSError:  # the folder is missing, or this user may not read it
        return ""
    near = get_close_matches(path.name, names, n=1, cutoff=FILE_CUTOFF)
    return str(path.with_name(near[0])) if near else ""


def nearest(text: str, known: Iterable[str]) -> str:
    """Return the first name that begins with `text`, else the most similar name, else ""."""
    names = tuple(known)
    begun = [name for name in names if text and name.startswith(text)]
    return next(iter(begun or get_close_matches(text, names, n=1)), "")
