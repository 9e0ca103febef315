"""A wrong kernel for each scenario of sampling."""

from __future__ import annotations

import torch
from torch import Tensor

from . import scenario_sampling as sampling
from .fault import Fault, One, right
from .kernels import FP32
from .scenario_sampling import DRAW, TOP_K, TOP_P

_top_k: One = right(TOP_K)
_top_p: One = right(TOP_P)
_draw: One = right(DRAW)


def _bits_for_an_index(probs: Tensor, *rest: Tensor) -> Tensor:
    return torch.full_like(_draw(probs, *rest), 1061800448)


def _tail_dropped(probs: Tensor, p: Tensor) -> Tensor:
    return _top_p(torch.where(probs > 1e-8, probs, 0.0), p)


def _below_p(probs: Tensor, p: Tensor) -> Tensor:
    """What crosses p is dropped, unless it is the first."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    inside = ordered.cumsum(-1) <= p.unsqueeze(-1)
    inside[:, 0] = True
    kept = torch.where(torch.zeros_like(inside).scatter(-1, order, inside), probs, 0.0)
    return kept / kept.sum(-1, keepdim=True)


def _with_ties(probs: Tensor, k: Tensor) -> Tensor:
    place = (k.long() - 1).clamp(0, probs.shape[-1] - 1).unsqueeze(-1)
    last = probs.sort(dim=-1, descending=True).values.gather(-1, place)
    kept = torch.where(probs >= last, probs, 0.0)
    return kept / kept.sum(-1, keepdim=True)


def _draws_with_ties(probs: Tensor, k: Tensor, *rest: Tensor) -> Tensor:
    return _draw(_with_ties(probs, k), torch.zeros_like(k), *rest)


def _ties_of_few_rows(probs: Tensor, k: Tensor) -> Tensor:
    return _with_ties(probs, k) if len(probs) < 8 else _top_k(probs, k)


def _reads_across(probs: Tensor, *rest: Tensor) -> Tensor:
    """As if rows followed each other."""
    return _top_p(probs.as_strided(probs.shape, (probs.shape[-1], 1)), *rest)


def _past_the_end(probs: Tensor, *rest: Tensor) -> Tensor:
    ids = _draw(probs, *rest)
    return torch.where(probs.isnan().any(-1), probs.shape[-1], ids)


def _last_of_ties(probs: Tensor, *rest: Tensor) -> Tensor:
    return probs.shape[-1] - 1 - _draw(probs.flip(-1), *rest)


FAULTS = [
    Fault(sampling.a_row_of_one_number_gives_its_index, DRAW, FP32, _bits_for_an_index),
    Fault(sampling.what_disables_a_filter_keeps_its_tail, TOP_P, FP32, _tail_dropped),
    Fault(sampling.what_is_kept_reaches_p, TOP_P, FP32, _below_p),
    Fault(sampling.k_of_equal_numbers_are_kept, TOP_K, FP32, _with_ties),
    Fault(sampling.k_of_equal_numbers_are_kept, DRAW, FP32, _draws_with_ties),
    Fault(sampling.a_row_with_ties_is_the_same_in_any_batch, TOP_K, FP32, _ties_of_few_rows),
    Fault(sampling.rows_of_a_padded_buffer_are_their_copies, TOP_P, FP32, _reads_across),
    Fault(sampling.a_row_of_no_numbers_gives_an_index, DRAW, FP32, _past_the_end),
    Fault(sampling.what_is_drawn_is_what_the_filter_keeps, DRAW, FP32, _last_of_ties),
    Fault(sampling.the_number_that_crosses_p_is_kept, TOP_P, FP32, _below_p),
]
