"""Bricks that are functions: attention, rotary position, the cache, sampling; each wrapped where it is looked up.

Rules
- They stay wrapped as long as anything is attached: Dynamo guards on which function it has seen, and to swap them for
  each step would compile anew. Outside of recorded steps a wrapper asks two questions and calls.
- A wrapper's first question is whether Dynamo compiles, and it closes over nothing that changes.
- Fused attention is one brick, "Attention (fused)", and is never split.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from cbtop.profiler.definitions import BrickDefinition
from cbtop.profiler.instrument import classification
from cbtop.profiler.instrument.steps import Generation, unit
from cbtop.profiler.instrument.wrapping import elements_of
from cbtop.protocol.attributes import Work
from cbtop.protocol.vocabulary import BrickCategory, BrickId

if TYPE_CHECKING:
    from torch import nn

Function = Callable[..., Any]

_ROPE = (
    "apply_rotary_pos_emb",
    "apply_rotary_emb",
    "apply_rotary_pos_emb_interleave",
    "apply_rotary_pos_emb_vision",
    "apply_multimodal_rotary_pos_emb",
)
# Arguments by which attention leaves out keys: of other sequences in the same row, of pages, of before a window.
_HIDE = ("cu_seq_lens_q", "cu_seqlens_q", "cache", "block_table", "sliding_window", "position_bias")
_EAGER = "eager_attention_forward"
GENERATION = "transformers.generation.utils"


class Functions:
    """The functions that are wrapped in this process."""

    def __init__(self) -> None:
        self._wrapped: dict[tuple[int, str], tuple[Any, str, Function, Function]] = {}

    def wrap(self, modules: Iterable[nn.Module]) -> None:
        """Wrap those that these modules call, as far as they are not yet."""
        self.replace(torch.nn.functional, "scaled_dot_product_attention", lambda f: _attention(f, "sdpa", 0))
        for name in sorted({type(module).__module__ for module in modules}):
            home = sys.modules.get(name)
            for function in _ROPE:
                self.replace(home, function, _rope)
            self.replace(home, _EAGER, _eager)
        self._wrap_transformers()
        self.wrap_generate()

    def unwrap(self) -> None:
        """Put back what was there, where nobody else has put something of theirs since."""
        for owner, name, original, ours in self._wrapped.values():
            if _get(owner, name) is ours:
                _set(owner, name, original)
        self._wrapped.clear()

    def _wrap_transformers(self) -> None:
        modules = sys.modules
        interface = getattr(modules.get("transformers.modeling_utils"), "AttentionInterface", None)
        known = getattr(interface, "_global_mapping", {})
        for name in list(known):
            if "eager" not in name:
                self.replace(known, name, functools.partial(_attention, label=name, queries=1))
        self.replace(getattr(modules.get("transformers.cache_utils"), "Cache", None), "update", _kv_write)

    def wrap_generate(self) -> None:
        """Wrap what keeps a step open until its token is chosen: before `generate` first calls a model."""
        generation = sys.modules.get(GENERATION)
        mixin = getattr(generation, "GenerationMixin", None)
        self.replace(mixin, "generate", generates)
        self.replace(mixin, "_assisted_decoding", _assisted)
        self.replace(getattr(generation, "LogitsProcessorList", None), "__call__", _scores)
        self.replace(getattr(generation, "StoppingCriteriaList", None), "__call__", _chosen)

    def replace(self, owner: Any, name: str, wrapper: Callable[[Function], Function]) -> None:
        """Let `owner` have what `wrapper` makes of its function `name`, if it has one that is not ours."""
        original = None if owner is None else _get(owner, name)
        if original is None or (id(owner), name) in self._wrapped or hasattr(original, "_is_of_cbtop"):
            return
        ours = wrapper(original)
        ours._is_of_cbtop = True  # type: ignore[attr-defined]
        self._wrapped[id(owner), name] = (owner, name, original, ours)
        _set(owner, name, ours)


def _get(owner: Any, name: str) -> Any:
    """What `owner` itself has of that name: a class not what it inherits."""
    return owner.get(name) if isinstance(owner, MutableMapping) else vars(owner).get(name)


def _set(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, MutableMapping):
        owner[name] = value
    else:
        setattr(owner, name, value)


def timed(original: Function, brick_of: Callable[[Any, Any], tuple[Any, int]], name: str) -> Function:
    """`original`, timed in recorded steps as the brick, with the elements, that `brick_of` makes of its arguments."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return original(*args, **kwargs)
        profiler = unit().profiler
        if profiler is None or _runs_inside(profiler, name):
            return original(*args, **kwargs)
        brick, elements = brick_of(args, kwargs)
        timer = profiler.start_brick(brick)
        try:
            result = original(*args, **kwargs)
        except BaseException:
            profiler.stop_brick(timer, 0, True)
            raise
        profiler.stop_brick(timer, elements)
        return result

    return call


