"""Parse thresholds such as `attn.p50<=1.05x`. A limit is absolute, or a multiple of the baseline."""

# Grammar
#     threshold = [PHASE ["[batch=" NUMBER "]"] "."] WHAT ["@" LAYER] ["." FIGURE] OPERATOR NUMBER [UNIT]
#               | PHASE ["[batch=" NUMBER "]"] ["." FIGURE] OPERATOR NUMBER [UNIT]
#                 (of the step; but a brick that is called like the phase is preferred)
#     WHAT      = a brick, a category (attn, ffn, norm), step, tokens_per_sec, samples_per_sec, in_steps, unattributed
#                 or loss; of training steps also a part, such as backward, memory.allocated and memory.reserved
#     LAYER     = only after a brick or category
#     FIGURE    = p50 (of a call; the default), p99, or per_token (µs per token or step)
#     UNIT      = x (times the baseline), %, ns, us, µs, ms or s; of memory x, B, kB, MB, GB, TB, KiB, MiB, GiB or TiB

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import inf

from cbtop.comparison.memory_peaks import ALLOCATED, MEMORY, RESERVED
from cbtop.errors import UsageError

FIGURES = ("p50", "p99", "per_token")
UNATTRIBUTED, LOSS, STEP = "unattributed", "loss", "step"
RATES = ("tokens_per_sec", "samples_per_sec", "in_steps")
UNITS = {"ns": 1e-3, "us": 1.0, "µs": 1.0, "μs": 1.0, "ms": 1e3, "s": 1e6}
SIZES = {"B": 1.0, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
SIZES |= {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}
MEMORIES = (ALLOCATED, RESERVED)
_FORM = re.compile(
    r"\s*(?P<what>[^<>=]+?)\s*(?P<sign><=|>=|==|<|>)\s*(?P<value>[0-9.eE+-]+)\s*(?P<unit>x|%|[nuµμm]?s|[kKMGT]?i?B)?\s*"
)
_BATCH = re.compile(r"\s*\[\s*batch\s*=\s*(?P<batch>[0-9]{1,9})\s*\]")
EXAMPLE = "attn.p50<=1.05x, RmsNorm.p99<=12us, decode.tokens_per_sec>=40, unattributed<=1%, loss==0"
MAX_CHARS = 200


@dataclass(frozen=True, slots=True)
class Threshold:
    """A parsed threshold.

    `value` is a time in µs, a size in bytes, a percentage, or a number without unit. With `is_relative`, it is a
    multiple of the baseline.
    """

    text: str
    names: tuple[str, ...]  # PHASE and WHAT: the dotted name before the figure, split at dots
    layer: str | None
    figure: str
    sign: str
    value: float
    unit: str
    where: tuple[str, int] = ("", 1)  # file and line of the threshold's text
    # If set, only steps with this many sequences count (tokens, if sequences are not reported).
    batch: int | None = None

    @property
    def is_relative(self) -> bool:
        return self.unit == "x"


def parse(text: str, where: tuple[str, int] = ("", 1)) -> Threshold:
    """Parse the text of a threshold. Raises UsageError with the wrong part of the text, the expected form, and
    examples.
    """
    shown = text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}…"
    of_batch = _BATCH.search(text) if len(text) <= MAX_CHARS else None
    plain = text if of_batch is None else text[: of_batch.start()] + text[of_batch.end() :]
    found = _FORM.fullmatch(plain) if len(text) <= MAX_CHARS else None
    if found is None:
        sign = next((one for one in ("<=", ">=", "==", "<", ">") if one in plain), None)
        wrong = "it has no <=, >= or =="
        if sign:
            wrong = (
                f"{plain.partition(sign)[2].strip()!r} is not a number with a unit (x, %, ns, us, ms, s, GB or none)"
            )
        raise UsageError(f"threshold {shown!r}: {wrong}; write it like {EXAMPLE}")
    try:
        value = float(found["value"])
    except ValueError:
        raise UsageError(f"threshold {shown!r}: {found['value']!r} is not a number; write it as 1.05 or 12") from None
    if not 0 <= value < inf:
        raise UsageError(f"threshold {shown!r}: expected a number of 0 or more")
    named, _, layer = found["what"].partition("@")
    names = named.split(".")
    if "." in layer:
        layer, _, figure = layer.rpartition(".")
        names.append(figure)
    figure = names.pop() if names[-1] in FIGURES else ""
    sign, unit = found["sign"], found["unit"] or ""
    names = [name.strip() for name in names]
    if names[-2:-1] == [MEMORY]:
        names[-2:] = [".".join(names[-2:])]
    phase = text[: of_batch.start()].strip() if of_batch else ""
    is_phase = names[-1:] and names[-1] not in (STEP, LOSS, UNATTRIBUTED, *RATES, *MEMORIES)
    if phase and is_phase and [name.strip() for name in phase.split(".")] == names:
        names.append(STEP)
    if of_batch and (not phase or [name.strip() for name in phase.split(".")] != names[:-1]):
        raise UsageError(f"threshold {shown!r}: write a batch after its phase, as in decode[batch=6].step.p50<=9ms")
    if not names or not all(names):
        raise UsageError(f"threshold {shown!r}: the name of a brick or figure is missing; write it like {EXAMPLE}")
    layer = layer.strip()
    _check(shown, names, layer, figure, sign, value, unit)
    scaled = value * (UNITS | SIZES).get(unit, 1.0)
    batch = int(of_batch["batch"]) if of_batch else None
    # Readers of annotations and logs work line by line, so replace line breaks.
    one_line = " ".join(text.split())
    return Threshold(one_line, tuple(names), layer or None, figure or FIGURES[0], sign, scaled, unit, where, batch)


