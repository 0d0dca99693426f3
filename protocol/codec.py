"""Encode messages to bytes and decode them. This module does not use sockets.

Messages
- A message is one msgpack map that contains its kind under "k" and its fields by name. Unknown fields and unknown
  kinds of the same major version of the protocol are ignored (`decode` returns None for an unknown kind).
- A field with its default value is left out, which saves most fields of a node.
- The attributes of a node (`cbtop.protocol.attributes`) are keys of the node's map like other fields. A group of
  attributes is ignored if a required one is missing.

Checks
- Input is not trusted. Every length is bounded before anything is allocated, every field is checked against its
  declared type, and every number against its range.
- Every string is sanitised here and nowhere else. Each control, bidi or invisible character becomes U+FFFD and the
  character's number, so names that differ only in such characters remain different. Plain spaces at either end become
  ␣, and other spaces there become U+FFFD and their number. Long strings are cut, and an empty name becomes `""`.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
import re
import types
from collections.abc import Callable
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

from cbtop.protocol import messages
from cbtop.protocol.errors import DecodeError
from cbtop.protocol.packing import load_msgpack
from cbtop.protocol.vocabulary import BrickCategory, BrickId, NodeKind

msgpack = load_msgpack()
MAX_FRAME_BYTES = 64 << 20  # largest frame; even a keyframe of a full node table with histograms is smaller
MAX_NAME_CHARS = 256
MAX_ITEMS = 200_000  # limit for the items of any list, twice the size of a full node table
# Limit for the items of all lists and maps of a frame together. A byte in a frame may become a much larger object.
MAX_PARTS = 5_000_000
I64_MIN = -(1 << 63)
U64_MAX = (1 << 64) - 1  # largest integer in a message; only hashes of PTX need 64 bits without a sign

# Characters that move the cursor or that no font draws: Unicode's categories Cc, Cf, Cs, Zl and Zp, fillers,
# variation selectors and tags. Also code points that Unicode reserves for further invisible characters
# (Default_Ignorable_Code_Point in DerivedCoreProperties.txt).
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160\u17b4\u17b5\u180b-\u180f"
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ud800-\udfff\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb"
    "\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)

_SPACES = "[ \xa0\u1680\u2000-\u200a\u202f\u205f\u3000]+"  # Unicode's category Zs
_EDGES = re.compile(rf"\A{_SPACES}|{_SPACES}\Z")
NO_NAME = '""'

Check = Callable[[Any, str], Any]
EncodedNode = tuple[messages.Node, bytes]


def sanitise(text: str) -> str:
    """Return `text` in a form that is safe to show: at most MAX_NAME_CHARS visible characters.

    No character moves the cursor or changes the order of the text.
    """
    text = text[:MAX_NAME_CHARS]
    if text.isascii() and text.isprintable() and text.strip(" ") == text:
        return text  # the usual case
    text = _UNSAFE.sub(lambda found: _numbered(found[0]), text)[:MAX_NAME_CHARS]
    # Replacing characters at the edges may make the text longer, so `_with_edges` cuts it to the limit. After the
    # cut, the last character may be a space again. So call `_with_edges` twice.
    return _with_edges(_with_edges(text))


def _with_edges(text: str) -> str:
    def seen(found: re.Match[str]) -> str:
        return "".join("␣" if one == " " else _numbered(one) for one in found[0])

    return _EDGES.sub(seen, text)[:MAX_NAME_CHARS]


def _numbered(character: str) -> str:
    return f"\ufffd{ord(character):04X}"


def encode(message: messages.Message) -> bytes:
    """Encode one message as one msgpack map."""
    packed: bytes = msgpack.packb(_plain(message), use_bin_type=True, unicode_errors="backslashreplace")
    return packed


def encode_node(node: messages.Node) -> EncodedNode:
    """Return the node and its encoding. Raises an error if the node cannot be encoded, or if its encoding cannot be
    decoded.

    The encoding is decoded as a test, but only if a field may have another type than declared.
    """
    payload = encode(node)
    if not _is_sure(node):
        decode(payload)
    return node, payload


def decode(frame: bytes | memoryview) -> messages.Message | None:
    """Return the message in `frame`, or None if its kind is unknown to this minor version of the protocol.

    Raises DecodeError if `frame` is not a valid message.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise DecodeError(f"a frame of {len(frame)} bytes; at most {MAX_FRAME_BYTES} are taken")
    parts = 0

    def counted(container: list[Any] | dict[str, Any]) -> object:
        nonlocal parts
        parts += 1 + len(container)
        if parts > MAX_PARTS:
            raise ValueError(f"more than {MAX_PARTS} parts")
        return container

    try:
        raw = msgpack.unpackb(
            frame,
            list_hook=counted,
            object_hook=counted,
            strict_map_key=True,
            max_str_len=1 << 16,
            max_bin_len=MAX_FRAME_BYTES,
            max_array_len=MAX_ITEMS,
            max_map_len=64,
            max_ext_len=0,
            unicode_errors="replace",
        )
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise DecodeError(f"not a message: {error}") from error
    return _message(raw)


