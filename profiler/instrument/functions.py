"""Times functions as bricks: attention, its masks, rotary position, the cache, sampling, inputs of `generate`.

The function objects do not change (see swapping.py).

Rules
- Only known functions are timed: plain functions in a file of transformers, with the expected first parameter.
  Functions in a program's own files, static methods, class methods and values are left alone.
- Functions are timed in recorded steps. Functions that mark the begin or end of a step are timed while a model is
  attached.
- If cbtop's code fails, it logs one line, and the host's function runs unchanged.
- Fused attention is one brick, "Attention (fused)", and is never split.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import gt
from types import BuiltinFunctionType, CellType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, get_autocast_dtype, is_autocast_enabled
from torch.compiler import is_dynamo_compiling

from cbtop.profiler.definitions import BrickDefinition
from cbtop.profiler.hot_path import HotPath, chosen
from cbtop.profiler.instrument import classification
from cbtop.profiler.instrument.generation import Function, assists, chooses, generates, prepares, scores, searches
from cbtop.profiler.instrument.multiplied import AUTOCAST_DEVICES, multiplied_type
from cbtop.profiler.instrument.open_step import recorded_here
from cbtop.profiler.instrument.step_contents import ask_for_modes
from cbtop.profiler.instrument.swapping import (
    SwapTarget,
    TimedBuiltin,
    TimedEntry,
    TimedFunction,
    held,
    swapped_in,
    swaps,
)
from cbtop.profiler.instrument.torch_internals import without_torch_function
from cbtop.profiler.instrument.trampolines import is_plain
from cbtop.profiler.instrument.trouble import log_own_error
from cbtop.profiler.instrument.wrapping import elements_of
from cbtop.protocol.attributes import Work
from cbtop.protocol.vocabulary import BrickCategory, BrickId

if TYPE_CHECKING:
    from torch import nn


# Gets the positional and the keyword arguments of a call. Returns the brick and its elements, or None to leave the
# call untimed.
BrickOf = Callable[[Any, Any], tuple[Any, Any] | None]

LIBRARY = "transformers"  # the library whose functions are known
# Functions that apply rotary position, with the names that their first parameter may have.
_ROPE = {
    "apply_rotary_pos_emb": ("q", "x", "tensor"),
    "apply_rotary_emb": ("xq",),
    "apply_rotary_pos_emb_interleave": ("q",),
    "apply_rotary_pos_emb_vision": ("q",),
    "apply_multimodal_rotary_pos_emb": ("q",),
}
# Other functions to time: functions in a model's file, and methods of its attention. The values are the brick, and
# the possible names of the first parameter (after `self`).
_FUNCTIONS = {
    "create_causal_mask": (classification.ATTENTION_MASK, ("config",)),
    "create_sliding_window_causal_mask": (classification.ATTENTION_MASK, ("config",)),
    "create_chunked_causal_mask": (classification.ATTENTION_MASK, ("config",)),
    "create_bidirectional_mask": (classification.ATTENTION_MASK, ("config",)),
    "create_bidirectional_sliding_window_mask": (classification.ATTENTION_MASK, ("config",)),
    "build_alibi_tensor": (classification.ALIBI_BIAS, ("attention_mask",)),
    "dropout_add": (classification.RESIDUAL_ADD, ("x",)),
}
_METHODS = {
    "_get_embed_positions": (classification.ROTARY_TABLES, ("position_ids",)),
    "_split_heads": (classification.SPLIT_HEADS, ("tensor", "fused_qkv", "x")),
    "_reshape": (classification.SPLIT_HEADS, ("tensor", "fused_qkv")),  # in Bloom
    "_merge_heads": (classification.MERGE_HEADS, ("tensor", "x")),
    "expand_kv": (classification.KV_EXPANSION, ("kv_nope",)),
}
_QUERY = ("query", "q")
_ANYTHING = ()  # the first parameter may have any name
# Arguments that make attention ignore some keys: keys of other sequences, of other pages, or too far away.
_HIDE = frozenset({"cu_seq_lens_q", "cu_seqlens_q", "cache", "block_table", "sliding_window", "position_bias"})
# Suffix of the names of attention functions in transformers, such as sdpa_attention_forward.
_ATTENTION = "_attention_forward"
_EAGER = f"eager{_ATTENTION}"
_CACHE_UPDATE = "cache_utils.update"
_EAGER_METHOD = "_attn"  # name of the method for eager attention in older models (GPT-J)
GENERATION = "transformers.generation.utils"


class TimedFunctions:
    """The functions of libraries that are timed in this process. At each call of `generate`, `met` is called with the
    model.
    """

    def __init__(self, met: Callable[[object], None] = lambda model: None) -> None:
        self._met = met
        # Functions that are timed while a model is attached, oldest first.
        self._wrapped: list[SwapTarget] = []

    def wrap(self, modules: Iterable[nn.Module]) -> None:
        """Time all known functions that the code of `modules` calls."""
        self._swap_attention_of_torch()
        kinds = {base for module in modules for base in type(module).__mro__ if _is_of_library(base)}
        for kind in kinds:
            self._swap_known(kind, _EAGER_METHOD, _QUERY, _eager, is_method=True)
            for method, (brick, first) in _METHODS.items() if "Attention" in kind.__name__ else ():
                self._swap_known(kind, method, first, functools.partial(_plain, name=brick), is_method=True)
            self._wrap_inputs(kind)
        for name in sorted({kind.__module__ for kind in kinds}):
            home = sys.modules.get(name)
            for function, first in _ROPE.items():
                self._swap_known(home, function, first, _rope)
            for function, (brick, first) in _FUNCTIONS.items():
                self._swap_known(home, function, first, functools.partial(_plain, name=brick))
            self._swap_known(home, _EAGER, ("module",), _eager)
        self._wrap_transformers()
        self.wrap_generate()

    def unwrap(self) -> None:
        """Restore all functions."""
        swaps.clear()
        for function in reversed(self._wrapped):
            function.take()
        self._wrapped.clear()

    def _swap_attention_of_torch(self) -> None:
        """Time torch's fused attention. It is a builtin function, so this needs the compiled hot path."""
        attention = torch.nn.functional.scaled_dot_product_attention
        if _compiled is not None and type(attention) is BuiltinFunctionType and not swaps.has(attention):
            swaps.add(TimedBuiltin(attention, lambda own: _call_of_attention(own, "sdpa", 0)))

    def _wrap_transformers(self) -> None:
        modules = sys.modules
        interface = getattr(modules.get("transformers.modeling_utils"), "AttentionInterface", None)
        known = getattr(interface, "_global_mapping", {})
        for name in list(known):
            if "eager" not in name:
                self._swap_known(known, name, ("module",), functools.partial(_attention, label=name, queries=1))
        cache = getattr(modules.get("transformers.cache_utils"), "Cache", None)
        self._swap_known(cache, "update", ("key_states",), _kv_write, is_method=True)

    def wrap_generate(self) -> None:
        """Wrap `generate` and the functions in it that choose a token, because a step ends with its token.

        Call this before the first `generate`.
        """
        generation = sys.modules.get(GENERATION)
        mixin = getattr(generation, "GenerationMixin", None)
        self._wrap_known(mixin, "generate", functools.partial(generates, met=self._met))
        self._wrap_known(mixin, "_assisted_decoding", assists)
        self._wrap_known(mixin, "_beam_search", searches)
        self._wrap_inputs(mixin)
        self._wrap_known(getattr(generation, "LogitsProcessorList", None), "__call__", scores)
        self._wrap_known(getattr(generation, "StoppingCriteriaList", None), "__call__", chooses)

    def _wrap_inputs(self, kind: Any) -> None:
        self._wrap_known(kind, "prepare_inputs_for_generation", prepares)
        update = functools.partial(_plain, name=classification.GENERATE_INPUTS)
        self._swap_known(kind, "_update_model_kwargs_for_generation", _ANYTHING, update)

    def replace(self, owner: Any, name: str, wrapper: Callable[[Function], Function]) -> None:
        """Time the function `name` of `owner`, if it exists, while a model is attached."""
        function = None if owner is None else held(owner, name)
        if function is not None and not any([one.is_of(function) for one in self._wrapped]):
            self._wrapped.append(_timed_as(owner, name, function, wrapper, stays=True))
            self._wrapped[-1].put()

    def swap(self, owner: Any, name: str, wrapper: Callable[[Function], Function]) -> None:
        """Time the function `name` of `owner`, if it exists, in recorded steps."""
        function = None if owner is None else held(owner, name)
        if function is not None and not swaps.has(function):
            swaps.add(_timed_as(owner, name, function, wrapper, stays=False))

    def _wrap_known(self, owner: Any, name: str, wrapper: Callable[[Function], Function]) -> None:
        if _is_known(owner, name, _ANYTHING, is_method=True):
            self.replace(owner, name, wrapper)

    def _swap_known(
        self,
        owner: Any,
        name: str,
        first: tuple[str, ...],
        wrapper: Callable[[Function], Function],
        *,
        is_method: bool = False,
    ) -> None:
        if _is_known(owner, name, first, is_method=is_method):
            self.swap(owner, name, wrapper)


