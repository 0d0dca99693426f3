"""Run a model: prefill, then one token after another with a KV cache. Every operation runs through its brick."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from cbtop.compute.brick import ComputeBrick, Profiler
from cbtop.compute.checks import AssertionResult, summary
from cbtop.compute.decoder.arguments import KernelArguments
from cbtop.compute.decoder.base import LayerWeights, Model, Projection
from cbtop.compute.decoder.bricks import BrickMaker, LayerBricks
from cbtop.compute.decoder.machine import Host, Machine
from cbtop.compute.decoder.mixture import Mixture, Run
from cbtop.compute.decoder.ranks import ALONE, Exchanges, Rank
from cbtop.compute.decoder.workspace import Workspace
from cbtop.compute.errors import ComputeError, NoTokenError
from cbtop.compute.guard import JidokaGuard
from cbtop.compute.kernels import attention, kv_caches
from cbtop.compute.kernels import sampling as kernels
from cbtop.compute.kernels.base import Arguments
from cbtop.compute.memory import available_bytes
from cbtop.compute.settings import DEFAULT_SETTINGS, DecoderSettings
from cbtop.profiler.steps import ActiveStep
from cbtop.protocol.messages import CheckResult

Floats = NDArray[np.float32]
# The type that a cache is stored in; float16 is stored as uint16 with the same bits.
Cache = NDArray[np.float32] | NDArray[np.uint16]
Scope = Callable[[int], AbstractContextManager[object]]
# A function that is called after each brick of a pass has run.
Observer = Callable[[ComputeBrick, Sequence[Arguments]], None]
User = TypeVar("User", bound="Decoder")
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer with its bricks, weights and caches. The caches have the layout that `kv_caches.empty_caches` makes."""

    bricks: LayerBricks
    weights: LayerWeights
    k_cache: Cache
    v_cache: Cache
    angles: Floats  # cosines and sines of all positions, made by `Rope.table`
    window: int


def _timed(brick: ComputeBrick, elements: int, *calls: Arguments) -> None:
    brick(elements, *calls)


def _by_contract(announce: Callable[[CheckResult], None]) -> Run:
    """Return a function that runs bricks and checks the conditions of their contracts.

    A condition that holds when its brick first runs is announced as passed. A condition that does not hold is
    announced as failed, but only the first time.
    """
    said: dict[tuple[str, str], bool] = {}
    known: set[ComputeBrick] = set()

    def report(brick: ComputeBrick, conditions: Iterable[str], holds: bool = False) -> None:
        for condition in conditions:
            key = brick.spec.name, condition
            if key not in said or (said[key] and not holds):
                said[key] = holds
                announce(CheckResult(*key, holds, None, None))

    def run(brick: ComputeBrick, elements: int, *calls: Arguments) -> None:
        brick.run_checked(report, elements, calls)
        if brick not in known:
            known.add(brick)
            for kernel in brick.kernels:
                report(brick, [held.name for held in kernel.contract.conditions], holds=True)

    return run


def _observed(run_brick: Run, observe: Observer) -> Run:
    def run(brick: ComputeBrick, elements: int, *calls: Arguments) -> None:
        run_brick(brick, elements, *calls)
        observe(brick, calls)

    return run


def one_call_at_a_time(method: Callable[Concatenate[User, P], R]) -> Callable[Concatenate[User, P], R]:
    """Let only one call at a time use the decoder, because two calls would write into the same cache.

    A second call raises ComputeError. It may come from another thread, or from an observer or a signal handler inside
    the first call.
    """

    @wraps(method)
    def alone(self: User, /, *arguments: P.args, **named: P.kwargs) -> R:
        users, process, use = self._users, os.getpid(), object()
        # An interrupt may come when any call returns, even right after the decoder was reserved. So `finally` checks
        # in the dictionary whether this call has reserved the decoder. If so, `finally` releases the decoder without
        # calling anything.
        try:
            if users.setdefault(process, use) is use:
                return method(self, *arguments, **named)
        finally:
            if process in users and users[process] is use:
                del users[process]
        raise ComputeError("this decoder is in use: it has one sequence; make one for each thread")

    return alone


def _require_settings(threads: int, context: int, settings: DecoderSettings) -> None:
    """Raise ComputeError for invalid numbers or an unknown cache type."""
    if not all(isinstance(one, int | np.integer) and one is not True and one > 0 for one in (threads, context)):
        raise ComputeError(f"{threads} threads and a context of {context}; whole numbers from 1 are wanted")
    if settings.cache_type not in kv_caches.CACHE_TYPES:
        supported = " and ".join(kv_caches.CACHE_TYPES)
        raise ComputeError(f"a KV cache of {settings.cache_type!r}; supported are {supported}")


