"""Tests of the codec: messages are unchanged after encoding and decoding. Anything else is rejected."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.protocol import codec, kernel_messages, messages
from cbtop.protocol.attributes import FunctionAttributes, KernelAttributes, ModuleAttributes, TransferAttributes, Work
from cbtop.protocol.errors import DecodeError
from cbtop.protocol.guard_messages import GuardedSteps, GuardFault
from cbtop.protocol.memory_messages import BrickMemories, BrickMemory, PartMemory, TrainingMemory
from cbtop.protocol.structure_messages import (
    CompiledCode,
    Conditions,
    GraphBreak,
    OperationCount,
    RunCondition,
    StepAllocations,
    StepOperations,
)
from cbtop.protocol.training_messages import (
    CommunicationTimes,
    GradientFault,
    GradientNorm,
    LossScale,
    PartTime,
    TrainingTimes,
)
from cbtop.protocol.vocabulary import BrickId, NodeKind, Provenance, TransferDirection
from tests.protocol.counter_strategies import COUNTED
from tests.protocol.sample_strategies import SAMPLED
from tests.protocol.serving_strategies import SERVING

KINDS = get_args(messages.Message)
CATALOG_KINDS = get_args(messages.CatalogMessage)


def values(annotation: Any) -> st.SearchStrategy[Any]:
    """Return a hypothesis strategy for valid values of a field with this annotation."""
    if annotation is str:
        return st.text(max_size=300).map(codec.sanitise)
    if annotation == messages.Name:
        return st.text(min_size=1, max_size=300).map(codec.sanitise)
    if annotation is int:
        return st.integers(-(2**63), 2**63 - 1)
    if annotation is float:
        return st.floats(1e-9, 1e20)  # Numbers in this range are valid in every message.
    if annotation is messages.Packed:
        return st.binary(max_size=20)
    if annotation is bytes:
        return st.integers(0, 4).map(lambda n: bytes(8 * n))
    if get_origin(annotation) in (types.UnionType, Union):
        (inner,) = (a for a in get_args(annotation) if a is not type(None))
        return st.none() | values(inner)
    if annotation == tuple[int, int, int]:
        return st.tuples(values(int), values(int), values(int))
    if get_origin(annotation) is tuple:
        (item, _) = get_args(annotation)
        inner_kinds = CATALOG_KINDS if item == messages.CatalogMessage else (item,)
        return st.lists(st.one_of([instances(kind) for kind in inner_kinds]), max_size=3).map(tuple)
    return instances(annotation) if dataclasses.is_dataclass(annotation) else st.from_type(annotation)


def takes_time(parts: list[PartTime]) -> bool:
    return any(part.sum_ns for part in parts)


def training_times(
    phase: str, model: str, steps: int, parts: list[PartTime], overlapped_ns: int | None
) -> TrainingTimes:
    communication = None if overlapped_ns is None else CommunicationTimes(tuple(parts), overlapped_ns)
    wall_ns = sum(part.sum_ns for part in parts)
    return TrainingTimes(phase, model, steps, wall_ns, tuple(parts), communication, steps % 3, wall_ns // 7)


STEPS = st.integers(0, 1 << 50)


def training_memory(phase: str, parts: list[PartMemory], numbers: list[int], why: str) -> TrainingMemory:
    return TrainingMemory(phase, "", len(parts), tuple(parts), *numbers, why)


def gradient_norm(phase: str, before: int, norms: list[float], *, is_shard: bool) -> GradientNorm:
    p50, norm, highest = sorted(norms)
    return GradientNorm(phase, "", before + 64, norm, p50, highest, 64, "after", is_shard)


def gradient_fault(phase: str, name: str, steps: list[int], counts: list[int]) -> GradientFault:
    finite, last, checked = sorted(steps)
    faulty, parameters = sorted(counts)
    return GradientFault(phase, "", name, "NaN", finite + 1, finite, last + 1, checked + 1, faulty, parameters)


def guard_fault(
    steps: tuple[int, int], names: tuple[str, ...], layer: int | None, given: str, more: tuple[str, ...]
) -> GuardFault:
    step, later = steps
    return GuardFault(names[0], step, names[1], names[2], names[3], layer, given, step + later, *more)


def guarded_steps(model: str, counts: tuple[int, int], fault: GuardFault | None) -> GuardedSteps:
    faulty, others = counts
    return GuardedSteps(model, faulty + others, 0 if fault is None else faulty, fault)


def loss_scale(phase: str, scales: list[float], counts: list[int], more: int) -> LossScale:
    rises, falls, *_ = counts
    return LossScale(phase, "", scales[0], sum(counts) + more, falls + more, scales[1], sum(counts), falls, rises)


def in_order(kind: Any, *before: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return a hypothesis strategy for messages of `kind`.

    Their last two fields are counts, and the first of these is the smaller one.
    """
    counts = st.tuples(STEPS, STEPS).map(sorted)
    return st.tuples(*before, counts).map(lambda drawn: kind(*drawn[:-1], *drawn[-1]))


