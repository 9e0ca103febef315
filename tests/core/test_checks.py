"""Which tensors share memory: every overlap is found, and the layouts of real models pass."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torch_ops import checks

STORE = 96


def places(tensor: Tensor) -> set[int]:
    """The address of every byte of every element."""
    width, start = tensor.element_size(), tensor.untyped_storage().data_ptr()
    ranges = (range(size) for size in tensor.shape)
    firsts = [
        int(tensor.storage_offset())
        + sum(i * s for i, s in zip(index, tensor.stride(), strict=True))
        for index in itertools.product(*ranges)
    ]
    return {start + first * width + byte for first in firsts for byte in range(width)}


def refused(x: Tensor, y: Tensor) -> bool:
    try:
        checks.no_overlap("op", "x", x, "y", y)
    except ValueError:
        return True
    return False


@st.composite
def views(draw: st.DrawFn, store: Tensor) -> Tensor:
    dims = draw(st.integers(0, 3))
    shape = draw(st.lists(st.integers(0, 4), min_size=dims, max_size=dims))
    stride = draw(
        st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12]), min_size=dims, max_size=dims)
    )
    last = sum(max(size - 1, 0) * step for size, step in zip(shape, stride, strict=True))
    offset = draw(st.integers(0, max(store.numel() - 1 - last, 0)))
    if offset + last >= store.numel():
        shape = [0] * dims
    return store.as_strided(shape, stride, offset)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    store = torch.zeros(STORE)
    other = draw(st.sampled_from([store, store.view(torch.bfloat16), store.view(torch.float64)]))
    return draw(views(store)), draw(views(other))


@settings(max_examples=400)
@given(pairs())
def test_no_overlap_is_missed(pair: tuple[Tensor, Tensor]) -> None:
    x, y = pair
    if places(x) & places(y):
        assert refused(x, y)
        assert refused(y, x)


PACKED = torch.zeros(3, 96)
APART = {
    "other storages": (torch.zeros(4), torch.zeros(4)),
    "rows": (PACKED[:2], PACKED[2:]),
    "columns": (PACKED[:, :32], PACKED[:, 32:64]),
    "columns of other widths": (PACKED[:, :64], PACKED[:, 64:]),
    "heads": (PACKED[:, :64].view(3, 4, 16), PACKED[:, 64:].view(3, 2, 16)),
    "columns of a batch": (
        torch.zeros(2, 3, 8).split(4, -1)[0],
        torch.zeros(2, 3, 8).split(4, -1)[1],
    ),
    "batch, heads": PACKED.view(3, 1, 6, 16).split([4, 2], 2),
    "even and odd": (PACKED[:, 0::2], PACKED[:, 1::2]),
    "one row of columns": (PACKED[:1, :32], PACKED[:1, 32:]),
    "transposed columns": (PACKED[:, :32].t(), PACKED[:, 32:].t()),
    "keys and values": torch.zeros(2, 5, 4).unbind(0),
    "nothing": (PACKED[:0], PACKED),
    "dtypes": (
        PACKED[:, :32].view(torch.bfloat16),
        PACKED[:, 32:64],
    ),
}


@pytest.mark.parametrize("name", APART)
def test_layouts_that_are_apart_pass(name: str) -> None:
    x, y = APART[name]
    assert not places(x) & places(y)
    assert not refused(x, y)
    assert not refused(y, x)


def test_expanded_tensors_share_elements() -> None:
    row = torch.zeros(1, 4)
    for tensor in (row.expand(3, 4), torch.zeros(()).expand(2), row.expand(2, 3, 4)):
        with pytest.raises(ValueError, match="a tensor whose elements don't share memory; clone"):
            checks.no_self_overlap("op", "x", tensor)
    for tensor in (row, row.expand(1, 4), torch.zeros(3, 4).t(), torch.zeros(0, 4).expand(0, 4)):
        checks.no_self_overlap("op", "x", tensor)
