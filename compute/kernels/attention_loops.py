"""The loops of attention, for one thread and for several. The variants of attention share these loops.

See attention.py. Each row of the scratch belongs to one head of one token.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from cbtop.compute.activations import each_tanh
from cbtop.compute.jit.compile import copy_of, jit, jit_inlined, jit_parallel, prange
from cbtop.compute.jit.cpu import CPU_NAME, HAS_VNNI
from cbtop.compute.jit.exponential import exponential, powers_of_two
from cbtop.compute.jit.sums import add_products, load_sums, store_sums, zero_sums
from cbtop.compute.jit.vectors import (
    LANES,
    add,
    any_above,
    larger,
    largest_of,
    load_floats,
    prefetch_to_l2,
    splat,
    store_floats,
    total_of,
)
from cbtop.compute.kernels.kv_caches import POSITIONS, padded
from cbtop.compute.memory import line_aligned_zeros
from cbtop.compute.settings import crossovers

# How many rows (heads of tokens) share a read of keys and values. A processor begins two multiply-adds per cycle, and
# each takes four cycles. So eight registers of sums keep it busy. A few more registers leave a margin. In pairs of
# rows, each row has two vectors of sums. With AVX-512, a vector is one register, so rows of larger groups have two
# vectors, too. A Zen 4 is an exception: it begins only one multiply-add per cycle, and takes 1.16 times as long with
# two vectors. There, rows of larger groups have one vector.
MANY, SOME, PAIR = 6, 4, 2
WIDE = HAS_VNNI and CPU_NAME != "znver4"
MAX_ROWS = 64  # largest number of rows (heads of tokens) in one piece of work
# Scores are multiplied by log2(e), so that softmax weights are powers of two.
LOG2_E, LN_2 = math.log2(math.e), np.float32(math.log(2))
# LOWEST is below every score. UNSEEN is the score of a position that is not visible. It is lower than LOWEST, so that
# its weight is 0 even before any visible position. Infinity cannot be used, because it is undefined under fastmath.
LOWEST, UNSEEN = np.float32(-1e30), np.float32(-2e30)
# A reference score is subtracted from the scores of a row. It is replaced only by a score that exceeds it by more
# than ABOVE. The reason is that finding the largest score of every block takes 4 % of the time. No weight exceeds
# 2^8, so sums of weights stay far below infinity.
ABOVE = np.float32(8)
NOTHING_LEFT = np.float32(126)  # if the reference score rises by this much, all earlier sums become 0
TIMES = 1  # factor for the outputs; a variant that reads too small values uses a different factor


def scratch_for(threads: int, head_dim: int) -> Any:
    """Return a scratch, float32 (threads * 64, columns).

    A row contains the weights, output and query of a head, its reference score, and the sums of its weights.
    """
    return line_aligned_zeros((threads * MAX_ROWS, POSITIONS + 2 * padded(head_dim) + 2 * LANES), np.float32)


# Number of rows that each function below processes, and number of vectors of sums that each row has. The sums stay in
# registers. `of_rows` makes copies of the functions with other numbers.
_ROWS, _VECTORS = 2, 2


def _scores(
    keys: Any, first: Any, head_dim: Any, ahead: Any, scratch: Any, row: Any, query: Any, column: Any
) -> None:
    """Multiply the queries of _ROWS rows by the keys of 16 * _VECTORS positions.

    The results replace scratch[row : row + _ROWS, column : + 16 * _VECTORS].
    """
    # compiled
    sums = zero_sums(_ROWS, _VECTORS)
    none = np.uint64(0)
    for i in range(head_dim):
        for vector in range(np.uint64(_VECTORS)):
            prefetch_to_l2(keys, first + i + vector * head_dim + ahead, none)
        sums = add_products(
            sums, keys, (first + i, none), (head_dim, none), scratch, (row, query + i), _ROWS, _VECTORS
        )
    store_sums(scratch, row, column, sums, _ROWS, _VECTORS)


def _add_values(
    values: Any, first: Any, skipped: Any, count: Any, ahead: Any, scratch: Any, row: Any, output: Any, column: Any
) -> None:
    """Multiply the weights of _ROWS rows by the values of positions `skipped` to `count` - 1.

    The results are added to scratch[row : row + _ROWS, output + column : + 16 * _VECTORS].
    """
    # compiled
    sums = load_sums(scratch, row, output + column, _ROWS, _VECTORS)
    none, lanes = np.uint64(0), np.uint64(LANES)
    for p in range(skipped, count):
        prefetch_to_l2(values, first + ahead, column * np.uint64(POSITIONS) + p * np.uint64(LANES * _VECTORS))
        sums = add_products(sums, values, (first + p, column), (none, lanes), scratch, (row, p), _ROWS, _VECTORS)
    store_sums(scratch, row, output + column, sums, _ROWS, _VECTORS)


@cache
def of_rows(function: Any, rows: int, vectors: int) -> Any:
    """Return a compiled copy of `function` for `rows` rows and `vectors` vectors of sums at a time."""
    own = {"_ROWS": rows, "_VECTORS": vectors}
    return jit_inlined(copy_of(function, f"{function.__name__}_of_{rows}_by_{vectors}", **own))


_scores_of_six, _scores_of_four = (of_rows(_scores, rows, 2 if WIDE else 1) for rows in (MANY, SOME))
_add_values_of_six, _add_values_of_four = (of_rows(_add_values, rows, 2 if WIDE else 1) for rows in (MANY, SOME))
_scores_of_pair, _add_values_of_pair = of_rows(_scores, PAIR, 2), of_rows(_add_values, PAIR, 2)
# The functions in this tuple process the last vector of a head with an odd number of vectors. They are not needed if
# the functions above process only one vector at a time.
_add_last_of_six, _add_last_of_four, _add_last_of_pair = (
    of_rows(_add_values, rows, 1) for rows in (MANY, SOME, PAIR)
)


@jit_inlined
def _first_seen(position: Any, window: Any) -> Any:
    """Return the first position that the token at `position` sees."""
    end = position + np.uint64(1)
    return end - window if window > np.uint64(0) and end > window else np.uint64(0)


@jit_inlined
def _leave(scratch: Any, row: Any, hidden: Any, visible: Any, cap: Any) -> None:
    """Do nothing. Variants of attention without a cap call this function instead of `hold`."""


@jit_inlined
def hold(scratch: Any, row: Any, hidden: Any, visible: Any, cap: Any) -> None:
    """Limit the scores from position `hidden` to position `visible` - 1 to the range from -cap to cap."""
    largest, inverse = np.float32(cap), np.float32(1 / cap)
    for p in range(hidden, visible):
        scratch[row, p] = largest * each_tanh(np.float32(scratch[row, p] * inverse))


@jit_inlined
def _rise(scratch: Any, row: Any, hidden: Any, visible: Any, head_dim: Any, output: Any, state: Any) -> None:
    """Set the scores of positions before `hidden` and from `visible` on to UNSEEN.

    If a score is far above the reference of the row, the largest score becomes the new reference, and the sums are
    rescaled.
    """
    positions, lanes = np.uint64(POSITIONS), np.uint64(LANES)
    for p in range(hidden):
        scratch[row, p] = np.float32(UNSEEN)
    for p in range(visible, positions):
        scratch[row, p] = np.float32(UNSEEN)
    before = scratch[row, state]
    most = splat(before)
    for p in range(np.uint64(0), positions, lanes):
        most = larger(load_floats(scratch, row, p), most)
    if any_above(most, np.float32(before + ABOVE)):
        # `largest` is a whole number. So the factor is an exact power of two, and does not change how sums are
        # rounded.
        largest = np.floor(largest_of(most))
        rise = np.float32(largest - before)
        factor = exponential(np.float32(-rise * LN_2)) if rise < NOTHING_LEFT else np.float32(0)
        scratch[row, state] = largest
        for i in range(lanes):
            scratch[row, state + lanes + i] *= factor
        for i in range(head_dim):
            scratch[row, output + i] *= factor


@jit_inlined
def take_query(q: Any, token: Any, first: Any, head_dim: Any, scale: Any, scratch: Any, row: Any, query: Any) -> None:
    """Set scratch[row, query : query + head_dim] to a head's query times `scale`."""
    for i in range(head_dim):
        scratch[row, query + i] = q[token, first + i] * np.float32(scale)


