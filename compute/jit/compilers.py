"""What of Numba's way from Python to machine code a kernel goes.

All of Numba's passes look at each function, several for what no kernel has: closures, literal_unroll, arrays that are
added as wholes. Without those it takes a tenth less to compile what a model runs.

Numba makes machine code of every function, keeps it in the cache, and gives callers what LLVM has made of it before.
Of functions that compiled code alone calls, which are inlined there and become machine code with it, that was a
twelfth of that time.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from numba.core import codegen, compiler

# Without types.
_codegen: Any = codegen
_compiler: Any = compiler

# A closure or literal_unroll is an error without its pass; arrays added as wholes make an array for each sum.
UNUSED = (
    "WithLifting", "InlineClosureLikes", "RewriteDynamicRaises", "MakeFunctionToJitFunction", "InlineInlinables",
    "FindLiterallyCalls", "LiteralUnroll", "LiteralPropagationSubPipelinePass", "InlineOverloads", "NopythonRewrites",
    "DumpParforDiagnostics",
)  # fmt: skip


class KernelCompiler(_compiler.Compiler):  # type: ignore[misc]
    """Numba's, without the passes that kernels have no use for; for one thread."""

    def define_pipelines(self) -> Any:
        """As Numba's."""
        pipelines = super().define_pipelines()
        for one in pipelines:
            one.passes = [(made_by, why) for made_by, why in one.passes if made_by.__name__ not in UNUSED]
            one.finalize()
        return pipelines


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


class InlinedCompiler(KernelCompiler):
    """As for kernels, into such a library."""

    def __init__(self, typing: Any, target: Any, library: Any, *more: Any) -> None:
        super().__init__(typing, target, library or _Library(target.codegen(), "inlined"), *more)