def _message(raw: object) -> messages.Message | None:
    if not isinstance(raw, dict) or not isinstance(raw.get("k"), str):
        raise DecodeError("not a message: a map with its kind under 'k' was wanted")
    reader = _READERS.get(raw["k"])
    return reader(raw) if reader else None


def _plain(value: object) -> object:
    plain = _PLAIN.get(type(value))
    if plain is not None:
        return plain(value)
    match value:
        case Enum():
            return value.value
        case str():
            return _cut(value)
        case bytes() | int() | float() | None:
            return value
        case numbers.Integral():  # integers of other types, for example NumPy's
            return int(value)
        case numbers.Real():
            return float(value)
        case tuple():
            return [_plain(item) for item in value]
        case _:
            raise TypeError(f"a message cannot carry a {type(value).__name__}")


def _cut(text: str) -> str:
    return text[:MAX_NAME_CHARS]


def _integer(value: Any, where: str) -> int:
    if type(value) is not int or not I64_MIN <= value <= U64_MAX:
        raise DecodeError(f"{where}: {value!r:.40} is no 64-bit integer")
    return value


def _number(value: Any, where: str) -> float:
    if type(value) is int:  # an integer from JSON may be too large for a float, so check its range first
        value = float(_integer(value, where))
    if type(value) is not float or not math.isfinite(value):
        raise DecodeError(f"{where}: {value!r:.40} is no finite number")
    return value


def _boolean(value: Any, where: str) -> bool:
    if type(value) is not bool:
        raise DecodeError(f"{where}: {value!r:.40} is neither true nor false")
    return value


def _text(value: Any, where: str) -> str:
    if type(value) is not str:
        raise DecodeError(f"{where}: {value!r:.40} is no string")
    return sanitise(value)


def _name(value: Any, where: str) -> str:
    return _text(value, where) or NO_NAME


def _column(value: Any, where: str) -> bytes:
    if type(value) is not bytes or len(value) % 8:
        raise DecodeError(f"{where}: no column of 64-bit integers")
    return value


def _packed(value: Any, where: str) -> bytes:
    if type(value) is not bytes:
        raise DecodeError(f"{where}: {value!r:.40} is no bytes")
    return value


def _enum(kind: type[Enum]) -> Check:
    def check(value: Any, where: str) -> Enum:
        try:
            return kind(value)
        except ValueError:
            raise DecodeError(f"{where}: {value!r:.40} is no {kind.__name__}") from None

    return check


def _optional(inner: Check) -> Check:
    return lambda value, where: None if value is None else inner(value, where)


def _triple(value: Any, where: str) -> tuple[int, int, int]:
    if type(value) is not list or len(value) != 3:
        raise DecodeError(f"{where}: three integers were wanted")
    x, y, z = (_integer(item, where) for item in value)
    return x, y, z


def _nested(kinds: tuple[type, ...]) -> Check:
    names = {kind.__name__ for kind in kinds}

    def check(value: Any, where: str) -> tuple[messages.Message, ...]:
        if type(value) is not list:
            raise DecodeError(f"{where}: a list of messages was wanted")
        for item in value:
            kind = item.get("k") if type(item) is dict else None
            if (
                type(kind) is str and kind in _READERS and kind not in names
                # Compare the kind before the item is decoded: maps and lists may be nested without limit.
            ):
                raise DecodeError(f"{where}: a {kind} has no place there")
        return tuple(message for item in value if (message := _message(item)) is not None)

    return check


_SCALARS: dict[Any, Check] = {
    int: _integer,
    float: _number,
    bool: _boolean,
    str: _text,
    messages.Name: _name,
    bytes: _column,
    messages.Packed: _packed,
}


def _check_for(annotation: Any) -> Check:
    if annotation in _SCALARS:
        return _SCALARS[annotation]
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return _enum(annotation)
    if annotation == tuple[int, int, int]:
        return _triple
    if get_origin(annotation) is tuple:
        (item, _) = get_args(annotation)
        return _nested(get_args(item) or (item,))
    if get_origin(annotation) in (types.UnionType, Union):
        (inner,) = (a for a in get_args(annotation) if a is not type(None))
        return _optional(_check_for(inner))
    raise TypeError(f"no rule for a field of type {annotation}")


