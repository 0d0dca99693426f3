"""Load msgpack from this environment. If it is not installed here, load it from the environment of `cbtop run`.

Rules
- A msgpack from the other environment gets a different module name, so that `import msgpack` still fails in the host.
- The compiled part of msgpack loads only in a Python of the same minor version. Otherwise msgpack's Python code is
used.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # `typing` is not imported, because that would be slow, see `cbtop.protocol.runtime_directory`
if TYPE_CHECKING:
    from typing import Any

# The environment variable with the directory of msgpack in the environment of `cbtop run`. `cbtop run` sets it.
LENT_MSGPACK = "CBTOP_RUN_MSGPACK"
# The compiled part of msgpack adds itself to sys.modules under this name, even if it is loaded under another name.
_COMPILED = "msgpack._cmsgpack"

# The same directory, in a process that `cbtop attach` has chosen. "" means that there is none.
lent_directory = ""


def msgpack_directory() -> str | None:
    """Return the directory of this environment's msgpack, or None without one. Does not load msgpack."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)  # finders from before Python 3.4 have no find_spec
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
    """Return the msgpack of this environment, or else the msgpack of `cbtop run` or `cbtop attach`.

    Raises ImportError if neither exists.
    """
    try:
        import msgpack
    except ModuleNotFoundError as error:
        directory = lent_directory or os.environ.get(LENT_MSGPACK)
        if error.name != "msgpack" or not directory:
            raise
        return _lent(directory)
    return msgpack
