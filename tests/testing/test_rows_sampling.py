"""Real bug reports of filters and draws: the references are right, and draws follow their rows.

A name carries the row of the catalogue.
"""

# ruff: noqa: N802 (rows are named as in the catalogue)

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from torch_ops import debug, ops


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def drawn(probs: Tensor, k: int = 0, p: float = 1.0, seed: int = 0) -> Tensor:
    """An index a row, each with an offset of its own."""
    rows = len(probs)
    numbers = torch.full((rows,), k).int(), torch.full((rows,), p), torch.full((rows,), seed)
    result: Tensor = ops.sample_top_k_top_p(probs, *numbers, torch.arange(rows), backend="torch")
    return result


def test_row_S1_one_hot_of_a_large_vocabulary() -> None:
    probs = torch.zeros(3, 32000)
    probs[:, 1] = 1.0
    assert drawn(probs, 2**30).tolist() == [1, 1, 1]


def test_row_S2_a_disabled_filter_keeps_the_tail() -> None:
    probs = torch.tensor([[1 - 2e-8, *[1e-9] * 20]])
    assert torch.equal(ops.top_p_renorm_probs(probs, torch.tensor([1.0])), probs)
    for k in (0, -1, 21, 2**30):
        assert torch.equal(ops.top_k_renorm_probs(probs, int32(k)), probs)
    assert torch.equal(ops.min_p_filter(probs, torch.tensor([0.0])), probs)


def test_row_S3_the_mass_that_is_kept_reaches_p() -> None:
    torch.manual_seed(0)
    probs = torch.randn(64, 500).softmax(-1)
    kept = ops.top_p_renorm_probs(probs, torch.full((64,), 0.9)) > 0
    mass = torch.where(kept, probs.double(), 0).sum(-1)
    assert bool((mass >= torch.tensor(0.9).double()).all())
    least = probs.double().masked_fill(~kept, 1).amin(-1)
    assert bool((mass - least < torch.tensor(0.9).double()).all())


def test_row_S5_of_ties_exactly_k() -> None:
    probs = torch.tensor([[0.4, 0.3, 0.3, 0.0]])
    found = ops.top_k_renorm_probs(probs, int32(2))
    torch.testing.assert_close(found, torch.tensor([[4 / 7, 3 / 7, 0, 0]]))
    assert set(drawn(probs.expand(500, 4), k=2).tolist()) == {0, 1}


def test_row_S6_ties_alone_and_in_a_batch_of_eight() -> None:
    probs = torch.tensor([0.1, 0.2, 0.2, 0.2, 0.2, 0.1]).expand(8, 6)
    batch = ops.top_k_renorm_probs(probs, torch.full((8,), 2).int())
    one = ops.top_k_renorm_probs(probs[:1], int32(2))
    assert torch.equal(batch, one.expand(8, 6))
    assert (one > 0).nonzero()[:, 1].tolist() == [1, 2]


def test_row_S7_rows_of_a_padded_buffer() -> None:
    torch.manual_seed(0)
    wide = torch.randn(3, 40).softmax(-1)
    view, k, p = wide[:, :33], int32(3, 5, 1), torch.tensor([0.5, 0.8, 0.2])
    copy = view.contiguous()
    assert torch.equal(ops.top_k_renorm_probs(view, k), ops.top_k_renorm_probs(copy, k))
    assert torch.equal(ops.top_p_renorm_probs(view, p), ops.top_p_renorm_probs(copy, p))
    assert torch.equal(ops.min_p_filter(view, p), ops.min_p_filter(copy, p))
    assert torch.equal(drawn(view, 5, 0.8), drawn(copy, 5, 0.8))


def test_row_S9_S13_rows_that_are_no_distribution_give_an_index_that_exists() -> None:
    """As a temperature of 0 or -1 makes them: argmax is asked for by k = 1 or p = 0."""
    naive = (torch.tensor([[1, -math.inf, 0]]) / -1).softmax(-1)
    assert bool(naive.isnan().all())
    assert drawn(naive).tolist() == [0]
    assert drawn(torch.zeros(2, 5)).tolist() == [0, 0]
    greedy = torch.tensor([[1, -math.inf, 0]]).softmax(-1)
    assert drawn(greedy, k=1).tolist() == drawn(greedy, p=0.0).tolist() == [0]


def test_row_S10_what_is_drawn_at_a_border_of_ties_is_kept() -> None:
    probs = torch.full((400, 16), 1 / 16)
    ids = drawn(probs, p=0.4)
    kept = ops.top_p_renorm_probs(probs, torch.full((400,), 0.4))
    assert bool(kept.gather(1, ids[:, None]).log().isfinite().all())
    assert set(ids.tolist()) == set(range(7))


def test_row_S11_what_crosses_p_is_kept() -> None:
    found = ops.top_p_renorm_probs(torch.tensor([[0.5, 0.41, 0.09]]), torch.tensor([0.9]))
    assert (found > 0).tolist() == [[True, True, False]]


def test_filters_are_joint_on_the_original_mass() -> None:
    probs = torch.tensor([[0.4, 0.2, 0.2, 0.1, 0.1]])
    assert set(drawn(probs.expand(2000, 5), k=4, p=0.82).tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize(("k", "p"), [(0, 1.0), (6, 1.0), (0, 0.7), (5, 0.9)])
def test_draws_follow_their_distribution(k: int, p: float) -> None:
    """A G-test: by chance a right sampler fails once in a million seeds, and the seed is fixed."""
    count, probs = 20_000, torch.tensor([0.3, 0.05, 0.2, 0.1, 0.15, 0.02, 0.08, 0.1])
    numbers = int32(k), torch.tensor([p])
    want = ops.top_k_renorm_probs(probs[None], numbers[0])
    kept = (ops.top_p_renorm_probs(probs[None], numbers[1]) > 0) & (want > 0)
    exact = torch.where(kept[0], probs.double(), 0)
    expected = count * exact / exact.sum()
    found = torch.bincount(drawn(probs.expand(count, 8), k, p, seed=11), minlength=8).double()
    assert not bool(found[~kept[0]].any())
    inside = kept[0]
    ratio = torch.special.xlogy(found[inside], found[inside] / expected[inside])
    freedom = (int(inside.sum()) - 1) / 2
    half = torch.tensor([freedom, float(ratio.sum())], dtype=torch.float64)
    assert float(torch.special.gammaincc(half[0], half[1])) > 1e-6


@pytest.mark.parametrize("op", ["top_k_renorm_probs", "top_p_renorm_probs", "min_p_filter"])
def test_negative_probabilities_are_refused_in_debug(op: str) -> None:
    number = int32(1) if op == "top_k_renorm_probs" else torch.tensor([0.5])
    with debug(), pytest.raises(ValueError, match=f"op '{op}': argument 'probs' is as low as -0.5"):
        getattr(ops, op)(torch.tensor([[1.0, -0.5]]), number)