NAMES, ANY_STEPS = st.text(max_size=30).map(codec.sanitise), st.integers(1, 1 << 50)
OPERATIONS = in_order(OperationCount, st.integers(0, 1 << 30), NAMES, NAMES)
BREAKS = st.builds(GraphBreak, NAMES, ANY_STEPS, st.integers(0, 1 << 30))
CONDITION = st.builds(RunCondition, NAMES, NAMES)
STRUCTURE: dict[Any, st.SearchStrategy[Any]] = {
    RunCondition: CONDITION,
    Conditions: st.lists(CONDITION, max_size=4, unique_by=lambda one: one.name).map(
        lambda some: Conditions(tuple(some))
    ),
    OperationCount: OPERATIONS,
    StepOperations: st.builds(StepOperations, NAMES, NAMES, ANY_STEPS, st.lists(OPERATIONS, max_size=3).map(tuple)),
    StepAllocations: in_order(StepAllocations, NAMES, NAMES, ANY_STEPS),
    GraphBreak: BREAKS,
    CompiledCode: st.tuples(st.tuples(STEPS, STEPS).map(sorted), st.lists(BREAKS, max_size=3).map(tuple)).map(
        lambda drawn: CompiledCode(drawn[0][1], drawn[0][0], drawn[1])
    ),
}


