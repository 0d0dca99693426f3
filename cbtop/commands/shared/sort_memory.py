"""The order that a user has sorted the tables of the screen in, kept from one run to the next.

A convenience: what cannot be read or written is no error, and the tables open as without it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

MAX_FILE_BYTES = 4096
Orders = Mapping[str, tuple[str, bool]]  # by table: the column's title, and whether the largest come first


def sort_file() -> Path:
    """`$XDG_STATE_HOME/cbtop/sort.json`, else in `~/.local/state`."""
    return Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")) / "cbtop" / "sort.json"


def remembered_orders() -> dict[str, tuple[str, bool]]:
    """What was kept, as far as it can be read."""
    try:
        with sort_file().open("rb") as file:
            found = json.loads(file.read(MAX_FILE_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    orders = {}
    for table, order in found.items():
        match order:
            case [str(title), bool(descending)]:
                orders[table] = title, descending
    return orders


def remember_orders(orders: Orders) -> None:
    """Keep these beside those of other tables; the file is replaced whole or not at all."""
    if not orders:
        return
    path = sort_file()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, beside = tempfile.mkstemp(prefix=".sort.", dir=path.parent)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump({**remembered_orders(), **orders}, file)
            os.replace(beside, path)
        except OSError:
            os.unlink(beside)
            raise
