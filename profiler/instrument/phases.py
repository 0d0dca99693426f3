"""The description of a model's call: phase, tokens, sequences and cached positions, from its arguments alone.

Nothing here waits for a device: facts that only a device tensor's contents could tell are unknown. Known arguments
are Hugging Face's names, the names of hand-written models (llama's reference, gpt-fast) for the positions of new
tokens, and a first tensor of token ids (sequences x tokens). A spectrogram, a picture, or a first tensor of other
numbers does not tell the tokens: its shape gives only the phase, and the sequences if their axis is known.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterable
from numbers import Integral
from typing import Any, NamedTuple, TypeGuard

from torch import Tensor, int32, int64

from cbtop.profiler.instrument.module_tree import can_be_asked, dictionary_of, has_method

PREFILL, DECODE, EXTEND, MIXED, VERIFY = "prefill", "decode", "extend", "mixed", "verify"
NO_CACHE = "decode, no cache"  # `generate` computes the whole sequence again for each token
ENCODE = "encode"  # the model has no cache and its attention looks both ways: an encoder
FORWARD = "forward"  # not known to be prefill, decode or encode

# Ids and their embeddings. The decoder's come first: in a model with an encoder, the step is its decoder's.
TOKENS = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds", "tokens", "idx")
PICTURES = ("input_features", "pixel_values")  # their shape has no axis of tokens
CACHES = ("past_key_values", "cache_params", "state")
POSITIONS = ("start_pos", "input_pos", "cache_position", "cache_pos", "past_length", "seqlen_offset")  # of new tokens
PACKED = "cu_seq_lens_q"  # where the sequences of a packed row end
_STAND = frozenset(POSITIONS)
TYPES_OF_IDS = (int64, int32)
_LENGTH = (
    "get_seq_length"  # the method of caches that gives their length; an object that answers to any name lacks it
)
_OF_CACHE, _OF_LAYER = ("self_attention_cache", "layers"), ("is_initialized", "has_previous_state")


class Call(NamedTuple):
    """`cached`: positions that the cache held for each sequence before; None if they differ or only a device knows.

    `tokens` and `sequences` are 0 if their number is not known.
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
    axis: int | None = None,
    takes_ids: bool = True,
) -> Call:
    """Describe a call with these arguments. `has_cache`: whether the model can take one at all.

    `without_cache` is the phase of a model that cannot.

    `axis` is the axis of sequences in arguments without a known name; None: not known. `takes_ids`: whether integers
    without a known name can be token ids.
    """
    new, sequences, length, tokens = _new_tokens(args, kwargs, axis, takes_ids)
    if new is None:  # a batch as one argument
        batches = [batch for batch in map(_batch, (*args, *kwargs.values())) if batch is not None]
        args, kwargs = (), batches[0] if batches else {}
        new, sequences, length, tokens = _new_tokens(args, kwargs, axis, takes_ids)
    if PACKED in kwargs:
        packed = _packed(kwargs, tokens)
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
            sequences = 0  # packed sequences: it is not known where each ends
        # If only a device knows the positions of several new tokens, they are taken for a prompt.
        is_known = bool(starts) or (held is not None and not _counts_on_a_device(held))
        is_prompt, is_mixed = starts == {0} or (not is_known and length > 1), 0 in starts
    if is_prompt:
        phase = PREFILL
    elif is_mixed:
        phase = MIXED
    elif is_assisted:
        phase = VERIFY
    elif length == 1:
        phase = DECODE
    else:
        phase = EXTEND
    return tuple.__new__(Call, (phase, tokens, sequences, cached))  # as `Call` does in a Python frame


def describe_captured(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    has_cache: bool,
    without_cache: str = FORWARD,
    axis: int | None = None,
    takes_ids: bool = True,
) -> Call:
    """Describe a replay of a call with these arguments: with one new token of each sequence, it decodes.

    No cache is read, because its work to answer might be captured, too.
    """
    _, sequences, length, tokens = _new_tokens(args, kwargs, axis, takes_ids)
    is_given = any([kwargs.get(name) is not None for name in CACHES])
    if length == 1:
        phase = DECODE
    elif not has_cache:
        phase = without_cache
    else:
        phase = EXTEND if is_given else PREFILL
    return Call(phase, tokens, sequences, None)


def _batch(value: Any) -> dict[str, Any] | None:
    """Return the entries of a dictionary, or of a UserDict (a batch of transformers). Runs no code of the host."""
    if issubclass(type(value), UserDict):
        value = dictionary_of(value).get("data")
    return dict(dict.items(value)) if issubclass(type(value), dict) else None


def _is_tensor(value: Any) -> TypeGuard[Tensor]:
    return issubclass(type(value), Tensor)  # `isinstance` would ask objects of the host's for their class