def instances(kind: Any) -> st.SearchStrategy[Any]:
    # The numbers of a batch depend on each other: its end is the sum of three of them.
    if kind is messages.RecordBatch:
        number = st.integers(0, 1 << 60)
        return st.tuples(values(str), number, number, number, values(messages.Packed)).map(
            lambda drawn: kind(drawn[0], drawn[1], sum(drawn[1:4]), *drawn[3:])
        )
    # A message with these times is valid only if there was at least one call.
    if kind is kernel_messages.BrickHostTime:
        return st.builds(kind, values(int), st.integers(1, 1 << 60), values(float))
    if kind is PartTime:
        time_ns = st.integers(0, 1 << 50)
        return st.builds(
            lambda name, p50_ns, more_ns: kind(name, p50_ns + more_ns, p50_ns),
            values(messages.Name),
            time_ns,
            time_ns,
        )
    if kind is TrainingTimes:
        parts = st.lists(instances(PartTime), min_size=1, max_size=4, unique_by=lambda part: part.name)
        return st.builds(
            training_times,
            values(messages.Name),
            values(str),
            st.integers(1, 64),
            parts.filter(takes_time),
            st.none() | st.integers(0, 1 << 50),
        )
    if kind is BrickMemory:
        return st.builds(kind, st.integers(1, 1 << 40), STEPS, STEPS, STEPS, st.integers(-(1 << 50), 1 << 50))
    if kind is PartMemory:
        return st.builds(kind, values(messages.Name), STEPS, STEPS)
    if kind is TrainingMemory:
        memory = st.lists(instances(PartMemory), max_size=4, unique_by=lambda part: part.name)
        return st.builds(training_memory, values(str), memory, st.lists(STEPS, min_size=6, max_size=6), values(str))
    if kind is GradientNorm:
        norms = st.lists(st.floats(0, 1e30), min_size=3, max_size=3)
        return st.builds(gradient_norm, values(str), STEPS, norms, is_shard=st.booleans())
    if kind is GradientFault:
        steps = st.lists(STEPS, min_size=3, max_size=3)
        counts = st.lists(st.integers(1, 1 << 40), min_size=2, max_size=2)
        return st.builds(gradient_fault, values(str), values(str), steps, counts)
    if kind is LossScale:
        counts = st.lists(st.integers(0, 20), min_size=3, max_size=3)
        return st.builds(loss_scale, values(str), st.lists(st.floats(0, 1e30), min_size=2), counts, STEPS)
    if kind in STRUCTURE | SERVING | SAMPLED | COUNTED:
        return (STRUCTURE | SERVING | SAMPLED | COUNTED)[kind]
    if kind is GuardedSteps:
        steps = st.tuples(st.integers(1, 1 << 40), st.integers(0, 1 << 40))
        names, more = st.tuples(*[values(str)] * 4), st.tuples(*[values(str)] * 3)
        layer, given = st.none() | st.integers(0, 1 << 40), st.sampled_from(["finite", "faulty", "unknown"])
        fault = st.builds(guard_fault, steps, names, layer, given, more)
        counts = st.tuples(st.integers(1, 1 << 40), st.integers(0, 1 << 40))
        return st.builds(guarded_steps, values(str), counts, st.none() | fault)
    # A message with these times is valid only if there was at least one call.
    if kind is kernel_messages.KernelTimes:
        count, time_ns = st.integers(1, 1 << 60), st.integers(0, 1 << 50)
        times = values(int), count, count, values(float), time_ns, time_ns, time_ns
        return st.tuples(*times, values(str), values(str)).map(
            lambda drawn: kind(
                *drawn[:3],
                mean_ns=float(sum(drawn[4:6])),
                deviation_ns=drawn[3],
                min_ns=drawn[4],
                max_ns=sum(drawn[4:7]),
                maker=drawn[7],
                source=drawn[8],
            )
        )
    fields = {name: values(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}
    if kind is kernel_messages.KernelBurst:
        fields["multiprocessors"] = st.none() | st.integers(1, 1 << 60)
    if kind is messages.Ceiling:
        fields["rounds"] = st.none() | st.integers(1, 1 << 30)
    if kind is KernelAttributes:  # Sizes, registers and a hash must not be negative.
        sizes = (
            "shared_memory_bytes", "static_shared_memory_bytes", "registers", "ptx_hash", "local_memory_bytes",
            "occupancy_percent",
        )  # fmt: skip
        fields |= dict.fromkeys(sizes, st.none() | st.integers(0, 2**64 - 1))
    return st.builds(kind, **fields)


@pytest.mark.parametrize("kind", KINDS)
def test_every_message_comes_back_as_it_went(kind: Any) -> None:
    @given(instances(kind))
    def comes_back(message: Any) -> None:
        assert codec.decode(codec.encode(message)) == message

    comes_back()


@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_an_error_or_nothing_and_never_a_crash(data: bytes) -> None:
    with contextlib.suppress(DecodeError):
        codec.decode(data)


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_of_the_wrong_type_is_refused_by_name(kind: Any) -> None:
    for field in dataclasses.fields(kind):
        if "bool" in str(field.type):
            continue
        fields = {"k": kind.__name__} | {f.name: None for f in dataclasses.fields(kind)} | {field.name: True}
        with pytest.raises(DecodeError, match=kind.__name__):
            codec.decode(msgpack.packb(fields))


def test_a_nodes_attributes_are_flat_in_its_map_as_before_they_had_classes() -> None:
    node = messages.Node(
        1,
        None,
        NodeKind.KERNEL,
        "gemv",
        work=Work(flops_per_call=8),
        kernel=KernelAttributes(grid=(1, 2, 3), ptx_hash=7),
        function=FunctionAttributes(line=12),
        transfer=TransferAttributes("host", "gpu0", 64, TransferDirection.H2D),
    )
    frame = codec.encode(node)
    assert msgpack.unpackb(frame) == {
        "k": "Node",
        "id": 1,
        "kind": NodeKind.KERNEL.value,
        "name": "gemv",
        "parent": None,
        "flops_per_call": 8.0,
        "flops_per_element": 0.0,
        "grid": [1, 2, 3],
        "ptx_hash": 7,
        "line": 12,
        "source": "host",
        "destination": "gpu0",
        "size_bytes": 64,
        "direction": "H2D",
    }
    assert codec.decode(frame) == node


# Values that a program may have put into any field, whatever its type.
ODD = (
    True, 5, 1 << 70, 1.5, float("nan"), float("inf"), "x", "\ud800" * 300, "", b"x", (1, 2, 3), [], object(),
    NodeKind.BRICK, BrickId.RMS_NORM, np.int64(3), np.float64(2), Work(1.0), KernelAttributes(registers=1),
)  # fmt: skip


def odd(holder: Any) -> Iterator[Any]:
    """Yield copies of `holder`. In each copy, one field has an unexpected value.

    The fields of nested groups are included.
    """
    for field in dataclasses.fields(holder):
        held = getattr(holder, field.name)
        for value in odd(held) if dataclasses.is_dataclass(held) else ODD:
            with contextlib.suppress(TypeError, ValueError):
                yield replace(holder, **{field.name: value})


def test_what_encode_node_takes_decodes_whatever_a_node_holds() -> None:
    node = messages.Node(
        1,
        None,
        NodeKind.TRANSFER,
        "a",
        work=Work(1.0, 2.0),
        transfer=TransferAttributes("host", "gpu0", 64, TransferDirection.H2D),
    )
    taken = 0
    for one in odd(node):
        try:
            _, payload = codec.encode_node(one)
        except (DecodeError, TypeError, OverflowError):
            continue
        decoded = codec.decode(payload)
        assert isinstance(decoded, messages.Node)
        taken += 1
    assert taken > 100


def test_a_usual_node_is_not_decoded_to_be_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    node = messages.Node(1, None, NodeKind.BRICK, "a", brick=BrickId.RMS_NORM, work=Work(1.0, 2.0))
    payload = codec.encode(node)
    monkeypatch.setattr(codec, "decode", None)
    assert codec.encode_node(node) == (node, payload)


@pytest.mark.parametrize("attribute", [{"grid": [1, 2]}, {"ptx_hash": -1}, {"flops_per_call": -1.0}, {"line": "x"}])
def test_a_nodes_attributes_are_checked_like_its_other_fields(attribute: dict[str, Any]) -> None:
    with pytest.raises(DecodeError):
        codec.decode(msgpack.packb({"k": "Node", "id": 1, "parent": None, "kind": 3, "name": ""} | attribute))


def test_a_transfer_that_lacks_its_direction_is_a_node_without_one() -> None:
    said = {"k": "Node", "id": 1, "parent": None, "kind": 3, "name": "", "source": "host", "size_bytes": 4}
    decoded = codec.decode(msgpack.packb(said))
    assert isinstance(decoded, messages.Node)
    assert decoded.transfer is None


@given(st.text(st.characters(categories=["Cc", "Cf", "Cs", "Zl", "Zp"]), min_size=1, max_size=9))
def test_no_character_that_is_not_seen_or_reorders_what_is_comes_through(hidden: str) -> None:
    assert codec.sanitise(f"a{hidden}b") == "a" + "".join(f"\ufffd{ord(one):04X}" for one in hidden) + "b"


HIDDEN = st.text(st.characters(categories=["Cc", "Cf", "Cs", "Zs", "Zl", "Zp", "Lu", "Nd"]), max_size=20)


@given(HIDDEN, HIDDEN)
def test_names_that_differ_in_what_is_not_seen_alone_stay_apart(one: str, other: str) -> None:
    kept = [codec.decode(codec.encode(messages.Activity(name, 0.0))) for name in (one, other)]
    assert (kept[0] == kept[1]) == (one == other)
    assert codec.sanitise(codec.sanitise(one)) == codec.sanitise(one)


def test_names_of_spaces_alone_and_of_nothing_are_seen_and_stay_apart() -> None:
    said = [messages.Node(1, None, NodeKind.BRICK, name) for name in ("", " ", "  ", "a ")]
    kept = [codec.decode(codec.encode(node)) for node in said]
    assert [node.name for node in kept if isinstance(node, messages.Node)] == ['""', "␣", "␣␣", "a␣"]
    check = codec.decode(codec.encode(messages.CheckResult("", "finite", True, None, None)))
    assert isinstance(check, messages.CheckResult)
    assert (check.brick, check.note) == ('""', "")


def test_a_name_of_nothing_that_is_seen_is_no_longer_than_others() -> None:
    assert len(codec.sanitise("\u200b" * 1000)) == codec.MAX_NAME_CHARS


@pytest.mark.parametrize(
    "hidden",
    [
        *"\u00ad\u034f\u061c\u115f\u180e\u200d\u2028\u202e\u206f\u3164\ufe0e\ufe0f\ufeff\uffa0\ufff0\ufff9\ufffa\ufffb",
        *"\U0001d173\U000e0000\U000e0001\U000e0041\U000e007f\U000e0100\U000e01ef\U000e0fff",
    ],
    ids=ascii,
)
def test_what_no_font_draws_does_not_come_through(hidden: str) -> None:
    assert codec.sanitise(f"Rms{hidden}Norm") == f"Rms\ufffd{ord(hidden):04X}Norm"


@given(st.text(st.characters(categories=["L", "N", "P", "S", "Zs"], exclude_characters="\u115f\u1160\u3164\uffa0")))
def test_letters_digits_signs_and_inner_spaces_of_every_script_are_kept(text: str) -> None:
    text = f"a{text[:99]}b"
    assert codec.sanitise(text) == text


def test_a_label_is_sanitised_and_bounded_like_a_name() -> None:
    said = {"k": "Node", "id": 1, "parent": None, "kind": 2, "name": "RmsNorm", "label": "q\x1b[31m" + "x" * 900}
    decoded = codec.decode(msgpack.packb(said))
    assert isinstance(decoded, messages.Node)
    assert decoded.label == codec.sanitise(said["label"])  # type: ignore[arg-type]
    assert len(decoded.label) == codec.MAX_NAME_CHARS


def test_what_a_later_minor_version_adds_is_ignored() -> None:
    packed = msgpack.packb({"k": "Goodbye", "reason": "done", "mood": "fine"})
    assert codec.decode(packed) == messages.Goodbye("done")
    assert codec.decode(msgpack.packb({"k": "Weather", "sun": True})) is None


def test_a_field_that_holds_its_default_takes_no_room() -> None:
    node = messages.Node(1, None, NodeKind.BRICK, "RmsNorm")
    assert set(msgpack.unpackb(codec.encode(node))) == {"k", "id", "parent", "kind", "name"}
    assert codec.decode(codec.encode(node)) == node


def test_a_missing_field_is_named() -> None:
    with pytest.raises(DecodeError, match="Goodbye: no reason"):
        codec.decode(msgpack.packb({"k": "Goodbye"}))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1 << 64])