@jit_inlined
def _weigh(scratch: Any, row: Any, state: Any) -> None:
    """Turn the scores of a row into weights, which are powers of two, and add them to the row's sum.

    The weight of UNSEEN is 0.
    """
    positions, lanes = np.uint64(POSITIONS), np.uint64(LANES)
    less, sums = splat(np.float32(-scratch[row, state])), load_floats(scratch, row, state + lanes)
    for p in range(np.uint64(0), positions, lanes):
        powers = powers_of_two(add(load_floats(scratch, row, p), less))
        store_floats(scratch, row, p, powers)
        sums = add(sums, powers)
    store_floats(scratch, row, state + lanes, sums)


@jit_inlined
def _columns(head_dim: Any) -> Any:
    """Return the size of a head with padding, and the columns of output, query and state in the scratch."""
    lanes = np.uint64(LANES)
    size = (head_dim + lanes - np.uint64(1)) // lanes * lanes
    output = np.uint64(POSITIONS)
    return size, output, output + size, output + size + size


# Each variant has copies of the functions from `_take_rows` to `attend_any`. In the copies, the `_held` and the
# products of the variant replace the functions of this file.
_held = _leave  # variants with a cap use the function `hold`, which limits the scores


def _take_rows(q: Any, scale: Any, piece: Any, head_dim: Any, scratch: Any, base: Any) -> None:  # compiled
    """Store the queries of the rows (heads of tokens) of one piece of work in the scratch, and set the rows' sums to
    zero.
    """
    first_token, first_head, heads, rows = piece
    size, output, query, state = _columns(head_dim)
    lanes, pair = np.uint64(LANES), np.uint64(PAIR)
    # round the number of rows up to an even number, because at least two rows share a read
    for one in range((rows + np.uint64(1)) // pair * pair):
        for i in range(np.uint64(2) * size):
            scratch[base + one, output + i] = np.float32(0)
        scratch[base + one, state] = np.float32(LOWEST)
        for i in range(lanes):
            scratch[base + one, state + lanes + i] = np.float32(0)
    for one in range(rows):
        t, head = first_token + one // heads, first_head + one % heads
        take_query(q, t, head * head_dim, head_dim, scale, scratch, base + one, query)


def _multiply_keys(
    together: Any, keys: Any, group: Any, head_dim: Any, ahead: Any, scratch: Any, at: Any, seen: Any
) -> None:  # compiled
    """Set the scores of `together` rows for the positions in `seen`. The keys begin at `group`."""
    skipped, count = seen
    lanes, query = np.uint64(LANES), _columns(head_dim)[2]
    at_once = lanes + lanes if together == np.uint64(PAIR) or WIDE else lanes
    for place in range(skipped // at_once * at_once, count, at_once):
        key = (group + place // lanes) * head_dim
        if together == np.uint64(MANY):
            _scores_of_six(keys, key, head_dim, ahead, scratch, at, query, place)
        elif together == np.uint64(SOME):
            _scores_of_four(keys, key, head_dim, ahead, scratch, at, query, place)
        else:
            _scores_of_pair(keys, key, head_dim, ahead, scratch, at, query, place)


def _weigh_rows(scratch: Any, base: Any, head_dim: Any, p: Any, rows: Any, heads: Any, scores: Any) -> None:
    """Turn the scores of the rows into weights. Rows that are only padding are included."""  # compiled
    first, end, first_position, first_head = rows
    _, window, cap = scores
    size, output, _, state = _columns(head_dim)
    position: Any = first_position
    of_token: Any = first_head
    for one in range(first, end):
        visible = min(np.uint64(POSITIONS), position + np.uint64(1) - p) if position >= p else np.uint64(0)
        own = _first_seen(position, window)
        hidden = min(np.uint64(POSITIONS), own - p) if own > p else np.uint64(0)
        _held(scratch, base + one, hidden, visible, cap)
        _rise(scratch, base + one, hidden, visible, size, output, state)
        of_token += np.uint64(1)
        if of_token == heads:  # divide several rows at once, because dividing for each row would take 5 % of the time
            position, of_token = position + np.uint64(1), np.uint64(0)
    for one in range(first, end):
        _weigh(scratch, base + one, state)


def _multiply_values(
    together: Any, values: Any, first: Any, head_dim: Any, ahead: Any, scratch: Any, at: Any, seen: Any
) -> None:  # compiled
    """Add the values of the positions in `seen`, times their weights, to the outputs of `together` rows."""
    skipped, count = seen
    size, output, _, _ = _columns(head_dim)
    lanes = np.uint64(LANES)
    at_once = lanes + lanes if together == np.uint64(PAIR) or WIDE else lanes
    column: Any = np.uint64(0)
    while column + at_once <= size:
        if together == np.uint64(MANY):
            _add_values_of_six(values, first, skipped, count, ahead, scratch, at, output, column)
        elif together == np.uint64(SOME):
            _add_values_of_four(values, first, skipped, count, ahead, scratch, at, output, column)
        else:
            _add_values_of_pair(values, first, skipped, count, ahead, scratch, at, output, column)
        column += at_once
    if column < size:
        if WIDE and together == np.uint64(MANY):
            _add_last_of_six(values, first, skipped, count, ahead, scratch, at, output, column)
        elif WIDE and together == np.uint64(SOME):
            _add_last_of_four(values, first, skipped, count, ahead, scratch, at, output, column)
        else:
            _add_last_of_pair(values, first, skipped, count, ahead, scratch, at, output, column)


def _attend_positions(
    keys: Any, values: Any, place: Any, piece: Any, scores: Any, head_dim: Any, scratch: Any, base: Any
) -> None:  # compiled
    """Process the block of positions that begins at `p` for the rows (heads of tokens) of one piece of work.

    The block's visible positions are added to the outputs of the rows.
    """
    kv_head, context, p, ahead = place
    first_token, _, heads, rows = piece
    start, window, _ = scores
    positions, lanes = np.uint64(POSITIONS), np.uint64(LANES)
    many, some, pair = np.uint64(MANY), np.uint64(SOME), np.uint64(PAIR)
    r: Any = np.uint64(0)
    while r < rows:
        left, own = rows - r, r
        together = many if left >= many - np.uint64(1) else some if left > pair else pair
        end = min(r + together, rows)
        position = start + first_token + r // heads
        seen_until = start + first_token + (end - np.uint64(1)) // heads + np.uint64(1)
        lowest = _first_seen(position, window)
        r += together
        if seen_until <= p or lowest >= p + positions:
            continue
        seen = lowest - p if lowest > p else np.uint64(0), min(positions, seen_until - p)
        group = (kv_head * context + p) // lanes
        _multiply_keys(together, keys, group, head_dim, ahead // lanes * head_dim, scratch, base + own, seen)
        _weigh_rows(scratch, base, head_dim, p, (own, end, position, own % heads), heads, scores)
        _multiply_values(together, values, kv_head * context + p, head_dim, ahead, scratch, base + own, seen)


def _write_rows(out: Any, piece: Any, head_dim: Any, scratch: Any, base: Any) -> None:  # compiled
    """Write the outputs of the rows (heads of tokens) of one piece of work to `out`, divided by the sums of their
    weights.
    """
    first_token, first_head, heads, rows = piece
    _, output, _, state = _columns(head_dim)
    for one in range(rows):
        t, head = first_token + one // heads, first_head + one % heads
        total = total_of(load_floats(scratch, base + one, state + np.uint64(LANES)))
        inverse = np.float32(np.float32(TIMES) / total)
        for i in range(head_dim):
            out[t, head * head_dim + i] = scratch[base + one, output + i] * inverse


def attend_any(  # compiled
    q: Any, keys: Any, values: Any, begin: Any, groups: Any, dimensions: Any, pieces: Any, scale: Any, width: Any,
    cap: Any, out: Any, scratch: Any, chunk: Any, chunks: Any,
) -> None:  # fmt: skip
    """Process every `chunks`-th piece of work, beginning with piece number `chunk`.

    A piece of work is a number of tokens and a number of heads of a group (all heads if `pieces` is 1).
    """
    start, kv_heads, head_dim, parts = np.uint64(begin), np.uint64(groups), np.uint64(dimensions), np.uint64(pieces)
    context, group = np.uint64(values.shape[0]) // kv_heads, np.uint64(q.shape[1]) // head_dim // kv_heads
    tokens, positions, window = np.uint64(q.shape[0]), np.uint64(POSITIONS), np.uint64(width)
    most_heads = (group + parts - np.uint64(1)) // parts
    most_tokens: Any = max(np.uint64(1), np.uint64(MAX_ROWS) // most_heads)
    blocks = (tokens + most_tokens - np.uint64(1)) // most_tokens
    base = np.uint64(chunk) * np.uint64(scratch.shape[0] // chunks)
    for number in range(np.uint64(chunk), kv_heads * parts * blocks, np.uint64(chunks)):
        kv_head, part, block = number // (parts * blocks), number // blocks % parts, number % blocks
        first_head = kv_head * group + part * group // parts
        heads = kv_head * group + (part + np.uint64(1)) * group // parts - first_head
        first_token = block * most_tokens
        rows = heads * min(most_tokens, tokens - first_token)
        piece = first_token, first_head, heads, rows
        _take_rows(q, scale, piece, head_dim, scratch, base)
        end = start + first_token + (rows - np.uint64(1)) // heads + np.uint64(1)
        begin_of_all = _first_seen(start + first_token, window) // positions * positions
        for p in range(begin_of_all, end, positions):
            # Prefetch the next block of positions, which may belong to the next head. Prefetch it only into L2,
            # because L1 is full of the present block.
            ahead = positions if p + positions < end else context + begin_of_all - p
            place = kv_head, context, p, ahead
            _attend_positions(keys, values, place, piece, (start, window, cap), head_dim, scratch, base)
        _write_rows(out, piece, head_dim, scratch, base)


def attend_any_parallel(  # compiled
    q: Any, keys: Any, values: Any, begin: Any, groups: Any, dimensions: Any, pieces: Any, scale: Any, width: Any,
    cap: Any, out: Any, scratch: Any, chunks: Any,
) -> None:  # fmt: skip
    for chunk in prange(chunks):
        own = np.int64(chunk)
        attend_any(q, keys, values, begin, groups, dimensions, pieces, scale, width, cap, out, scratch, own, chunks)


def compiled_loops(name: str, **own: Any) -> tuple[Any, Any]:
    """Return two loops of a variant: one for a single thread, called `name`, and one for several threads.

    `own` contains the variant's functions and numbers, which replace those of this file with the same names.
    """
    parts = _take_rows, _multiply_keys, _weigh_rows, _multiply_values, _attend_positions, _write_rows
    for part in parts:  # the order matters: `_attend_positions` calls the functions before it in this tuple
        own[part.__name__] = jit_inlined(copy_of(part, f"{part.__name__}_of{name}", **own))
    alone = jit(copy_of(attend_any, name, **own))
    return alone, jit_parallel(copy_of(attend_any_parallel, f"{name}_parallel", attend_any=alone))


def attend(
    loops: tuple[Any, Any], q: Any, caches: tuple[Any, Any], start: int, scores: tuple[float, int, float], out: Any,
    scratch: Any,
) -> None:  # fmt: skip
    """Run the loop for one thread. If there is enough work, run the loop for all threads that `scratch` has room for.

    `scores` is a tuple of scale, window and cap.
    """
    (k_cache, v_cache), (scale, window, cap) = caches, scores
    kv_heads, _, head_dim, _ = k_cache.shape
    tokens, columns = q.shape
    group = columns // head_dim // kv_heads
    seen = min(start + tokens, window) if window else start + tokens
    threads = scratch.shape[0] // MAX_ROWS
    chunks = threads if threads > 1 and columns * tokens * seen >= crossovers().attention_products else 1
    # Divide the heads of a group into parts if there are more threads than groups, or if a group has more than
    # MAX_ROWS heads.
    parts = max(min(group, -(-chunks // kv_heads)), -(-group // MAX_ROWS))
    keys, values = k_cache.reshape(-1, LANES), v_cache.reshape(-1, v_cache.shape[2])
    own = start, kv_heads, head_dim, parts, scale * LOG2_E, window, cap * LOG2_E
    alone, together = loops
    if chunks == 1:
        alone(q, keys, values, *own, out, scratch, 0, 1)
    else:
        together(q, keys, values, *own, out, scratch, chunks)
