"""The covering array: few rows, and every two choices meet."""

from __future__ import annotations

import itertools

import pytest

from torch_ops.testing import proof_of
from torch_ops.testing.covering import pairwise
from torch_ops.testing.layouts import LAYOUTS
from torch_ops.testing.proof import proof_names
from torch_ops.testing.search import covering_rows, dtypes_of


def test_every_pair_of_choices_is_in_some_row() -> None:
    axes = {"a": range(5), "b": "xyz", "c": (True, False), "d": (None, 1, 2.5, "s")}
    rows = pairwise(axes)
    for one, two in itertools.combinations(axes, 2):
        wanted = set(itertools.product(axes[one], axes[two]))
        assert {(row[one], row[two]) for row in rows} == wanted
    assert len(rows) <= 30
    assert rows == pairwise(axes)


@pytest.mark.parametrize("op", proof_names())
def test_rows_of_an_op_are_few_and_cover_dtypes_and_layouts(op: str) -> None:
    rows = covering_rows(op, dtypes_of(op))
    assert 60 <= len(rows) <= 90
    seen = {(s.operands[0][1].dtype, s.operands[0][1].layout) for s in rows}
    possible = {layout for layout in LAYOUTS if layout != "expand0" or not proof_of(op).mutates}
    assert seen >= set(itertools.product(dtypes_of(op), possible))