def test_numbers_out_of_range_are_refused(value: float) -> None:
    with pytest.raises((DecodeError, OverflowError)):
        codec.decode(msgpack.packb({"k": "Activity", "name": "x", "done": value}))


@pytest.mark.parametrize("sign", ["\x1b[31m", "\x9b2J", "\u202e", "\r\n", "\u2028", "\ufeff", "\x7f", "\ud800"])
def test_no_control_or_bidi_character_of_a_name_gets_through(sign: str) -> None:
    decoded = codec.decode(codec.encode(messages.Goodbye(f"a{sign}b")))
    assert isinstance(decoded, messages.Goodbye)
    assert not set(decoded.reason) & set(sign) - set("[0123456789mJ?")
    assert decoded.reason.startswith("a")


def test_a_long_name_is_cut() -> None:
    decoded = codec.decode(codec.encode(messages.Goodbye("x" * 10_000)))
    assert decoded == messages.Goodbye("x" * codec.MAX_NAME_CHARS)


def test_a_frame_beyond_the_bound_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", 16)
    with pytest.raises(DecodeError, match="at most 16"):
        codec.decode(b"\xc0" * 17)
    with pytest.raises(DecodeError, match="not a message"):  # The frame is valid msgpack but contains no message.
        codec.decode(b"\xc0" * 16)