def _new_tokens(
    args: tuple[Any, ...], kwargs: dict[str, Any], axis: int | None, takes_ids: bool
) -> tuple[Tensor | None, int, int, int]:
    """Return the likeliest tensor of new tokens, its sequences, the length of each, and the total of tokens."""
    for name in (*TOKENS, *PICTURES):
        if name in kwargs and issubclass(type(kwargs[name]), Tensor):
            new = kwargs[name]
            break
    else:
        name = ""
        for value in (*args, *kwargs.values()):
            if _is_tensor(value):
                new = value
                break
        else:
            return None, 0, 0, 0
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
        if axis == 1 and dimensions == 2:
            sequences, length = length, sequences
        return new, sequences, length, sequences * length
    return new, 0 if axis is None or dimensions < 3 else int(shape[axis]), length, 0


def of_sequence(new: int, cached: int, *, writes: bool) -> str:
    """Return an engine's phase for one sequence: `new` tokens after `cached` ones; `writes` once it has output."""
    if writes and new == 1:
        return DECODE
    return EXTEND if cached else PREFILL


def of_several(sequences: Iterable[str]) -> str:
    """Return the phase of a step with sequences of these phases. In a step that verifies, others may decode."""
    found = set(sequences)
    if found == {DECODE, VERIFY}:
        return VERIFY
    return found.pop() if len(found) == 1 else MIXED


def _packed(kwargs: dict[str, Any], tokens: int) -> Call | None:
    """Describe a call with packed sequences of different lengths (Hugging Face's continuous batching)."""
    ends, longest, longest_kept = kwargs.get(PACKED), kwargs.get("max_length_q"), kwargs.get("max_length_k")
    if not _is_tensor(ends) or not isinstance(longest, int):
        return None
    sequences = ends.numel() - 1
    if longest == 1:
        phase = DECODE
    elif longest == longest_kept:
        phase = PREFILL if sequences * longest == tokens or sequences == 1 else MIXED
    else:
        phase = EXTEND if sequences == 1 else MIXED
    return Call(phase, tokens, sequences, None)


def cached_positions(cache: Any) -> int | None:
    """Return the number of cached positions, or None if it is stored on a device or not tracked."""
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
            found = length()  # almost always, and with fewer calls
        else:
            if _is_fresh(cache, layers):
                return 0
            found = length() if _counts_positions(layers) else None
        return found if isinstance(found, int) else _on_the_host(found)
    if issubclass(type(cache), (tuple, list)):  # before there were caches: layers of (keys, values)
        first = cache[0] if cache else None
        keys = first[0] if isinstance(first, (tuple, list)) and first else None
        return int(keys.shape[-2]) if _is_tensor(keys) and keys.dim() > 2 else None
    return None


def _counts_on_a_device(cache: Any) -> bool:
    """Whether only a device knows the cached positions, as with a static cache, which may have been emptied since."""
    is_known = can_be_asked(type(cache), *_OF_CACHE) and has_method(type(cache), _LENGTH)
    found = cache.get_seq_length() if is_known and _counts_positions(_layers_of(cache)) else None
    return _is_tensor(found) and not found.is_cpu


def _on_the_host(found: Any) -> int | None:
    """Return the integer that all elements of a tensor on the host are, or None. A tensor subclass may have none."""
    if type(found) is not Tensor or not found.is_cpu or found.is_floating_point():
        return None
    numbers = set(found.flatten().tolist())
    return int(numbers.pop()) if len(numbers) == 1 else None


def _starts(given: Any, sequences: int, length: int) -> set[int]:
    """Return where sequences begin, from one number, one of each, or the positions of all new tokens; empty: unknown.

    Positions that are not consecutive may each begin a sequence, unless there is one for each sequence.
    """
    if type(given) is Tensor:
        if not given.is_cpu or given.is_floating_point():
            return set()
        if given.dim() > 1:  # sequences x tokens
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
    """Return the layers of a cache of transformers, of the decoder's own one if there are two."""
    own = getattr(cache, "self_attention_cache", cache)
    layers = getattr(own, "layers", None) if can_be_asked(type(own), *_OF_CACHE) else None
    return layers if type(layers) is list else []


def _is_fresh(cache: Any, layers: list[Any]) -> bool:
    """Whether nothing has been put into a cache: it has no layer, or none has been used."""
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
    """Whether a value, or any in a list, is True: a layer with several states has a list of whether each was used."""
    if isinstance(value, (list, tuple)):
        return any(map(_truth, value))
    if isinstance(value, dict):
        return any(map(_truth, value.values()))
    return value is True


def _counts_positions(layers: list[Any]) -> bool:
    """Whether any layer of a cache counts its positions. Layers of mixers keep a state instead."""
    if not layers:
        return True
    for layer in layers:  # noqa: SIM110 - the first decides, mostly; any() would cost more than the question
        if has_method(type(layer), _LENGTH):
            return True
    return False
