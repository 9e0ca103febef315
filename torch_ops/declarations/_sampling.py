"""What ops on rows of probabilities share: checks, exact masses, and the order of a row.

Masses are whole numbers: a row is scaled by a power of two, so that its largest probability fills
all the bits that its sum leaves, and what is left behind the point is dropped. Sums of whole
numbers depend on no order, so that every kernel finds the same ones, bit for bit. What is dropped
of V columns adds up to less than 2^(2 log2(V) - 61) of the largest probability, and a kept mass
that reaches a bound does so without it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_ops import checks

__all__ = [
    "Row",
    "check_numbers",
    "check_probs",
    "kept",
    "look_at",
    "mass_bits",
    "refuse_negative",
    "renormalized",
]

SUM_BITS = 62


class Row:
    """Rows of probabilities as whole numbers.

    Attributes:
        values: ``[B, V]`` the probabilities, 0 in place of what is negative or not finite.
        mass: ``[B, V]`` int64, ``values * power`` without its fraction.
        power: ``[B, 1]`` float64, a power of two.
        sound: ``[B, 1]`` whether all that is given is finite.
    """

    def __init__(self, values: Tensor, mass: Tensor, power: Tensor, sound: Tensor) -> None:
        self.values, self.mass, self.power, self.sound = values, mass, power, sound


def mass_bits(columns: int) -> int:
    """Give how many bits a mass may have so that a row's sum has at most 62."""
    return SUM_BITS - max(columns - 1, 0).bit_length()


def look_at(probs: Tensor) -> Row:
    """Scale contiguous rows of at least one column."""
    sound = probs.isfinite().all(-1, keepdim=True)
    values = torch.where((probs > 0) & probs.isfinite(), probs, 0.0)
    # 2^(exponent - 1) <= largest < 2^exponent, but for subnormal numbers, which are smaller.
    exponent = (values.amax(-1, keepdim=True).view(torch.int32) >> 23).clamp(min=1) - 126
    shift = mass_bits(probs.shape[-1]) - exponent.long()
    power = ((shift + 1023) << 52).view(torch.float64)
    return Row(values, (values.double() * power).long(), power, sound)


def kept(row: Row, k: Tensor | None, p: Tensor | None) -> Tensor:
    """Give which elements are among the first k, and among the first whose mass reaches p."""
    order = torch.sort(row.values, dim=-1, descending=True, stable=True).indices
    first = torch.ones_like(row.sound).expand(row.values.shape)
    if k is not None:
        limit = k.unsqueeze(-1)
        place = torch.arange(first.shape[-1], device=first.device)
        first = first & ((limit <= 0) | (place < limit))
    if p is not None:
        limit = p.unsqueeze(-1)
        wanted = (limit.double() * row.power).ceil().clamp(1, 2.0**SUM_BITS)
        mass = row.mass.gather(-1, order)
        before = mass.cumsum(-1) - mass
        first = first & (~(limit < 1) | (before < wanted.nan_to_num(1.0).long()))
    return torch.zeros_like(first).scatter(-1, order, first)


def renormalized(probs: Tensor, row: Row, chosen: Tensor, active: Tensor) -> Tensor:
    """Divide what is chosen by its sum; rows that aren't active stay as they are."""
    total = torch.where(chosen, row.mass, 0).sum(-1, keepdim=True).clamp(min=1)
    scaled = (row.values.double() * row.power).float()
    divided = torch.where(chosen, scaled / total.float(), 0.0)
    result = torch.where(row.sound, divided, float("nan"))
    return torch.where(active.unsqueeze(-1), result, probs)


def check_probs(op: str, probs: Tensor) -> None:
    """Refuse what isn't a float32 ``[B, V]`` tensor."""
    if probs.dtype != torch.float32:
        checks.refuse(op, "probs", probs.dtype, "torch.float32", kind=TypeError)
    if probs.dim() != 2:
        checks.rank(op, "probs", probs, 2, "[B, V]")


def check_numbers(op: str, name: str, numbers: Tensor, dtype: torch.dtype, probs: Tensor) -> None:
    """Refuse what isn't a number of this dtype for each row."""
    if numbers.dtype != dtype:
        checks.refuse(op, name, numbers.dtype, str(dtype), kind=TypeError)
    if numbers.shape != probs.shape[:1]:
        checks.shape(op, name, numbers, probs.shape[:1], "[B] of 'probs'")
    if numbers.device != probs.device:
        checks.refuse(op, name, f"on device {numbers.device}", f"{probs.device}, as 'probs'")


def refuse_negative(op: str, probs: Tensor) -> None:
    """Refuse negative probabilities; this reads the data."""
    lowest: Any = probs[probs < 0]
    if lowest.numel():
        checks.refuse(op, "probs", f"as low as {float(lowest.min()):g}", "at least 0")