def test_a_map_of_more_fields_than_any_message_has_is_refused() -> None:
    def gone(fields: int) -> bytes:
        more = {f"later {number}": 1 for number in range(fields - 2)}
        packed: bytes = msgpack.packb({"k": "Goodbye", "reason": "x", **more})
        return packed

    assert codec.decode(gone(64)) == messages.Goodbye("x")
    with pytest.raises(DecodeError, match="not a message"):
        codec.decode(gone(65))


@pytest.mark.parametrize(("value", "fits"), [(-(2**63), True), (2**64 - 1, True), (-(2**63) - 1, False)])
def test_whole_numbers_of_64_bits_come_through_and_no_larger_ones(value: int, fits: bool) -> None:
    fields = {"k": "Manifest", "model": "m", "architecture": "a", "backend": "b", "quantization": "q"}
    fields |= dict.fromkeys(("layers", "hidden_size", "context_length", "parameters", "weights_bytes"), 1)  # type: ignore[arg-type]
    if fits:
        found = codec.decode(msgpack.packb(fields | {"threads": value}))
        assert isinstance(found, messages.Manifest)
        assert found.threads == value
    else:  # JSON can contain this number, but msgpack cannot.
        with pytest.raises(DecodeError, match="is no 64-bit integer"):
            codec.reader_for(messages.Manifest)(fields | {"threads": value})


