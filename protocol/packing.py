"""msgpack: of this environment, or of the environment of `cbtop run` if this one has none.

Rules
- A lent msgpack has a name of its own, so that the host still finds no `msgpack` if it has none.
- Its compiled part loads only in a Python of the same minor version. msgpack is Python code otherwise.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # see `cbtop.protocol.runtime_directory`
if TYPE_CHECKING:
    from typing import Any

LENT_MSGPACK = "CBTOP_RUN_MSGPACK"  # set by `cbtop run`: the directory of its msgpack
_COMPILED = "msgpack._cmsgpack"  # it adds this name to sys.modules, whatever the name of its package


def msgpack_directory() -> str | None:
    """Return the directory of this environment's msgpack without loading it, or None if there is none."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)  # older ones have none
        spec = None if find is None else find("msgpack", None)
        if spec is not None:
            return os.path.dirname(spec.origin) if spec.origin else None
    return None


def _lent(directory: str) -> Any:
    from importlib.util import module_from_spec, spec_from_file_location

    name, before = f"{__name__}.msgpack", sys.modules.get(_COMPILED)
    spec = spec_from_file_location(
        name, os.path.join(directory, "__init__.py"), submodule_search_locations=[directory]
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        if before is None:
            sys.modules.pop(_COMPILED, None)
    return module


def load_msgpack() -> Any:
    """Return the module msgpack of this environment, or the lent one. Raises ImportError if there is neither."""
    try:
        import msgpack
    except ModuleNotFoundError as error:
        directory = os.environ.get(LENT_MSGPACK)
        if error.name != "msgpack" or not directory:
            raise
        return _lent(directory)
    return msgpack
