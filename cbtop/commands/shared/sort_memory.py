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
from typing import Any

MAX_FILE_BYTES = 4096
ONCE = "chosen once"  # the key of the orders that were chosen in one run only
# maps the name of a table to (title of the sorted column, whether the largest values come first)
Orders = Mapping[str, tuple[str, bool]]


def sort_file() -> Path:
    """Return the path of sort.json in `$XDG_STATE_HOME/cbtop`, or else in `~/.local/state/cbtop`."""
    return Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")) / "cbtop" / "sort.json"


def remembered_orders() -> dict[str, tuple[str, bool]]:
    """Return the sort orders of the tables that were chosen in two runs. Orders that cannot be read are left out."""
    return _orders(_stored())


def remember_orders(orders: Orders) -> None:
    """Store the sort `orders` that were chosen in this run, and keep the orders of other tables.

    An order comes back only after it was chosen in two runs in a row, because most orders are for one look. The file
    is replaced atomically.
    """
    if not orders:
        return
    stored = _stored()
    twice, once = _orders(stored), _orders(stored.get(ONCE))
    for table, order in orders.items():
        if once.pop(table, None) == order:
            twice[table] = order
        elif twice.get(table) != order:
            once[table] = order
    path = sort_file()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, beside = tempfile.mkstemp(prefix=".sort.", dir=path.parent)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump({**twice, ONCE: once}, file)
            os.replace(beside, path)
        except OSError:
            os.unlink(beside)
            raise


def _stored() -> dict[str, Any]:
    try:
        with sort_file().open("rb") as file:
            found = json.loads(file.read(MAX_FILE_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _orders(found: object) -> dict[str, tuple[str, bool]]:
    orders = {}
    for table, order in found.items() if isinstance(found, dict) else ():
        match order:
            case [str(title), bool(descending)]:
                orders[table] = title, descending
    return orders