PARTS = [{"k": "PartTime", "name": "forward", "sum_ns": 30, "p50_ns": 10}]
TIMES = {"k": "TrainingTimes", "phase": "train", "model": "", "steps": 3, "wall_ns": 30, "parts": PARTS}


def test_communication_of_a_training_step_comes_through_and_is_left_out_without() -> None:
    parts = PartTime("forward", 30, 10), PartTime("communication", 5, 1)
    communication = CommunicationTimes((PartTime("AllGather, forward", 5, 1),), 7)
    sent = TrainingTimes("train", "", 3, 35, parts, communication)
    assert codec.decode(codec.encode(sent)) == sent
    assert codec.encode(replace(sent, communication=None)) == codec.encode(TrainingTimes("train", "", 3, 35, parts))
    unknown = replace(communication, overlapped_ns=None, why_unknown="asynchronous")
    assert codec.decode(codec.encode(replace(sent, communication=unknown))) == replace(sent, communication=unknown)


def test_an_unknown_part_of_a_training_step_keeps_its_name() -> None:
    later = [{"k": "PartTime", "name": "communication", "sum_ns": 5, "p50_ns": 1}]
    found = codec.decode(msgpack.packb(TIMES | {"wall_ns": 35, "parts": PARTS + later}))
    assert isinstance(found, TrainingTimes)
    assert [part.name for part in found.parts] == ["forward", "communication"]


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"steps": 0}, "0 steps"),
        ({"by_kernels": 65}, "kernels of 65 steps"),
        ({"steps": 65}, "65 steps"),
        ({"wall_ns": 0}, "steps of 0 ns"),
        ({"wall_ns": -30}, "steps of -30 ns"),
        ({"wall_ns": 30.0}, "no 64-bit integer"),
        ({"wall_ns": float("nan")}, "no 64-bit integer"),
        ({"wall_ns": 29}, "the parts take 30 ns, the steps 29 ns"),
        ({"wall_ns": 31}, "the parts take 30 ns, the steps 31 ns"),
        ({"parts": []}, "the parts take 0 ns"),
        ({"parts": PARTS * 2, "wall_ns": 60}, "named once"),
        ({"parts": [PARTS[0] | {"name": str(number)} for number in range(33)], "wall_ns": 990}, "33 parts"),
        ({"parts": [PARTS[0] | {"sum_ns": -1}]}, "took -1 ns"),
        ({"parts": [PARTS[0] | {"p50_ns": 31}]}, "a median step 31 ns"),
        ({"parts": [PARTS[0] | {"p50_ns": -1}]}, "a median step -1 ns"),
        ({"parts": [TIMES]}, "has no place there"),
        ({"exposed": [PARTS[0] | {"sum_ns": 31}]}, "communication took 31 ns, the steps 30 ns"),
        ({"exposed": PARTS * 2}, "2 kinds of communication"),
        ({"exposed": PARTS, "overlapped_ns": -1}, "-1 ns of communication"),
    ],
)
def test_training_times_that_cannot_be_are_refused(wrong: dict[str, Any], complaint: str) -> None:
    assert codec.decode(msgpack.packb(TIMES)) is not None
    with pytest.raises(DecodeError, match=complaint):
        codec.decode(msgpack.packb(TIMES | wrong))


def test_numpys_numbers_go_as_pythons() -> None:
    ceiling = messages.Ceiling("dram_read", "bandwidth", np.float32(2.5), "GB/s", Provenance.MEASURED)
    assert codec.decode(codec.encode(ceiling)) == replace(ceiling, value=2.5)
    step = messages.Manifest(
        "m", "qwen2", "numba", "Q4_K", threads=np.int64(2), layers=3, hidden_size=4, context_length=5,
        parameters=6, weights_bytes=7,
    )  # fmt: skip
    assert codec.decode(codec.encode(step)) == replace(step, threads=2)
    with pytest.raises(TypeError, match="a message cannot carry a set"):
        codec.encode(messages.Goodbye({"x"}))  # type: ignore[arg-type]


