"""fused_add_rms_norm_: the same, written over its inputs."""

from __future__ import annotations

from torch import Tensor

from torch_ops import checks
from torch_ops.contracts import NormContract
from torch_ops.declarations.fused_add_rms_norm import fused_add_rms_norm
from torch_ops.declare import op

_functional = fused_add_rms_norm.reference


@op(
    contract=NormContract(weight_mul="fp32_all", residual="norm_of_rounded"),
    mutates=("x", "residual"),
)
def fused_add_rms_norm_(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    """Add ``x`` to the residual in place and write the norm of the sum to ``x``.

    residual := x + residual
    x := residual / sqrt(mean(residual ** 2, -1) + eps) * weight

    Args:
        x: ``[..., hidden]`` float16, bfloat16, float32 or float64, any strides; overwritten.
        residual: Shape, dtype and device of ``x``, overwritten; shares no memory with ``x``.
        weight: ``[hidden]`` of any of these dtypes; shares no memory with the others.
        eps: Added to the mean of squares, >= 0.

    Raises:
        TypeError: a dtype isn't accepted.
        ValueError: shapes or devices disagree, arguments overlap, or ``eps`` is negative.
        NoBackwardError: an input requires grad.
    """
    out, residual_out = _functional(x, residual, weight, eps)
    residual.copy_(residual_out)
    x.copy_(out)


fused_add_rms_norm_.batch("x", "residual")


@fused_add_rms_norm_.check
def _check(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    name = "fused_add_rms_norm_"
    checks.float_dtype(name, "x", x)
    if x.dim() < 1:
        checks.refuse(name, "x", "of shape []", "rank >= 1, [..., hidden]")
    checks.shape(name, "residual", residual, x.shape, "the shape of 'x'")
    checks.like(name, "residual", residual, x, "x")
    checks.vector(name, "weight", weight, x)
    checks.non_negative(name, "eps", eps)
    checks.no_self_overlap(name, "x", x)
    checks.no_self_overlap(name, "residual", residual)


@fused_add_rms_norm_.memory_check
def _memory_check(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    name = "fused_add_rms_norm_"
    if checks.apart(x, residual, weight):
        return
    checks.no_overlap(name, "x", x, "residual", residual)
    checks.no_overlap(name, "weight", weight, "x", x)
    checks.no_overlap(name, "weight", weight, "residual", residual)


@fused_add_rms_norm_.fake
def _fake(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    return None
