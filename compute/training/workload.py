"""The work of `cbtop demo --train`: train adapters of a model on a short text, repeatedly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cbtop.compute.errors import ComputeError
from cbtop.compute.settings import WorkloadOptions
from cbtop.compute.workload import SHORTEST_CONTEXT, Progress, ShouldStop, conditions_of, manifest_of

if TYPE_CHECKING:
    from cbtop.compute.brick import Profiler
    from cbtop.compute.decoder.base import Model
    from cbtop.compute.places import ComputeTarget
    from cbtop.compute.training.trainer import Trainer

TOKENS = 64  # number of tokens in a step, if the user gives none
ANNOUNCED_EVERY_NS = 1_000_000_000
SEED = 3

# A function that is called after each step with the number of steps and the loss.
Report = Callable[[int, float], None]


def run(
    options: WorkloadOptions, profiler: Profiler, should_stop: ShouldStop, progress: Progress, report: Report
) -> None:
    """Announce the model, the checks of its bricks and the machine's ceilings.

    Then train until the end, or until `should_stop` returns True. It is called between steps.

    `progress` gets the name of each long task, and "" when none is running. Options that are only for decoding are
    ignored. Raises ModelError if the model cannot be trained, and LossError if the loss is NaN or infinite.
    """
    # These modules are imported here, because they load Numba.
    from cbtop.compute.backends import compiling, is_first_run
    from cbtop.compute.demo_model import demo_model
    from cbtop.compute.first_run import compile_in_fork
    from cbtop.compute.places import place_of
    from cbtop.compute.training.text import batches

    # Exact products are needed, because gradients are computed only for exact products.
    options = replace(options, is_exact=True)
    path = options.model or demo_model(progress)
    if is_first_run():
        compile_in_fork(partial(_compile, options, path), lambda: progress(compiling(), None))
    place = place_of(options)
    progress("reading the model", None)
    model = place.model(path)
    tokens = _tokens(options, model)
    profiler.announce(manifest_of(model, place, tokens, ranks=1))
    profiler.announce(conditions_of(place))
    progress("compiling kernels", None)
    _warm_up(options, place, model, tokens)
    trainer = _trainer(options, place, model, profiler, tokens)
    source = batches(tokens, model.vocabulary, SEED)
    progress("checking the bricks", None)
    for result in trainer.verify_step(next(source)):
        profiler.announce(result)
    progress("measuring ceilings", None)
    for ceiling in place.ceilings(model, progress):
        profiler.announce(ceiling)
    progress("", None)
    done, announced_ns = 0, trainer.times.ended_ns
    while not should_stop() and (options.steps is None or done < options.steps):
        loss = trainer.step(source)
        done += 1
        report(done, loss)
        if done == options.steps or trainer.times.ended_ns - announced_ns >= ANNOUNCED_EVERY_NS:
            profiler.announce(trainer.times.latest())
            announced_ns = trainer.times.ended_ns


def _trainer(
    options: WorkloadOptions, place: ComputeTarget, model: Model, profiler: Profiler, tokens: int
) -> Trainer:
    from cbtop.compute.training.trainer import Trainer

    assert place.threads is not None  # a GPU has no number of threads; training always runs on a CPU
    return Trainer(model, place.label, place.threads, profiler, tokens, check_contracts=options.check_contracts)


def _tokens(options: WorkloadOptions, model: Model) -> int:
    """Return the number of tokens of a step. Raises ComputeError if the number is too small or too large."""
    from cbtop.compute.decoder.machine import Host
    from cbtop.compute.training.text import TEXT

    largest = min(model.context_length, Host.most_together, len(TEXT) - 1)
    tokens = min(TOKENS, largest) if options.context is None else options.context
    if not SHORTEST_CONTEXT <= tokens <= largest:
        raise ComputeError(f"a training step of {tokens} tokens; give a context of {SHORTEST_CONTEXT} to {largest}")
    return tokens


def _warm_up(options: WorkloadOptions, place: ComputeTarget, model: Model, tokens: int) -> None:
    """Run one step without recording it, because the first call of each kernel compiles.

    The trainer of this step is not used afterwards.
    """
    from cbtop.compute.training.text import batches
    from cbtop.profiler.profiler import BrickProfiler

    silent = replace(options, check_contracts=False)
    trainer = _trainer(silent, place, model, BrickProfiler(enabled=False), tokens)
    trainer.step(batches(tokens, model.vocabulary, SEED))


def _compile(options: WorkloadOptions, path: Path) -> None:
    """Compile the kernels of a run by calling them. Nothing is recorded."""
    from cbtop.compute.backends import is_first_run
    from cbtop.compute.places import place_of

    place = place_of(options)
    # If the cache still has no kernels, the disk cannot be written. Kernels that this forked process compiles would
    # then be lost.
    if is_first_run():
        return
    model = place.model(path)
    _warm_up(options, place, model, _tokens(options, model))
    for _ in place.ceilings(model, lambda what, done: None):
        pass
