"""The main work of `cbtop demo`: run a model's prefill and decode through bricks, repeatedly."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cbtop.compute.errors import ComputeError, NoTokenError
from cbtop.compute.settings import DecoderSettings, WorkloadOptions
from cbtop.profiler.conditions import conditions
from cbtop.protocol.messages import Manifest

if TYPE_CHECKING:
    from cbtop.compute.brick import Profiler
    from cbtop.compute.decoder.base import Model
    from cbtop.compute.decoder.decoder import Decoder
    from cbtop.compute.decoder.tracing import DecodeTracing
    from cbtop.compute.places import ComputeTarget
    from cbtop.compute.tokenizer import Tokenizer
    from cbtop.protocol.messages import Ceiling, CheckResult
    from cbtop.protocol.structure_messages import Conditions

Progress = Callable[[str, float | None], None]
Write = Callable[[str], None]
ShouldStop = Callable[[], bool]

_log = logging.getLogger("cbtop")

MAX_DEFAULT_CONTEXT = 2048
SHORTEST_CONTEXT = 2
# Names of the checks of `verify_pass`.
WHOLE_PASS = "logits are those of float64"
EACH_LOGIT = "each token's logit is that of float64"
PROMPT_TOKENS = 32
PROMPT_SEED = 7
# Number of tokens to check bricks with. The first five run in one pass, because five is not a multiple of four. The
# last one runs alone.
VERIFIED_TOKENS = 6
# Largest number of tokens for a check of products in tiles. More would not fit into one pass, and their references
# would take too long.
MOST_VERIFIED = 128
# Number of tokens to verify a whole pass with. The last PASS_DECODED tokens are decoded. The other tokens are
# prefilled. They do not fit into one pass.
PASS_TOKENS, PASS_DECODED = 140, 7
# The largest allowed root mean square error of logits, in standard deviations of the float64 logits. The key is
# `is_exact`. The values are static. Exact products differ by 0.1 %, because the KV cache rounds to float16. int8
# activations differ by 2 % on the demo, as in llama.cpp (`benchmarks compute`).
PASS_TOLERANCE = {True: 3e-3, False: 0.15}
# The largest allowed error of the logit of a single token, in standard deviations of the float64 logits. On the demo,
# the largest errors are 0.1 % (exact) and 5 % (int8). A logit of a wrong token would differ by about 1.
LOGIT_TOLERANCE = {True: 3e-2, False: 0.5}


def run(
    options: WorkloadOptions,
    profiler: Profiler,
    should_stop: ShouldStop,
    progress: Progress,
    write: Write = lambda text: None,
) -> object:
    """Announce the model, its checks and the machine's ceilings. Then decode until `should_stop` or the end.

    `should_stop` is called between steps. `progress` gets the name of each long task, and "" when none is running.
    `write` gets the prompt and then the model's continuation, as it is decoded.

    Returns an object that keeps a GPU's memory. Freeing that memory takes seconds, so the caller may print its last
    message first. Raises ModelError if the model cannot be run.
    """
    # These modules are imported here, because Numba takes half a second to load, and some code only needs
    # WorkloadOptions.
    from cbtop.compute.demo_model import demo_model
    from cbtop.compute.guard import JidokaGuard, Reaction
    from cbtop.compute.places import place_of

    if options.steps is not None and options.steps < 1:
        raise ComputeError(f"{options.steps} steps; give 1 or more")
    path = _compile_in_fork(options, progress)
    place = place_of(options)
    path = path or demo_model(progress)
    tokenizer = None
    if options.prompt is not None:
        progress("reading the tokenizer", None)
        tokenizer = _tokenizer(path)
    progress("reading the model", None)
    model = place.model(path)
    context = _context(options, model)
    _warn_of_less_context(options, context, progress)
    profiler.announce(manifest_of(model, place, context, ranks=1 if options.rank is None else options.rank.count))
    profiler.announce(conditions_of(place))
    decoder = place.decoder(model, profiler, context)
    prompt = _prompt(model, context)
    if tokenizer is not None and options.prompt is not None:
        prompt = _tokens(tokenizer, options.prompt, model, context)
    _announce_checks(decoder, place, prompt, profiler, progress)
    # The guard begins here. Its samples cover a share of the time since its start. The time for compiling should not
    # count.
    if place.guard:
        decoder.guard = JidokaGuard(Reaction(place.guard), profiler, decoder.bricks.places())
    _decode(decoder, prompt, options, profiler, should_stop, tokenizer, write)
    return decoder


def _compile_in_fork(options: WorkloadOptions, progress: Progress) -> Path | None:
    """Compile the kernels in a forked process if this is the first run.

    Returns the model's path, or None if unknown.
    """
    from cbtop.compute.backends import compiling, is_first_run
    from cbtop.compute.demo_model import demo_model
    from cbtop.compute.first_run import compile_in_fork

    path = options.model
    if options.backend == "cpu" and is_first_run():
        path = path or demo_model(progress)
        compile_in_fork(partial(_compile, options, path), lambda: progress(compiling(), None))
    return path


def _warn_of_less_context(options: WorkloadOptions, context: int, progress: Progress) -> None:
    """Log a warning if the model's context is smaller than the requested one.

    With several ranks, only the first rank logs it.
    """
    if (options.context or 0) > context and (options.rank is None or options.rank.number == 0):
        progress("", None)  # remove the progress line, because it does not belong into the log
        _log.warning(
            "a context of %s tokens is cut to the %s that the model was trained for",
            f"{options.context:,}",
            f"{context:,}",
        )


def _announce_checks(
    decoder: Decoder, place: ComputeTarget, prompt: list[int], profiler: Profiler, progress: Progress
) -> None:
    """Compile the kernels, check every brick, measure the ceilings, and set budgets."""
    progress("compiling kernels", None)
    _warm_up(decoder, prompt, profiler)
    progress("checking the bricks", None)
    for result in decoder.verify(*_verified(prompt, decoder.context)):
        profiler.announce(result)
    progress("measuring ceilings", None)
    roofs = {}
    for ceiling in place.ceilings(decoder.model, progress):
        profiler.announce(ceiling)
        roofs[ceiling.name] = ceiling
    set_budgets(decoder, roofs)
    progress("", None)


def _decode(
    decoder: Decoder,
    prompt: list[int],
    options: WorkloadOptions,
    profiler: Profiler,
    should_stop: ShouldStop,
    tokenizer: Tokenizer | None,
    write: Write,
) -> None:
    """Decode until `should_stop` or the end. Then report the results of traces and guard."""
    from cbtop.compute.decoder.tracing import DecodeTracing
    from cbtop.profiler.traces.base import TracerConfig

    tracing = DecodeTracing(decoder, profiler, TracerConfig.of(options.trace)) if options.trace else None
    try:
        if tokenizer is None:
            _decode_until(decoder, prompt, options.steps, should_stop, tracing)
        else:
            write(options.prompt or "")
            _go_on(decoder, prompt, options.steps, should_stop, tracing, tokenizer, write)
    finally:
        decoder.tell()
    if tracing:
        tracing.finish()
    if decoder.guard:
        decoder.guard.finish()


def set_budgets(decoder: Decoder, roofs: Mapping[str, Ceiling]) -> None:
    """Set time budgets for bricks that read weights.

    The budgets assume the rate at which weights are read, or the memory's rate if that is lower. (Weights in a cache
    are read faster, but then the bounds of the contracts do not hold.)

    No budget is set if a roof (peak rate) is unsure, or if the bounds are not for this processor or for a format of
    the model.
    """
    from cbtop.compute.contracts import WEIGHTS
    from cbtop.compute.jit.cpu import TIER
    from cbtop.compute.quantization import FORMATS
    from cbtop.profiler.analysis.roofline import is_unsure

    found = [roofs[name] for name in ("dram_read", WEIGHTS) if name in roofs]
    is_sure = len(found) == 2 and not any(is_unsure(one.value, one.median) for one in found)
    without = {one.name for one in FORMATS.values() if not one.has_budget}
    if not is_sure or TIER == "generic" or without.intersection(decoder.model.quantization.split("+")):
        return
    for brick in decoder.bricks.places():
        brick.set_budget(min(one.value for one in found))


def _compile(options: WorkloadOptions, path: Path) -> None:
    """Compile the kernels of a run by calling them. Nothing is recorded."""
    from cbtop.compute.backends import is_first_run
    from cbtop.compute.places import place_of
    from cbtop.profiler.profiler import BrickProfiler

    silent = BrickProfiler(enabled=False)
    # Do not check contracts now, because the results would be announced.
    place = place_of(replace(options, check_contracts=False))
    # if the cache still has no kernels, the disk cannot be written, and this forked process would compile in vain
    if is_first_run():
        return
    model = place.model(path)
    context = _context(options, model)
    _warm_up(place.decoder(model, silent, context), _prompt(model, context), silent)
    for _ in place.ceilings(model, lambda what, done: None):
        pass


def _context(options: WorkloadOptions, model: Model) -> int:
    """Return the context length in tokens. Raises ComputeError if it is too short to decode."""
    wanted = MAX_DEFAULT_CONTEXT if options.context is None else options.context
    context = min(wanted, model.context_length)
    if context < SHORTEST_CONTEXT:
        raise ComputeError(f"a context of {context} leaves no room to decode; give {SHORTEST_CONTEXT} or more")
    return context


def verify_model(path: Path, threads: int, *, is_exact: bool, backend: str = "cpu") -> list[CheckResult]:
    """Check every brick of the model at `path`, with one token and with several.

    Raises ModelError if the model cannot be run.
    """
    model, decoder = _to_verify(path, threads, 2 * PROMPT_TOKENS, is_exact=is_exact, backend=backend)
    return decoder.verify(*_verified(_prompt(model, decoder.context), decoder.context))


def _verified(prompt: Sequence[int], context: int) -> list[Sequence[int]]:
    """Return lists of tokens to check bricks with.

    The first has a few tokens. If larger products use tiles, the second has enough tokens for tiles.
    """
    from cbtop.compute.jit.cpu import HAS_TILES
    from cbtop.compute.settings import crossovers

    found, many = [prompt[:VERIFIED_TOKENS]], crossovers().bf16_tokens + 1
    if HAS_TILES and many < min(context, MOST_VERIFIED):
        found.append([prompt[place % len(prompt)] for place in range(many + 1)])
    return found


def verify_pass(path: Path, threads: int, *, is_exact: bool, backend: str = "cpu") -> list[CheckResult]:
    """Check whether the logits of the model at `path` equal the logits of a float64 pass in NumPy.

    This finds faults that checks of single bricks miss, such as wrong arguments. Raises ModelError if the model
    cannot be run.

    The first check reports the error of the worst position: the root mean square of the differences of its logits, in
    standard deviations of the logits. For a mixture of experts, it reports the median position instead, because
    rounding may select a different expert that is about as good.

    A few wrong logits hardly change the error of a position. So the second check reports the error of the worst
    token: the median difference of its logit over all positions.
    """
    import numpy as np

    from cbtop.compute.decoder import FAMILIES
    from cbtop.compute.decoder.base import read_model
    from cbtop.compute.decoder.reference import forward_reference

    model, decoder = _to_verify(path, threads, PASS_TOKENS, is_exact=is_exact, backend=backend)
    tokens = np.random.default_rng(PROMPT_SEED).integers(0, model.vocabulary, decoder.context).tolist()
    together = max(len(tokens) - PASS_DECODED, 1)
    note = _unseen(model, len(tokens))
    try:
        decoder.prefill(tokens[:together])
        found = [decoder.logits.copy()]
        for token in tokens[together:]:
            decoder.decode(token)
            found.append(decoder.logits.copy())
    except NoTokenError:
        return _of_pass(math.nan, math.nan, is_exact, note)
    on_host = model if backend == "cpu" else read_model(path, FAMILIES)
    expected = forward_reference(on_host, tokens, decoder.context)[together - 1 :]
    off = np.abs(np.array(found) - expected) / expected.std(axis=1, keepdims=True)
    of_positions = np.sqrt((off**2).mean(axis=1))
    error = float(np.median(of_positions) if model.experts else of_positions.max())
    return _of_pass(error, float(np.median(off, axis=0).max()), is_exact, note)


def _of_pass(error: float, of_each: float, is_exact: bool, note: str) -> list[CheckResult]:
    return [
        _of_logits(WHOLE_PASS, error, PASS_TOLERANCE[is_exact], note),
        _of_logits(EACH_LOGIT, of_each, LOGIT_TOLERANCE[is_exact], note),
    ]


def _of_logits(assertion: str, error: float, tolerance: float, note: str) -> CheckResult:
    from cbtop.protocol.messages import CheckResult

    is_known = math.isfinite(error)
    return CheckResult(
        brick="LmHead",
        assertion=assertion,
        passed=is_known and error <= tolerance,
        max_error=error if is_known else None,
        tolerance=tolerance,
        not_finite="" if is_known else "NaN or infinity",
        note=note,
    )


def _to_verify(path: Path, threads: int, context: int, *, is_exact: bool, backend: str) -> tuple[Model, Decoder]:
    """Return the model at `path` on its processor, and a decoder of it.

    The decoder has the given context, or the model's context if that is smaller.
    """
    from cbtop.compute.places import place_of
    from cbtop.profiler.profiler import BrickProfiler

    place = place_of(WorkloadOptions(threads=threads, is_exact=is_exact, backend=backend))
    model = place.model(path)
    context = min(context, model.context_length)
    if backend == "cpu":
        return model, bare_decoder(model, threads, context)
    return model, place.decoder(model, BrickProfiler(enabled=False), context)


def _unseen(model: Model, tokens: int) -> str:
    slides = model.window and any(layer.slides for layer in model.layers)
    return f"the window of {model.window:,} tokens is not reached" if slides and model.window >= tokens else ""


def bare_decoder(model: Model, threads: int, context: int, cache_type: str = "f16") -> Decoder:
    """Return a decoder of `model` that records nothing.

    Raises ComputeError if `threads` is more than this process may use.
    """
    from cbtop.compute.backends import cpu_backend
    from cbtop.compute.decoder.decoder import Decoder
    from cbtop.profiler.profiler import BrickProfiler

    backend, settings = cpu_backend(threads), DecoderSettings(cache_type)
    return Decoder(model, backend.label, backend.threads, BrickProfiler(enabled=False), context, settings)


def _decode_until(
    decoder: Decoder,
    prompt: list[int],
    steps: int | None,
    should_stop: ShouldStop,
    tracing: DecodeTracing | None,
) -> None:
    """Run prefill, then decode until the context is full, and start again. `steps` limits the total number of decode
    steps.
    """
    done = 0
    while not should_stop() and (steps is None or done < steps):
        decoder.restart()
        token = decoder.prefill(prompt)
        while decoder.position < decoder.context and (steps is None or done < steps) and not should_stop():
            token = decoder.decode(token, tracing.observer() if tracing else None)
            done += 1


def _go_on(
    decoder: Decoder,
    prompt: list[int],
    steps: int | None,
    should_stop: ShouldStop,
    tracing: DecodeTracing | None,
    tokenizer: Tokenizer,
    write: Write,
) -> None:
    """Run prefill once, and decode to the end of the text, the context or `steps`. Each piece of text is written at
    once.
    """
    stream = tokenizer.stream(prompt)
    decoder.restart()
    token, done = decoder.prefill(prompt), 0
    while token not in tokenizer.ends:
        write(stream.text_of(token))
        if decoder.position == decoder.context or done == steps or should_stop():
            break
        token = decoder.decode(token, tracing.observer() if tracing else None)
        done += 1
    write(stream.rest() + "\n")


def _warm_up(decoder: Decoder, prompt: list[int], profiler: Profiler) -> None:
    """Run a prefill step and a decode step without recording them, because the first call of each compiles
    kernels.
    """
    was_enabled = profiler.enabled
    profiler.disable()
    try:
        with suppress(NoTokenError):  # A fault here is reported later, by the checks, the guard or the first step.
            decoder.decode(decoder.prefill(prompt))
        decoder.restart()
    finally:
        if was_enabled:
            profiler.enable()


def _prompt(model: Model, context: int) -> list[int]:
    """Return a fixed prompt of random tokens that leaves at least half of the context for decoding."""
    import numpy as np

    count = max(min(PROMPT_TOKENS, context // 2), 1)
    return [int(token) for token in np.random.default_rng(PROMPT_SEED).integers(0, model.vocabulary, count)]


def _tokenizer(path: Path) -> Tokenizer:
    from cbtop.compute.gguf import GgufFile
    from cbtop.compute.tokenizer import read_tokenizer
    from cbtop.compute.tokenizer_file import read_tokenizer_file

    with GgufFile.open(path) as file:
        if file.is_safetensors:
            return read_tokenizer_file(path if path.is_dir() else path.parent, file.rows_of("token_embd.weight"))
        return read_tokenizer(file)


def _tokens(tokenizer: Tokenizer, prompt: str, model: Model, context: int) -> list[int]:
    """Return the tokens of `prompt`.

    Raises ComputeError if the tokens leave no room for another token, or if they are not tokens of this model.
    """
    if len(tokenizer.pieces) != model.vocabulary:
        raise ComputeError(
            f"the model has {len(tokenizer.pieces):,} tokens in its tokenizer and {model.vocabulary:,} in its "
            "embedding: convert it again, or leave the prompt away"
        )
    tokens = tokenizer.encode(prompt)
    if not tokens:
        raise ComputeError("the prompt is empty, and the model has no token to begin with; give a word")
    if len(tokens) >= context:
        most = model.context_length
        larger = f", or a larger --context (the model's: {most:,})" if context < most else ""
        raise ComputeError(
            f"the prompt has {len(tokens):,} tokens, which leaves no room in a context of {context:,}; give a "
            f"shorter one{larger}"
        )
    return tokens


def manifest_of(model: Model, place: ComputeTarget, context: int, ranks: int) -> Manifest:
    """Return the manifest of a run, which the process announces. `context` is the number of tokens of a sequence."""
    return Manifest(
        model=model.name,
        architecture=model.architecture,
        backend=place.label,
        quantization=model.quantization,
        threads=place.threads or 1,
        layers=len(model.layers),
        hidden_size=model.hidden,
        context_length=context,
        parameters=model.parameters,
        weights_bytes=model.weights_bytes,
        ranks=ranks,
    )


def conditions_of(place: ComputeTarget) -> Conditions:
    """Return the conditions of this process that may affect its times."""
    from cbtop.compute.jit.cpu import HAS_TILES, TIER

    known = {} if place.threads is None else {"instructions": f"{TIER}, AMX" if HAS_TILES else TIER}
    return conditions(known, {"numba": "Numba", "llvmlite": "llvmlite", "numpy": "NumPy", "cupy": "CuPy"})
