"""A brick of a model with its kernels.

It runs its kernels and times them, or checks them against their references.
"""

# In compute, only this file measures times. The decoder's traces come from the profiler.

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cbtop.compute.brick_specs import BrickSpec
from cbtop.compute.checks import AssertionResult, Output
from cbtop.compute.contracts import WEIGHTS
from cbtop.compute.jit.halves import from_bits
from cbtop.compute.kernels.base import Arguments, Kernel, KernelWork, with_copies
from cbtop.profiler.analysis.budget import ByteBudget
from cbtop.profiler.definitions import BrickDefinition, KernelDefinition
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.attributes import Work

ONE_THREAD = "numba"  # the name of the backend for a kernel that always runs on one thread
REFERENCE = "numpy"  # the name of the backend for a brick that runs the references instead of the kernels
# Calls that take less than this many microseconds per token get no budget, because most of their time is a fixed
# cost.
LEAST_BUDGET_US = 100.0
# A budget is this many times the time that the contracts imply. Calls in a step take 0.9 to 1.1 times that time (AMD
# EPYC), and more if the processor is busy.
SLACK = 2.0
Profiler = BrickProfiler
# A function that is called with a brick and the names of the contract's conditions that do not hold.
Violated = Callable[["ComputeBrick", Iterable[str]], None]


@dataclass(frozen=True, slots=True)
class BrickLaunch:
    """A kernel that a brick runs. `elements_per_token` is the number of the brick's elements that the kernel computes
    per token.
    """

    kernel: Kernel
    work: KernelWork
    elements_per_token: float = 1.0


