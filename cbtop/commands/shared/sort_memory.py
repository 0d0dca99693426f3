"""Store the sort order of the screen's tables from one run to the next.

Errors when reading or writing are ignored, because the sort order is only a convenience. After an error, the tables
have their default order.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

MAX_FILE_BYTES = 4096
# maps the name of a table to (title of the sorted column, whether the largest values come first)
Orders = Mapping[str, tuple[str, bool]]


def sort_file() -> Path:
    """Return the path of sort.json in `$XDG_STATE_HOME/cbtop`, or else in `~/.local/state/cbtop`."""
    return Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")) / "cbtop" / "sort.json"


def remembered_orders() -> dict[str, tuple[str, bool]]:
    """Return the stored sort orders of the tables. Orders that cannot be read are left out."""
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
    """Store the sort `orders` of some tables, and keep the orders of other tables.

    The file is replaced atomically.
    """
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
