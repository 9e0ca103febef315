"""top_k_renorm_probs: the k largest probabilities of each row, divided by their sum."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops.contracts import SamplingContract
from torch_ops.declarations import _sampling
from torch_ops.declare import op

_OP = "top_k_renorm_probs"


@op(contract=SamplingContract(batch_invariant=True), dtypes=(torch.float32,))
def top_k_renorm_probs(probs: Tensor, k: Tensor) -> Tensor:
    """Keep the k largest probabilities of each row, divided by their sum; the others become 0.

    Exactly k are kept: of equal ones those of the lowest index.

    Args:
        probs: ``[B, V]`` float32, at least 0 (checked in ``torch_ops.debug()`` alone; what is
            negative counts as 0), any strides. Rows needn't add up to 1.
        k: ``[B]`` int32; a row whose k is 0 or less, or at least V, is returned bit for bit.

    Returns:
        ``[B, V]`` float32, contiguous. Where k counts, a row that holds NaN or an infinity becomes
        NaN, and one in which nothing is positive zeros.

    Raises:
        TypeError: a dtype isn't accepted.
        ValueError: shapes or devices disagree.
        NoBackwardError: an input requires grad.

    Source: Fan et al., Hierarchical Neural Story Generation (arXiv 1805.04833), section 5.4.
    """
    if probs.numel() == 0:
        return probs.new_empty(probs.shape)
    probs = probs.contiguous()
    row = _sampling.look_at(probs)
    active = (k > 0) & (k < probs.shape[-1])
    return _sampling.renormalized(probs, row, _sampling.kept(row, k, None), active)


top_k_renorm_probs.batch("probs", "k", merge=True)


@top_k_renorm_probs.check
def _check(probs: Tensor, k: Tensor) -> None:
    _sampling.check_probs(_OP, probs)
    _sampling.check_numbers(_OP, "k", k, torch.int32, probs)


@top_k_renorm_probs.debug_check
def _debug_check(probs: Tensor, k: Tensor) -> None:
    _sampling.refuse_negative(_OP, probs)


@top_k_renorm_probs.fake
def _fake(probs: Tensor, k: Tensor) -> Tensor:
    return probs.new_empty(probs.shape)
