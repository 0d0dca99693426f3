"""Describes a model's call by its arguments alone: phase, tokens, sequences and cached positions.

Nothing here waits for a device, so facts that only a tensor on a device has are unknown.

These arguments are known
- Hugging Face's names.
- The positions of new tokens, under the names of hand-written models (llama's reference, gpt-fast).
- A first tensor of token ids (sequences x tokens).

If the input is a spectrogram, a picture or another tensor of numbers, the tokens are unknown. The shape then gives
only the phase, and the number of sequences if their axis is known.
"""

from __future__ import annotations

from _thread import get_ident
from collections import UserDict
from collections.abc import Iterable
from numbers import Integral
from typing import Any, NamedTuple, TypeGuard

from torch import Tensor, int32, int64

from cbtop.profiler.instrument.module_tree import can_be_asked, dictionary_of, has_method

PREFILL, DECODE, EXTEND, MIXED, VERIFY = "prefill", "decode", "extend", "mixed", "verify"
# A phase of `generate` without a cache: each new token computes the whole sequence again.
NO_CACHE = "decode, no cache"
ENCODE = "encode"  # phase of an encoder, which has no cache and looks at tokens on both sides
# Phase of a call that may be a prefill, a decode or an encode.
FORWARD = "forward"

# Arguments with token ids or their embeddings. The decoder's come first, because a step counts the decoder's tokens.
TOKENS = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds", "tokens", "idx")
# Arguments with pictures, which have no axis of tokens.
PICTURES = ("input_features", "pixel_values")
CACHES = ("past_key_values", "cache_params", "state")
# Arguments with the positions of new tokens.
POSITIONS = ("start_pos", "input_pos", "cache_position", "cache_pos", "past_length", "seqlen_offset")
PACKED = "cu_seq_lens_q"  # the argument with the ends of the sequences in a packed row
# By thread: the description of its next call with packed sequences, from an engine's scheduler (continuous_batching).
announced: dict[int, Call] = {}
_STAND = frozenset(POSITIONS)
TYPES_OF_IDS = (int64, int32)
_LENGTH = "get_seq_length"  # a cache's method that returns its length
_OF_CACHE, _OF_LAYER = ("self_attention_cache", "layers"), ("is_initialized", "has_previous_state")


def with_beams(phase: str, beams: int) -> str:
    """Return the name of the decode steps `phase` in a beam search.

    Only tokens of beams that will be returned count in these steps.
    """
    return f"{phase}, {beams} beams"


class Call(NamedTuple):
    """The description of a model's call.

    `cached` is the number of cached positions per sequence before the call. It is None if sequences differ, or if
    only a device knows. `tokens` and `sequences` are 0 if unknown.
    """

    phase: str
    tokens: int
    sequences: int
    cached: int | None


def describe(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    has_cache: bool,
    without_cache: str = FORWARD,
    is_assisted: bool = False,
    is_generating: bool = False,
    axis: int | None = None,
    takes_ids: bool = True,
) -> Call:
    """Describe a call with these arguments.

    `has_cache` says that the model can take a cache. `without_cache` is the phase of a model that cannot. It is also
    the phase of a call with `use_cache=False` outside of `generate` (`is_generating`). An example is a call that
    scores texts. `axis` is the axis of sequences in arguments without a known name (None: unknown). `takes_ids` says
    that integers without a known name can be token ids.
    """
    new, sequences, length, tokens = _new_tokens(args, kwargs, axis, takes_ids)
    if new is None:  # the arguments are in a batch (a dictionary), which is itself an argument
        batches = [batch for batch in map(_batch, (*args, *kwargs.values())) if batch is not None]
        args, kwargs = (), batches[0] if batches else {}
        new, sequences, length, tokens = _new_tokens(args, kwargs, axis, takes_ids)
    if PACKED in kwargs:
        packed = announced.get(get_ident()) or _packed(kwargs, tokens)
        if packed is not None:
            return packed
    if not has_cache:
        return Call(without_cache, tokens, sequences, None)
    held = None
    for name in CACHES:
        held = kwargs.get(name)
        if held is not None:
            break
    stand: list[Any] = []
    if not _STAND.isdisjoint(kwargs):
        stand += [kwargs[name] for name in POSITIONS if kwargs.get(name) is not None]
    cached = cached_positions(held) if held is not None else None if stand else 0
    is_prompt, is_mixed = cached == 0, False
    if cached is None:
        starts = _starts(stand[0], sequences, length) if stand else set()
        cached = min(starts) if len(starts) == 1 else None
        if new is not None and new.dim() == 1 and len(starts) > 1:
            sequences = 0  # the sequences are packed in one row, and their ends are unknown
        # With several new tokens at positions that only a device knows, the call counts as a prefill.
        is_known = bool(starts) or (held is not None and not _counts_on_a_device(held))
        is_prompt, is_mixed = starts == {0} or (not is_known and length > 1), 0 in starts
    if is_prompt:
        is_alone = held is None and not is_generating and kwargs.get("use_cache") is False
        phase = without_cache if is_alone else PREFILL
    elif is_mixed:
        phase = MIXED
    elif is_assisted:
        phase = VERIFY
    elif length == 1:
        phase = DECODE
    else:
        phase = EXTEND
    return tuple.__new__(Call, (phase, tokens, sequences, cached))  # makes a `Call` without a Python frame


