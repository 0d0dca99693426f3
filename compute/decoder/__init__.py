"""The decoder runs a GGUF model token by token. Every operation runs through a brick."""

from __future__ import annotations

from cbtop.compute.decoder.base import Family
from cbtop.compute.decoder.gemma2 import GEMMA2
from cbtop.compute.decoder.gemma3 import GEMMA3
from cbtop.compute.decoder.llama import LLAMA
from cbtop.compute.decoder.phi3 import PHI3
from cbtop.compute.decoder.qwen2 import QWEN2
from cbtop.compute.decoder.qwen3 import QWEN3
from cbtop.compute.decoder.qwen3moe import QWEN3MOE
from cbtop.compute.decoder.stablelm import STABLELM

FAMILIES: dict[str, Family] = {
    family.architecture: family for family in (QWEN2, QWEN3, QWEN3MOE, LLAMA, PHI3, GEMMA2, GEMMA3, STABLELM)
}
