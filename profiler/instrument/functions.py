"""Bricks that are functions: attention, its masks, rotary position, the cache, sampling, what generate prepares.

Each is wrapped where it is looked up.

Rules
- Those that a module or a mapping holds are swapped in for recorded steps, see swapping.py; methods stay wrapped as
  long as anything is attached. Where nothing is recorded a wrapper asks two questions and calls.
- A wrapper's first question is whether Dynamo compiles, and it closes over functions alone: nothing that changes, and
  where it is a method of what compiled code makes, Dynamo takes nothing else from a closure.
- Where something of ours fails, it is said once, and what is wrapped is called as it is.
- Fused attention is one brick, "Attention (fused)", and is never split.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from cbtop.profiler.definitions import BrickDefinition
from cbtop.profiler.hot_path import HotPath, chosen
from cbtop.profiler.instrument import classification
from cbtop.profiler.instrument.steps import Generation, recorded_here, unit
from cbtop.profiler.instrument.swapping import Replaced, held, swapped_in, swaps
from cbtop.profiler.instrument.trouble import ours
from cbtop.profiler.instrument.wrapping import elements_of
from cbtop.protocol.attributes import Work
from cbtop.protocol.clock import perf_counter_ns
from cbtop.protocol.vocabulary import BrickCategory, BrickId

if TYPE_CHECKING:
    from torch import nn


Function = Callable[..., Any]
# By the arguments of a call: its brick, and its elements; None where it is not timed.
BrickOf = Callable[[Any, Any], tuple[Any, Any] | None]
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_ROPE = (
    "apply_rotary_pos_emb",
    "apply_rotary_emb",
    "apply_rotary_pos_emb_interleave",
    "apply_rotary_pos_emb_vision",
    "apply_multimodal_rotary_pos_emb",
)
# Other functions of a model's file, and methods of its attention, with their bricks.
_FUNCTIONS = {
    "create_causal_mask": classification.ATTENTION_MASK,
    "create_sliding_window_causal_mask": classification.ATTENTION_MASK,
    "create_chunked_causal_mask": classification.ATTENTION_MASK,
    "create_bidirectional_mask": classification.ATTENTION_MASK,
    "create_bidirectional_sliding_window_mask": classification.ATTENTION_MASK,
    "build_alibi_tensor": classification.ALIBI_BIAS,
    "dropout_add": classification.RESIDUAL_ADD,
}
_METHODS = {
    "_get_embed_positions": classification.ROTARY_TABLES,
    "_split_heads": classification.SPLIT_HEADS,
    "_reshape": classification.SPLIT_HEADS,  # Bloom's
    "_merge_heads": classification.MERGE_HEADS,
    "expand_kv": classification.KV_EXPANSION,
}
# Arguments by which attention leaves out keys: of other sequences in the same row, of pages, of before a window.
_HIDE = frozenset({"cu_seq_lens_q", "cu_seqlens_q", "cache", "block_table", "sliding_window", "position_bias"})
_ATTENTION = "_attention_forward"  # that of transformers ends so: sdpa_attention_forward
_EAGER = f"eager{_ATTENTION}"
_CACHE_UPDATE = "cache_utils.update"
_EAGER_METHOD = "_attn"  # the same of older models (GPT-J): of the attention itself, which is its first argument
GENERATION = "transformers.generation.utils"


class Functions:
    """The functions that are wrapped in this process. `met` is told of each model that begins to generate."""

    def __init__(self, met: Callable[[object], None] = lambda model: None) -> None:
        self._met = met
        self._wrapped: list[Replaced] = []  # in the order it was done

    def wrap(self, modules: Iterable[nn.Module]) -> None:
        """Wrap those that these modules call, as far as they are not yet."""
        self.swap(torch.nn.functional, "scaled_dot_product_attention", lambda f: _attention(f, "sdpa", 0))
        kinds = {base for module in modules for base in type(module).__mro__}
        for kind in kinds:
            self.replace(kind, _EAGER_METHOD, _eager)
            for method, brick in _METHODS.items() if "Attention" in kind.__name__ else ():
                self.replace(kind, method, functools.partial(_plain, name=brick))
            self._wrap_inputs(kind)
        for name in sorted({kind.__module__ for kind in kinds}):
            home = sys.modules.get(name)
            for function in _ROPE:
                self.swap(home, function, _rope)
            for function, brick in _FUNCTIONS.items():
                self.swap(home, function, functools.partial(_plain, name=brick))
            self.swap(home, _EAGER, _eager)
        self._wrap_transformers()
        self.wrap_generate()

    def unwrap(self) -> None:
        """Put back what was there, where nobody else has put something of theirs since."""
        swaps.clear()
        for function in reversed(self._wrapped):
            function.put(function.original, function.wrapped)
        self._wrapped.clear()

    def _wrap_transformers(self) -> None:
        modules = sys.modules
        interface = getattr(modules.get("transformers.modeling_utils"), "AttentionInterface", None)
        known = getattr(interface, "_global_mapping", {})
        for name in list(known):
            if "eager" not in name:
                self.swap(known, name, functools.partial(_attention, label=name, queries=1))
        self.replace(getattr(modules.get("transformers.cache_utils"), "Cache", None), "update", _kv_write)

    def wrap_generate(self) -> None:
        """Wrap what keeps a step open until its token is chosen: before `generate` first calls a model."""
        generation = sys.modules.get(GENERATION)
        mixin = getattr(generation, "GenerationMixin", None)
        self.replace(mixin, "generate", functools.partial(generates, met=self._met))
        self.replace(mixin, "_assisted_decoding", _assisted)
        self._wrap_inputs(mixin)
        self.replace(getattr(generation, "LogitsProcessorList", None), "__call__", _scores)
        self.replace(getattr(generation, "StoppingCriteriaList", None), "__call__", _chosen)

    def _wrap_inputs(self, kind: Any) -> None:
        self.replace(kind, "prepare_inputs_for_generation", _prepares)
        update = functools.partial(_plain, name=classification.GENERATE_INPUTS)
        self.replace(kind, "_update_model_kwargs_for_generation", update)

    def replace(self, owner: Any, name: str, wrapper: Callable[[Function], Function]) -> None:
        """Let `owner` have what `wrapper` makes of its function `name`, if it has one that is not ours."""
        function = _replaced(owner, name, wrapper)
        if function is not None:
            self._wrapped.append(function)
            function.put(function.wrapped, function.original)

    def swap(self, owner: Any, name: str, wrapper: Callable[[Function], Function]) -> None:
        """Let `owner` have it where the calls of a model are timed."""
        if owner is not None and not swaps.has(owner, name, held(owner, name)):
            function = _replaced(owner, name, wrapper)
            if function is not None:
                swaps.add(function)


def _replaced(owner: Any, name: str, wrapper: Callable[[Function], Function]) -> Replaced | None:
    original = None if owner is None else held(owner, name)
    if original is None or hasattr(original, "_is_of_cbtop"):
        return None
    wrapped = wrapper(original)
    wrapped._is_of_cbtop = True  # type: ignore[attr-defined]
    return Replaced(owner, name, original, wrapped)


class FunctionCall:
    """Calls a function as a brick where a step is recorded.

    The brick is `brick`, with the elements of the first tensor from the argument numbered `first` on; or what
    `brick_of` makes of the arguments. On a compiled hot path calls are made in C, which does the same; `last` is
    there what `brick_of` made of the last call of attention whose query is the argument numbered `queries`.
    """

    __slots__ = ("brick", "brick_of", "first", "last", "name", "original", "queries")

    def __init__(
        self,
        original: Function,
        name: str,
        brick: BrickDefinition | None,
        first: int,
        brick_of: BrickOf | None,
        queries: int | None,
    ) -> None:
        self.original, self.name = original, name
        self.brick, self.first, self.brick_of, self.queries = brick, first, brick_of, queries

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        path: Any = None  # or a capture
        timer, elements = None, 0
        try:
            path = recorded_here()
            # One attention function calls another: what runs in such a brick already is a part of it.
            if path is not None and getattr(path.position.scope.key, "name", None) != self.name:
                if self.brick_of is None:
                    found: tuple[Any, Any] | None = (self.brick, elements_of(args[self.first :], kwargs))
                else:
                    found = self.brick_of(args, kwargs)
                if found is not None:
                    brick, elements = found
                    timer = path.start_brick(brick)
        except Exception as error:  # noqa: BLE001 - see the rules
            ours(error, f"some calls of {self.name} are not timed")
        if path is None or timer is None:
            return self.original(*args, **kwargs)
        try:
            result = self.original(*args, **kwargs)
        except BaseException:
            path.stop_brick(timer, 0, True)
            raise
        path.stop_brick(timer, elements)
        return result


_compiled: Callable[[Function], Function] | None = None
if chosen() is not HotPath:
    from cbtop.profiler import _hot_path

    _hot_path.compile_function_calls(FunctionCall, BrickDefinition, swapped_in, _HIDE)
    _compiled = _hot_path.compile_wrapper


def _unless_it_is_odd(brick_of: BrickOf, name: str) -> BrickOf:
    def guarded(args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        try:
            with torch._C.DisableTorchFunction():  # the host's do not see that we ask
                return brick_of(args, kwargs)
        except Exception as error:  # noqa: BLE001 - see the rules
            ours(error, f"some calls of {name} are not timed")
        return None

    return guarded


def timed(
    original: Function,
    name: str,
    brick: BrickDefinition | None = None,
    *,
    first: int = 0,
    brick_of: BrickOf | None = None,
    queries: int | None = None,
) -> Function:
    """`original`, timed in recorded steps; see `FunctionCall`."""

    run = FunctionCall(original, name, brick, first, brick_of and _unless_it_is_odd(brick_of, name), queries)

    def call_timed(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or not swapped_in:
            return original(*args, **kwargs)
        return call_timed(*args, **kwargs)

    return call if _compiled is None else _compiled(call)


ROPE = BrickDefinition.of(BrickId.ROPE_EMBEDDING, backend="torch")


def _plain(original: Function, name: str) -> Function:
    """A brick of which no more is known than its name."""
    return timed(original, name, brick_of_name(name))


@functools.cache
def brick_of_name(name: str) -> BrickDefinition:
    """A brick of which no more is known than its name."""
    return BrickDefinition(name, classification.CATEGORIES[name], backend="torch")


def brick_of_function(function: str) -> BrickDefinition | None:
    """The brick that calls of a function are; its name stands behind that of its file, as far as that is known."""
    file, _, name = function.rpartition(".")
    if name in _ROPE:
        return ROPE
    if name in _FUNCTIONS:
        return brick_of_name(_FUNCTIONS[name])
    if function == _CACHE_UPDATE:
        return brick_of_name(classification.KV_WRITE)
    if name == "scaled_dot_product_attention":
        return _attention_brick(classification.ATTENTION_FUSED, "sdpa", 0, 0, 0)
    label = name.removesuffix(_ATTENTION)
    if not file or label == name:
        return None
    kind = classification.ATTENTION_EAGER if label == "eager" else classification.ATTENTION_FUSED
    return _attention_brick(kind, label.strip("_"), 0, 0, 0)


def _rope(original: Function) -> Function:
    return timed(original, ROPE.name, ROPE)


def _kv_write(original: Function) -> Function:
    return timed(original, classification.KV_WRITE, brick_of_name(classification.KV_WRITE), first=1)


def _attention(original: Function, label: str, queries: int) -> Function:
    """Fused attention; its query, key and value are the arguments from the one numbered `queries` on."""
    name = classification.ATTENTION_FUSED

    def brick_of(args: Any, kwargs: Any) -> tuple[Any, int]:
        if len(args) > queries + 3:
            query, key, _, mask = args[queries : queries + 4]
        else:
            query, key = named(args, kwargs, queries, "query"), named(args, kwargs, queries + 1, "key")
            mask = named(args, kwargs, queries + 3, "attention_mask" if queries else "attn_mask")
        is_causal = kwargs.get("is_causal")
        if is_causal is None:
            is_causal = getattr(args[0], "is_causal", False) if queries else len(args) > 5 and args[5]
        hides = mask is not None or (
            not _HIDE.isdisjoint(kwargs) and any([kwargs.get(word) is not None for word in _HIDE])
        )
        return _attended(name, label, query, key, hides, bool(is_causal))

    return timed(original, name, brick_of=brick_of, queries=queries)


def _eager(original: Function) -> Function:
    """Attention written out: it multiplies every query with every key, whatever the mask hides."""
    name = classification.ATTENTION_EAGER

    def brick_of(args: Any, kwargs: Any) -> tuple[Any, int]:
        return _attended(name, "eager", named(args, kwargs, 1, "query"), named(args, kwargs, 2, "key"), False, False)

    return timed(original, name, brick_of=brick_of)


def named(args: Any, kwargs: Any, at: int, name: str) -> Any:
    """The argument that stands at position `at`, or is given by name; None where it is not given."""
    return args[at] if len(args) > at else kwargs.get(name)


def _attended(name: str, label: str, query: Any, key: Any, has_mask: bool, is_causal: bool) -> tuple[Any, int]:
    """The brick, and the pairs of a query and a key over all heads; what a mask hides only a device knows."""
    if not (isinstance(query, Tensor) and isinstance(key, Tensor)):
        return _attention_brick(name, label, 0, 0, 0), 0
    return _pairs(name, label, query.shape, key.shape, key.element_size(), not has_mask, is_causal and not has_mask)


@functools.lru_cache(maxsize=256)  # all layers of a step are alike
def _pairs(
    name: str, label: str, queries: Any, keys: Any, itemsize: int, is_known: bool, is_causal: bool
) -> tuple[Any, int]:
    if len(queries) != 4 or len(keys) != 4 or queries[3] != keys[3]:  # the last: keys on their side
        return _attention_brick(name, label, 0, 0, 0), 0
    sequences, heads, new, columns = queries
    _, key_heads, kept, _ = keys
    pairs = new * kept
    if is_causal and new > 1:
        pairs = new * (new + 1) // 2 + new * (kept - new) if kept >= new else pairs
    if not is_known:
        return _attention_brick(name, label, 0, 0, 0), sequences * heads * pairs
    shared = max(1, heads // max(1, key_heads))
    return _attention_brick(name, label, columns, shared, itemsize if new == 1 else 0), sequences * heads * pairs


@functools.lru_cache(maxsize=256)
def _attention_brick(name: str, label: str, columns: int, shared: int, itemsize: int) -> BrickDefinition:
    """`shared` heads of queries read one head of keys; bytes are known where one query reads them all once."""
    work = None
    if columns:
        read = 2 * columns * itemsize / shared if itemsize else None
        work = Work(flops_per_element=4 * columns, bytes_per_element=read)
    return BrickDefinition(name, BrickCategory.ATTENTION, backend="torch", work=work, label=label)


# --- generate: the step stays open until its token is chosen --------------------------------------------------


def generates(original: Function, met: Callable[[object], None] = lambda model: None) -> Function:
    @functools.wraps(original)
    def generate(*args: Any, **kwargs: Any) -> Any:
        depth = None
        try:
            model = args[0] if args else None
            met(model)
            depth = _begin_generate(model)
            return original(*args, **kwargs)
        finally:
            try:
                _end_generate(depth)
            except BaseException:  # of a signal handler: what has ended by then ends no more
                _end_generate(depth)
                raise

    return generate


def _unless_it_fails(function: Callable[Arguments, Result]) -> Callable[Arguments, Result | None]:
    @functools.wraps(function)
    def guarded(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result | None:
        try:
            return function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - see the rules
            ours(error, "some steps of generate lack their sampling")
        return None

    return guarded


@_unless_it_fails
def _begin_generate(model: object) -> int:
    """Gives how many calls of `generate` there are around it."""
    generations = unit().generations
    generations.append(Generation(model))
    return len(generations) - 1


@_unless_it_fails
def _end_generate(depth: int | None) -> None:
    if depth is not None:
        unit().end_generate(depth)


@_unless_it_fails
def _is_assisted() -> None:
    generation = unit().generation
    if generation is not None:
        generation.is_assisted = True


@_unless_it_fails
def _begin_sampling() -> Any:
    """Gives the step in which a token is chosen."""
    waiting = _waiting()
    if waiting is not None:
        waiting.begin_sampling()
    return waiting


@_unless_it_fails
def _end_sampling(args: tuple[Any, ...]) -> None:
    """The arguments are those of stopping criteria: the words chosen so far come second."""
    waiting = _waiting()
    if waiting is not None:
        words = args[1] if len(args) > 1 else None
        with torch._C.DisableTorchFunction():  # the host's do not see that we ask
            length = words.shape[-1] if isinstance(words, Tensor) else None
        waiting.end_sampling(length)


@_unless_it_fails
def _prepares_now() -> int:
    """The inputs of the next step are: the last one is over, whether or not a token was chosen. Gives the time."""
    waiting = _waiting()
    if waiting is not None:
        waiting.close()
    return perf_counter_ns()


@_unless_it_fails
def _prepared(start_ns: int | None) -> None:
    """The inputs of the next step have been, from then until now: that is a part of it, and it has not begun."""
    generation = unit().generation
    if generation is not None and start_ns is not None:
        generation.prepared = start_ns, perf_counter_ns() - start_ns


def _prepares(original: Function) -> Function:
    @functools.wraps(original)
    def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return original(*args, **kwargs)
        start_ns = _prepares_now()
        result = original(*args, **kwargs)
        _prepared(start_ns)
        return result

    return prepare_inputs


def _assisted(original: Function) -> Function:
    @functools.wraps(original)
    def assisted_decoding(*args: Any, **kwargs: Any) -> Any:
        _is_assisted()
        return original(*args, **kwargs)

    return assisted_decoding


def _scores(original: Function) -> Function:
    @functools.wraps(original)
    def process_scores(*args: Any, **kwargs: Any) -> Any:
        step = None if is_dynamo_compiling() else _begin_sampling()
        try:
            return original(*args, **kwargs)
        finally:
            if step is not None:
                step.is_running = False  # the scores are there

    return process_scores


def _chosen(original: Function) -> Function:
    @functools.wraps(original)
    def is_done(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not is_dynamo_compiling():
            _end_sampling(args)
        return result

    return is_done


def _waiting() -> Any:
    """The step of the innermost `generate` whose model has returned."""
    here = unit()
    step = here.open[-1] if here.open else None
    return (
        step
        if step is not None and step.waits and not step.is_running and step.generation is here.generation
        else None
    )