def describe_captured(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    has_cache: bool,
    without_cache: str = FORWARD,
    axis: int | None = None,
    takes_ids: bool = True,
) -> Call:
    """Describe each replay of a captured call with these arguments. It is a decode if each sequence has one new
    token.

    The length of the cache is not read, because the read could launch work that would be captured.
    """
    _, sequences, length, tokens = _new_tokens(args, kwargs, axis, takes_ids)
    is_given = any([kwargs.get(name) is not None for name in CACHES])
    if length == 1:
        phase = DECODE
    elif not has_cache or (not is_given and kwargs.get("use_cache") is False):
        phase = without_cache
    else:
        phase = EXTEND if is_given else PREFILL
    return Call(phase, tokens, sequences, None)


def _batch(value: Any) -> dict[str, Any] | None:
    """Return the entries of a dictionary or UserDict (a batch of transformers), or None for other values.

    Runs no code of the host.
    """
    if issubclass(type(value), UserDict):
        value = dictionary_of(value).get("data")
    return dict(dict.items(value)) if issubclass(type(value), dict) else None


def _is_tensor(value: Any) -> TypeGuard[Tensor]:
    return issubclass(type(value), Tensor)  # compares types, because `isinstance` may run the host's `__class__`


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any], takes_ids: bool = True) -> Tensor | None:
    """Return the first argument that is a tensor, or None.

    A number, or one number per row, is skipped if rows follow it: some denoisers take their times before the rows. If
    the model `takes_ids`, integers may be token ids, which are not skipped.
    """
    tensors = [value for value in (*args, *kwargs.values()) if _is_tensor(value)]
    for at, one in enumerate(tensors):
        shape = one.shape
        if len(shape) > 1 or (takes_ids and one.dtype in TYPES_OF_IDS):
            return one
        following = [other.shape for other in tensors[at + 1 :]]
        if not any([len(rows) > 1 and (not shape or shape[0] in (1, rows[0])) for rows in following]):
            return one
    return None


def _new_tokens(
    args: tuple[Any, ...], kwargs: dict[str, Any], axis: int | None, takes_ids: bool
) -> tuple[Tensor | None, int, int, int]:
    """Return the tensor that probably has the new tokens, the number of sequences, the length of a sequence, and the
    number of tokens.
    """
    for name in (*TOKENS, *PICTURES):
        if name in kwargs and issubclass(type(kwargs[name]), Tensor):
            new = kwargs[name]
            break
    else:
        name, found = "", first_tensor(args, kwargs, takes_ids)
        if found is None:
            return None, 0, 0, 0
        new = found
    shape = new.shape
    dimensions = len(shape)
    sequences, length = (int(shape[0]), int(shape[1])) if dimensions > 1 else (1, int(shape[0]) if shape else 1)
    if dimensions > 3:
        return new, sequences, 0, 0
    if name in TOKENS:
        return new, sequences, length, sequences * length
    if name:
        return new, sequences if dimensions == 3 else 0, length, 0
    if takes_ids and dimensions < 3 and new.dtype in TYPES_OF_IDS:
        tokens = sequences * length
        if axis == 1 and dimensions == 2:
            sequences, length = length, sequences
        return new, 0 if axis is None and dimensions == 2 else sequences, length, tokens
    if dimensions == 2 and axis == 0 and new.dtype.is_floating_point:
        # Rows of features. Rows of a graph's nodes come with its edges, which have another number of rows.
        others = [value for value in (*args, *kwargs.values()) if _is_tensor(value)]
        return new, sequences if all([one.shape[:1] in ((), shape[:1]) for one in others]) else 0, length, 0
    return new, 0 if axis is None or dimensions < 3 else int(shape[axis]), length, 0


def of_sequence(new: int, cached: int, *, writes: bool) -> str:
    """Return the phase of one sequence in a step of an engine, which adds `new` tokens after `cached` ones.

    `writes` says that the sequence already has output tokens.
    """
    if writes and new == 1:
        return DECODE
    return EXTEND if cached else PREFILL


def of_several(sequences: Iterable[str]) -> str:
    """Return the phase of a step with several sequences, from the phases of these sequences.

    If some verify a draft and the others decode, the step is a verifying step.
    """
    found = set(sequences)
    if found == {DECODE, VERIFY}:
        return VERIFY
    return found.pop() if len(found) == 1 else MIXED


