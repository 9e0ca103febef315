"""Pairwise covering arrays: few rows in which every two choices of two axes meet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

_CANDIDATES = 24


def pairwise(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Returns rows such that every pair of values of two different axes is in some row.

    Greedy: each row starts from an uncovered pair and takes, of some random completions, the one
    that covers most. The result is the same on every machine.
    """
    names = list(axes)
    left = {
        (a, i, b, j)
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(len(axes[names[a]]))
        for j in range(len(axes[names[b]]))
    }
    source = random.Random(0)
    rows = []
    while left:
        start = min(left)
        options = [_complete(start, axes, names, source) for _ in range(_CANDIDATES)]
        best = max(options, key=lambda row: len(_pairs(row) & left))
        left -= _pairs(best)
        rows.append({name: axes[name][k] for name, k in zip(names, best, strict=True)})
    return rows


def _complete(
    start: tuple[int, int, int, int],
    axes: Mapping[str, Sequence[Any]],
    names: Sequence[str],
    source: random.Random,
) -> tuple[int, ...]:
    row = [source.randrange(len(axes[name])) for name in names]
    a, i, b, j = start
    row[a], row[b] = i, j
    return tuple(row)


def _pairs(row: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(range(len(row)), 2)}