def test_a_message_inside_another_must_be_of_the_kind_that_belongs_there() -> None:
    inner = {"k": "SourceGone", "source": "x"}
    packed = msgpack.packb({"k": "SourceCatalog", "source": "x", "complete": True, "messages": [inner]})
    with pytest.raises(DecodeError, match="a SourceGone has no place there"):
        codec.decode(packed)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(DecodeError):
        codec.decode(b"\x91" * 100_000 + b"\xc0")


def packed(**fields: object) -> bytes:
    """Return an encoded message of a kind that this version does not know.

    The size of such messages must be limited, too.
    """
    found: bytes = msgpack.packb({"k": "later", **fields})
    return found


def taken(frame: bytes) -> bool:
    try:
        return codec.decode(frame) is None
    except DecodeError:
        return False


def test_every_bound_of_a_frame_is_where_it_is_said_to_be() -> None:
    """A frame may have 64 MiB, five million parts, lists of 200,000 items, and texts of 65,536 bytes.

    Lists and maps themselves count as parts.
    """
    assert [taken(packed(a=[0] * count)) for count in (200_000, 200_001)] == [True, False]
    assert [taken(packed(a="x" * count)) for count in (65_536, 65_537)] == [True, False]
    lists = [[0] * 199_999] * 24
    room = 5_000_000 - (1 + 2) - (1 + 25) - 24 * 200_000
    assert [taken(packed(a=[*lists, [0] * (room - 1 + more)])) for more in (0, 1)] == [True, False]
    for size, complaint in ((64 << 20, "not a message"), ((64 << 20) + 1, "a frame of")):
        with pytest.raises(DecodeError, match=complaint):
            codec.decode(bytes(size))
    assert [len(codec.sanitise("x" * count)) for count in (256, 257)] == [256, 256]


@pytest.mark.parametrize("column", [b"1234567", "12345678", None])
def test_a_column_is_bytes_and_whole_integers_of_64_bits(column: object) -> None:
    columns = [field.name for field in dataclasses.fields(messages.StatsUpdate) if field.type == "bytes"]
    numbers = {"source": "one", "sequence": 1, "monotonic_ns": 2, "received": 3}
    raw = {"k": "StatsUpdate", **numbers, **dict.fromkeys(columns, bytes(8)), "cells": b""}
    assert isinstance(codec.decode(msgpack.packb(raw)), messages.StatsUpdate)
    with pytest.raises(DecodeError, match="min_ns"):
        codec.decode(msgpack.packb(raw | {"min_ns": column}))


MEMORY_PARTS = [{"k": "PartMemory", "name": "forward", "allocated_bytes": 30, "reserved_bytes": 40}]
MEMORY = {"k": "TrainingMemory", "phase": "train", "model": "", "steps": 3, "parts": MEMORY_PARTS}


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"steps": 65}, "memory of 65 steps in 1 parts"),
        ({"steps": 0}, "memory of 0 steps in 1 parts"),
        ({"parts": []}, "memory of 3 steps in 0 parts"),
        ({"parts": MEMORY_PARTS * 2}, "2 parts; expected up to 32, named once"),
        ({"parts": [MEMORY_PARTS[0] | {"allocated_bytes": -1}]}, "has -1 bytes allocated"),
        ({"retries": -1}, "out of range"),
        ({"lowest_reserved_bytes": -1}, "out of range"),
    ],
)
def test_memory_of_training_steps_that_cannot_be_is_refused(wrong: dict[str, object], complaint: str) -> None:
    assert isinstance(codec.decode(msgpack.packb(MEMORY)), TrainingMemory)
    with pytest.raises(DecodeError, match=complaint):
        codec.decode(msgpack.packb(MEMORY | wrong))


BRICK = {"k": "BrickMemory", "node": 4, "allocated_bytes": 30, "reserved_bytes": 40, "kept_bytes": -5}
BRICKS = {"k": "BrickMemories", "phase": "train", "model": "", "bricks": [BRICK]}


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"bricks": [BRICK] * 513}, "513 bricks; expected up to 512"),
        ({"bricks": [BRICK | {"node": 0}]}, "memory of node 0"),
        ({"bricks": [BRICK | {"output_bytes": -1}]}, "out of range"),
    ],
)
def test_memory_of_bricks_that_cannot_be_is_refused(wrong: dict[str, object], complaint: str) -> None:
    assert isinstance(codec.decode(msgpack.packb(BRICKS)), BrickMemories)
    with pytest.raises(DecodeError, match=complaint):
        codec.decode(msgpack.packb(BRICKS | wrong))