def _layers_of(
    machine: Machine, model: Model, bricks: Sequence[LayerBricks], context: int, dtype: Any
) -> tuple[_Layer, ...]:
    """Return the layers with caches of `dtype` for `context` tokens."""
    angles = sliding_angles = machine.array(model.rope.table(context))
    if model.sliding_rope is not model.rope:
        sliding_angles = machine.array(model.sliding_rope.table(context))
    caches = machine.caches(len(model.layers), model.kv_heads, context, model.head_dim, dtype)
    return tuple(
        _Layer(
            own,
            weights,
            *of_layer,
            angles=sliding_angles if weights.slides else angles,
            window=model.window if weights.slides else 0,
        )
        for own, weights, of_layer in zip(bricks, model.layers, caches, strict=True)
    )


def _require_room(model: Model, context: int, item_bytes: int) -> None:
    """Raise ComputeError if a context needs more than the available memory.

    A context needs the angles of its positions, and its caches fill up later. Computing the angles needs a float64
    copy for a moment. The caches and this copy are not needed at the same time, so only the larger of the two counts.
    """
    caches = 2 * len(model.layers) * model.kv_heads * kv_caches.padded(model.head_dim) * item_bytes
    tables = 4 * model.rope.dimensions
    if model.sliding_rope is not model.rope:
        tables += 4 * model.sliding_rope.dimensions
    size_bytes = context * (tables + max(caches, 4 * model.sliding_rope.dimensions))
    available = available_bytes()
    if available is not None and size_bytes > available:
        raise ComputeError(
            f"the KV cache of {context:,} tokens and their angles take {size_bytes / 1e9:,.1f} GB of memory, and "
            f"{available / 1e9:,.1f} GB are available here; give a shorter context"
        )


