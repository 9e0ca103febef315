"""min_p_filter: the probabilities of each row that are a part of its largest, or more."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops.contracts import SamplingContract
from torch_ops.declarations import _sampling
from torch_ops.declare import op

_OP = "min_p_filter"


@op(contract=SamplingContract(batch_invariant=True, renormalized=False), dtypes=(torch.float32,))
def min_p_filter(probs: Tensor, min_p: Tensor) -> Tensor:
    """Keep the probabilities of each row that are at least min_p of its largest; others become 0.

    What is kept is kept bit for bit, not renormalized: a top-p after it counts the original mass.
    The bound ``min_p * max(probs)`` is rounded to float32; all that equal it are kept.

    Args:
        probs: ``[B, V]`` float32, at least 0 (checked in ``torch_ops.debug()`` alone; what is
            negative counts as 0), any strides.
        min_p: ``[B]`` float32; a row whose min_p is 0 or less, or NaN, is returned bit for bit. 1
            or more keeps those that equal the largest.

    Returns:
        ``[B, V]`` float32, contiguous. Where min_p counts, a row that holds NaN or an infinity
        becomes NaN.

    Raises:
        TypeError: a dtype isn't accepted.
        ValueError: shapes or devices disagree.
        NoBackwardError: an input requires grad.

    Source: Nguyen et al., Turning Up the Heat: Min-p Sampling (arXiv 2407.01082).
    """
    if probs.numel() == 0:
        return probs.new_empty(probs.shape)
    probs = probs.contiguous()
    part = min_p.unsqueeze(-1)
    positive = torch.where(probs > 0, probs, 0.0)
    bound = positive.amax(-1, keepdim=True) * part.clamp(max=1)
    sound = probs.isfinite().all(-1, keepdim=True)
    filtered = torch.where(sound, torch.where(positive >= bound, positive, 0.0), float("nan"))
    return torch.where(part > 0, filtered, probs)


min_p_filter.batch("probs", "min_p", merge=True)


@min_p_filter.check
def _check(probs: Tensor, min_p: Tensor) -> None:
    _sampling.check_probs(_OP, probs)
    _sampling.check_numbers(_OP, "min_p", min_p, torch.float32, probs)


@min_p_filter.debug_check
def _debug_check(probs: Tensor, min_p: Tensor) -> None:
    _sampling.refuse_negative(_OP, probs)


@min_p_filter.fake
def _fake(probs: Tensor, min_p: Tensor) -> Tensor:
    return probs.new_empty(probs.shape)
