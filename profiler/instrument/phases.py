"""What a call of a model is: its phase, tokens, sequences and the positions its cache holds, by its arguments alone.

Nothing here waits for a device: what only a tensor's contents there could tell is unknown. Hugging Face's names of
arguments are known, those of models written by hand (llama's reference, gpt-fast) for where the new tokens stand, and
a first tensor of token ids (sequences x tokens). Of a spectrogram, a picture, or a first tensor of other numbers the
tokens are not known: its shape tells the phase alone, and sequences where their axis is said.
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
FORWARD = "forward"  # nothing says prefill, decode or encode

# Ids and their embeddings. The decoder's come first: of a model with an encoder, the step is what its decoder does.
TOKENS = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds", "tokens", "idx")
PICTURES = ("input_features", "pixel_values")  # of whose shape no axis is that of tokens
CACHES = ("past_key_values", "cache_params", "state")
POSITIONS = ("start_pos", "input_pos", "cache_position", "cache_pos", "past_length", "seqlen_offset")  # of new tokens
PACKED = "cu_seq_lens_q"  # where sequences that lie behind one another end
_STAND = frozenset(POSITIONS)
TYPES_OF_IDS = (int64, int32)
_LENGTH = (
    "get_seq_length"  # the method of caches that tells their length; an object that answers to any name lacks it
)
_OF_CACHE, _OF_LAYER = ("self_attention_cache", "layers"), ("is_initialized", "has_previous_state")


class Call(NamedTuple):
    """`cached`: positions that the cache held of each sequence before; None where they differ or only a device knows.

    `tokens` and `sequences` are 0 where their number is not known.
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
    """What a call with these arguments does. `has_cache` says whether the model can take one at all.

    `without_cache` is the phase of a model that cannot.

    `axis` is that of sequences in what comes without a known name; None: the model does not say. `takes_ids` is
    whether whole numbers without a known name can be token ids.
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
            sequences = 0  # they lie behind one another: nobody says where each ends
        # Where only a device knows where several new tokens stand, they are taken for a prompt.
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
    return tuple.__new__(Call, (phase, tokens, sequences, cached))  # which `Call` does in a frame of Python's


def describe_captured(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    has_cache: bool,
    without_cache: str = FORWARD,
    axis: int | None = None,
    takes_ids: bool = True,
) -> Call:
    """What a replay of a call with these arguments does: with one new token of each sequence, it decodes.

    No cache is asked: what it does to answer might be captured, too.
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
    """The entries of a dictionary, or of a UserDict, as batches of transformers are. No code of the host runs."""
    if issubclass(type(value), UserDict):
        value = dictionary_of(value).get("data")
    return dict(dict.items(value)) if issubclass(type(value), dict) else None


def _is_tensor(value: Any) -> TypeGuard[Tensor]:
    return issubclass(type(value), Tensor)  # `isinstance` would ask objects of the host's what class they have


def _new_tokens(
    args: tuple[Any, ...], kwargs: dict[str, Any], axis: int | None, takes_ids: bool
) -> tuple[Tensor | None, int, int, int]:
    """The tensor that is the likeliest to be the new tokens, its sequences, the length of each, and all tokens."""
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
    """What an engine's step is for one sequence: `new` tokens behind `cached` ones; `writes`, once it has output."""
    if writes and new == 1:
        return DECODE
    return EXTEND if cached else PREFILL


def of_several(sequences: Iterable[str]) -> str:
    """The phase of a step with sequences of these phases; where drafts are verified the others decode beside them."""
    found = set(sequences)
    if found == {DECODE, VERIFY}:
        return VERIFY
    return found.pop() if len(found) == 1 else MIXED


def _packed(kwargs: dict[str, Any], tokens: int) -> Call | None:
    """A call whose sequences of different lengths lie behind one another (Hugging Face's continuous batching)."""
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
    """How many positions a cache holds; None where it has some, and their number lies on a device or is not kept."""
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
            found = length()  # as almost always, and fewer calls
        else:
            if _is_fresh(cache, layers):
                return 0
            found = length() if _counts_positions(layers) else None
        return found if isinstance(found, int) else _on_the_host(found)
    if issubclass(type(cache), (tuple, list)):  # of before there were caches: layers of (keys, values)
        first = cache[0] if cache else None
        keys = first[0] if isinstance(first, (tuple, list)) and first else None
        return int(keys.shape[-2]) if _is_tensor(keys) and keys.dim() > 2 else None
    return None


def _counts_on_a_device(cache: Any) -> bool:
    """Whether a device alone knows how much a cache holds: as a static one's, which may have been emptied since."""
    is_known = can_be_asked(type(cache), *_OF_CACHE) and has_method(type(cache), _LENGTH)
    found = cache.get_seq_length() if is_known and _counts_positions(_layers_of(cache)) else None
    return _is_tensor(found) and not found.is_cpu


def _on_the_host(found: Any) -> int | None:
    """The whole number that all of a tensor's are, where they are on the host; a kind of its own may have none."""
    if type(found) is not Tensor or not found.is_cpu or found.is_floating_point():
        return None
    numbers = set(found.flatten().tolist())
    return int(numbers.pop()) if len(numbers) == 1 else None


def _starts(given: Any, sequences: int, length: int) -> set[int]:
    """Where sequences begin, by one number, one of each, or the positions of all new tokens; empty: unknown.

    Positions that do not follow one another, where there is not one for each sequence, may each begin one.
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
    """The layers of a cache of transformers, of the decoder's own one where there are two."""
    own = getattr(cache, "self_attention_cache", cache)
    layers = getattr(own, "layers", None) if can_be_asked(type(own), *_OF_CACHE) else None
    return layers if type(layers) is list else []


def _is_fresh(cache: Any, layers: list[Any]) -> bool:
    """Whether nothing has been put into a cache: no layer is there, or none has been used."""
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
    """Of lists too: a layer with several states has a list of whether each was used."""
    if isinstance(value, (list, tuple)):
        return any(map(_truth, value))
    if isinstance(value, dict):
        return any(map(_truth, value.values()))
    return value is True


def _counts_positions(layers: list[Any]) -> bool:
    """Whether any layer of a cache counts its positions; those of mixers keep a state instead."""
    if not layers:
        return True
    for layer in layers:  # noqa: SIM110 - the first says so, mostly; any() would cost more than the question
        if has_method(type(layer), _LENGTH):
            return True
    return False