class ComputeBrick:
    """One brick at one place of a model. A call of the brick runs its kernels and records one timing."""

    __slots__ = (
        "_contracts", "_is_int8", "_many_elements", "_needs_earlier", "_of_many", "_of_token", "_profiler",
        "_token_elements", "_turn", "definition", "implementations", "kernels", "makes_codes", "spec",
    )  # fmt: skip

    def __init__(
        self,
        spec: BrickSpec,
        launches: Sequence[BrickLaunch],
        backend: str,
        profiler: Profiler,
        *,
        names_launches: bool = False,
        bfloat16_tokens: int | None = None,
    ) -> None:
        """Create the brick.

        `names_launches`: whether each kernel records its own launch, with its shape.

        `bfloat16_tokens`: the number of tokens at which int8 products begin to run in bfloat16. None: all run in
        int8.
        """
        self.spec = spec
        self._profiler = profiler
        work = combined_work(launches)
        # On a GPU, only roofs of float matrices are known. The highest of these also limits int8 work, so the work
        # has no dtype.
        if names_launches:
            work = replace(work, dtype="")
        self.kernels = tuple(launch.kernel for launch in launches)
        #: The functions that a call runs, one for each kernel. They may be replaced, for example to plant a fault.
        self.implementations = tuple(kernel.implementation for kernel in self.kernels)
        self._contracts = tuple(kernel.contract for kernel in self.kernels)
        self._needs_earlier = any(contract.earlier for contract in self._contracts)
        self._is_int8 = not names_launches and all(launch.work.dtype == "int8" for launch in launches)
        #: Whether the brick also makes int8 codes of its output, which later products read.
        self.makes_codes = any("codes" in contract.arguments for contract in self._contracts)
        self.definition = BrickDefinition(
            name=spec.name,
            category=spec.category,
            brick=spec.brick,
            backend=backend,
            work=work,
            kernels=tuple(
                KernelDefinition(kernel.name, backend if kernel.parallel else ONE_THREAD)
                for kernel in self.kernels
                if not names_launches
            ),
        )
        self._turn = 0  # number of comparisons with the reference; each comparison checks different rows
        self._token_elements = sum(launch.elements_per_token for launch in launches)
        # the definition for calls of one token, including a budget; None if such calls have no budget
        self._of_token: BrickDefinition | None = None
        self._of_many, self._many_elements = self.definition, math.inf
        if bfloat16_tokens is not None and work.dtype == "int8":
            self._of_many = replace(self.definition, work=replace(work, dtype="bfloat16"))
            self._many_elements = bfloat16_tokens * self._token_elements

    def __call__(self, elements: int, *calls: Arguments) -> None:
        """Run each kernel with its arguments, and record the time. `elements` is the size of the call."""
        definition = self.definition if elements < self._many_elements else self._of_many
        if self._of_token is not None and elements <= self._token_elements:
            definition = self._of_token
        timer = self._profiler.start_brick(definition)
        for implementation, arguments in zip(self.implementations, calls, strict=True):
            implementation(*arguments)
        self._profiler.stop_brick(timer, elements)

    def set_budget(self, gb_per_sec: float) -> None:
        """Give later calls of one token a time budget: twice the time that the contracts imply at `gb_per_sec`.

        A brick gets a budget on two conditions: its products run in int8, and every contract says that reading
        weights limits the kernel's time.

        Calls of many tokens get no budget, because multiplication limits their time. Calls of less than 100 µs get no
        budget either.
        """
        bounds = [contract.performance for contract in self._contracts]
        work = self.definition.work
        assert isinstance(work, Work)
        if not self._is_int8 or any(bound.roof != WEIGHTS for bound in bounds):
            return
        budget = ByteBudget(gb_per_sec * min(bound.fraction for bound in bounds) / SLACK)
        moved_bytes = work.bytes(1, self._token_elements)
        assert moved_bytes is not None
        if budget.to_token_budget(moved_bytes).us_per_token >= LEAST_BUDGET_US:
            self._of_token = replace(self.definition, budget=budget)

    def run_checked(self, violated: Violated, elements: int, calls: Sequence[Arguments]) -> None:
        """Run the brick. Check the preconditions of its kernels before they run, and the postconditions afterwards.

        If conditions fail, `violated` is called with their names. The timing does not include the checks.
        """
        # Nine of ten bricks have one kernel. The loops below would add a third to the time of their checks.
        if len(calls) == 1:
            (contract,), (arguments,) = self._contracts, calls
            if failed := contract.before.failed(arguments):
                violated(self, contract.before.names_of(failed))
            after = arguments + with_copies(arguments, contract.earlier) if contract.earlier else arguments
            self(elements, arguments)
            if failed := contract.after.failed(after):
                violated(self, contract.after.names_of(failed))
            return
        # `strict=True` is left out, because it would take as long as checking a condition.
        for contract, arguments in zip(self._contracts, calls):  # noqa: B905
            if failed := contract.before.failed(arguments):
                violated(self, contract.before.names_of(failed))
        # Postconditions need the arguments of the call. Some also need values from before the call.
        values = calls
        if self._needs_earlier:
            values = [
                arguments + with_copies(arguments, contract.earlier) if contract.earlier else arguments
                for contract, arguments in zip(self._contracts, calls)  # noqa: B905
            ]
        self(elements, *calls)
        for contract, after in zip(self._contracts, values):  # noqa: B905
            if failed := contract.after.failed(after):
                violated(self, contract.after.names_of(failed))

    def check(self, calls: Sequence[Arguments]) -> Iterator[tuple[str, str, AssertionResult]]:
        """Run each kernel, then its reference on the same input. Yields (brick, assertion, finding).

        If a kernel's output contains NaN or infinity and the reference's output does not, the reference's output
        replaces it. Later bricks then read valid numbers.
        """
        before, every = [], []
        turn = self._next_turn()
        # Check one kernel at a time, because several kernels of a brick may add to the same output.
        for kernel, implementation, arguments in zip(self.kernels, self.implementations, calls, strict=True):
            earlier = with_copies(arguments, kernel.outputs)
            implementation(*arguments)
            with np.errstate(all="ignore"):  # do not warn about infinities, because the checks look for them
                every += [(one, found) for one, found, *_ in self._compared_kernel(turn, kernel, arguments, earlier)]
            before.append(earlier)
        with np.errstate(all="ignore"):
            mended = any(found.not_finite for _, found in every) and self.use_reference_outputs(calls, before)
        for assertion, found in every:
            yield self.spec.name, assertion, replace(found, mended=mended and bool(found.not_finite))

    def compared(
        self, calls: Sequence[Arguments], before: Sequence[Arguments]
    ) -> Iterator[tuple[str, AssertionResult, Output, Output, str]]:
        """Evaluate each assertion on each output of finished calls.

        `before` holds each kernel's arguments from before the calls, with copies of the outputs.

        Yields (assertion, finding, checked output, the reference's rows, the output's name in the contract).

        An assertion that needs a reference checks only a few rows, because the reference is slow. Each call checks
        different rows. Other assertions check the whole output.
        """
        turn = self._next_turn()
        for kernel, arguments, earlier in zip(self.kernels, calls, before, strict=True):
            yield from self._compared_kernel(turn, kernel, arguments, earlier)

    def _next_turn(self) -> int:
        turn, self._turn = self._turn, self._turn + 1
        return turn

    def _compared_kernel(
        self, turn: int, kernel: Kernel, arguments: Arguments, earlier: Arguments
    ) -> Iterator[tuple[str, AssertionResult, Output, Output, str]]:
        output = kernel.narrow(arguments, turn)
        expected = kernel.narrow(with_copies(earlier, kernel.outputs), turn)
        kernel.reference(*expected)
        for place in kernel.outputs:
            name = kernel.contract.arguments[place]
            rows, wanted = from_bits(output[place]), from_bits(expected[place])
            for assertion in self.spec.assertions:
                met = rows if assertion.needs_reference else from_bits(arguments[place])
                yield assertion.name, assertion.evaluate(met, wanted), met, wanted, name

    def use_reference_outputs(self, calls: Sequence[Arguments], before: Sequence[Arguments]) -> bool:
        """Replace the outputs of finished calls by the references' outputs.

        Returns whether the new outputs are finite. `before` holds the arguments of each kernel from before the calls.
        Outputs among these arguments are copies.
        """
        is_finite = True
        for kernel, arguments, earlier in zip(self.kernels, calls, before, strict=True):
            for place in kernel.outputs:
                arguments[place][...] = earlier[place]
            kernel.reference(*arguments)
            is_finite &= all([bool(np.isfinite(from_bits(arguments[place])).all()) for place in kernel.outputs])
        return is_finite

    def fall_back(self) -> None:
        """From the next call on, run the references instead of the kernels. The references compute in float64."""
        self.implementations = tuple(kernel.reference for kernel in self.kernels)
        self._many_elements, self._of_token, self._is_int8 = math.inf, None, False
        work = self.definition.work
        assert isinstance(work, Work)
        self.definition = replace(
            self.definition,
            backend=REFERENCE,
            work=replace(work, dtype="float64"),
            kernels=tuple(KernelDefinition(kernel.name, REFERENCE) for kernel in self.kernels),
        )


def combined_work(launches: Sequence[BrickLaunch]) -> Work:
    """Return the summed work of all kernels, as a linear function of the sum of their elements.

    If the kernels multiply several number types, all work counts as the type with the highest roof (peak rate): int8,
    then bfloat16. So the shown share of the roof is never too high.
    """
    total = sum(launch.elements_per_token for launch in launches)
    dtypes = {launch.work.dtype for launch in launches}

    def per_element(values: Sequence[float]) -> float:
        return sum(v * one.elements_per_token / total for v, one in zip(values, launches, strict=True))

    return Work(
        flops_per_call=sum(launch.work.flops_per_call for launch in launches),
        flops_per_element=per_element([launch.work.flops_per_element for launch in launches]),
        bytes_per_call=sum(launch.work.bytes_per_call for launch in launches),
        bytes_per_element=per_element([launch.work.bytes_per_element for launch in launches]),
        dtype=next((dtype for dtype in ("int8", "bfloat16") if dtype in dtypes), "float32"),
    )
