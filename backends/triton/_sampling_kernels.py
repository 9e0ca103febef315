"""Kernels of ops on rows of probabilities: one program a row, several passes over it.

Bits of floats that aren't negative are ordered as they are, so that the last one that is kept is
found by halving a range of bits twice a pass, without a sort. Masses are whole numbers, as those of
the reference: sums are the same ones in any order.
"""

from __future__ import annotations

import triton.language as tl

from ._launch import device_function, kernel

__all__ = ["filter_min_p", "renormalize"]

_INFINITY = tl.constexpr(0x7F800000)


@device_function
def _keys(row: tl.tensor, first: tl.tensor, columns: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Load bits of probabilities, 0 behind the last column."""
    cols = first + tl.arange(0, BLOCK)
    return tl.load(row + cols, cols < columns, other=0.0).to(tl.int32, bitcast=True)


@device_function
def _top(row: tl.tensor, columns: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Give the largest key, 0 for none that is positive, and the first column of no number."""
    most = tl.zeros((BLOCK,), tl.int32)
    bad = tl.zeros((BLOCK,), tl.int32) + columns
    for first in range(0, columns, BLOCK):
        key = _keys(row, first, columns, BLOCK)
        wrong = (key & 0x7FFFFFFF) >= _INFINITY
        bad = tl.minimum(bad, tl.where(wrong, first + tl.arange(0, BLOCK), columns))
        most = tl.maximum(most, tl.where(wrong, 0, key))
    return tl.max(most, 0), tl.min(bad, 0)


@device_function
def _powers(top: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """Give two powers of two, as float32, whose product makes a mass of a probability."""
    shift = BITS + 126 - tl.maximum(top >> 23, 1)
    half = shift // 2
    low = ((half + 127) << 23).to(tl.float32, bitcast=True)
    high = ((shift - half + 127) << 23).to(tl.float32, bitcast=True)
    return low, high


@device_function
def _scaled(key: tl.tensor, low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Scale probabilities, exactly; negative ones are 0."""
    return tl.maximum(key, 0).to(tl.float32, bitcast=True) * low * high


@device_function
def _wanted(p: tl.tensor, low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Give the smallest mass that isn't below p."""
    scaled = p.to(tl.float64) * low.to(tl.float64) * high.to(tl.float64)
    scaled = tl.minimum(tl.maximum(scaled, 0.0), 4611686018427387904.0)  # 2^62
    whole = scaled.to(tl.int64)
    return tl.maximum(whole + (whole.to(tl.float64) < scaled).to(tl.int64), 1)


@device_function
def _tally(
    row: tl.tensor, columns: tl.tensor, a: tl.tensor, b: tl.tensor, c: tl.tensor,
    low: tl.tensor, high: tl.tensor, BY_MASS: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Give how many elements have keys of at least a, b and c, or their mass."""
    kind: tl.constexpr = tl.int64 if BY_MASS else tl.int32
    of_a, of_b, of_c = (
        tl.zeros((BLOCK,), kind), tl.zeros((BLOCK,), kind), tl.zeros((BLOCK,), kind)
    )  # fmt: skip
    for first in range(0, columns, BLOCK):
        key = _keys(row, first, columns, BLOCK)
        each = _scaled(key, low, high).to(tl.int64) if BY_MASS else key * 0 + 1
        of_a += tl.where(key >= a, each, 0)
        of_b += tl.where(key >= b, each, 0)
        of_c += tl.where(key >= c, each, 0)
    return (
        tl.sum(of_a, 0).to(tl.int64), tl.sum(of_b, 0).to(tl.int64), tl.sum(of_c, 0).to(tl.int64)
    )  # fmt: skip


@device_function
def _search(
    row: tl.tensor, columns: tl.tensor, first: tl.tensor, end: tl.tensor, want: tl.tensor,
    low: tl.tensor, high: tl.tensor, BY_MASS: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Give the largest key at and above which there is what is wanted, and what is above it.

    At and above ``first`` there is enough, at and above ``end``, which is larger, nothing.
    """
    above = want * 0
    while end - first > 1:
        step = (end - first + 3) // 4
        a = first + step
        b = tl.minimum(a + step, end)
        c = tl.minimum(b + step, end)
        at_a, at_b, at_c = _tally(row, columns, a, b, c, low, high, BY_MASS, BLOCK)
        above = tl.where(
            at_a < want,
            at_a,
            tl.where(at_b < want, at_b, tl.where(at_c < want, at_c, above)),
        )
        last = end
        end = tl.where(at_a < want, a, tl.where(at_b < want, b, tl.where(at_c < want, c, last)))
        first = tl.where(at_c >= want, c, tl.where(at_b >= want, b, tl.where(at_a >= want, a,
                                                                             first)))  # fmt: skip
    return first, above


@device_function
def _mass_above(
    row: tl.tensor, columns: tl.tensor, key: tl.tensor, low: tl.tensor, high: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Give the mass of what is larger than a key."""
    total = tl.zeros((BLOCK,), tl.int64)
    for first in range(0, columns, BLOCK):
        each = _keys(row, first, columns, BLOCK)
        total += tl.where(each > key, _scaled(each, low, high).to(tl.int64), 0)
    return tl.sum(total, 0)


@device_function
def _first_k(
    row: tl.tensor, columns: tl.tensor, top: tl.tensor, k: tl.tensor,
    low: tl.tensor, high: tl.tensor, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Give the last key of the first k, how many of that key count, and the mass above it."""
    want = k.to(tl.int64)
    last, above = _search(row, columns, top * 0, top + 1, want, low, high, False, BLOCK)
    return last, want - above, _mass_above(row, columns, last, low, high, BLOCK)


@device_function
def _first_p(
    row: tl.tensor, columns: tl.tensor, first: tl.tensor, top: tl.tensor, want: tl.tensor,
    low: tl.tensor, high: tl.tensor, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Give the last key of what reaches a mass, how many of that key count, the mass above it."""
    last, above = _search(row, columns, first, top + 1, want, low, high, True, BLOCK)
    each = tl.maximum(_scaled(last, low, high).to(tl.int64), 1)
    return last, (want - above + each - 1) // each, above


@device_function
def _chosen(key: tl.tensor, last: tl.tensor, ties: tl.tensor, seen: tl.tensor) -> tl.tensor:
    """Give what is kept of a block, and how many of the last key there were up to its end."""
    tie = (key == last).to(tl.int32)
    rank = seen + tl.cumsum(tie, 0) - tie
    return (key > last) | ((tie > 0) & (rank < ties)), seen + tl.sum(tie, 0)


@kernel(unaligned=("numbers",))
def renormalize(
    probs: tl.tensor, out: tl.tensor, numbers: tl.tensor, lanes: tl.int32, step: tl.int64,
    BY_MASS: tl.constexpr, BITS: tl.constexpr, LANE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Keep the first k, or the first that reach p, of a row, and divide them by their sum."""
    at = tl.program_id(0).to(tl.int64)
    columns = lanes * LANE
    row = probs + at * step * LANE
    result = out + at * lanes * LANE
    number = tl.load(numbers + at)
    active = number < 1 if BY_MASS else (number > 0) & (number < columns)
    last = tl.full((), -1, tl.int32)
    ties, total = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    low, high = tl.full((), 1.0, tl.float32), tl.full((), 1.0, tl.float32)
    sound = active
    if active:
        top, bad = _top(row, columns, BLOCK)
        low, high = _powers(top, BITS)
        sound = bad == columns
        if BY_MASS:
            want = _wanted(number, low, high)
            total = _mass_above(row, columns, -1, low, high, BLOCK)
            if sound & (total >= want):
                last, ties, total = _first_p(row, columns, top * 0, top, want, low, high, BLOCK)
        elif sound:
            last, ties, total = _first_k(row, columns, top, number, low, high, BLOCK)
        total += tl.maximum(ties, 0) * _scaled(last, low, high).to(tl.int64)
    divisor = tl.maximum(total, 1).to(tl.float32)
    seen = tl.full((), 0, tl.int32)
    for first in range(0, columns, BLOCK):
        key = _keys(row, first, columns, BLOCK)
        kept, seen = _chosen(key, last, ties, seen)
        value = tl.where(kept, tl.div_rn(_scaled(key, low, high), divisor), 0.0)
        value = tl.where(sound, value, float("nan"))
        value = tl.where(active, value, key.to(tl.float32, bitcast=True))
        cols = first + tl.arange(0, BLOCK)
        tl.store(result + cols, value, cols < columns)


@kernel(unaligned=("numbers",))
def filter_min_p(
    probs: tl.tensor, out: tl.tensor, numbers: tl.tensor, lanes: tl.int32, step: tl.int64,
    LANE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Keep of a row what is at least a part of its largest."""
    at = tl.program_id(0).to(tl.int64)
    columns = lanes * LANE
    row = probs + at * step * LANE
    result = out + at * lanes * LANE
    part = tl.load(numbers + at)
    active = part > 0
    top, bad = _top(row, columns, BLOCK)
    bound = top.to(tl.float32, bitcast=True) * tl.minimum(part, 1.0)
    for first in range(0, columns, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        given = tl.load(row + cols, cols < columns, other=0.0)
        value = tl.where((given >= bound) & (given > 0), given, 0.0)
        value = tl.where(bad == columns, value, float("nan"))
        tl.store(result + cols, tl.where(active, value, given), cols < columns)
