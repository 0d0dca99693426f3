"""Check options that must be one of several names, and suggest the nearest name."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches


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


def nearest(text: str, known: Iterable[str]) -> str:
    """Return the first name that begins with `text`, or the name that is most like it, or "" if none is."""
    names = tuple(known)
    begun = [name for name in names if text and name.startswith(text)]
    return next(iter(begun or get_close_matches(text, names, n=1)), "")