def is_of_records(names: Sequence[str], unit: str) -> bool:
    """Whether a threshold limits lost records. `train.loss<=2ms` does not: it limits the loss function of a training
    step.
    """
    return names[-1] == LOSS and (len(names) == 1 or unit not in ("x", *UNITS))


def _check(text: str, names: Sequence[str], layer: str, figure: str, sign: str, value: float, unit: str) -> None:
    """Raise UsageError if the threshold's unit, operator, layer and figure cannot be combined."""
    name, is_loss, wrong = names[-1], is_of_records(names, unit), ""
    if is_loss and (unit not in ("", "%") or figure or (value and not unit)):
        wrong = "loss is a share of the records: write loss==0 or loss<=0.1%"
    elif name == UNATTRIBUTED and (unit != "%" or figure):
        wrong = "unattributed is a share of a step: write unattributed<=1%"
    elif name in RATES and (unit not in ("", "x") or figure):
        wrong = f"{name} is a number or a multiple of the baseline: write {name}>=40 or {name}>=0.97x"
    elif name.startswith(f"{MEMORY}.") and name not in MEMORIES:
        wrong = f"there is no figure {name}; there are {' and '.join(MEMORIES)}"
    elif name in MEMORIES and (unit not in ("x", *SIZES) or figure):
        wrong = f"{name} is a size or a multiple of the baseline: write {name}<=40GB or {name}<=1.05x"
    elif not is_loss and name not in (UNATTRIBUTED, *RATES, *MEMORIES) and unit not in ("x", *UNITS):
        wrong = f"expected a time or a multiple of the baseline: write {name}.p50<=12us or {name}.p50<=1.05x"
        if name != STEP and (rate := get_close_matches(name, RATES, 1)):
            wrong = f"there is no figure {name}; did you mean {rate[0]}?"
    elif layer and (is_loss or name in (UNATTRIBUTED, *RATES, *MEMORIES, STEP)):
        wrong = f"{name} covers all layers: omit @{layer}"
    elif sign == "==" and not is_loss:
        wrong = "measured values cannot be compared with ==; use <= or >="
    if wrong:
        raise UsageError(f"threshold {text!r}: {wrong}")
