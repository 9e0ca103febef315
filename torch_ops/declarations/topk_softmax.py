"""topk_softmax: choose each token's experts by its logits, and weigh them by their softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops import checks
from torch_ops.contracts import RoutingContract
from torch_ops.declarations._shared import upcast
from torch_ops.declare import op

_OP = "topk_softmax"


@op(contract=RoutingContract())
def topk_softmax(logits: Tensor, k: int, renormalize: bool = False) -> tuple[Tensor, Tensor]:
    """Choose the k largest logits of each row and give their parts of the row's softmax.

    ids = the k experts of the largest logits; weights = softmax(logits)[ids]

    Args:
        logits: ``[T, E]`` float16, bfloat16, float32 or float64, any strides.
        k: Experts of a token, 1 to E.
        renormalize: Divide the weights of a row by their sum.

    Returns:
        ``(weights, ids)``: ``[T, k]`` float32 and ``[T, k]`` int32, contiguous, in descending
        order of the logits; of equal logits the lowest expert comes first. A NaN logit ranks as
        -inf, so that ids are distinct and in ``[0, E)`` whatever the logits are. Weights are NaN
        in rows that have no softmax: with NaN, +inf, or nothing but -inf. The softmax is computed
        in float32 (float64 for float64 logits).

    Raises:
        TypeError: a dtype isn't accepted.
        ValueError: a shape or ``k`` isn't accepted.
        NoBackwardError: an input requires grad.

    Source: Shazeer et al., Outrageously Large Neural Networks (arXiv 1701.06538), section 2.1.
    """
    wide = upcast(logits)
    ranked = wide.masked_fill(wide.isnan(), float("-inf"))
    ids = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, :k]
    weights = torch.softmax(wide, dim=-1).gather(-1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.float(), ids.int().contiguous()


topk_softmax.batch("logits", merge=True)


@topk_softmax.check
def _check(logits: Tensor, k: int, renormalize: bool = False) -> None:
    checks.float_dtype(_OP, "logits", logits)
    if logits.dim() != 2 or logits.shape[1] < 1:
        received = f"of shape {list(logits.shape)}"
        checks.refuse(_OP, "logits", received, "rank 2, [T, E], E at least 1")
    if not 1 <= k <= logits.shape[1]:
        checks.refuse(_OP, "k", k, f"1 to {logits.shape[1]}, the experts of 'logits'")


@topk_softmax.fake
def _fake(logits: Tensor, k: int, renormalize: bool = False) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], k)
    return (
        logits.new_empty(shape, dtype=torch.float32),
        logits.new_empty(shape, dtype=torch.int32),
    )
