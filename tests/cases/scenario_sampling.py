"""Rows of sampling: which probabilities are kept, and which index is drawn of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .kernels import FP32, Kernels, judge, require, same
from .scenario import scenario

TOP_K, TOP_P, MIN_P = "top_k_renorm_probs", "top_p_renorm_probs", "min_p_filter"
DRAW = "sample_top_k_top_p"
OPS = (TOP_K, TOP_P, MIN_P, DRAW)


def _rows(kernels: Kernels, values: Sequence[float], count: int = 1) -> Tensor:
    return torch.tensor([values] * count, device=kernels.device)


def _numbers(
    kernels: Kernels, op: str, rows: int, k: int = 0, p: float = 1.0, min_p: float = 0.5
) -> list[Tensor]:
    """The same numbers for all rows; seeds of a sampler count."""
    limit = torch.full((rows,), k, dtype=torch.int32)
    mass = torch.full((rows,), p)
    seeds, offsets = torch.arange(rows), torch.full((rows,), 5)
    made = {
        TOP_K: [limit], TOP_P: [mass], MIN_P: [torch.full((rows,), min_p)],
        DRAW: [limit, mass, seeds, offsets],
    }  # fmt: skip
    return [number.to(kernels.device) for number in made[op]]


def _counts(kernels: Kernels, rows: int, columns: int) -> Tensor:
    """Rows of many ties."""
    return (kernels.normal(rows, columns).abs() * 3).floor() / 64


@scenario("S1", ops=[DRAW], dtypes=[FP32])
def a_row_of_one_number_gives_its_index(kernels: Kernels, op: str, _: torch.dtype) -> None:
    probs = kernels.full((2, 32000), 0.0)
    probs[:, 1] = 1
    (ids,) = kernels(op, probs, *_numbers(kernels, op, 2, k=2**30))
    same("S1", ids, torch.ones_like(ids))


@scenario("S2", ops=[TOP_P], dtypes=[FP32])
def what_disables_a_filter_keeps_its_tail(kernels: Kernels, op: str, _: torch.dtype) -> None:
    probs = _rows(kernels, [1 - 2e-8, *[1e-9] * 20], 2)
    (found,) = kernels(op, probs, *_numbers(kernels, op, 2))
    same("S2", found, probs)


@scenario("S3", ops=[TOP_P], dtypes=[FP32])
def what_is_kept_reaches_p(kernels: Kernels, op: str, _: torch.dtype) -> None:
    probs = kernels.normal(8, 500).softmax(-1)
    numbers = _numbers(kernels, op, 8, p=0.9)
    (found,) = kernels.proven(op, probs, *numbers)
    mass = torch.where(found > 0, probs.double(), 0.0).sum(-1)
    require("what is kept reaches p", (mass >= numbers[0].double()).all())


@scenario("S5", ops=[TOP_K, DRAW], dtypes=[FP32])
def k_of_equal_numbers_are_kept(kernels: Kernels, op: str, _: torch.dtype) -> None:
    probs = _rows(kernels, [0.4, 0.3, 0.3, 0.0], 6)
    (found,) = kernels.proven(op, probs, *_numbers(kernels, op, 6, k=2))
    if op == TOP_K:
        same("S5", found > 0, _rows(kernels, [1, 1, 0, 0], 6) > 0)
    else:
        require("both of two are drawn, and nothing else", set(found.tolist()) == {0, 1})


@scenario("S6", ops=OPS, dtypes=[FP32])
def a_row_with_ties_is_the_same_in_any_batch(kernels: Kernels, op: str, _: torch.dtype) -> None:
    probs, numbers = _counts(kernels, 8, 40), _numbers(kernels, op, 8, k=7, p=0.4)
    (whole,) = kernels.proven(op, probs, *numbers)
    for row in (0, 5):
        (one,) = kernels(op, probs[row : row + 1], *(n[row : row + 1] for n in numbers))
        same("S6", one, whole[row : row + 1])


@scenario("S7", ops=OPS, dtypes=[FP32])
def rows_of_a_padded_buffer_are_their_copies(kernels: Kernels, op: str, _: torch.dtype) -> None:
    padded = kernels.normal(4, 64).softmax(-1)
    padded[:, 50:] = float("nan")
    numbers = _numbers(kernels, op, 4, k=9, p=0.7)
    given = padded[:, :50]
    found = kernels(op, given, *numbers)
    same("S7", found, kernels(op, given.contiguous(), *numbers))
    judge(op, (given, *numbers), found)


@scenario("S9", "S13", ops=[DRAW], dtypes=[FP32])
def a_row_of_no_numbers_gives_an_index(kernels: Kernels, op: str, _: torch.dtype) -> None:
    logits = torch.tensor([[1, float("-inf"), 0], [1, 2, 0], [0, 0, 0]], device=kernels.device)
    softmax = (logits / torch.tensor([[-1.0], [0.0], [0.0]], device=kernels.device)).softmax(-1)
    require("the softmax of these is no number", softmax.isnan().all())
    (ids,) = kernels(op, softmax, *_numbers(kernels, op, 3, k=2, p=0.9))
    require("indices are in the vocabulary", ((ids >= 0) & (ids < 3)).all())


@scenario("S10", ops=[DRAW], dtypes=[FP32])
def what_is_drawn_is_what_the_filter_keeps(kernels: Kernels, op: str, _: torch.dtype) -> None:
    probs = _rows(kernels, [0.125] * 8, 8)
    (ids,) = kernels(op, probs, *_numbers(kernels, op, 8, p=0.6))
    (kept,) = kernels(TOP_P, probs, *_numbers(kernels, TOP_P, 8, p=0.6))
    require("its logarithm is finite", kept.gather(-1, ids.unsqueeze(-1)).log().isfinite().all())


@scenario("S11", ops=[TOP_P], dtypes=[FP32])
def the_number_that_crosses_p_is_kept(kernels: Kernels, op: str, _: torch.dtype) -> None:
    probs = _rows(kernels, [0.5, 0.41, 0.09], 2)
    (found,) = kernels.proven(op, probs, *_numbers(kernels, op, 2, p=0.9))
    same("S11", found > 0, _rows(kernels, [1, 1, 0], 2) > 0)