class Decoder:
    """Runs one model over one sequence of at most `context` tokens.

    With `settings.check_contracts`, each brick also checks the pre- and postconditions of its kernels' contracts. The
    results are announced as CheckResults. If a `guard` is given, the guard watches the passes.

    With a `rank`, the decoder runs only one part of the model, and other processes run the others. Only ranks that
    choose tokens have logits. All ranks must make the same calls.
    """

    def __init__(
        self,
        model: Model,
        backend: str,
        threads: int,
        profiler: Profiler,
        context: int,
        settings: DecoderSettings = DEFAULT_SETTINGS,
        machine: Machine | None = None,
        rank: Rank = ALONE,
    ) -> None:
        _require_settings(threads, context, settings)
        self.model = model
        self.backend = backend
        self.context = context
        self.position = 0  # number of tokens in the KV cache
        self.guard: JidokaGuard | None = None
        self._start: Any = 0  # the first position of the running pass, in the type that kernels take
        dtype = np.dtype(kv_caches.CACHE_TYPES[settings.cache_type])
        if machine is None:
            _require_room(model, context, dtype.itemsize)
            machine = Host(threads)
        self._machine = machine
        # process id -> the call that is running; a forked process has calls of its own
        self._users: dict[int, object] = {}
        self._profiler = profiler
        self._run_brick = _by_contract(profiler.announce) if settings.check_contracts else _timed
        self._sampling = settings.sampling
        self._sequence = 0  # number of the sequence; random draws depend on this number
        chooser = kernels.GREEDY if settings.sampling.is_greedy else kernels.DRAWN
        names_launches = machine.names_launches
        maker = BrickMaker(model, backend, profiler, dtype.itemsize, chooser, names_launches=names_launches)
        self.bricks = maker.bricks()
        self._exchanges = Exchanges(rank, backend, profiler, names_launches=names_launches)
        self._rank = rank
        self._layers = _layers_of(machine, model, self.bricks.layers, context, dtype)
        columns = max(model.hidden, model.feed_forward, model.heads * model.head_dim)
        most, experts = min(context, machine.most_together), model.experts
        scratch = machine.scratch(columns)
        used = 1 if experts is None else experts.used  # number of rows of activations that one token needs
        self.int8_scratch = machine.int8_scratch(model, max(most, used), columns)
        self._attention_scratch = machine.attention_scratch(model, context)
        self._no_bias = machine.array(np.zeros(0, np.float32))
        self._space = Workspace.of(model, most, machine.zeros, None if names_launches else self.int8_scratch)
        self._alone = self._space.first(1)
        self._arguments = KernelArguments(model.epsilon, scratch, self.int8_scratch)
        self._mixture = None if experts is None else Mixture(model, experts, machine, self._arguments, most)

    @one_call_at_a_time
    def restart(self) -> None:
        """Begin a new sequence. Raises ComputeError while another call uses the decoder."""
        self._begin()

    def _begin(self) -> None:
        """Begin a new sequence. The caller must have reserved the decoder."""
        self.position = 0
        self._sequence += 1

    def tell(self) -> None:
        """Publish the measurements of recorded steps.

        In this class, the method does nothing, because each step is published when it ends.
        """

    @one_call_at_a_time
    def prefill(self, tokens: Sequence[int], observe: Observer | None = None) -> int:
        """Append `tokens` to the sequence and return the next token.

        Raises ComputeError if the tokens do not fit or are not in the vocabulary. Raises NoTokenError if a logit is
        NaN or infinite and no guard handles it. After an error or an interrupt, no token has been appended.
        """
        self._check(tokens)
        with self._profiler.step("prefill", tokens=len(tokens)) as step:
            self._say(step)
            return self._guarded(tokens, self._run(observe))

    @one_call_at_a_time
    def decode(self, token: int, observe: Observer | None = None) -> int:
        """Append one token and return the next one. Raises the same errors as `prefill`."""
        self._check((token,))
        with self._profiler.step("decode", tokens=1) as step:
            self._say(step)
            return self._guarded((token,), self._run(observe))

    def _say(self, step: ActiveStep) -> None:
        """Record the size of a step: one sequence, and the number of cached positions.

        The size is used to compare the step with steps of similar size.
        """
        step.sequences, step.cached = 1, self.position

    def _guarded(self, tokens: Sequence[int], run: Run) -> int:
        """Run a pass. If there is a guard and the logits show a fault, run the pass again and check every brick."""
        guard, start, layer, space = self.guard, self.position, self._profiler.layer, self._space
        # Look for faults in the logits before and after their soft cap. The cap hides infinities, and may produce NaN
        # or infinity itself.
        if guard is None:
            token = self._forward(tokens, run, layer)
            looked_at = (space.logits_product, *([space.logits] if self.bricks.soft_cap else []))
            if self._rank.chooses and not all([np.isfinite(logits).all() for logits in looked_at]):
                self.position = start
                raise NoTokenError
            return token
        token = self._forward(tokens, guard.run(run, start), layer)
        if guard.has_fault(space.logits_product) or (self.bricks.soft_cap and guard.has_fault(space.logits)):
            self.position = start
            token = self._forward(tokens, guard.again(self._run_brick), layer)
            guard.finish_again(self.bricks.lm_head)
        return token

    def _run(self, observe: Observer | None) -> Run:
        return self._run_brick if observe is None else _observed(self._run_brick, observe)

    def plan(self, tokens: Sequence[int], run: Run, scope: Scope) -> None:
        """Call `run` with the bricks of a pass. `run` need not execute the bricks.

        Without execution, no router chooses experts. Then all tokens go to the same experts, as many as one token
        uses.
        """
        if self._mixture is not None:
            self._mixture.plan(len(tokens))
        self._whole_pass(tokens, run, scope)

    @property
    def logits(self) -> Floats:
        """The logits of the last token, float32 (vocabulary,). The next pass overwrites them."""
        logits: Floats = self._space.logits[0]
        return logits

    @one_call_at_a_time
    def verify(self, *prompts: Sequence[int]) -> list[CheckResult]:
        """Check each brick against its reference, in both kinds of pass. Nothing is timed.

        First all tokens of a prompt except the last run together from position 0. Then the last token runs alone. The
        sequence is restarted.

        Returns one result for each pair of brick name and assertion, over all places where the brick runs. If a
        brick's output was not finite and could not be replaced, failures of later bricks count as skipped, because
        the bad input may have caused them.
        """
        findings: list[tuple[str, str, AssertionResult]] = []
        in_turn, last_kept = list(self.bricks.places()), self.bricks.layers[-1].kv_write
        for tokens in prompts:
            self._begin()
            self._check(tokens)
            spoilt_by: list[ComputeBrick] = []
            for part in (tokens[:-1], tokens[-1:]):
                if part:
                    self._forward(part, self._checking(findings, spoilt_by), lambda index: nullcontext())
                if spoilt_by and in_turn.index(spoilt_by[0]) > in_turn.index(last_kept):
                    # this fault came after the last write to the cache, and the next pass reads only the cache of
                    # this pass
                    spoilt_by.clear()
        self._begin()
        return summary(findings)

    def _checking(self, findings: list[tuple[str, str, AssertionResult]], spoilt_by: list[ComputeBrick]) -> Run:
        """Return a function that runs and checks the bricks of a pass, and appends the results to `findings`.

        If the output of a brick stays NaN or infinite, the function stores the first such brick in `spoilt_by`.
        """
        check = self._check_of_pass()

        def run(brick: ComputeBrick, elements: int, *calls: Arguments) -> None:
            for name, assertion, found in check(brick, calls):
                if not found.passed and spoilt_by and brick is not spoilt_by[0]:
                    reason = f"what {spoilt_by[0].spec.name} computed before it is not finite"
                    found = AssertionResult(True, tolerance=found.tolerance, skipped=reason)
                elif found.not_finite and not found.mended and not spoilt_by:
                    spoilt_by.append(brick)
                findings.append((name, assertion, found))

        return run

    def _check_of_pass(
        self,
    ) -> Callable[[ComputeBrick, tuple[Arguments, ...]], Iterator[tuple[str, str, AssertionResult]]]:
        """Return a function that checks the bricks of the next pass.

        The function runs a brick and yields (brick, assertion, finding).
        """
        return ComputeBrick.check

    def _check(self, tokens: Sequence[int]) -> None:
        self._machine.check()
        count, vocabulary = len(tokens), self.model.vocabulary
        if not count:
            raise ComputeError("no token to begin with: give a prompt of one or more")
        if count > self.context - self.position:
            raise ComputeError(
                f"{count} tokens at position {self.position} do not fit a context of {self.context}; restart first"
            )
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, int | np.integer) or not 0 <= token < vocabulary:
                raise ComputeError(
                    f"a token is {token!r:.40}; whole numbers from 0 to {vocabulary - 1:,} are wanted, which is the "
                    "vocabulary"
                )

    def _forward(self, tokens: Sequence[int], run: Run, scope: Scope) -> int:
        start = self.position
        try:
            with self._machine.turn():
                return int(self._whole_pass(tokens, run, scope).choice[0])
        # Undo a pass also after Ctrl-C. Otherwise, the tokens of the pass would be in the cache twice when the caller
        # passes them again.
        except BaseException:
            self.position = start
            raise

    def _whole_pass(self, tokens: Sequence[int], run: Run, scope: Scope) -> Workspace:
        """Run every brick of a pass. Returns the buffers.

        They contain the chosen token once the machine has finished the pass.
        """
        for first in range(0, len(tokens), self._machine.most_together):
            space = self._through_layers(tokens[first : first + self._machine.most_together], run, scope)
        if self._rank.chooses:
            self._choose(space, run)
        if self._exchanges.broadcast is not None:
            run(self._exchanges.broadcast, 1, (space.choice,))
        return space

    def _choose(self, space: Workspace, run: Run) -> None:
        model, head, bricks = self.model, self.model.lm_head, self.bricks
        norm, projection = bricks.final_norm, Projection(head, self._no_bias)
        codes = space.last_codes if norm.makes_codes else None
        run(norm, model.hidden, self._arguments.norm(space.last, model.final_norm, space.last_normed, codes))
        run(
            bricks.lm_head,
            head.rows,
            self._arguments.product(projection, space.last_normed, space.logits_product, codes),
        )
        if bricks.soft_cap is not None:
            run(bricks.soft_cap, model.vocabulary, (space.logits_product, model.logit_cap, space.logits))
        run(bricks.sampling, model.vocabulary, self._choice(space))

    def _choice(self, space: Workspace) -> Arguments:
        if self._sampling.is_greedy:
            return space.logits, space.choice
        how = self._sampling
        settings = how.temperature, how.top_k, how.top_p, how.seed
        return space.logits, *settings, self.position, self._sequence, space.choice

    def _through_layers(self, tokens: Sequence[int], run: Run, scope: Scope) -> Workspace:
        count, model, bricks = len(tokens), self.model, self.bricks
        space = self._alone if count == 1 else self._space.first(count)
        given = self._machine.put(space.tokens, tokens)
        self._start = self._machine.position(self.position)
        if self._exchanges.recv is None:
            embedding = model.embedding
            arguments = (embedding.format.code, embedding.data, given, model.embedding_scale, space.x)
            run(bricks.embedding, count * model.hidden, arguments)
        else:
            run(self._exchanges.recv, space.x.size, (space.x,))
        for index, layer in enumerate(self._layers, model.first_layer):
            with scope(index):
                self._attention(layer, space, count, run)
                self._feed_forward(layer, space, count, run)
        if self._exchanges.send is not None:
            run(self._exchanges.send, space.x.size, (space.x,))
        self.position += count
        return space

    def _attention(self, layer: _Layer, space: Workspace, count: int, run: Run) -> None:
        model, bricks, weights, start = self.model, layer.bricks, layer.weights, self._start
        product = self._arguments.product
        query_rows, kv_rows = weights.q.weight.rows, weights.k.weight.rows
        neox, angles, head_dim = model.rope.layout == "neox", layer.angles, model.head_dim
        seen = model.heads * attention.positions_seen(self.position, count, layer.window)
        codes = space.normed_codes if bricks.attention_norm.makes_codes else None

        run(
            bricks.attention_norm,
            space.x.size,
            self._arguments.norm_of_stream(bricks.attention_norm, weights.attention_norm, space, codes),
        )
        run(
            bricks.qkv,
            count * (query_rows + 2 * kv_rows),
            *self._arguments.qkv(bricks.qkv, weights, space, codes),
        )
        if bricks.qk_norm is not None:
            products = (space.q_product, weights.q_norm, space.q), (space.k_product, weights.k_norm, space.k)
            run(
                bricks.qk_norm,
                space.q.size + space.k.size,
                *(
                    self._arguments.norm(x.reshape(-1, head_dim), norm, out.reshape(-1, head_dim))
                    for x, norm, out in products
                ),
            )
        run(
            bricks.rope,
            count * (model.heads + model.kv_heads) * model.rope.dimensions,
            (space.q, head_dim, start, angles, neox),
            (space.k, head_dim, start, angles, neox),
        )
        run(bricks.kv_write, 2 * count * kv_rows, (space.k, space.v, start, layer.k_cache, layer.v_cache))
        caches, scratch = (layer.k_cache, layer.v_cache), self._attention_scratch
        scores = model.attention_scale, layer.window, model.attention_cap
        run(bricks.attention, seen, (space.q, *caches, start, *scores, space.attended, scratch))
        run(bricks.output_projection, space.x.size, product(weights.output, space.attended, space.delta_product))
        self._add_up(space, run)
        if bricks.attention_post_norm is not None:
            normed = self._arguments.norm(space.delta_product, weights.attention_post_norm, space.delta)
            run(bricks.attention_post_norm, space.x.size, normed)
        if bricks.attention_add is not None:
            run(bricks.attention_add, space.x.size, (space.x, space.delta))

    def _feed_forward(self, layer: _Layer, space: Workspace, count: int, run: Run) -> None:
        bricks, weights, inner = layer.bricks, layer.weights, space.gate.size
        codes = space.normed_codes if bricks.ffn_norm.makes_codes else None
        run(
            bricks.ffn_norm,
            space.x.size,
            self._arguments.norm_of_stream(bricks.ffn_norm, weights.ffn_norm, space, codes),
        )
        if bricks.experts is not None:
            assert self._mixture is not None
            self._mixture.mix(weights, bricks.experts, space, count, run)
        else:
            if bricks.gated is not None:
                outs = space.gate, space.up, space.activated
                run(
                    bricks.gated,
                    inner,
                    self._arguments.gated(weights.gate, weights.up, space.normed, *outs, codes=codes),
                )
            else:
                run(bricks.gate, inner, self._arguments.product(weights.gate, space.normed, space.gate, codes))
                run(bricks.up, inner, self._arguments.product(weights.up, space.normed, space.up, codes))
                run(bricks.activation, inner, (space.gate, space.up, space.activated))
            run(
                bricks.down, space.x.size, self._arguments.product(weights.down, space.activated, space.delta_product)
            )
        self._add_up(space, run)
        if bricks.ffn_post_norm is not None:
            normed = self._arguments.norm(space.delta_product, weights.ffn_post_norm, space.delta)
            run(bricks.ffn_post_norm, space.x.size, normed)
        if bricks.ffn_add is not None:
            run(bricks.ffn_add, space.x.size, (space.x, space.delta))

    def _add_up(self, space: Workspace, run: Run) -> None:
        """Add up the outputs of all ranks that compute a layer together."""
        if self._exchanges.all_reduce is not None:
            run(self._exchanges.all_reduce, space.delta_product.size, (space.delta_product,))
