"""Kernels of ops on rows of probabilities: one program a row, several passes over it.

Bits of floats that aren't negative are ordered as they are, so that the last one that is kept is
found by halving a range of bits twice a pass, without a sort. Masses are whole numbers, as those of
the reference: sums are the same ones in any order.
"""

from __future__ import annotations

import triton.language as tl

from ._launch import device_function, kernel

__all__ = ["filter_min_p", "renormalize", "sample"]

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


@device_function
def _uniform(seed: tl.tensor, offset: tl.tensor, below: tl.tensor) -> tl.tensor:
    """Give ``floor(below * u)``, u of 62 bits of Philox4x32-10, as the reference makes it."""
    a, b = offset & 0xFFFFFFFF, (offset >> 32) & 0xFFFFFFFF
    c, d = offset * 0, offset * 0
    first, second = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in tl.static_range(10):
        high_a, low_a = _product(a, 0xD251, 0x1F53)
        high_c, low_c = _product(c, 0xCD9E, 0x8D57)
        a, b, c, d = high_c ^ b ^ first, low_c, high_a ^ d ^ second, low_a
        first = (first + 0x9E3779B9) & 0xFFFFFFFF
        second = (second + 0xBB67AE85) & 0xFFFFFFFF
    high, low = a >> 1, b >> 1
    upper, lower = below >> 31, below & 0x7FFFFFFF
    middle = high * lower + low * upper + ((low * lower) >> 31)
    return high * upper + (middle >> 31)


@device_function
def _product(x: tl.tensor, UPPER: tl.constexpr, LOWER: tl.constexpr) -> tl.tensor:
    """Give the upper and the lower 32 bits of a product; nothing exceeds 63 bits."""
    low = x * LOWER
    high = x * UPPER + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


@device_function
def _limits(
    row: tl.tensor, columns: tl.tensor, top: tl.tensor, k: tl.tensor, p: tl.tensor,
    low: tl.tensor, high: tl.tensor, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Give the last key of what both filters keep, how many of that key count, and the mass."""
    last = tl.full((), -1, tl.int32)
    ties = tl.full((), 0, tl.int64)
    if (k > 0) & (k < columns):
        last, ties, above = _first_k(row, columns, top, k, low, high, BLOCK)
    else:
        above = _mass_above(row, columns, -1, low, high, BLOCK)
    total = above + ties * _scaled(last, low, high).to(tl.int64)
    want = _wanted(p, low, high)
    if (p < 1) & (total >= want):
        # The first k reach p: what reaches it ends among them, or with the last of them.
        start = tl.maximum(last, 0)
        last, ties, above = _first_p(row, columns, start, top, want, low, high, BLOCK)
        total = above + ties * _scaled(last, low, high).to(tl.int64)
    return last, ties, total


@kernel(unaligned=("out", "k", "p", "seed", "offset"))
def sample(
    probs: tl.tensor, out: tl.tensor, k: tl.tensor, p: tl.tensor, seed: tl.tensor,
    offset: tl.tensor, lanes: tl.int32, step: tl.int64,
    BITS: tl.constexpr, LANE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Draw an index of a row: the first, of what is kept, whose sum of masses is large enough."""
    at = tl.program_id(0).to(tl.int64)
    columns = lanes * LANE
    row = probs + at * step * LANE
    top, bad = _top(row, columns, BLOCK)
    index = bad.to(tl.int64)
    if (bad == columns) & (top == 0):
        index = at * 0
    elif bad == columns:
        low, high = _powers(top, BITS)
        last, ties, total = _limits(
            row, columns, top, tl.load(k + at), tl.load(p + at), low, high, BLOCK
        )
        drawn = _uniform(tl.load(seed + at), tl.load(offset + at), total)
        index, sum_ = at * 0, at * 0
        seen = tl.full((), 0, tl.int32)
        for first in range(0, columns, BLOCK):
            key = _keys(row, first, columns, BLOCK)
            kept, seen = _chosen(key, last, ties, seen)
            each = tl.where(kept, _scaled(key, low, high).to(tl.int64), 0)
            here = tl.sum(each, 0)
            if sum_ + here <= drawn:
                index += BLOCK
            elif sum_ <= drawn:
                index += tl.sum((tl.cumsum(each, 0) + sum_ <= drawn).to(tl.int64), 0)
            sum_ += here
    tl.store(out + at, index)
