"""Measure the cost of checking contracts at every call of a debug run, per condition.

The models are the demo's and one with half a billion weights. Processor time is measured, with one thread, in rounds
that take turns.

- "Evaluated" is the time of all conditions of a decode step, in the step's order. They get copies of each call's
  arguments. The time of the same loop without the conditions is subtracted.
- "Evaluated and counted" is the time that `ComputeBrick.run_checked` adds to bricks that compute nothing: calls from
  Python, all conditions, and the copies for `old(x)`. The peer is a call of a Python function that does nothing.
- "All told" compares a step of a checking decoder with one that does not check. It includes the copies for `old(x)`,
  Python, and caches that the kernels in between have filled.
- Then follow the slowest conditions, each alone again and again. The conditions of the greedy choice among as many
  logits as Qwen has follow last. They are limited by reading.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.base import Figure, Ratio, interleaved_cpu_ns
from benchmarks.decode import half_a_billion
from cbtop.compute.backends import cpu_backend
from cbtop.compute.brick import ComputeBrick
from cbtop.compute.contracts import Condition, Contract, contract
from cbtop.compute.contracts.conditions import Failed
from cbtop.compute.contracts.terms import Checks
from cbtop.compute.decoder.decoder import Decoder
from cbtop.compute.decoder.int8 import model_to_run
from cbtop.compute.demo_model import demo_model
from cbtop.compute.kernels.base import Arguments, with_copies
from cbtop.compute.settings import DecoderSettings
from cbtop.profiler.profiler import BrickProfiler

ROUNDS, ROUND_STEPS = 41, 5
PAIRS = 400  # Each of the compared decoders runs this many steps.
CONTEXT = 32  # number of tokens in the KV cache before each step
LOGITS = 151_936
LARGEST, CALLS, ALONE_ROUNDS = 8, 1_000, 9
# Copy arguments with at most this many elements, because a later call of the step may overwrite them. Caches and
# weights are larger.
COPIED_ELEMENTS = 1 << 17


@dataclass(frozen=True, slots=True)
class Call:
    """The conditions before or after one call of a kernel, the function that evaluates them, and the values of the
    arguments.
    """

    contract: Contract
    conditions: Sequence[Condition]
    failed: Failed
    values: Arguments

    @classmethod
    def of(cls, contract: Contract, conditions: Sequence[Condition], checks: Checks, values: Arguments) -> Call:
        # The first call compiles the function that evaluates the conditions.
        assert checks.failed(values) == 0, contract.name
        return cls(contract, conditions, checks.failed, values)

    def alone_ns(self) -> Iterator[tuple[float, str]]:
        """Yield the name of each condition, and the time (ns) that it takes if it is evaluated alone."""
        for one in self.conditions:
            checks = Checks([one], self.contract.arguments)
            assert checks.failed(self.values) == 0
            failed, values = checks.failed, self.values
            calls: dict[str, Callable[[], object]] = {"own": lambda: failed(values), "none": lambda: None}  # noqa: B023
            yield (
                _less(interleaved_cpu_ns(calls, CALLS, ALONE_ROUNDS)),
                f"{self.contract.name}: {one.expression.text}",
            )


class IdleBrick:
    """A brick that computes nothing: a call copies the known outputs into place. It has what `run_checked` needs.

    `calls` are the arguments of its kernels before the call, and `outputs` are pairs of an array among them and its
    values after the call.
    """

    def __init__(
        self, contracts: Sequence[Contract], calls: Sequence[Arguments], outputs: Sequence[tuple[Any, Any]]
    ) -> None:
        self._contracts = tuple(contracts)
        self._needs_earlier = any(contract.earlier for contract in contracts)
        self.calls = calls
        self._outputs = outputs
        self._inputs = [(array, array.copy()) for array, _ in outputs]

    def __call__(self, elements: int, *calls: Arguments) -> None:
        for array, values in self._outputs:
            array[...] = values

    def reset(self) -> None:
        for array, values in self._inputs:
            array[...] = values


def run() -> list[Figure]:
    cpu_backend(1)  # Use one thread. Waiting threads spin, which would count as processor time.
    found = []
    for name, path in (("the demo's", demo_model(lambda *_: None)), ("0.5 billion", half_a_billion())):
        found += _of_model(name, path)
    return [*found, *_of_logits()]


def _of_model(name: str, path: Path) -> Iterator[Figure]:
    model, backend, profiler = model_to_run(path), cpu_backend(1), BrickProfiler()
    decoders = {
        checks: Decoder(model, backend.label, 1, profiler, 512, DecoderSettings(check_contracts=checks))
        for checks in (True, False)
    }
    (token,) = {decoder.prefill(range(CONTEXT)) for decoder in decoders.values()}
    calls, bricks = _calls_of(decoders[True], token, profiler)
    count = sum(len(call.conditions) for call in calls)
    yield Figure(f"{name}: a condition, evaluated", _in_step(calls) / count, "ns")
    yield _counted(f"{name}: a condition, evaluated and counted", bricks, count)
    times: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(PAIRS):
        for checks in (True, False) if turn % 2 else (False, True):
            decoders[checks].position = CONTEXT
            begun_ns = time.thread_time_ns()
            decoders[checks].decode(token)
            times[checks].append(time.thread_time_ns() - begun_ns)
    added_ns = statistics.median(on - off for on, off in zip(times[True], times[False], strict=True))
    yield Figure(f"{name}: a condition, all told", added_ns / count, "ns")
    step_ms = statistics.median(times[True]) / 1e6
    yield Figure(
        f"{name}: a step with {count:,} conditions", step_ms, "ms", "one without", Ratio.of(times[True], times[False])
    )
    first = {call.failed: call for call in reversed(calls)}
    alone_ns = sorted((found for call in first.values() for found in call.alone_ns()), reverse=True)
    for each_ns, condition in alone_ns[:LARGEST]:
        yield Figure(f"{name}: {condition:.38}", each_ns, "ns")


def _calls_of(decoder: Decoder, token: int, profiler: BrickProfiler) -> tuple[list[Call], list[IdleBrick]]:
    """Return the calls of kernels in a decode step with the values of their arguments, and the bricks of the step."""
    calls: list[Call] = []
    bricks: list[IdleBrick] = []

    def kept(values: Arguments) -> Arguments:
        return with_copies(values, [place for place, one in enumerate(values) if _may_change(one)])

    def noted(brick: Any, elements: int, *given: Arguments) -> None:
        earlier = [kept(arguments) for arguments in given]
        for kernel, values in zip(brick.kernels, earlier, strict=True):
            said = kernel.contract
            calls.append(Call.of(said, said.preconditions, said.before, values))
        brick(elements, *given)
        for kernel, arguments, before in zip(brick.kernels, given, earlier, strict=True):
            said = kernel.contract
            changed = [at for at in kernel.outputs if _may_change(arguments[at])]
            after = [arguments[at].copy() if at in changed else one for at, one in enumerate(before)]
            calls.append(Call.of(said, said.postconditions, said.after, (*after, *before)))
        bricks.append(_idle(brick, given, earlier))

    decoder.position = CONTEXT
    decoder.plan([token], noted, profiler.layer)
    return calls, bricks


def _idle(brick: Any, given: Sequence[Arguments], earlier: Sequence[Arguments]) -> IdleBrick:
    """Return a brick with the outputs that `brick` has written into `given`. `earlier` are copies from before."""
    own: dict[int, Any] = {}  # One copy of each array, because the kernels of a brick share arrays.
    outputs = []
    for kernel, arguments, before in zip(brick.kernels, given, earlier, strict=True):
        for place, value in enumerate(arguments):
            if _may_change(value) and id(value) not in own:
                own[id(value)] = before[place].copy()
        outputs += [arguments[place] for place in kernel.outputs if _may_change(arguments[place])]
    calls = [tuple([own.get(id(value), value) for value in arguments]) for arguments in given]
    changed = [(own[id(array)], array.copy()) for array in outputs]
    return IdleBrick([kernel.contract for kernel in brick.kernels], calls, changed)


def _may_change(value: Any) -> bool:
    is_array = isinstance(value, np.ndarray) and value.dtype != np.uint8
    return is_array and value.size <= COPIED_ELEMENTS and value.ndim < 3


def _in_step(calls: list[Call]) -> float:
    """Return the time (ns) of evaluating all conditions of a step, one call of a kernel after another."""
    functions = [(call.failed, call.values) for call in calls]

    def all_of() -> None:
        for failed, values in functions:
            failed(values)

    def none_of() -> None:
        for _, _ in functions:
            pass

    return _less(interleaved_cpu_ns({"own": all_of, "none": none_of}, ROUND_STEPS, ROUNDS))


def _counted(what: str, bricks: Sequence[IdleBrick], conditions: int) -> Figure:
    """Return the time (ns) of a condition in `run_checked`, of all bricks of a step one after another."""
    failed: list[str] = []

    def violated(brick: object, names: Iterator[str]) -> None:
        failed.extend(names)

    def checked() -> None:
        for brick in bricks:
            brick.reset()
            ComputeBrick.run_checked(brick, violated, 1, brick.calls)  # type: ignore[arg-type]  # it has what is needed

    def unchecked() -> None:
        for brick in bricks:
            brick.reset()
            brick(1, *brick.calls)

    def nothing(value: object) -> object:
        return value

    def python() -> None:
        for _ in range(conditions):
            nothing(None)

    taken = interleaved_cpu_ns({"checked": checked, "unchecked": unchecked, "python": python}, ROUND_STEPS, ROUNDS)
    assert not failed, failed[:3]
    net = [on - off for on, off in zip(taken["checked"], taken["unchecked"], strict=True)]
    return Figure(
        what, statistics.median(net) / conditions, "ns", "a call of a Python function", Ratio.of(net, taken["python"])
    )


def _less(taken: dict[str, list[float]]) -> float:
    """Return the median time (ns) of one call of `call`, without the time of the loop itself."""
    return statistics.median(taken["own"]) - statistics.median(taken["none"])


def _of_logits() -> Iterator[Figure]:
    said = contract("greedy")
    logits = np.random.default_rng(1).standard_normal((1, LOGITS), np.float32)
    # Take the two conditions of the contract that read all logits.
    reading = said.preconditions[0], said.postconditions[-1]
    call = Call(said, reading, said.before.failed, (logits, logits.argmax(axis=1)))
    for each_ns, condition in call.alone_ns():
        yield Figure(f"{LOGITS:,} logits: {condition}", each_ns, "ns")
