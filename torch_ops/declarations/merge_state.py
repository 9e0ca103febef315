"""merge_state: combine attention over two parts of the keys into attention over both."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops import checks
from torch_ops.contracts import MergeContract
from torch_ops.declarations._shared import accumulation_dtype, upcast
from torch_ops.declare import op

_EMPTY = float("-inf")


@op(contract=MergeContract())
def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Combine two attention states by the weights of their softmax denominators.

    s = log(exp(s_a) + exp(s_b))
    v = v_a * exp(s_a - s) + v_b * exp(s_b - s)

    Args:
        v_a, v_b: ``[T, H, D]`` outputs over disjoint keys, float16, bfloat16, float32 or float64.
        s_a, s_b: ``[T, H]`` float32 natural log-sum-exp; -inf, and +inf too, is a part with
            nothing to attend: its values are never read, NaN or not.

    Returns:
        ``(v, s)``: ``[T, H, D]`` of dtype of ``v_a`` and ``[T, H]`` float32, contiguous; zeros and
        -inf where both parts are empty. Computed in float32 (float64 for float64 values). Every
        value lies between those of its parts, so that finite ones give finite ones.

    Raises:
        TypeError: a dtype isn't accepted.
        ValueError: shapes or devices disagree.
        NoBackwardError: an input requires grad.

    Source: Ye et al., FlashInfer (arXiv 2501.01005), section 2.2.
    """
    wide = accumulation_dtype(v_a.dtype)
    a, b = (s.contiguous().to(wide).masked_fill(s == float("inf"), _EMPTY) for s in (s_a, s_b))
    top = torch.maximum(a, b)
    shift = top.masked_fill(top == _EMPTY, 0.0)
    weight_a, weight_b = torch.exp(a - shift), torch.exp(b - shift)
    total = weight_a + weight_b
    divisor = total.masked_fill(total == 0, 1.0)
    wide_a, wide_b = upcast(v_a), upcast(v_b)
    part_a = (wide_a * (weight_a / divisor).unsqueeze(-1)).masked_fill(_none(weight_a), 0.0)
    part_b = (wide_b * (weight_b / divisor).unsqueeze(-1)).masked_fill(_none(weight_b), 0.0)
    merged = part_a + part_b
    low, high = torch.minimum(wide_a, wide_b), torch.maximum(wide_a, wide_b)
    merged = torch.where(merged < low, low, torch.where(merged > high, high, merged))
    return merged.masked_fill(_none(total), 0.0).to(v_a.dtype), (shift + torch.log(total)).float()


def _none(weight: Tensor) -> Tensor:
    return (weight == 0).unsqueeze(-1)


merge_state.batch("v_a", "s_a", "v_b", "s_b", merge=True)


@merge_state.check
def _check(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> None:
    checks.float_dtype("merge_state", "v_a", v_a)
    parts, device = v_a.shape, v_a.device
    if len(parts) != 3:
        checks.rank("merge_state", "v_a", v_a, 3, "[T, H, D]")
    if v_b.shape != parts:
        checks.shape("merge_state", "v_b", v_b, parts, "the shape of 'v_a'")
    if v_b.dtype != v_a.dtype or v_b.device != device:
        checks.like("merge_state", "v_b", v_b, v_a, "v_a")
    rows = parts[:2]
    for name, s in (("s_a", s_a), ("s_b", s_b)):
        if s.shape != rows:
            checks.shape("merge_state", name, s, rows, "[T, H] of 'v_a'")
        if s.dtype != torch.float32:
            checks.refuse("merge_state", name, s.dtype, "torch.float32", kind=TypeError)
        if s.device != device:
            checks.refuse("merge_state", name, f"on device {s.device}", f"{device}, as 'v_a'")


@merge_state.fake
def _fake(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    return v_a.new_empty(v_a.shape), s_a.new_empty(s_a.shape)