def reader_for(kind: type) -> Callable[[dict[str, Any]], Any]:
    """Return a function that takes a map, checks every field, and returns an object of the class `kind`. The function
    raises DecodeError.

    `kind` is a message class, or a class whose objects are stored in a file in the same format.
    """
    hints = get_type_hints(kind, include_extras=True)
    groups = {name: _group_of(hint) for name, hint in hints.items()}
    required = {f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING}
    rules = [(name, f"{kind.__name__}.{name}", _check_for(hint)) for name, hint in hints.items() if not groups[name]]
    flat = [(name, *_group_reader(group)) for name, group in groups.items() if group]

    def read(raw: dict[str, Any]) -> Any:
        missing = required - raw.keys()
        if missing:
            raise DecodeError(f"{kind.__name__}: no {', '.join(sorted(missing))}")
        fields = {name: rule(raw[name], where) for name, where, rule in rules if name in raw}
        for name, names, needed, group in flat:
            if not names.isdisjoint(raw) and needed <= raw.keys():
                fields[name] = group(raw)
        try:
            return kind(**fields)
        # The constructor of a message class may check its own fields, as `Ceiling` does.
        except ValueError as error:
            raise DecodeError(f"{kind.__name__}: {error}") from error

    return read


def _group_of(annotation: Any) -> type | None:
    """Return the class of a group of attributes, or None for an ordinary field.

    The attributes of a group are keys in the message's map, like ordinary fields.
    """
    kinds = get_args(annotation) if get_origin(annotation) in (types.UnionType, Union) else (annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and dataclasses.is_dataclass(kind)), None)


def _group_reader(group: type) -> tuple[frozenset[str], frozenset[str], Callable[[dict[str, Any]], Any]]:
    """Return the field names of a group, its required field names, and a function that makes the group from a map."""
    members = dataclasses.fields(group)
    needed = frozenset(member.name for member in members if member.default is dataclasses.MISSING)
    return frozenset(member.name for member in members), needed, reader_for(group)


def plain_for(kind: type) -> Callable[[Any], dict[str, object]]:
    """Return a function that makes a map from a message. The map contains only plain values."""
    fill = _filler_for(kind)

    def plain(message: Any) -> dict[str, object]:
        packed: dict[str, object] = {"k": kind.__name__}
        fill(message, packed)
        return packed

    return plain


def _filler_for(kind: type) -> Callable[[Any, dict[str, object]], None]:
    """Return a function that takes a message and a map, and puts the fields of the message and of its groups into the
    map.
    """
    hints = get_type_hints(kind)
    members = dataclasses.fields(kind)
    getters = [operator.attrgetter(field.name) for field in members]
    groups = [_filler_for(group) if (group := _group_of(hints[field.name])) else None for field in members]
    rules = list(zip((field.name for field in members), getters, (f.default for f in members), groups, strict=True))

    def fill(message: Any, packed: dict[str, object]) -> None:
        for name, get, default, group in rules:
            value = get(message)
            # A value may equal the default of its field without being the same object. Such a value is sent, although
            # it could be left out.
            if value is default:
                continue
            if group is not None:
                group(value, packed)
            else:
                packed[name] = value if type(value) in _AS_THEY_ARE else _plain(value)

    return fill


def _sure_for(kind: type) -> Callable[[Any], bool]:
    """Return a function that says whether every field of a node, and of its groups, has exactly its declared type.

    The encoding of such a node can always be decoded, for three reasons: strings are sanitised, integers with too
    many bits cannot be encoded, and a node rejects numbers that are not finite.
    """
    hints = get_type_hints(kind)
    members = dataclasses.fields(kind)
    getters = [operator.attrgetter(field.name) for field in members]
    types_of = [frozenset(get_args(hints[field.name]) or (hints[field.name],)) for field in members]
    groups = [_sure_for(group) if (group := _group_of(hints[field.name])) else None for field in members]
    rules = list(zip(getters, (field.default for field in members), types_of, groups, strict=True))

    def is_sure(message: Any) -> bool:
        for get, default, wanted, group in rules:
            value = get(message)
            if value is default:
                continue
            if type(value) not in wanted:
                return False
            if group is not None and value is not None and not group(value):
                return False
        return True

    return is_sure


_AS_THEY_ARE = {int, float, bool, bytes, types.NoneType}
_KINDS = get_args(messages.Message)
_PLAIN: dict[type, Callable[[Any], object]] = {kind: plain_for(kind) for kind in _KINDS}
# Encode enumerations and strings, the most common values, without `_plain`. The result is the same, but faster.
_PLAIN |= dict.fromkeys((BrickCategory, BrickId, NodeKind), operator.attrgetter("_value_"))
_PLAIN[str] = _cut
_READERS = {kind.__name__: reader_for(kind) for kind in _KINDS}
_is_sure = _sure_for(messages.Node)