def _is_of_library(thing: Any) -> bool:
    """Return whether the class or function `thing` was defined in a file of transformers."""
    return str(getattr(thing, "__module__", "")).partition(".")[0] == LIBRARY


def _is_known(owner: Any, name: str, first: tuple[str, ...], *, is_method: bool) -> bool:
    """Return whether `owner` itself has a plain function `name` of transformers with the expected first parameter.

    Static methods, class methods and properties are not plain functions. Returns False if the program has replaced
    the function.
    """
    function: Any = None if owner is None else held(owner, name)
    if not is_plain(function) or not _is_of_library(function):
        return False
    home = function.__globals__.get("__name__", "")
    parameters = inspect.unwrap(function).__code__.co_varnames
    found = parameters[is_method : is_method + 1]
    # Look inside `torch.no_grad`, because it wraps some of these functions.
    is_at_home = str(home).partition(".")[0] in (LIBRARY, "torch")
    return is_at_home and (not first or (bool(found) and found[0] in first))


def _timed_as(
    owner: Any, name: str, function: Any, wrapper: Callable[[Function], Function], *, stays: bool
) -> SwapTarget:
    if is_plain(function) and not isinstance(owner, CellType):
        return TimedFunction(function, wrapper, traceable=stays)
    return TimedEntry(owner, name, function, wrapper)


