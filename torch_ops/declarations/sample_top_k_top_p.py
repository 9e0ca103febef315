"""sample_top_k_top_p: an index for each row, from what both top-k and top-p keep."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops import checks
from torch_ops.contracts import SamplingContract
from torch_ops.declarations import _sampling
from torch_ops.declarations._philox import uniform
from torch_ops.declare import op

_OP = "sample_top_k_top_p"


@op(
    contract=SamplingContract(
        batch_invariant=True, not_finite="first_of_them", no_mass="index_0", uniform="philox4x32_10"
    ),
    dtypes=(torch.float32,),
)
def sample_top_k_top_p(probs: Tensor, k: Tensor, p: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
    """Draw an index of each row, of those that top-k and top-p keep, by their probabilities.

    Both filters are of the row as it is given: what is kept are the first k in the order of size,
    of equal ones the lowest index first, but no more than it takes to reach p. Of what is kept, in
    the order of indices, the first whose sum exceeds ``u * total`` is drawn. u in [0, 1) is made of
    62 bits of Philox4x32-10 with the row's seed as key and its offset as counter: a row gives the
    same index in any batch, on any device. Draw again with the offset plus 1.

    Args:
        probs: ``[B, V]`` float32, V at least 1, at least 0 (checked in ``torch_ops.debug()`` alone;
            what is negative counts as 0), any strides. Rows needn't add up to 1: p isn't scaled.
        k: ``[B]`` int32; 0 or less, and V or more, don't filter.
        p: ``[B]`` float32; 1 or more, and NaN, don't filter. 0 or less keeps the largest alone.
        seed: ``[B]`` int64, any.
        offset: ``[B]`` int64, any.

    Returns:
        ``[B]`` int64, contiguous, in [0, V) always. Of a row that holds NaN or an infinity, the
        first place of one; of a row in which nothing is positive, 0.

    Raises:
        TypeError: a dtype isn't accepted.
        ValueError: shapes or devices disagree.
        NoBackwardError: an input requires grad.

    Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011).
    """
    if probs.numel() == 0:
        return seed.new_empty(seed.shape)
    probs = probs.contiguous()
    row = _sampling.look_at(probs)
    mass = torch.where(_sampling.kept(row, k, p), row.mass, 0).cumsum(-1)
    drawn = uniform(seed, offset, mass[:, -1])
    index = (mass <= drawn.unsqueeze(-1)).sum(-1)
    index = torch.where(mass[:, -1] > 0, index, 0)
    wrong = (~probs.isfinite()).to(torch.int8).argmax(-1)
    return torch.where(row.sound.squeeze(-1), index, wrong)


sample_top_k_top_p.batch("probs", "k", "p", "seed", "offset", merge=True)


@sample_top_k_top_p.check
def _check(probs: Tensor, k: Tensor, p: Tensor, seed: Tensor, offset: Tensor) -> None:
    _sampling.check_probs(_OP, probs)
    if probs.shape[1] == 0:
        checks.refuse(_OP, "probs", f"of shape {list(probs.shape)}", "[B, V], V at least 1")
    _sampling.check_numbers(_OP, "k", k, torch.int32, probs)
    _sampling.check_numbers(_OP, "p", p, torch.float32, probs)
    _sampling.check_numbers(_OP, "seed", seed, torch.int64, probs)
    _sampling.check_numbers(_OP, "offset", offset, torch.int64, probs)


@sample_top_k_top_p.debug_check
def _debug_check(probs: Tensor, k: Tensor, p: Tensor, seed: Tensor, offset: Tensor) -> None:
    _sampling.refuse_negative(_OP, probs)


@sample_top_k_top_p.fake
def _fake(probs: Tensor, k: Tensor, p: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
    return seed.new_empty(seed.shape)
