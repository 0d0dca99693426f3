"""The programs in `benchmarks/programs`, their requirements, and the warnings that cbtop must report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "programs"
# expected because the time between steps contains the backward pass and the optimizer
BETWEEN_STEPS = frozenset({"idle-between-steps"})
# expected because eager decoding of one token at a time makes a GPU wait for Python
LAUNCHES = frozenset({"launch-bound"})
NONE: frozenset[str] = frozenset()
VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # The program has already used CUDA, so a forked engine could not use it.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


class ProgramError(Exception):
    """A program failed. The text is the last line of its output, or the reason."""


def last_line(errors: str) -> str:
    """Return the last line that a program wrote on its standard error."""
    return (errors.strip() or "it wrote nothing on stderr").splitlines()[-1]


@dataclass(frozen=True, slots=True)
class Program:
    """A program, and the ids of the warnings and errors that cbtop must report for it, on a CPU and on a GPU."""

    name: str
    on_cpu: frozenset[str] = NONE
    on_cuda: frozenset[str] = NONE
    needs: tuple[str, ...] = ()  # required Python modules
    needs_cuda: bool = False
    has_modules: bool = True  # False for compiled code, which calls no modules, so that no times can be compared
    file: str = ""
    arguments: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.file or self.name}.py"


PROGRAMS = {
    program.name: program
    for program in (
        Program("generate_eager", on_cuda=LAUNCHES, needs=("transformers",)),
        Program("generate_static", needs=("transformers",), has_modules=False),
        Program("generate_assisted", on_cuda=LAUNCHES, needs=("transformers",)),
        Program("vit", needs=("transformers",)),
        Program("bert", needs=("transformers",)),
        Program("whisper", on_cuda=LAUNCHES, needs=("transformers",)),
        Program("gpt"),
        Program("unet"),
        Program("train", on_cuda=BETWEEN_STEPS),
        Program("lora", on_cuda=BETWEEN_STEPS | LAUNCHES, needs=("transformers", "peft")),
        Program("captured", needs_cuda=True),
        Program("captured_pool", needs_cuda=True),
        Program("two_models"),
        Program("vllm_eager", on_cuda=LAUNCHES, needs=("vllm",), file="vllm_generate", arguments=("eager",)),
        Program("vllm_default", needs=("vllm",), has_modules=False, file="vllm_generate"),
    )
}
