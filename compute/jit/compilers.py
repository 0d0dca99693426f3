"""Numba's compiler for kernels, with fewer passes from Python to machine code.

Several of Numba's passes look for constructs that no kernel contains: closures, literal_unroll, sums of whole arrays.
Without these passes, compiling the functions of a model takes a tenth less time.

Numba makes machine code of every function, even of functions that only compiled code calls. These become part of
their callers' machine code anyway. So this compiler makes no separate machine code for them, which took a twelfth of
the time.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from numba.core import codegen, compiler

# Numba's modules have no type annotations.
_codegen: Any = codegen
_compiler: Any = compiler

# Names of passes that are left out. Without them, a closure or literal_unroll is an error, and a sum of whole arrays
# allocates an array.
UNUSED = (
    "WithLifting", "InlineClosureLikes", "RewriteDynamicRaises", "MakeFunctionToJitFunction", "InlineInlinables",
    "FindLiterallyCalls", "LiteralUnroll", "LiteralPropagationSubPipelinePass", "InlineOverloads", "NopythonRewrites",
    "DumpParforDiagnostics",
)  # fmt: skip


class KernelCompiler(_compiler.Compiler):  # type: ignore[misc]
    """Numba's compiler for one thread, without the passes that kernels do not need."""

    def define_pipelines(self) -> Any:
        """Return Numba's pipelines without the UNUSED passes."""
        pipelines = super().define_pipelines()
        for one in pipelines:
            one.passes = [(made_by, why) for made_by, why in one.passes if made_by.__name__ not in UNUSED]
            one.finalize()
        return pipelines


class _Library(_codegen.JITCodeLibrary):  # type: ignore[misc]
    """The LLVM code of one function and of everything that it calls, before optimisation."""

    def finalize(self) -> None:
        """Finish the library as Numba does, but without making machine code from it."""
        self._raise_if_finalized()
        for library in dict.fromkeys(self._linking_libraries):
            self._reload_init.update(library._reload_init)
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """Return 0 as the address, because there is no machine code."""
        self._ensure_finalized()
        return 0

    @property
    def codegen(self) -> Any:
        """Return an object that ignores the Python globals that Numba sets for machine code.

        Kernels use only constants.
        """
        return SimpleNamespace(set_env=lambda *_: None)


class InlinedCompiler(KernelCompiler):
    """The compiler of functions that are always inlined. It uses `_Library`."""

    def __init__(self, typing: Any, target: Any, library: Any, *more: Any) -> None:
        super().__init__(typing, target, library or _Library(target.codegen(), "inlined"), *more)
