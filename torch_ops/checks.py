"""Argument checks shared by declarations. On the hot path: one comparison each, text on failure."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

__all__ = [
    "apart",
    "float_dtype",
    "like",
    "no_overlap",
    "no_self_overlap",
    "non_negative",
    "rank",
    "refuse",
    "shape",
    "vector",
]

_NAMES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}
_is_alias_of = torch._C._is_alias_of  # type: ignore[attr-defined]
_storage = torch.Tensor.untyped_storage  # found once, not at each call


def apart(x: Tensor, y: Tensor, *read: Tensor) -> bool:
    """Whether two that are written, and those that are read, lie in storages of their own."""
    first, second = _storage(x), _storage(y)  # one object as long as it is held
    if first is second:
        return False
    for tensor in read:
        storage = _storage(tensor)
        if storage is first or storage is second:
            return False
    return True


def refuse(
    op: str, argument: str, received: object, accepted: str, *, kind: type = ValueError
) -> NoReturn:
    """Raise ``op 'x': argument 'y' is <received> (accepted: <accepted>)``."""
    raise kind(f"op {op!r}: argument {argument!r} is {received} (accepted: {accepted})")


def float_dtype(
    op: str, argument: str, x: Tensor, accepted: Collection[torch.dtype] = _NAMES
) -> None:
    """Refuse a tensor of another dtype: by default, than float16, bfloat16, float32 or float64."""
    if x.dtype not in accepted:
        refuse(op, argument, x.dtype, ", ".join(map(str, accepted)), kind=TypeError)


def rank(op: str, argument: str, x: Tensor, dims: int, letters: str) -> None:
    """Refuse a tensor whose number of dimensions isn't ``dims``."""
    if x.dim() != dims:
        refuse(op, argument, f"of shape {list(x.shape)}", f"rank {dims}, {letters}")


def shape(op: str, argument: str, x: Tensor, wanted: Sequence[Any], letters: str) -> None:
    """Refuse a tensor of another shape than ``wanted``."""
    if x.shape != wanted:
        refuse(op, argument, f"of shape {list(x.shape)}", f"{list(wanted)}, {letters}")


def like(op: str, argument: str, x: Tensor, other: Tensor, name: str) -> None:
    """Refuse a tensor that differs from ``other`` in dtype or device."""
    if x.dtype != other.dtype:
        refuse(op, argument, x.dtype, f"{other.dtype}, as {name!r}", kind=TypeError)
    if x.device != other.device:
        refuse(op, argument, f"on device {x.device}", f"{other.device}, as {name!r}")


def vector(op: str, argument: str, weight: Tensor, x: Tensor) -> None:
    """Refuse a weight that isn't a floating ``[hidden]`` tensor on the device of ``x``."""
    if weight.shape != x.shape[-1:]:
        refuse(
            op,
            argument,
            f"of shape {list(weight.shape)}",
            f"[{x.shape[-1]}], the last dimension of 'x' {list(x.shape)}",
        )
    if weight.dtype not in _NAMES:
        refuse(op, argument, weight.dtype, ", ".join(map(str, _NAMES)), kind=TypeError)
    if weight.device != x.device:
        refuse(op, argument, f"on device {weight.device}", f"{x.device}, as 'x'")


def non_negative(op: str, argument: str, value: float) -> None:
    """Refuse a negative number and NaN."""
    if not value >= 0:
        refuse(op, argument, repr(value), "a number >= 0")


def no_self_overlap(op: str, argument: str, x: Tensor) -> None:
    """Refuse to write a tensor of which several elements share memory, as after ``expand``."""
    if not x.is_contiguous() and any(
        stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)
    ):
        refuse(
            op,
            argument,
            f"of strides {list(x.stride())} for shape {list(x.shape)}",
            "a tensor whose elements don't share memory; clone it first",
        )


def no_overlap(op: str, first: str, x: Tensor, second: str, y: Tensor) -> None:
    """Refuse two arguments that share memory where one of them is written.

    Two tensors of one storage pass where their elements are known to be apart, as the column
    blocks of one matrix are.
    """
    if _is_alias_of(x, y) and _may_overlap(_place(x), _place(y)):
        refuse(
            op,
            first,
            f"at offset {x.storage_offset()} of the storage of {second!r} "
            f"(offset {y.storage_offset()})",
            f"memory apart from {second!r}; clone one of them",
        )


class _Place(NamedTuple):
    """Where a tensor lies in its storage."""

    offset: Any
    shape: Sequence[Any]
    strides: Sequence[Any]
    width: int


def _place(x: Tensor) -> _Place:
    return _Place(x.storage_offset(), x.shape, x.stride(), x.element_size())


def _may_overlap(x: _Place, y: _Place) -> bool:
    """Remembers what it found: parts of a packed projection meet at every call."""
    try:
        return _known_to_overlap(x, y)
    except TypeError:  # symbolic numbers have no hash
        return _overlap(x, y)


def _overlap(x: _Place, y: _Place) -> bool:
    if 0 in x.shape or 0 in y.shape:
        return False
    (first, end), (other, other_end) = _bytes(x), _bytes(y)
    if end <= other or other_end <= first:
        return False
    # A list: symbolic strides have no hash.
    pitches = [step for size, step in (*_steps(x), *_steps(y)) if size > 1 and step > 0]
    return not any(_columns_apart(x, y, pitch) for pitch in pitches)


_known_to_overlap = functools.lru_cache(maxsize=256)(_overlap)


def _steps(x: _Place) -> list[tuple[Any, Any]]:
    """Give size and stride in bytes of each dimension."""
    return [(size, stride * x.width) for size, stride in zip(x.shape, x.strides, strict=True)]


def _bytes(x: _Place) -> tuple[Any, Any]:
    """Where in its storage the first element begins and the last one ends."""
    first: Any = x.offset * x.width
    last = sum((size - 1) * step for size, step in _steps(x))
    return first, first + last + x.width


def _columns_apart(x: _Place, y: _Place, pitch: int) -> bool:
    """Whether both keep to columns of their own in a matrix with rows of ``pitch`` bytes.

    So do the parts of a packed projection: queries and keys, or gate and value.
    """
    (first, end), (other, other_end) = _columns(x, pitch), _columns(y, pitch)
    return bool(max(end, other_end) <= pitch and (end <= other or other_end <= first))


def _columns(x: _Place, pitch: int) -> tuple[Any, Any]:
    """Give the columns that a tensor touches, the last one exclusive; past ``pitch`` it wraps."""
    first: Any = x.offset * x.width % pitch
    inside = sum((size - 1) * step for size, step in _steps(x) if step % pitch)
    return first, first + inside + x.width
