"""top_p_renorm_probs: the fewest largest probabilities whose mass is p, divided by their sum."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops.contracts import SamplingContract
from torch_ops.declarations import _sampling
from torch_ops.declare import op

_OP = "top_p_renorm_probs"


@op(contract=SamplingContract(batch_invariant=True), dtypes=(torch.float32,))
def top_p_renorm_probs(probs: Tensor, p: Tensor) -> Tensor:
    """Keep the fewest largest probabilities of each row that add up to p, divided by their sum.

    The one that reaches p is kept, and of equal ones those of the lowest index first. The sum of
    what is kept is at least p, not rounded; if the whole row has less, all are kept.

    Args:
        probs: ``[B, V]`` float32, at least 0 (checked in ``torch_ops.debug()`` alone; what is
            negative counts as 0), any strides. Rows needn't add up to 1: p isn't scaled.
        p: ``[B]`` float32; a row whose p is 1 or more, or NaN, is returned bit for bit. 0 or less
            keeps the largest alone.

    Returns:
        ``[B, V]`` float32, contiguous. Where p counts, a row that holds NaN or an infinity becomes
        NaN, and one in which nothing is positive zeros.

    Raises:
        TypeError: a dtype isn't accepted.
        ValueError: shapes or devices disagree.
        NoBackwardError: an input requires grad.

    Source: Holtzman et al., The Curious Case of Neural Text Degeneration (arXiv 1904.09751).
    """
    if probs.numel() == 0:
        return probs.new_empty(probs.shape)
    probs = probs.contiguous()
    row = _sampling.look_at(probs)
    return _sampling.renormalized(probs, row, _sampling.kept(row, None, p), p < 1)


top_p_renorm_probs.batch("probs", "p", merge=True)


@top_p_renorm_probs.check
def _check(probs: Tensor, p: Tensor) -> None:
    _sampling.check_probs(_OP, probs)
    _sampling.check_numbers(_OP, "p", p, torch.float32, probs)


@top_p_renorm_probs.debug_check
def _debug_check(probs: Tensor, p: Tensor) -> None:
    _sampling.refuse_negative(_OP, probs)


@top_p_renorm_probs.fake
def _fake(probs: Tensor, p: Tensor) -> Tensor:
    return probs.new_empty(probs.shape)
