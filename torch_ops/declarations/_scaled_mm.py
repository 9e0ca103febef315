"""What the products of quantized matrices share: the forms of scales, checks, and the product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ops import checks

__all__ = ["BLOCK", "Forms", "blocks", "check", "forms", "product"]

BLOCK = 128
"""Columns of ``a``, rows and columns of ``b``, that share a scale where there is one a group."""

_OUT = (torch.float16, torch.bfloat16, torch.float32)


class Forms(NamedTuple):
    """Scales as matrices.

    Attributes:
        a: ``[M or 1, groups or 1]``.
        b: ``[groups or 1, N or blocks or 1]``.
        grouped: Whether parts of K have scales of their own.
        blocked: Whether `BLOCK` columns of ``b`` share one.
    """

    a: Tensor
    b: Tensor
    grouped: bool
    blocked: bool


def blocks(size: Any) -> Any:
    """Give how many blocks hold ``size``, the last one perhaps in part; at least one."""
    return max(-(-size // BLOCK), 1)


def forms(b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Forms:
    """Give both scales as matrices; they have passed `check`."""
    left = scale_a.reshape(1, 1) if scale_a.numel() == 1 else scale_a
    right = scale_b.reshape(1, 1) if scale_b.numel() == 1 else scale_b
    grouped = left.shape[1] > 1 or right.shape[0] > 1
    return Forms(left, right, grouped, right.shape[1] not in (1, b.shape[1]))


def check(
    op: str,
    tensors: Sequence[Tensor],
    out_dtype: torch.dtype,
    bias: Tensor | None,
    dtypes: Sequence[torch.dtype],
) -> None:
    """Refuse what isn't a product of quantized matrices.

    Args:
        op: Name of the op.
        tensors: ``a, b, scale_a, scale_b``.
        out_dtype: Dtype of the result.
        bias: What is added, or None.
        dtypes: Accepted dtypes of ``a``.
    """
    a, b, scale_a, scale_b = tensors
    if a.dtype not in dtypes:
        checks.refuse(op, "a", a.dtype, ", ".join(map(str, dtypes)), kind=TypeError)
    checks.rank(op, "a", a, 2, "[M, K]")
    checks.rank(op, "b", b, 2, "[K, N]")
    checks.like(op, "b", b, a, "a")
    (m, k), n = a.shape, b.shape[1]
    if b.shape[0] != k:
        checks.shape(op, "b", b, (k, n), "[K, N] for 'a' [M, K]")
    _scale(op, "scale_a", scale_a, a, ([m, 1], [m, blocks(k)]))
    _scale(op, "scale_b", scale_b, a, ([1, n], [blocks(k), blocks(n)]))
    if out_dtype not in _OUT:
        checks.refuse(op, "out_dtype", out_dtype, ", ".join(map(str, _OUT)), kind=TypeError)
    if bias is not None:
        checks.float_dtype(op, "bias", bias)
        checks.shape(op, "bias", bias, (n,), "[N] of 'b'")
        _on(op, "bias", bias, a)


def _scale(op: str, name: str, scale: Tensor, a: Tensor, shapes: Sequence[list[Any]]) -> None:
    if scale.dtype != torch.float32:
        checks.refuse(op, name, scale.dtype, "torch.float32", kind=TypeError)
    if list(scale.shape) not in ([], [1], [1, 1], *shapes):
        each, grouped = shapes
        accepted = f"[], [1], [1, 1], {each} or, for groups of {BLOCK}, {grouped}"
        checks.refuse(op, name, f"of shape {list(scale.shape)}", accepted)
    _on(op, name, scale, a)


def _on(op: str, name: str, x: Tensor, a: Tensor) -> None:
    if x.device != a.device:
        checks.refuse(op, name, f"on device {x.device}", f"{a.device}, as 'a'")


def product(
    tensors: Sequence[Tensor], out_dtype: torch.dtype, bias: Tensor | None, wide: torch.dtype
) -> Tensor:
    """Multiply in a dtype that holds every product exactly, scale and add in float32.

    Args:
        tensors: ``a, b, scale_a, scale_b``.
        out_dtype: Dtype of the result.
        bias: What is added, or None.
        wide: Dtype of the sums of products.
    """
    a, b, scale_a, scale_b = tensors
    left, right, grouped, blocked = forms(b, scale_a, scale_b)
    exact_a, exact_b = a.contiguous().to(wide), b.t().contiguous().to(wide).t()
    if blocked:
        right = right.repeat_interleave(BLOCK, 1)[:, : b.shape[1]]
    if grouped:
        parts = [
            (exact_a[:, i : i + BLOCK] @ exact_b[i : i + BLOCK]).float()
            * (left[:, min(g, left.shape[1] - 1), None] * right[min(g, right.shape[0] - 1)])
            for g, i in enumerate(range(0, a.shape[1], BLOCK))
        ]
        out = torch.stack(parts).sum(0)
    else:
        out = (exact_a @ exact_b).float() * (left * right)
    return (out if bias is None else out + bias.float()).to(out_dtype)