def _runs_inside(profiler: Any, name: str) -> bool:
    """Whether what runs is in such a brick already: one attention function calls another."""
    key = profiler._path.position.scope.key
    return isinstance(key, BrickDefinition) and key.name == name


ROPE = BrickDefinition.of(BrickId.ROPE_EMBEDDING, backend="torch")
KV_WRITE = BrickDefinition(classification.KV_WRITE, BrickCategory.ATTENTION, backend="torch")


def _rope(original: Function) -> Function:
    return timed(original, lambda args, kwargs: (ROPE, elements_of(args, kwargs)), ROPE.name)


def _kv_write(original: Function) -> Function:
    return timed(original, lambda args, kwargs: (KV_WRITE, elements_of(args[1:], kwargs)), KV_WRITE.name)


def _attention(original: Function, label: str, queries: int) -> Function:
    """Fused attention; its query, key and value are the arguments from the one numbered `queries` on."""
    name = classification.ATTENTION_FUSED

    def brick_of(args: Any, kwargs: Any) -> tuple[Any, int]:
        module = args[0] if queries else None
        query, key = _named(args, kwargs, queries, "query"), _named(args, kwargs, queries + 1, "key")
        mask = _named(args, kwargs, queries + 3, "attention_mask" if queries else "attn_mask")
        is_causal = kwargs.get("is_causal")
        if is_causal is None:
            is_causal = getattr(module, "is_causal", False) if queries else len(args) > 5 and args[5]
        hides = mask is not None or any(kwargs.get(word) is not None for word in _HIDE)
        return _attended(name, label, query, key, hides, bool(is_causal))

    return timed(original, brick_of, name)


def _eager(original: Function) -> Function:
    """Attention written out: it multiplies every query with every key, whatever the mask hides."""
    name = classification.ATTENTION_EAGER

    def brick_of(args: Any, kwargs: Any) -> tuple[Any, int]:
        return _attended(
            name, "eager", _named(args, kwargs, 1, "query"), _named(args, kwargs, 2, "key"), False, False
        )

    return timed(original, brick_of, name)


def _named(args: Any, kwargs: Any, at: int, name: str) -> Any:
    return args[at] if len(args) > at else kwargs.get(name)


def _attended(name: str, label: str, query: Any, key: Any, has_mask: bool, is_causal: bool) -> tuple[Any, int]:
    """The brick, and the pairs of a query and a key over all heads; what a mask hides only a device knows."""
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and query.dim() == 4 == key.dim()):
        return _attention_brick(name, label, 0, 0, 0), 0
    sequences, heads, new, columns = query.shape
    kept = key.shape[2]
    pairs = new * kept
    if is_causal and not has_mask and new > 1:
        pairs = new * (new + 1) // 2 + new * (kept - new) if kept >= new else pairs
    if has_mask or query.device.type != "cpu":  # what the host sees there are launches
        return _attention_brick(name, label, 0, 0, 0), sequences * heads * pairs
    shared = max(1, heads // max(1, key.shape[1]))
    itemsize = key.element_size() if new == 1 else 0
    return _attention_brick(name, label, columns, shared, itemsize), sequences * heads * pairs


@functools.lru_cache(maxsize=256)
def _attention_brick(name: str, label: str, columns: int, shared: int, itemsize: int) -> BrickDefinition:
    """`shared` heads of queries read one head of keys; bytes are known where one query reads them all once."""
    work = None
    if columns:
        read = 2 * columns * itemsize / shared if itemsize else None
        work = Work(flops_per_element=4 * columns, bytes_per_element=read)
    return BrickDefinition(name, BrickCategory.ATTENTION, backend="torch", work=work, label=label)


# --- generate: the step stays open until its token is chosen --------------------------------------------------


def generates(original: Function) -> Function:
    @functools.wraps(original)
    def generate(*args: Any, **kwargs: Any) -> Any:
        here = unit()
        here.generations.append(Generation())
        try:
            return original(*args, **kwargs)
        finally:
            here.end_generate()

    return generate


def _assisted(original: Function) -> Function:
    @functools.wraps(original)
    def assisted_decoding(*args: Any, **kwargs: Any) -> Any:
        generation = unit().generation
        if generation is not None:
            generation.is_assisted = True
        return original(*args, **kwargs)

    return assisted_decoding


def _scores(original: Function) -> Function:
    @functools.wraps(original)
    def process_scores(*args: Any, **kwargs: Any) -> Any:
        if not is_dynamo_compiling():
            waiting = _waiting()
            if waiting is not None:
                waiting.begin_sampling()
        return original(*args, **kwargs)

    return process_scores


def _chosen(original: Function) -> Function:
    @functools.wraps(original)
    def is_done(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return original(*args, **kwargs)
        waiting = _waiting()
        result = original(*args, **kwargs)
        if waiting is not None:
            words = args[1] if len(args) > 1 else None
            waiting.end_sampling(words.shape[-1] if isinstance(words, Tensor) else None)
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