class FunctionCall:
    """Calls a function. If a step is recorded, the call is timed as a brick.

    `brick_of` returns the brick and its elements. Without it, the brick is `brick`, with the elements of the first
    tensor among the arguments from number `first` on. In attention, argument number `queries` is the query.

    If the hot path is compiled, C code does the same, and stores the last result for attention in `last`.
    """

    __slots__ = ("__weakref__", "brick", "brick_of", "first", "last", "name", "original", "queries")

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
        path: Any = None  # the Path that records the call, or the Capture of a CUDA graph
        timer, elements = None, 0
        try:
            path = recorded_here()
            # If one attention function calls another, only the outer call is a brick.
            if path is not None and getattr(path.position.scope.key, "name", None) != self.name:
                if self.brick_of is None:
                    found: tuple[Any, Any] | None = (self.brick, elements_of(args[self.first :], kwargs))
                else:
                    found = self.brick_of(args, kwargs)
                if found is not None:
                    brick, elements = found
                    timer = path.start_brick(brick)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            log_own_error(error, f"some calls of {self.name} are not timed")
        if path is None or timer is None:
            return self.original(*args, **kwargs)
        try:
            result = self.original(*args, **kwargs)
        except BaseException:
            path.stop_brick(timer, 0, True)
            raise
        try:
            path.stop_brick(timer, elements)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            log_own_error(error, f"some calls of {self.name} are not timed")
        return result


_attentions: weakref.WeakSet[FunctionCall] = weakref.WeakSet()
_compiled: Callable[[Function], Function] | None = None
if chosen() is not HotPath:
    from cbtop.profiler import _hot_path

    ask_for_modes(
        functools.partial(_hot_path.compile_function_calls, FunctionCall, BrickDefinition, swapped_in, _HIDE)
    )
    _compiled = _hot_path.compile_wrapper


