"""Functions that compiled code alone calls: what is made of one is inlined there, and becomes machine code with it.

Numba makes machine code of every function, keeps it in the cache, and gives callers what LLVM has made of it before:
of those here, which nobody calls by itself, that was a twelfth of the time that all kernels of a model take to
compile.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from numba.core import codegen, compiler

# Without types.
_codegen: Any = codegen
_compiler: Any = compiler


class _Library(_codegen.JITCodeLibrary):  # type: ignore[misc]
    """What LLVM is given of one function, with all that it calls, linked and not yet optimised."""

    def finalize(self) -> None:
        """As Numba's, without what is for machine code."""
        self._raise_if_finalized()
        for library in dict.fromkeys(self._linking_libraries):
            self._reload_init.update(library._reload_init)
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """There is none."""
        self._ensure_finalized()
        return 0

    @property
    def codegen(self) -> Any:
        """What would give the function, were it there, the globals of Python that it met: here they are constants."""
        return SimpleNamespace(set_env=lambda *_: None)


class InlinedCompiler(_compiler.Compiler):  # type: ignore[misc]
    """As Numba's, into such a library."""

    def __init__(self, typing: Any, target: Any, library: Any, *more: Any) -> None:
        super().__init__(typing, target, library or _Library(target.codegen(), "inlined"), *more)
