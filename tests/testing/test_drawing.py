"""What sample_top_k_top_p draws with: Philox's known answers, and how often it draws what."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from torch_ops import ops
from torch_ops.declarations import _philox
from torch_ops.testing.proofs import sample_top_k_top_p as proof

WORD = 2**32
# Known answers of Random123 for philox4x32_10: counter, key, result.
ANSWERS = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((WORD - 1,) * 4, (WORD - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)  # fmt: skip
DRAWS = 20000
PROBS = (0.31, 0.02, 0.27, 0.005, 0.0, 0.145, 0.25)


@pytest.mark.parametrize(("counter", "key", "answer"), ANSWERS)
def test_philox_gives_its_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], answer: tuple[int, ...]
) -> None:
    def tensors(*numbers: int) -> tuple[Tensor, ...]:
        return tuple(torch.tensor([n]) for n in numbers)

    first, second = tensors(*key)
    found = _philox.philox(tensors(*counter), (first, second))
    assert tuple(int(word) for word in found) == answer


def test_a_part_of_a_whole_is_exact() -> None:
    seeds = torch.tensor([0, 1, -1, 2**62 + 5, -(2**63), 2**40])
    offsets = torch.tensor([0, -1, 7, 2**33, 2**63 - 1, -(2**35)])
    below = torch.tensor([1, 2**62, 2**62 - 1, 12345678901234567, 2**31, 3])
    found = _philox.uniform(seeds, offsets, below)
    numbers = zip(seeds.tolist(), offsets.tolist(), below.tolist(), strict=True)
    for got, (seed, offset, limit) in zip(found.tolist(), numbers, strict=True):
        a, b = proof.philox(seed, offset)
        exact = limit * ((a >> 1) * 2**31 + (b >> 1)) // 2**62
        assert exact - 2 <= got <= exact
        assert 0 <= got < limit


def test_seeds_of_opposite_signs_and_swapped_halves_differ() -> None:
    seeds = torch.tensor([5, -5, 5 << 32, 5 + (5 << 32)])
    found = _philox.uniform(seeds, torch.zeros(4, dtype=torch.int64), torch.full((4,), 2**62))
    assert len(set(found.tolist())) == 4


def survival(statistic: float, freedom: int) -> float:
    """The chance of a larger value of chi-squared."""
    half = torch.tensor(freedom / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, torch.tensor(statistic / 2, dtype=torch.float64)))


def g_test(ids: Tensor, wanted: Tensor) -> float:
    """The chance of counts that are further from what is wanted than these."""
    counts = torch.bincount(ids, minlength=len(wanted)).double()
    inside = wanted > 0
    assert not bool(counts[~inside].any())
    expected = wanted[inside] / wanted.sum() * len(ids)
    terms = torch.xlogy(counts[inside], counts[inside] / expected)
    return survival(2 * float(terms.sum()), int(inside.sum()) - 1)


@pytest.mark.parametrize("by", ["seed", "offset"])
@pytest.mark.parametrize(
    ("k", "p", "kept"),
    [(0, 1.0, range(7)), (3, 1.0, (0, 2, 6)), (0, 0.9, (0, 2, 5, 6)), (2, 0.9, (0, 2))],
)
def test_what_is_drawn_follows_the_probabilities(
    by: str, k: int, p: float, kept: tuple[int, ...]
) -> None:
    count, fixed = torch.arange(DRAWS), torch.full((DRAWS,), 3)
    seed, offset = (count, fixed) if by == "seed" else (fixed, count)
    probs = torch.tensor(PROBS)
    ids = ops.sample_top_k_top_p(
        probs.expand(DRAWS, -1), torch.full((DRAWS,), k).int(), torch.full((DRAWS,), p),
        seed, offset, backend="torch",
    )  # fmt: skip
    wanted = torch.zeros(7, dtype=torch.float64)
    wanted[list(kept)] = probs.double()[list(kept)]
    assert g_test(ids, wanted) > 1e-6


@pytest.mark.parametrize("shift", [0.02, -0.02])
def test_the_test_of_counts_finds_a_wrong_law(shift: float) -> None:
    probs = torch.tensor(PROBS, dtype=torch.float64)
    wrong = probs.clone()
    wrong[0] += shift
    wrong[2] -= shift
    uniform = (torch.arange(DRAWS) + 0.5) / DRAWS
    ids = torch.searchsorted(probs.cumsum(0), uniform.double() * (1 - 1e-9), right=True)
    assert g_test(ids, probs) > 0.5
    assert g_test(ids, wrong) < 1e-6


def test_survival_is_that_of_tables() -> None:
    assert math.isclose(survival(3.841459, 1), 0.05, rel_tol=1e-6)
    assert math.isclose(survival(12.591587, 6), 0.05, rel_tol=1e-6)