def _unless_it_is_odd(brick_of: BrickOf, name: str) -> BrickOf:
    def guarded(args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        try:
            with without_torch_function():  # hides cbtop's calls from the host's `__torch_function__`
                return brick_of(args, kwargs)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            log_own_error(error, f"some calls of {name} are not timed")
        return None

    return guarded


def _call_of(
    original: Function,
    name: str,
    brick: BrickDefinition | None,
    first: int,
    brick_of: BrickOf | None,
    queries: int | None,
) -> FunctionCall:
    call = FunctionCall(original, name, brick, first, brick_of and _unless_it_is_odd(brick_of, name), queries)
    if queries is not None:
        _attentions.add(call)
    return call


def forget_types() -> None:
    """Forget the number types that attention functions multiply. Each function finds its type again at its next
    call.
    """
    multiplied_type.cache_clear()
    for call in list(_attentions):
        if hasattr(call, "last"):
            del call.last


def timed(
    original: Function,
    name: str,
    brick: BrickDefinition | None = None,
    *,
    first: int = 0,
    brick_of: BrickOf | None = None,
    queries: int | None = None,
) -> Function:
    """Return a wrapper of `original` that times its calls in recorded steps (see `FunctionCall`)."""

    run = _call_of(original, name, brick, first, brick_of, queries)

    def call_timed(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or not swapped_in:
            return original(*args, **kwargs)
        return call_timed(*args, **kwargs)

    return call if _compiled is None else _compiled(call)


ROPE = BrickDefinition.of(BrickId.ROPE_EMBEDDING, backend="torch")


def _plain(original: Function, name: str) -> Function:
    """Return a wrapper of `original` that times it as a brick. Its FLOP and bytes are not known."""
    return timed(original, name, brick_of_name(name))


@functools.cache
def brick_of_name(name: str) -> BrickDefinition:
    """Return the brick called `name`. Its FLOP and bytes are not known."""
    return BrickDefinition(name, classification.CATEGORIES[name], backend="torch")


def brick_of_function(function: str) -> BrickDefinition | None:
    """Return the brick for calls of a function, or None if there is none. `function` is its name, or
    `file.function`.
    """
    file, _, name = function.rpartition(".")
    if name in _ROPE:
        return ROPE
    if name in _FUNCTIONS:
        return brick_of_name(_FUNCTIONS[name][0])
    if function == _CACHE_UPDATE:
        return brick_of_name(classification.KV_WRITE)
    if name == "scaled_dot_product_attention":
        return _attention_brick(classification.ATTENTION_FUSED, "sdpa", 0, 0, "")
    label = name.removesuffix(_ATTENTION)
    if not file or label == name:
        return None
    kind = classification.ATTENTION_EAGER if label == "eager" else classification.ATTENTION_FUSED
    return _attention_brick(kind, label.strip("_"), 0, 0, "")


def _rope(original: Function) -> Function:
    return timed(original, ROPE.name, ROPE)


def _kv_write(original: Function) -> Function:
    return timed(original, classification.KV_WRITE, brick_of_name(classification.KV_WRITE), first=1)


def _attention(original: Function, label: str, queries: int) -> Function:
    return timed(original, classification.ATTENTION_FUSED, brick_of=_fused(label, queries), queries=queries)


def _call_of_attention(original: Function, label: str, queries: int) -> FunctionCall:
    return _call_of(original, classification.ATTENTION_FUSED, None, 0, _fused(label, queries), queries)


def _fused(label: str, queries: int) -> BrickOf:
    """Return a function that describes calls of fused attention (`BrickOf`). Query, key and value are its arguments
    from number `queries` on.
    """
    name = classification.ATTENTION_FUSED

    def brick_of(args: Any, kwargs: Any) -> tuple[Any, int]:
        if len(args) > queries + 3:
            query, key, value, mask = args[queries : queries + 4]
        else:
            query, key = named(args, kwargs, queries, "query"), named(args, kwargs, queries + 1, "key")
            value = named(args, kwargs, queries + 2, "value")
            mask = named(args, kwargs, queries + 3, "attention_mask" if queries else "attn_mask")
        is_causal = kwargs.get("is_causal")
        if is_causal is None:
            is_causal = getattr(args[0], "is_causal", False) if queries else len(args) > 5 and args[5]
        hides = mask is not None or (
            not _HIDE.isdisjoint(kwargs) and any([kwargs.get(word) is not None for word in _HIDE])
        )
        return _attended(name, label, (query, key, value), hides, bool(is_causal))

    return brick_of


def _eager(original: Function) -> Function:
    """Return a wrapper of attention that is written out in Python (eager attention).

    Eager attention multiplies each query by all keys, even those that the mask hides.
    """
    name = classification.ATTENTION_EAGER

    def brick_of(args: Any, kwargs: Any) -> tuple[Any, int]:
        given = [named(args, kwargs, at, word) for at, word in enumerate(("query", "key", "value"), 1)]
        return _attended(name, "eager", given, False, False)

    return timed(original, name, brick_of=brick_of)


def named(args: Any, kwargs: Any, at: int, name: str) -> Any:
    """Return the argument that is given at position `at` or by `name`, or None."""
    return args[at] if len(args) > at else kwargs.get(name)


def _attended(name: str, label: str, given: Sequence[Any], has_mask: bool, is_causal: bool) -> tuple[Any, int]:
    """Return the brick of attention and its elements: the pairs of a query and a key, over all heads.

    `given` are the queries, keys and values. With a mask the work per pair is unknown, because reading the mask would
    wait for the device.
    """
    query, key, value = given
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        return _attention_brick(name, label, 0, 0, ""), 0
    device = query.device.type
    autocast = get_autocast_dtype(device) if device in AUTOCAST_DEVICES and is_autocast_enabled(device) else None
    dtype = multiplied_type(query.dtype, device, autocast)
    shapes = query.shape, key.shape, value.shape
    return _pairs(name, label, shapes, key.element_size(), dtype, not has_mask, is_causal and not has_mask)


@functools.lru_cache(maxsize=256)  # cached, because all layers of a step have the same arguments
def _pairs(
    name: str, label: str, shapes: Any, itemsize: int, dtype: str, is_known: bool, is_causal: bool
) -> tuple[Any, int]:
    queries, keys, values = shapes
    axes = len(queries)
    # The work is unknown if the axes have a different order (transposed keys), or if several sequences share a query.
    is_odd = axes < 3 or len(keys) != axes or len(values) != axes or queries[-1] != keys[-1] or keys[-2] != values[-2]
    if is_odd or any(map(gt, keys[:-2], queries)) or any(map(gt, values[:-2], queries)):
        return _attention_brick(name, label, 0, 0, ""), 0
    new, columns = queries[-2:]
    kept, value_columns = values[-2:]
    pairs = new * kept
    if is_causal and new > 1 and label == "sdpa":  # in torch, a causal mask aligns the first query with the first key
        seen = min(new, kept)
        pairs = seen * (seen + 1) // 2 + (new - seen) * kept
    elif is_causal and new > 1:  # in other libraries, a causal mask aligns the last query with the last key
        pairs = new * (new + 1) // 2 + new * (kept - new) if kept >= new else pairs
    elements = math.prod(queries[:-2]) * pairs
    if not is_known:
        return _attention_brick(name, label, 0, 0, ""), elements
    read = 0.0  # bytes to read per pair; known only if one query reads all keys and values once
    if new == 1 and queries[:-3] == keys[:-3] == values[:-3]:
        heads = max(1, queries[-3])
        read = itemsize * (columns * keys[-3] + value_columns * values[-3]) / heads
    return _attention_brick(name, label, columns + value_columns, read, dtype), elements


@functools.lru_cache(maxsize=256)
def _attention_brick(name: str, label: str, columns: int, read_bytes: float, dtype: str) -> BrickDefinition:
    """Return the brick of attention with the given work.

    `columns` is the length of a key plus the length of a value. `read_bytes` are the bytes to read per pair of a
    query and a key. 0 means unknown.
    """
    work = None
    if columns:
        work = Work(flops_per_element=2 * columns, bytes_per_element=read_bytes or None, dtype=dtype)
    return BrickDefinition(name, BrickCategory.ATTENTION, backend="torch", work=work, label=label)
