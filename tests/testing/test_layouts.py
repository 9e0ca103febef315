"""Layouts keep values, poison gaps, and are what their names say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torch_ops.testing import values
from torch_ops.testing.layouts import INT64_STRIDE, LAYOUTS, OF_CACHES, fits, place

SHAPES = ((6,), (4, 6), (1, 6), (3, 4, 6), (2, 3, 4, 6), (1, 1, 2, 6), (0, 6), (4, 0))


def _behind(value: Tensor) -> Tensor:
    return torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())


def _untouched(value: Tensor) -> Tensor:
    """The storage behind a tensor without its elements."""
    flat = _behind(value)
    used = torch.zeros(flat.numel(), dtype=torch.bool)
    used.as_strided(value.shape, value.stride(), value.storage_offset()).fill_(True)
    return flat[~used]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", [*LAYOUTS, *OF_CACHES])
def test_values_stay_and_gaps_are_nan(layout: str, shape: tuple[int, ...]) -> None:
    if not fits(layout, shape):
        with pytest.raises(ValueError, match="has no such layout"):
            place(torch.zeros(shape), layout)
        return
    content = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    placed = place(content, layout)
    expected = content[:1].expand(shape) if layout == "expand0" else content
    assert torch.equal(placed, expected)
    if layout not in {"expand0", "int64_stride"}:
        assert bool(_untouched(placed).isnan().all())


def test_integer_gaps_are_zero() -> None:
    placed = place(torch.arange(1, 7), "step2")
    assert _untouched(placed).eq(0).all()


def test_strides_are_what_the_names_say() -> None:
    content = torch.arange(24.0).view(2, 3, 4)
    assert place(content, "row_stride").stride() == (27, 9, 1)
    assert place(content, "transposed").stride() == (12, 1, 3)
    assert place(content, "expand0").stride() == (0, 4, 1)
    assert place(content, "step2").stride() == (24, 8, 2)
    assert place(content, "qkv_split").stride() == (36, 4, 1)
    assert place(content, "unbind").stride() == (24, 4, 1)
    assert place(content.view(2, 3, 2, 2), "heads_first").stride() == (12, 2, 6, 1)
    assert place(content, "misalign").storage_offset() == 1
    assert place(content, "slice_offset").storage_offset() == 16
    assert place(content[:1], "int64_stride").stride() == (INT64_STRIDE, 4, 1)


def test_overlapping_elements_are_not_for_mutated_tensors() -> None:
    assert fits("expand0", (3, 4))
    assert not fits("expand0", (3, 4), mutated=True)
    assert fits("expand0", (1, 4), mutated=True)


@pytest.mark.parametrize("name", sorted(values.REGIMES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(5, 8), (0, 8), (3, 0)])
def test_regimes_are_finite(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    made = values.cast(values.REGIMES[name](shape, generator), dtype)
    assert made.dtype == dtype
    assert tuple(made.shape) == shape
    assert bool(made.isfinite().all())


@pytest.mark.parametrize("name", sorted(values.INDEX_REGIMES))
def test_indices_stay_below_high(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    made = values.INDEX_REGIMES[name]((64,), generator, 17)
    assert made.dtype == torch.int64
    assert int(made.min()) >= 0
    assert int(made.max()) < 17


def test_specials_are_written_modulo_the_size() -> None:
    x = torch.ones(4, dtype=torch.float16)
    values.write_specials(x, ((5, "max"), (2, "-inf"), (3, "tiny")))
    assert x.tolist() == [1.0, 65504.0, -torch.inf, 2.0**-14]
    nothing = torch.ones(0)
    values.write_specials(nothing, ((5, "nan"),))
    assert nothing.numel() == 0


def test_unit_circle_starts_with_no_turn_and_a_quarter() -> None:
    rows = values.REGIMES["unit_circle"]((5, 6), torch.Generator().manual_seed(1))
    assert rows[0].tolist() == [1, 1, 1, 0, 0, 0]
    assert rows[1].tolist() == [0, 0, 0, 1, 1, 1]
    assert torch.allclose(rows[:, :3] ** 2 + rows[:, 3:] ** 2, torch.ones(5, 3).double())
