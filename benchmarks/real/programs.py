"""The programs in `benchmarks/programs`, their requirements, and the warnings that cbtop must report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "programs"
# These warnings are expected in training, because the time between steps contains the backward pass and the
# optimizer.
BETWEEN_STEPS = frozenset({"idle-between-steps"})
# This warning is expected in eager decoding, because a GPU waits for Python if one token is decoded at a time.
LAUNCHES = frozenset({"launch-bound"})
NONE: frozenset[str] = frozenset()
VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # This program uses CUDA before it starts the engine. A forked engine could not use CUDA then.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


class ProgramError(Exception):
    """A program has failed. The text is the last line of its output, or the reason."""


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
    # Whether the program calls modules. Compiled code does not, so its times cannot be compared with the oracle's.
    has_modules: bool = True
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
