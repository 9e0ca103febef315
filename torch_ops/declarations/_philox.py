"""A counter-based random number: the same one for the same key and counter, on every machine.

Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011), Philox4x32-10.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ROUNDS", "philox", "uniform"]

ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_HALF = 31


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Give four numbers below 2^32 for a counter of four and a key of two of them, all int64."""
    a, b, c, d = counter
    first, second = key
    for _ in range(ROUNDS):
        high_a, low_a = _product(a, _MULTIPLIERS[0])
        high_c, low_c = _product(c, _MULTIPLIERS[1])
        a, b, c, d = high_c ^ b ^ first, low_c, high_a ^ d ^ second, low_a
        first, second = (first + _WEYL[0]) & _LOW, (second + _WEYL[1]) & _LOW
    return a, b, c, d


def _product(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Give the upper and the lower 32 bits, by halves of the factor: nothing exceeds 63 bits."""
    low = x * (factor & 0xFFFF)
    high = x * (factor >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def uniform(seed: Tensor, offset: Tensor, below: Tensor) -> Tensor:
    """Give whole numbers in ``[0, below)``: ``floor(below * u)``, u of 62 random bits.

    The key is the seed, the counter the offset; both count as 64 bits without a sign.

    Args:
        seed, offset: int64.
        below: int64, at most 2^62.
    """
    zero = torch.zeros_like(offset)
    counter = (offset & _LOW, (offset >> 32) & _LOW, zero, zero)
    first, second, _, _ = philox(counter, (seed & _LOW, (seed >> 32) & _LOW))
    high, low = first >> 1, second >> 1  # 31 bits each
    upper, lower = below >> _HALF, below & (2**_HALF - 1)
    middle = high * lower + low * upper + ((low * lower) >> _HALF)
    result: Tensor = high * upper + (middle >> _HALF)
    return result
