"""Memory layouts: the same values, placed differently, with poison in every gap.

A gap holds NaN (or zero for integers), so that a kernel that reads one is wrong, and its bytes
are compared after the call, so that a kernel that writes one is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

INT64_STRIDE = 2**31
TAIL = 16


def _buffer(values: Tensor, shape: Iterable[int]) -> Tensor:
    gap = float("nan") if values.dtype.is_floating_point else 0
    return torch.full(tuple(shape), gap, dtype=values.dtype)


def _fill(view: Tensor, values: Tensor) -> Tensor:
    view.copy_(values)
    return view


def _contig(values: Tensor) -> Tensor:
    """From the start of a storage that goes on behind the last element."""
    flat = _buffer(values, (values.numel() + TAIL,))
    return _fill(flat[: values.numel()].view(values.shape), values)


def _row_stride(values: Tensor) -> Tensor:
    *lead, last = values.shape
    return _fill(_buffer(values, (*lead, last + 5))[..., 3 : 3 + last], values)


def _transposed(values: Tensor) -> Tensor:
    swapped = values.transpose(-1, -2)
    return _fill(_buffer(values, swapped.shape).transpose(-1, -2), values)


def _expand0(values: Tensor) -> Tensor:
    return values[:1].clone().expand(values.shape)


def _offset(elements: int) -> Callable[[Tensor], Tensor]:
    def place(values: Tensor) -> Tensor:
        flat = _buffer(values, (values.numel() + elements + 2,))
        return _fill(flat[elements : elements + values.numel()].view(values.shape), values)

    return place


def _step2(values: Tensor) -> Tensor:
    *lead, last = values.shape
    return _fill(_buffer(values, (*lead, 2 * last))[..., ::2], values)


def _qkv_split(values: Tensor) -> Tensor:
    """The middle third of a packed projection: a slice along the axis that heads share."""
    axis = -2 if values.dim() >= 3 else -1
    size = values.shape[axis]
    packed = list(values.shape)
    packed[axis] = 3 * size
    return _fill(_buffer(values, packed).narrow(axis, size, size), values)


def _unbind(values: Tensor) -> Tensor:
    first, *rest = values.shape
    return _fill(_buffer(values, (first, 2, *rest)).unbind(1)[1], values)


def _int64_stride(values: Tensor) -> Tensor:
    """A size-1 axis with a stride past 32 bits: legal, since it is never stepped along."""
    axis = values.shape.index(1)
    strides = list(values.stride())
    strides[axis] = INT64_STRIDE
    return values.clone().as_strided(values.shape, strides)


def _heads_first(values: Tensor) -> Tensor:
    """A cache whose pages hold one head after the other."""
    swapped = values.transpose(1, 2)
    return _fill(_buffer(values, swapped.shape).transpose(1, 2), values)


_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "contig": _contig,
    "row_stride": _row_stride,
    "transposed": _transposed,
    "expand0": _expand0,
    "slice_offset": _offset(16),
    "misalign": _offset(1),
    "step2": _step2,
    "qkv_split": _qkv_split,
    "unbind": _unbind,
    "int64_stride": _int64_stride,
}
LAYOUTS = tuple(_PLACE)
_PLACE["heads_first"] = _heads_first
OF_CACHES = ("heads_first",)
_MIN_RANK = {
    "heads_first": 3,
    "transposed": 2,
    "unbind": 1,
    "row_stride": 1,
    "step2": 1,
    "qkv_split": 1,
}


def fits(layout: str, shape: tuple[int, ...], *, mutated: bool = False) -> bool:
    """Whether a layout exists for a shape; elements of a mutated tensor may not overlap."""
    if len(shape) < _MIN_RANK.get(layout, 0):
        return False
    if layout == "int64_stride":
        return 1 in shape
    if layout == "expand0":
        return bool(shape) and shape[0] > 0 and not (mutated and shape[0] > 1)
    return True


def place(values: Tensor, layout: str) -> Tensor:
    """Returns the values of a contiguous tensor in the named layout.

    ``expand0`` repeats the first slice, so its values differ from those given.

    Raises:
        ValueError: No such layout, or it doesn't exist for this shape.
    """
    if layout not in _PLACE:
        msg = f"place: layout: received {layout!r}, accepted {tuple(_PLACE)}"
        raise ValueError(msg)
    shape = tuple(values.shape)
    if not fits(layout, shape):
        msg = f"place: layout: received {layout!r} for shape {shape}, which has no such layout"
        raise ValueError(msg)
    return _PLACE[layout](values)
