"""Convert columns to pyarrow's tables.

pyarrow is in the extra `arrow`, and is loaded only here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cbtop.errors import UsageError
from cbtop.tables.typed_column import TypedColumn

if TYPE_CHECKING:
    import pyarrow

INSTALL = "pip install 'cbtop[arrow]'"


def arrow_table(columns: Mapping[str, TypedColumn], what: str) -> pyarrow.Table:
    """Return `columns` as a pyarrow table. Numbers are not copied, and texts become dictionaries.

    If pyarrow is missing, raises UsageError with the command that installs it. `what` is the feature that needs it.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise UsageError(f"{what} needs pyarrow; {INSTALL}") from error
    arrays = {name: _array(column, pyarrow) for name, column in columns.items()}
    return pyarrow.Table.from_arrays(list(arrays.values()), names=list(arrays))


def _array(column: TypedColumn, arrow: Any) -> pyarrow.Array:
    is_known, values = column.known(), np.ascontiguousarray(column.values)
    kind = arrow.from_numpy_dtype(values.dtype)
    data = _bits(values) if values.dtype == np.bool_ else values
    buffers = [None if is_known is None else arrow.py_buffer(_bits(is_known)), arrow.py_buffer(data)]
    found = arrow.Array.from_buffers(kind, len(values), buffers)
    if column.texts is None:
        return found
    return arrow.DictionaryArray.from_arrays(found, arrow.array([*column.texts], arrow.string()))


def _bits(mask: NDArray[np.bool_]) -> NDArray[np.uint8]:
    return np.packbits(mask, bitorder="little")
