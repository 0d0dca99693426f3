"""Check every kernel variant against its peer, and check that planted faults are found.

Rules
- The tests call the same `implementation` as the decoder, and choose it by the same arguments.
- `variants` is the only table of variants. The tolerance is always taken from the kernel's contract.
- A planted fault that no check finds is a failure, because such a check would pass any output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cbtop.compute import brick_specs
from cbtop.compute.brick_specs import BrickSpec, backward_of
from cbtop.compute.checks import AssertionResult, IsEquivalent, IsFinite
from cbtop.compute.jit.cpu import BF16_PAYS, HAS_TILES
from cbtop.compute.jit.halves import from_bits
from cbtop.compute.kernels import (
    all_kernels,
    attention,
    attention_bf16,
    expert_gated,
    expert_linear,
    gated,
    kv_write,
    linear,
    linear_backward,
    linear_bf16,
    linear_int8,
    qkv,
    quantize_rows,
)
from cbtop.compute.kernels.base import Arguments, Kernel, with_copies
from cbtop.compute.kernels.kv_caches import CACHE_TYPES
from cbtop.compute.quantization import FORMATS
from cbtop.compute.quantization.q4_k import Q4_K
from cbtop.compute.quantization.q6_k import Q6_K
from cbtop.compute.settings import crossovers, with_crossovers

SIZES = (1, 7, 32, 200)
SEED = 20261123
MANY = 127  # number of tokens: one less than in the largest batch, so that it is not a multiple of four
PRODUCTS_WITH = ((1, 1), (1, 2), (6, 1), (MANY, 2))  # the pairs of (tokens, threads) that are verified
DENSE_PRODUCTS = (
    brick_specs.QKV_PROJECTION,
    brick_specs.OUTPUT_PROJECTION,
    brick_specs.GATE_PROJECTION,
    brick_specs.UP_PROJECTION,
    brick_specs.DOWN_PROJECTION,
    brick_specs.LM_HEAD,
)
PRODUCTS = (*DENSE_PRODUCTS, brick_specs.MOE_ROUTER, brick_specs.MOE_EXPERTS)
# Name of a kernel's contract -> the bricks that run the kernel. Kernels that are missing here run in all of PRODUCTS.
BRICKS_OF: Mapping[str, tuple[BrickSpec, ...]] = {
    "embedding": (brick_specs.EMBEDDING,),
    "rms_norm": (brick_specs.RMS_NORM,),
    "rms_norm_int8": (brick_specs.RMS_NORM,),
    "layer_norm": (brick_specs.LAYER_NORM,),
    "qkv": (brick_specs.QKV_PROJECTION,),
    "rope": (brick_specs.ROPE_EMBEDDING, backward_of(brick_specs.ROPE_EMBEDDING)),
    "kv_write": (brick_specs.KV_WRITE,),
    "attention": (brick_specs.ATTENTION,),
    "attention_bf16": (brick_specs.ATTENTION_BF16,),
    "gated": (brick_specs.GATED, brick_specs.MOE_EXPERTS),
    "swiglu": (brick_specs.ACTIVATION, brick_specs.MOE_EXPERTS),
    "geglu": (brick_specs.ACTIVATION, brick_specs.MOE_EXPERTS),
    "route": (brick_specs.MOE_ROUTER,),
    "take_rows": (brick_specs.MOE_EXPERTS,),
    "expert_gated": (brick_specs.MOE_EXPERTS,),
    "expert_linear": (brick_specs.MOE_EXPERTS,),
    "combine": (brick_specs.MOE_COMBINE,),
    "residual_add": (brick_specs.RESIDUAL_ADD, brick_specs.LORA),
    "add_rms_norm": (brick_specs.ADD_RMS_NORM,),
    "add_rms_norm_int8": (brick_specs.ADD_RMS_NORM,),
    "soft_cap": (brick_specs.SOFT_CAP,),
    "greedy": (brick_specs.SAMPLING,),
    "drawn": (brick_specs.SAMPLING,),
    "cross_entropy": (brick_specs.LOSS,),
    "cross_entropy_backward": (backward_of(brick_specs.LOSS),),
    "rms_norm_backward": (backward_of(brick_specs.RMS_NORM), backward_of(brick_specs.ADD_RMS_NORM)),
    "layer_norm_backward": (backward_of(brick_specs.LAYER_NORM),),
    "linear_backward": tuple(map(backward_of, (*DENSE_PRODUCTS, brick_specs.GATED, brick_specs.LORA))),
    "weight_gradient": (backward_of(brick_specs.LORA),),
    "swiglu_backward": (backward_of(brick_specs.ACTIVATION), backward_of(brick_specs.GATED)),
    "geglu_backward": (backward_of(brick_specs.ACTIVATION),),
    "attention_backward": (backward_of(brick_specs.ATTENTION),),
    "adam_w": (brick_specs.OPTIMIZER,),
}
OF_SEVERAL_SHAPES = (
    "attention",
    "attention_bf16",
    "expert_gated",
    "expert_linear",
    "gated",
    "kv_write",
    "linear_backward",
    "qkv",
)  # Names of the contracts of kernels with several shapes. These kernels have variants of their own.
# a function that calls a kernel; the kernel writes its outputs into the arguments
Run = Callable[[Kernel, Arguments], None]
REFERENCE, SINGLE_TOKENS, PARTS = "reference", "single tokens", "its parts"


def _by_reference(kernel: Kernel, arguments: Arguments) -> None:
    kernel.reference(*arguments)


def _by_single_tokens(kernel: Kernel, arguments: Arguments) -> None:
    for call in kernel.single_tokens(arguments):
        kernel.implementation(*call)


def _by_parts(kernel: Kernel, arguments: Arguments) -> None:
    assert kernel.parts is not None
    for part, call in kernel.parts(arguments):
        part.implementation(*call)


# What a kernel can be compared with: its reference, the same kernel one token at a time, and the kernels that it
# fuses.
PEERS: Mapping[str, Callable[[Kernel, Arguments], None]] = {
    REFERENCE: _by_reference,
    SINGLE_TOKENS: _by_single_tokens,
    PARTS: _by_parts,
}


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel with one set of shapes. `how` describes the shapes.

    The kernel is compared with the computation PEERS[peer]. `tokens` is the number of rows in examples that have one
    row per token.
    """

    kernel: Kernel
    how: str = ""
    peer: str = REFERENCE
    tokens: int = 3

    @property
    def bricks(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in BRICKS_OF.get(self.kernel.contract.name, PRODUCTS))


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of verifying one variant.

    `max_error` is the largest error over all sizes, relative to the largest value. It is None if a value is not
    finite, and `not_finite` is then "NaN" or "infinity".

    `missed` names the planted faults that no check found. It also names conditions of the contract that still held
    although the arguments were changed to break them.
    """

    kernel: str
    contract: str
    bricks: tuple[str, ...]
    how: str
    peer: str
    sizes: tuple[int, ...]
    max_error: float | None
    not_finite: str
    tolerance: float
    failed: tuple[str, ...]  # names of the checks with their sizes, such as `equals reference at size 32`
    planted: int
    missed: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.failed and not self.missed


def run_here(kernel: Kernel, arguments: Arguments) -> None:
    """Run the kernel on the CPU, in the same way as a decoder does."""
    kernel.implementation(*arguments)


def variants() -> Iterator[Variant]:
    """Yield every kernel of a decoder in each format and with each type of KV cache.

    Each kernel is yielded with one token and with several, and with one thread and with two. The peer of each kernel
    is its reference. A kernel of several tokens is also compared with itself for one token at a time. A fused kernel
    is also compared with its parts.
    """
    for variant in _beside_reference():
        yield variant
        if variant.tokens > 1 and variant.kernel.by_token and not _is_of_tiles_where_many(variant):
            yield replace(variant, peer=SINGLE_TOKENS)
        if variant.kernel.parts is not None:
            yield replace(variant, peer=PARTS)


def variants_on_gpu() -> Iterator[Variant]:
    """Yield the kernels of a GPU. They are the same on every processor.

    The peer of each kernel is its reference. Threads are ignored, because only the CPU has them. Products of many
    tokens are yielded in int8 and in bfloat16, even if this processor has only one of the two.
    """
    of_many = (
        Variant(kernel_for(FORMATS[code], MANY), f"{MANY} tokens")
        for kernel_for, codes in (
            (linear_bf16.kernel_for, linear_bf16.LINEAR_BF16),
            (linear_int8.kernel_for, linear_int8.LINEAR_INT8),
        )
        for code in codes
    )
    found: dict[tuple[str, str], Variant] = {}
    for one in (*variants(), *of_many):
        if one.kernel.cuda is not None and one.peer == REFERENCE:
            how = one.how.replace(", 1 thread", "").replace(", 2 threads", "")
            found.setdefault((one.kernel.name, how), replace(one, how=how))
    yield from found.values()


def _is_of_tiles_where_many(variant: Variant) -> bool:
    """Return whether many tokens of the variant run in bfloat16, but single tokens in int8.

    The results for single tokens then differ.
    """
    is_int8 = variant.kernel.parts is not None and variant.kernel.name.endswith("int8")
    return HAS_TILES and is_int8 and variant.tokens >= crossovers().bf16_tokens


def _beside_reference() -> Iterator[Variant]:
    for kernel in all_kernels():
        name = kernel.contract.name
        if name in BRICKS_OF and name not in OF_SEVERAL_SHAPES:
            yield Variant(kernel)
    for block_format in FORMATS.values():
        for tokens, threads in PRODUCTS_WITH:
            yield _of(linear.kernel_for(block_format, tokens, threads), tokens, threads)
            yield _of(linear_backward.kernel_for(block_format, tokens, threads), tokens, threads)
    for code in linear_int8.LINEAR_INT8:
        for tokens, threads in PRODUCTS_WITH:
            many = HAS_TILES and tokens >= crossovers().bf16_tokens
            kernel_for = linear_bf16.kernel_for if many else linear_int8.kernel_for
            yield _of(kernel_for(FORMATS[code], tokens, threads), tokens, threads)
            if many:
                yield _of(kernel_for(FORMATS[code], tokens, 1), tokens, 1)
    yield Variant(quantize_rows.QUANTIZE_ROWS)
    yield from _attention()
    yield from _fused()
    for name, dtype in CACHE_TYPES.items():
        yield Variant(kv_write.kernel_for(dtype), f"{name} cache")


def _attention() -> Iterator[Variant]:
    kinds: list[Callable[..., Kernel]] = [attention.kernel_for, *[attention_bf16.kernel_for] * BF16_PAYS]
    for kernel_for in kinds:
        for tokens, threads in ((1, 1), (70, 2)):
            held = kernel_for(tokens, threads, slides=True, cap=2.0)
            yield _of(held, tokens, threads, ", a window, a soft cap")
            yield _of(kernel_for(tokens, threads, slides=True), tokens, threads, ", a window")
        for tokens, threads, group in ((1, 1, 8), (1, 2, 1), (6, 1, 2), (70, 2, 8)):
            rising = kernel_for(tokens, threads, group=group, rises=True)
            yield _of(rising, tokens, threads, f", groups of {group}, scores that rise")
    for tokens, threads in ((1, 1), (1, 2), (6, 1), (70, 1), (70, 2)):
        for name, dtype in CACHE_TYPES.items():
            yield _of(attention.kernel_for(tokens, threads, dtype), tokens, threads, f", {name} cache")
        if BF16_PAYS:
            yield _of(attention_bf16.kernel_for(tokens, threads), tokens, threads)


def _fused() -> Iterator[Variant]:
    """Yield kernels that fuse several products or run experts.

    PRODUCTS_WITH lists pairs of a number of tokens and a number of threads. A format has one variant, with one of
    these pairs. A mix of two formats, as in Q4_K_M models, has a variant for each pair.
    """
    for is_int8, codes in ((False, tuple(FORMATS)), (True, tuple(linear_int8.LINEAR_INT8))):
        for turn, code in enumerate(codes):
            tokens, threads = PRODUCTS_WITH[turn % len(PRODUCTS_WITH)]
            yield _of(qkv.kernel_for((code,) * 3, tokens, threads, is_int8), tokens, threads)
            yield _of(gated.kernel_for((code,) * 2, tokens, threads, is_int8), tokens, threads)
            yield _of_experts(expert_gated.kernel_for((code, code), threads, is_int8), threads)
            yield _of_experts(expert_linear.kernel_for(FORMATS[code], threads, is_int8), threads)
    for threads in (1, 2):
        mixed = expert_gated.kernel_for((Q4_K.code, Q6_K.code), threads, is_int8=True)
        yield _of_experts(mixed, threads, ", mixed")
    for tokens, threads in PRODUCTS_WITH:
        three = qkv.kernel_for((Q4_K.code, Q4_K.code, Q6_K.code), tokens, threads, is_int8=True)
        two = gated.kernel_for((Q4_K.code, Q6_K.code), tokens, threads, is_int8=True)
        yield from (_of(kernel, tokens, threads, ", mixed") for kernel in (three, two))


def _of(kernel: Kernel, tokens: int, threads: int, more: str = "") -> Variant:
    how = f"{tokens} token{'s' * (tokens > 1)}, {threads} thread{'s' * (threads > 1)}{more}"
    return Variant(kernel, how, tokens=tokens)


def _of_experts(kernel: Kernel, threads: int, more: str = "") -> Variant:
    pairs = expert_linear.PAIRS
    return Variant(kernel, f"{pairs} experts, {threads} thread{'s' * (threads > 1)}{more}", tokens=pairs)


def verified(variant: Variant, sizes: Sequence[int] = SIZES, run: Run = run_here) -> Verified:
    """Run the kernel on inputs of every size, and plant each fault that its contract names.

    Faults of the arguments and broken conditions are planted only for the peer `reference`. `run` calls the kernel,
    on the CPU or another backend.

    A variant with several threads always uses all of them, even if one thread would be faster. Variants with one
    thread test the loop for one thread.
    """
    with with_crossovers(replace(crossovers(), product_bytes=1, attention_products=1)):
        return _verified(variant, sizes, run)


def _verified(variant: Variant, sizes: Sequence[int], run: Run) -> Verified:
    kernel, contract, peer = variant.kernel, variant.kernel.contract, variant.peer
    equal = IsEquivalent(contract.tolerance, peer)
    findings: list[AssertionResult] = []
    failed, missed, count = [], set(), 0
    for size in sizes:
        arguments = kernel.examples(np.random.default_rng([SEED, size]), size)
        earlier = with_copies(arguments, {*kernel.outputs, *contract.earlier})
        expected = with_copies(arguments, kernel.outputs)
        conditions = contract.check_before(arguments)
        run(kernel, arguments)
        PEERS[peer](kernel, expected)
        conditions += contract.check_after(arguments, earlier)
        failed += [f"{condition} at size {size}" for condition, holds in conditions if not holds]
        failed += [f"{check} at size {size}" for check in _failed(kernel, arguments, expected, peer)]
        for place in kernel.outputs:
            findings.append(equal.evaluate(from_bits(arguments[place]), from_bits(expected[place])))
        plants = planted(kernel, earlier, expected)
        if peer != REFERENCE:
            plants = _found(kernel, _wrong_outputs(kernel, expected), expected)
        for name, found in plants:
            count += 1
            if not found:
                missed.add(name)
    not_finite = next((found.not_finite for found in findings if found.not_finite), "")
    errors = [found.max_error for found in findings if found.max_error is not None]
    return Verified(
        kernel.name,
        contract.name,
        variant.bricks,
        variant.how,
        peer,
        tuple(sizes),
        None if not_finite else max(errors, default=None),
        not_finite,
        contract.tolerance,
        tuple(failed),
        count,
        tuple(sorted(missed)),
    )


def _failed(kernel: Kernel, found: Arguments, expected: Arguments, peer: str) -> list[str]:
    """Return the names of the checks that fail for the outputs in `found`."""
    checks = IsFinite(), IsEquivalent(kernel.contract.tolerance, peer)
    outputs = [(from_bits(found[place]), from_bits(expected[place])) for place in kernel.outputs]
    return [check.name for output in outputs for check in checks if not check.evaluate(*output).passed]


def planted(kernel: Kernel, earlier: Arguments, right: Arguments) -> Iterator[tuple[str, bool]]:
    """Plant every fault that the kernel's contract names. Yields each fault's name, and whether a check found it.

    The arguments are the same as in `faults`.
    """
    yield from _found(kernel, faults(kernel, earlier, right), right)
    yield from kernel.contract.broken(earlier, right)


def _found(kernel: Kernel, wrong: Iterable[tuple[str, Arguments]], right: Arguments) -> Iterator[tuple[str, bool]]:
    for name, arguments in wrong:
        yield name, bool(_failed(kernel, arguments, right, REFERENCE))


def faults(kernel: Kernel, earlier: Arguments, right: Arguments) -> Iterator[tuple[str, Arguments]]:
    """Yield the name of each fault in the kernel's contract, and the arguments after a call with that fault.

    A fault that would change nothing is left out. `earlier` are the arguments before a call, and `right` the
    arguments after a correct call.
    """
    yield from _wrong_outputs(kernel, right)
    for change in kernel.contract.argument_faults:
        wrong = with_copies(change.of(earlier), kernel.outputs)
        with np.errstate(all="ignore"):  # a fault may reorder the bytes of weights, so scales may become NaN
            kernel.reference(*wrong)
        if not all([np.array_equal(wrong[place], right[place]) for place in kernel.outputs]):
            yield change.name, wrong


def _wrong_outputs(kernel: Kernel, right: Arguments) -> Iterator[tuple[str, Arguments]]:
    for name in kernel.contract.output_faults:
        for place in kernel.outputs:
            wrong = with_copies(right, {place})
            FAULTS[name](from_bits(wrong[place]))
            if not np.array_equal(wrong[place], right[place]):
                yield name, wrong


def _scaled(values: Any) -> None:
    values *= values.dtype.type(1.5 if values.dtype.kind in "fc" else 2)


def _not_a_number(values: Any) -> None:
    if values.dtype.kind in "fc":
        values.reshape(-1)[-1] = np.nan


def _swapped(values: Any) -> None:
    rows = values.reshape(-1, values.shape[-1])
    rows[..., [0, -1]] = rows[..., [-1, 0]]


def _left_out(values: Any) -> None:
    """Plant a fault: set the largest value to 0, as if the kernel had not written it."""
    flat = values.reshape(-1)
    flat[np.abs(flat).argmax()] = 0


FAULTS: Mapping[str, Callable[[Any], None]] = {
    "scaled by 1.5": _scaled,
    "a NaN": _not_a_number,
    "two outputs swapped": _swapped,
    "an output left out": _left_out,
}
