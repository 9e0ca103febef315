"""A plain merge in pieces, each of which a planted fault replaces."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_ops.testing.arithmetic import compute_dtype
from torch_ops.testing.batch_faults import batch_mutants
from torch_ops.testing.faults import floored, generic_mutants, raised, truncated
from torch_ops.testing.proof import Mutant


def _unlimited(a: Tensor, b: Tensor, share_a: Tensor, share_b: Tensor) -> Tensor:
    return a * share_a + b * share_b


def _combined(a: Tensor, b: Tensor, share_a: Tensor, share_b: Tensor) -> Tensor:
    """The sum of the parts, of which only overflow is cut off: faults remain to be seen."""
    value, largest = _unlimited(a, b, share_a, share_b), torch.finfo(a.dtype).max
    return torch.where(a.isfinite() & b.isfinite(), value.clamp(-largest, largest), value)


def _summed_first(a: Tensor, b: Tensor, share_a: Tensor, share_b: Tensor) -> Tensor:
    larger = torch.maximum(share_a, share_b)
    divisor = torch.where(larger > 0, larger, 1.0)
    return (a * (share_a / divisor) + b * (share_b / divisor)) * larger


def _by_difference(a: Tensor, b: Tensor, share_a: Tensor, share_b: Tensor) -> Tensor:
    return torch.where(share_a > 0, a * (share_a + share_b) + (b - a) * share_b, b * share_b)


def merge(
    exp: Callable[[Tensor], Tensor] = torch.exp,
    log: Callable[[Tensor], Tensor] = torch.log,
    finish: Callable[[Tensor, torch.dtype], Tensor] = lambda y, dtype: y.to(dtype),
    empty_value: float = 0.0,
    empty_lse: float = -math.inf,
    reads_empty: bool = False,
    divide: Callable[[Tensor], Tensor] = lambda total: total,
    s: Callable[[Tensor], Tensor] = lambda s: s,
    weight_b: Callable[[Tensor], Tensor] = lambda w: w,
    top: Callable[[Tensor, Tensor], Tensor] = torch.maximum,
    combine: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = _combined,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns a merge made of these pieces."""

    def kernel(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
        work = compute_dtype(v_a.dtype)
        a, b = s(s_a.contiguous().to(work)), s(s_b.contiguous().to(work))
        high = top(a, b)
        high = high.masked_fill(high == -math.inf, 0.0)
        w_a, w_b = exp(a - high), weight_b(exp(b - high))
        total = w_a + w_b
        parts = [
            x.contiguous().to(work) if reads_empty else x.contiguous().to(work).masked_fill(
                (w == 0).unsqueeze(-1), 0.0)
            for x, w in ((v_a, w_a), (v_b, w_b))
        ]  # fmt: skip
        empty = total == 0
        divisor = divide(total).masked_fill(empty, 1.0)
        value = combine(*parts, *((w / divisor).unsqueeze(-1) for w in (w_a, w_b)))
        value = torch.where(empty.unsqueeze(-1), value + empty_value, value)
        lse = (high + log(total)).masked_fill(empty, empty_lse)
        return finish(value, v_a.dtype), lse.float()

    return kernel


def _naive(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Differences of two infinities are NaN."""
    w_a, w_b = s_a.exp().unsqueeze(-1), s_b.exp().unsqueeze(-1)
    return ((v_a * w_a + v_b * w_b) / (w_a + w_b)).to(v_a.dtype), torch.logaddexp(s_a, s_b)


def _rows_before(kernel: Callable[..., Any], *places: int) -> Callable[..., Any]:
    def call(*args: Tensor) -> Any:
        return kernel(*(a.roll(1, 0) if i in places else a for i, a in enumerate(args)))

    return call


def _first_row(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    return merge()(v_a, s_a, v_b, s_b[:1].expand(s_b.shape))


MUTANTS = (
    Mutant("base_2", ("with_itself", "bound"), merge(exp=torch.exp2, log=torch.log2)),
    Mutant("base_2_weights", ("bound",), merge(exp=torch.exp2)),
    Mutant("truncated", ("rounding_bias", "bound",), merge(finish=truncated)),
    Mutant("not_divided", ("with_itself", "bound"), merge(divide=torch.ones_like)),
    Mutant("denominator_plus_one", ("with_itself", "empty_part", "bound"),
           merge(divide=lambda t: t + 1)),
    Mutant("lse_of_larger", ("with_itself", "bound"), merge(log=torch.zeros_like)),
    Mutant("second_weight_larger", ("swap", "bound"), merge(weight_b=lambda w: w * (1 + 2**-6))),
    Mutant("second_weight_rounded", ("swap", "bound"),
           merge(weight_b=lambda w: w.bfloat16().to(w.dtype))),
    Mutant("second_ignored", ("swap", "bound"), merge(weight_b=torch.zeros_like)),
    Mutant("empty_part_read", ("empty_part",), merge(reads_empty=True)),
    Mutant("naive", ("empty_part", "both_empty", "shift", "bound"), _naive),
    Mutant("empty_part_counts", ("empty_part", "bound"), merge(s=lambda s: s.clamp(min=-2))),
    Mutant("both_empty_is_one", ("both_empty", "bound"), merge(empty_value=1.0)),
    Mutant("both_empty_finite_lse", ("both_empty", "bound"), merge(empty_lse=-1e4)),
    Mutant("both_empty_nan", ("both_empty", "bound"), merge(empty_value=math.nan)),
    Mutant("both_empty_plus_inf", ("both_empty", "bound"), merge(empty_lse=math.inf)),
    Mutant("lse_clipped", ("shift", "bound"), merge(s=lambda s: s.clamp(max=8))),
    Mutant("lse_in_bfloat16", ("shift", "bound"), merge(s=lambda s: s.bfloat16().to(s.dtype))),
    Mutant("no_largest", ("shift", "bound"),
           merge(exp=lambda d: d.clamp(max=4).exp(), top=lambda a, b: torch.zeros_like(a))),
    Mutant("values_clipped", ("scale", "bound"), merge(finish=lambda y, d: y.clamp(-2, 2).to(d))),
    Mutant("constant_added", ("scale", "bound"), merge(finish=lambda y, d: (y + 0.125).to(d))),
    Mutant("values_on_grid", ("scale", "bound"),
           merge(finish=lambda y, d: ((y * 4).round() / 4).to(d))),
    Mutant("summed_before_dividing", ("finite",), merge(combine=_summed_first)),
    Mutant("shares_over_one", ("finite",), merge(combine=_unlimited)),
    Mutant("difference_of_parts", ("finite",), merge(combine=_by_difference)),
    Mutant("rounded_down", ("rounding_bias", "bound",), merge(finish=floored)),
    Mutant("rounded_up", ("rounding_bias", "bound",), merge(finish=raised)),
    Mutant("lse_of_row_before", ("row_permutation", "bound"), _rows_before(merge(), 1)),
    Mutant("values_of_row_before", ("row_permutation", "bound"), _rows_before(merge(), 2)),
    Mutant("lse_of_row_0", ("row_permutation", "bound"), _first_row),
    *generic_mutants(merge()),
    *batch_mutants(merge(), (0, 1, 2, 3)),
)  # fmt: skip