NORM = {"k": "GradientNorm", "phase": "train", "model": "", "step": 9, "measured": 3}
NORM |= {"norm": 1.0, "p50": 0.5, "highest": 2.0}
FAULT = {"k": "GradientFault", "phase": "train", "model": "", "parameter": "up.weight", "kind": "NaN"}
FAULT |= {"step": 5, "finite_step": 4, "last_step": 6, "checked_step": 8, "faulty": 2, "parameters": 3}
GUARD_FAULT = {"phase": "decode", "step": 5, "kind": "NaN", "brick": "Down", "module": "down"}
GUARD_FAULT |= {"layer": 2, "given": "finite", "last_step": 6}
GUARDED = {"k": "GuardedSteps", "model": "", "checked": 9, "faulty": 2} | GUARD_FAULT
SCALE = {"k": "LossScale", "phase": "train", "model": "", "scale": 2.0, "before": 8.0}
SCALE |= {"updates": 90, "falls": 3, "latest": 20, "latest_falls": 2, "latest_rises": 1}


@pytest.mark.parametrize("usual", [NORM, FAULT, SCALE, GUARDED])
def test_gradients_as_usual_are_taken(usual: dict[str, Any]) -> None:
    assert codec.decode(msgpack.packb(usual)) is not None


@pytest.mark.parametrize(
    ("usual", "wrong", "complaint"),
    [
        (GUARDED, {"faulty": 10}, "10 of 9 checked"),
        (GUARDED, {"steps": 8}, "9 of 8 steps are checked"),
        (GUARDED, {"faulty": 0}, "0 of 9 checked"),
        (GUARDED, {"faulty": -1}, "-1 of 9 checked"),
        (GUARDED, {"step": 0}, "steps 0 to 6"),
        (GUARDED, {"last_step": 4}, "steps 5 to 4"),
        (GUARDED, {"given": "odd"}, "odd"),
        (GUARDED, {"layer": -1}, "layer -1"),
        (NORM, {"measured": 0}, "0 norms"),
        (NORM, {"measured": 65, "step": 99}, "65 norms"),
        (NORM, {"measured": 10}, "10 norms of 9 steps"),
        (NORM, {"norm": 3.0}, "norms 3.0"),
        (NORM, {"p50": -1.0}, "-1.0"),
        (NORM, {"norm": float("nan")}, "no finite number"),
        (FAULT, {"finite_step": 5}, "finite in step 5"),
        (FAULT, {"finite_step": -1}, "finite in step -1"),
        (FAULT, {"last_step": 9}, "checked in 8"),
        (FAULT, {"faulty": 0}, "0 of 3"),
        (FAULT, {"faulty": 4}, "4 of 3"),
        (SCALE, {"scale": -1.0}, "a scale of -1.0"),
        (SCALE, {"latest": 65}, "in 65 updates"),
        (SCALE, {"latest": 2}, "fell 2 times and grew 1 times"),
        (SCALE, {"falls": 1}, "fell 1 times"),
        (SCALE, {"updates": 19}, "in 19 updates"),
    ],
)
def test_gradients_that_cannot_be_are_refused(usual: dict[str, Any], wrong: dict[str, Any], complaint: str) -> None:
    with pytest.raises(DecodeError, match=complaint):
        codec.decode(msgpack.packb(usual | wrong))


def test_the_module_of_a_brick_is_cut_and_has_no_control_characters() -> None:
    sent = ModuleAttributes(
        module_class="\x1b[2J" + "a" * 999,
        module_source="slow\u202e.py:10",
        weight_shape="4x8",
        weight_dtype="float32",
    )
    node = messages.Node(1, None, NodeKind.BRICK, "DownProjection", module=sent)
    got = codec.decode(codec.encode(node))
    assert isinstance(got, messages.Node)
    assert "\x1b" not in got.module.module_class
    assert len(got.module.module_class) <= codec.MAX_NAME_CHARS
    assert "\u202e" not in got.module.module_source
    assert (got.module.weight_shape, got.module.weight_dtype) == ("4x8", "float32")


def test_a_module_with_a_number_as_its_class_is_rejected() -> None:
    frame = msgpack.packb({"k": "Node", "id": 1, "kind": NodeKind.BRICK.value, "name": "a", "module_class": 7})
    with pytest.raises(DecodeError):
        codec.decode(frame)