def _packed(kwargs: dict[str, Any], tokens: int) -> Call | None:
    """Describe a call that packs sequences of different lengths into a row (Hugging Face's continuous batching)."""
    ends, longest, longest_kept = kwargs.get(PACKED), kwargs.get("max_length_q"), kwargs.get("max_length_k")
    if not _is_tensor(ends) or not isinstance(longest, int):
        return None
    if isinstance(longest_kept, dict):  # since transformers 5, one number for each type of layer
        longest_kept = max(longest_kept.values(), default=None)
    sequences = ends.numel() - 1
    if longest == 1:
        phase = DECODE
    elif longest == longest_kept:
        phase = PREFILL if sequences * longest == tokens or sequences == 1 else MIXED
    else:
        phase = EXTEND if sequences == 1 else MIXED
    return Call(phase, tokens, sequences, None)


def cached_positions(cache: Any) -> int | None:
    """Return the number of cached positions. None if only a device has it, or if it is not counted."""
    kind = type(cache)
    if can_be_asked(kind, *_OF_CACHE) and has_method(kind, _LENGTH):
        length = cache.get_seq_length
        layers = _layers_of(cache)
        first = layers[0] if layers else None
        if (
            can_be_asked(type(first), *_OF_CACHE)
            and getattr(first, "is_initialized", None) is True
            and hasattr(first, _LENGTH)
        ):
            found = length()  # the usual case, written out to save calls
        else:
            if _is_fresh(cache, layers):
                return 0
            found = length() if _counts_positions(layers) else None
        return found if isinstance(found, int) else _on_the_host(found)
    if issubclass(type(cache), (tuple, list)):  # an older form of a cache, a tuple of (keys, values) for each layer
        first = cache[0] if cache else None
        keys = first[0] if isinstance(first, (tuple, list)) and first else None
        return int(keys.shape[-2]) if _is_tensor(keys) and keys.dim() > 2 else None
    return None


def _counts_on_a_device(cache: Any) -> bool:
    """Whether the cache keeps its number of positions on a device, as a static cache does.

    The host cannot know whether such a cache was emptied.
    """
    is_known = can_be_asked(type(cache), *_OF_CACHE) and has_method(type(cache), _LENGTH)
    found = cache.get_seq_length() if is_known and _counts_positions(_layers_of(cache)) else None
    return _is_tensor(found) and not found.is_cpu


def _on_the_host(found: Any) -> int | None:
    """Return the value of a host tensor of integers if all its elements are equal, else None. None for tensor
    subclasses.
    """
    if type(found) is not Tensor or not found.is_cpu or found.is_floating_point():
        return None
    numbers = set(found.flatten().tolist())
    return int(numbers.pop()) if len(numbers) == 1 else None


def _starts(given: Any, sequences: int, length: int) -> set[int]:
    """Return the positions of the sequences' first new tokens, or an empty set if unknown.

    `given` is one number, one number per sequence, or the positions of all new tokens. Consecutive positions belong
    to one sequence. Otherwise each of them may be the first of a sequence, so all are returned.
    """
    if type(given) is Tensor:
        if not given.is_cpu or given.is_floating_point():
            return set()
        if given.dim() > 1:  # shape (sequences, tokens)
            first = given[..., :1].flatten().tolist()
            return _starts(first, len(first), 0)
        given = given.tolist()
    said = list(given) if isinstance(given, (list, tuple)) else [given]
    numbers = [int(number) for number in said if isinstance(number, Integral)]
    if not said or len(numbers) < len(said) or min(numbers) < 0:
        return set()
    is_one_of_each = len(numbers) == sequences and len(numbers) != length
    follow = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return set(numbers[:1] if follow and not is_one_of_each else numbers)


def _layers_of(cache: Any) -> list[Any]:
    """Return the layers of a cache of transformers. For an encoder-decoder cache, the layers for self-attention."""
    own = getattr(cache, "self_attention_cache", cache)
    layers = getattr(own, "layers", None) if can_be_asked(type(own), *_OF_CACHE) else None
    return layers if type(layers) is list else []


def _is_fresh(cache: Any, layers: list[Any]) -> bool:
    """Whether a cache is empty: it has no layers, or none of them was used."""
    is_known = False
    for layer in layers:
        for name in ("is_initialized", "has_previous_state"):
            used = getattr(layer, name, None) if can_be_asked(type(layer), *_OF_LAYER) else None
            if used is not None:
                is_known = True
                if used is True or _truth(used):
                    return False
    return hasattr(cache, "layers") and (is_known or not layers)


def _truth(value: object) -> bool:
    """Return whether `value` is True, or a list or dictionary that contains True.

    A cache layer with several states has a list with one flag per state, which says whether it was used.
    """
    if isinstance(value, (list, tuple)):
        return any(map(_truth, value))
    if isinstance(value, dict):
        return any(map(_truth, value.values()))
    return value is True


def _counts_positions(layers: list[Any]) -> bool:
    """Whether a layer of the cache counts its positions. A mixer layer has a state instead of positions."""
    if not layers:
        return True
    for layer in layers:  # noqa: SIM110 - any() would take longer, because usually the first layer decides
        if has_method(type(layer), _LENGTH):
            return True
    return False
