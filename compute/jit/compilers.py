"""Numba's compiler for kernels: fewer passes from Python to machine code.

All of Numba's passes look at each function. Several look for things that no kernel has: closures, literal_unroll,
sums of whole arrays. Without those, compiling what a model runs takes a tenth less time.

Numba makes machine code of every function, keeps it in the cache, and gives callers the LLVM code before it.
Functions that only compiled code calls are inlined there and become machine code with it. Their own machine code took
a twelfth of that time.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from numba.core import codegen, compiler

# Without types.
_codegen: Any = codegen
_compiler: Any = compiler

# A closure or literal_unroll is an error without its pass; sums of whole arrays make an array for each sum.
UNUSED = (
    "WithLifting", "InlineClosureLikes", "RewriteDynamicRaises", "MakeFunctionToJitFunction", "InlineInlinables",
    "FindLiterallyCalls", "LiteralUnroll", "LiteralPropagationSubPipelinePass", "InlineOverloads", "NopythonRewrites",
    "DumpParforDiagnostics",
)  # fmt: skip


class KernelCompiler(_compiler.Compiler):  # type: ignore[misc]
    """Numba's compiler, without the passes that kernels do not need; for one thread."""

    def define_pipelines(self) -> Any:
        """Return Numba's pipelines without those passes."""
        pipelines = super().define_pipelines()
        for one in pipelines:
            one.passes = [(made_by, why) for made_by, why in one.passes if made_by.__name__ not in UNUSED]
            one.finalize()
        return pipelines


class _Library(_codegen.JITCodeLibrary):  # type: ignore[misc]
    """The LLVM code of one function, linked with all that it calls, and not yet optimised."""

    def finalize(self) -> None:
        """Finish as Numba does, without the steps for machine code."""
        self._raise_if_finalized()
        for library in dict.fromkeys(self._linking_libraries):
            self._reload_init.update(library._reload_init)
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """Return 0, because machine code does not exist."""
        self._ensure_finalized()
        return 0

    @property
    def codegen(self) -> Any:
        """Return a substitute: machine code would get its Python globals here, but here they are constants."""
        return SimpleNamespace(set_env=lambda *_: None)


class InlinedCompiler(KernelCompiler):
    """The compiler of kernels, with a library of that kind."""

    def __init__(self, typing: Any, target: Any, library: Any, *more: Any) -> None:
        super().__init__(typing, target, library or _Library(target.codegen(), "inlined"), *more)
